"""Reading a frozen language model and its tokeniser: a transformers folder, a GGUF file, or a name on the hub.

Serves CAR, section 3.1: TKN and TRF, the token embeddings and transformer blocks, are taken as they are and never
trained. Only safetensors and GGUF are read; a pickle can run code, so it is refused. Code in a model's folder is never
run either.

Reading a GGUF file takes a minute (its words and its quantised weights are decoded in Python), so this is done once:
the decoded weights are kept in the cache as an ordinary transformers folder, in 32 bits, named by the file's digest.
"""

from __future__ import annotations

import hashlib
import io
import json
import mmap
import os
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any, Literal

from confide.errors import Stopped, UserError, one_line
from confide.files import cache_folder, make_folder

_GGUF_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of the values of a GGUF file's header, by kind."""
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
_TOKENISERS = ("tokenizer.json", "tokenizer.model", "vocab.txt", "vocab.json", "spiece.model")
# Part of the name of every converted file: change it whenever the same GGUF would give another folder.
_SCHEME = 1
_NOT_KEPT = ("quantization_config", "_name_or_path", "_model_name_or_path")


def encoders_folder() -> Path:
    """Where installed and converted encoders lie."""
    return cache_folder() / "encoders"


def file_digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find(source: str, kind: Literal["text", "speech"] = "text") -> Path | None:
    """The transformers folder of a source: a preset, a folder or a GGUF file; None if it is a name on the hub."""
    from confide.encoders.presets import PRESETS

    path = Path(source).expanduser()
    if source in PRESETS and not path.is_dir():
        chosen = PRESETS[source]
        if chosen.kind != kind:
            fitting = ", ".join(name for name, each in PRESETS.items() if each.kind == kind)
            raise UserError(f"the encoder {source} is one of {chosen.kind}; expected one of {kind}, such as {fitting}")
        if not chosen.installed:
            raise UserError(
                f"the encoder {source} ({chosen.model}) is not installed; expected it in {chosen.folder}: run "
                f"{chosen.command} ({chosen.megabytes} MB)"
            )
        return chosen.folder
    if path.is_dir():
        _check_folder(path, kind)
        return path
    if path.is_file() and kind == "text":
        return _convert_once(path)
    if path.is_file():
        raise UserError(
            f"the encoder {source} is a file; expected the folder of a speech encoder of transformers, with its "
            f"config.json: {path.parent}, perhaps"
        )
    if _looks_local(source):
        form = "a transformers folder, a GGUF file" if kind == "text" else "a transformers folder"
        fitting = ", ".join(name for name, each in PRESETS.items() if each.kind == kind)
        raise UserError(
            f"no encoder {source!r}: it is no folder, no file and no preset; expected {form}, one of {fitting}, or "
            "owner/name on the hub"
        )
    return None


def is_url(source: str) -> bool:
    """Whether a source is an encoder server rather than a model."""
    return source.startswith(("https://", "http://"))


def is_local(source: str) -> bool:
    """Whether a source is a file or folder of this machine: no preset, no owner/name on the hub, no server."""
    from confide.encoders.presets import PRESETS

    if is_url(source):
        return False
    return (_looks_local(source) and source not in PRESETS) or os.path.exists(source)  # too long a name is no path


def _looks_local(source: str) -> bool:
    return source.endswith(".gguf") or source.count("/") != 1 or source.startswith((".", "/", "~"))


def asking(local: bool) -> dict[str, Any]:
    """How transformers is asked everywhere: code beside a model's weights never runs, nor is anybody asked about it."""
    return {"trust_remote_code": False, **({"local_files_only": True} if local else {})}


def load(source: str) -> tuple[Any, Any]:
    """The model without its language head, and its tokeniser, both in memory and ready for evaluation."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    folder = find(source)
    where = asking(folder is not None)
    expected = "a network that reaches the hub" if folder is None else "a complete model that transformers knows"
    advice = "give another folder or GGUF file, or one of the presets (confide encoder list)"
    with explain_unreadable(f"read the encoder {source}", f"{expected}: {advice}"):
        tokeniser = AutoTokenizer.from_pretrained(str(folder or source), **where)
        model, report = AutoModel.from_pretrained(
            str(folder or source), dtype=torch.float32, use_safetensors=True, output_loading_info=True, **where
        )
    # What is missing would be drawn at random. A pooler is not used here, and many models come without one.
    missing = sorted(name for name in report["missing_keys"] if "pooler" not in name)
    if missing:
        raise UserError(
            f"the encoder {source} lacks {len(missing)} of its tensors ({', '.join(missing[:3])} ...); expected the "
            f"complete weights of a {model.config.model_type}: fetch or save the model again"
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise UserError(
            f"the encoder {source} is of type {model.config.model_type}, an encoder with a decoder; expected a causal "
            "or a masked language model"
        )
    model.eval().requires_grad_(False)
    return model, tokeniser


def is_causal(config: Any) -> bool:
    """Whether a token sees only those before it. Types that exist in both forms (BERT) say which one they are."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    if config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return bool(getattr(config, "is_decoder", False))
    return config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def convert_gguf(file: Path, folder: Path) -> None:
    """Decode a GGUF file into a transformers folder: weights in 32 bits with the language head, and the tokeniser."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _check_gguf(file)
    place = asking(local=True) | {"gguf_file": file.name}
    expected = "a complete GGUF file of a causal language model that transformers can read: give another file, or a "
    with (
        explain_unreadable(f"decode {file}", f"{expected}transformers folder"),
        redirect_stderr(io.StringIO()),  # its bar obeys no setting
    ):
        _check_header(file)
        tokeniser = AutoTokenizer.from_pretrained(str(file.parent), **place)
        model = AutoModelForCausalLM.from_pretrained(str(file.parent), dtype=torch.float32, **place)
    _restore_start_token(file, tokeniser)
    folder.mkdir(parents=True, exist_ok=True)
    # Not model.save_pretrained: it takes the decoded weights for quantised ones and refuses.
    save_file(_drop_tied_head(model), str(folder / "model.safetensors"), metadata={"format": "pt"})
    config = {key: value for key, value in model.config.to_dict().items() if key not in _NOT_KEPT}
    config["architectures"] = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n", encoding="utf-8")
    with quiet_transformers():
        tokeniser.save_pretrained(str(folder))


def _drop_tied_head(model: Any) -> dict[str, Any]:
    """Take every tensor once: a language head that is the embeddings themselves is left to the configuration."""
    state = model.state_dict()
    shared = model.get_input_embeddings().weight.data_ptr()
    tied = {name for name, tensor in state.items() if tensor.data_ptr() == shared and name.startswith("lm_head")}
    return {name: tensor.contiguous() for name, tensor in state.items() if name not in tied}


def _restore_start_token(file: Path, tokeniser: Any) -> None:
    """Put the start token before every text where the file asks for it, which the conversion forgets.

    Without the key, tokenisers of the kind `llama` have it by convention. Models trained with it attend to it heavily.
    """
    from gguf import GGUFReader
    from tokenizers.processors import TemplateProcessing

    fields = GGUFReader(str(file)).fields
    asked, kind = fields.get("tokenizer.ggml.add_bos_token"), fields.get("tokenizer.ggml.model")
    wanted = bool(asked.contents()) if asked is not None else kind is not None and kind.contents() == "llama"
    if wanted and tokeniser.bos_token is not None and tokeniser("a")["input_ids"][0] != tokeniser.bos_token_id:
        start = tokeniser.bos_token
        tokeniser.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{start} $A", pair=f"{start} $A {start} $B", special_tokens=[(start, tokeniser.bos_token_id)]
        )


def _convert_once(file: Path) -> Path:
    """Find the decoded folder of a GGUF file in the cache, or make it."""
    _check_gguf(file)
    folder = encoders_folder() / f"gguf-{_SCHEME}-{file_digest(file)[:24]}"
    if not folder.is_dir():
        make_folder(folder.parent)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
            convert_gguf(file, Path(scratch) / "model")
            try:
                os.replace(Path(scratch) / "model", folder)
            except OSError:
                if not folder.is_dir():  # another process was faster: its folder is as good
                    raise
    return folder


def _check_gguf(file: Path) -> None:
    with file.open("rb") as opened:
        magic = opened.read(len(_GGUF_MAGIC))
    if magic != _GGUF_MAGIC:
        raise UserError(
            f"{file} is not a GGUF file (it begins with {magic!r}); expected a GGUF file or a transformers folder. "
            "Pickles (.bin, .pt) are refused because reading them can run code: convert them to safetensors"
        )


def _check_header(file: Path) -> None:
    """Go once over what a GGUF file says of itself: its reader believes every count, also past the end of the file."""
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as held:
        try:
            order = "<" if struct.unpack_from("<I", held, 4)[0] & 0xFFFF else ">"
            _, _, count = struct.unpack_from(f"{order}IQQ", held, 4)
            at = 24
            for _ in range(count):
                at = _after(held, at, _STRING, order)
                at = _after(held, at + 4, struct.unpack_from(f"{order}I", held, at)[0], order)
        except (struct.error, KeyError, ValueError, RecursionError) as error:
            raise ValueError(f"its header is cut off or damaged: {error}") from None


def _after(held: mmap.mmap, at: int, kind: int, order: str) -> int:
    """Where the value of this kind ends that begins here."""
    if kind == _STRING:
        at += 8 + struct.unpack_from(f"{order}Q", held, at)[0]
    elif kind == _ARRAY:
        inner, count = struct.unpack_from(f"{order}IQ", held, at)
        at += 12
        if inner in _SIZES:
            at += count * _SIZES[inner]
        else:
            for _ in range(count):
                at = _after(held, at, inner, order)
    else:
        at += _SIZES[kind]
    if at > len(held):
        raise ValueError(f"a value is said to go on to byte {at} of {len(held)}")
    return at


def _check_folder(folder: Path, kind: Literal["text", "speech"]) -> None:
    """Say what is missing before transformers looks for it on the hub."""
    files = [file.name for file in folder.glob("*.gguf")]
    if files and not (folder / "config.json").is_file():
        raise UserError(f"{folder} holds GGUF files and no config.json; name the file itself: {folder / files[0]}")
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{folder} is not a model: it has no config.json; expected a transformers folder (config.json, "
            "*.safetensors and a tokeniser), or a GGUF file"
        )
    if not any(folder.glob("*.safetensors")):
        pickles = [file.name for pattern in _PICKLES for file in folder.glob(pattern)]
        refused = f" ({pickles[0]} is a pickle, which can run code, and is refused)" if pickles else ""
        raise UserError(
            f"{folder} has no *.safetensors{refused}; expected weights as safetensors: save the model again with "
            "save_pretrained"
        )
    if kind == "text" and not any((folder / name).is_file() for name in _TOKENISERS):
        raise UserError(
            f"{folder} has no tokeniser; expected one of {', '.join(_TOKENISERS)} beside the weights: save the "
            "tokeniser into the same folder"
        )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep the library's bars and notices off the terminal; what goes wrong is an exception anyway."""
    from transformers.utils import logging

    library: Any = logging  # it has no types
    level, bars = library.get_verbosity(), library.is_progress_bar_enabled()
    hub = getLogger("huggingface_hub")
    before = hub.level
    library.set_verbosity_error()
    library.disable_progress_bar()
    hub.setLevel(ERROR)
    try:
        yield
    finally:
        hub.setLevel(before)
        library.set_verbosity(level)
        if bars:
            library.enable_progress_bar()


@contextmanager
def explain_unreadable(what: str, expected: str) -> Iterator[None]:
    """Read with transformers, quietly; say in one line what could not be done, why, and what was expected."""
    try:
        with quiet_transformers():
            yield
    except (UserError, Stopped):
        raise
    except Exception as error:  # what a damaged file leads to in somebody else's reader is anything
        reason = one_line(" ".join(str(error).split()), 300) or type(error).__name__
        raise UserError(f"cannot {what} ({reason}); expected {expected}") from error

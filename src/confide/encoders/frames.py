"""Frozen speech encoders: samples become frames, at an utterance's own length.

Serves speech on a pretrained encoder: CAR's frozen blocks (section 3.1), for sound in place of text. An encoder is read
in three stages, so that those that never train can be run once and kept:

    stem     samples (n,) -> the input of the first block (frames, width): the model's own features, convolutions and
             positions. One utterance at a time: some models normalise over time, where padding would count.
    blocks   any stretch of them on a padded batch; padding is masked in the attention, so that an utterance's states do
             not depend on its neighbours, up to rounding.
    finish   the model's last norm, where it has one after the blocks.

Whisper's own code insists on windows of 30 s. Its layers are run here on as many frames as there are, with the first
positions. wav2vec 2.0 and its relatives (HuBERT, WavLM, data2vec, UniSpeech) and Moonshine take any length.

The weights are only read when states have to be computed: what is kept on disk is known by `identity`, a digest of the
tensors and of the configuration.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from confide.encoders.weights import asking, explain_unreadable, find
from confide.errors import UserError

SAMPLE_RATE = 16_000
_KNOWN = "Whisper, Moonshine, wav2vec 2.0, HuBERT, WavLM, or another with the parts of wav2vec 2.0"
# Configuration entries that do not change a state.
_INCIDENTAL = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "architectures", "use_cache")
_MOONSHINE_STEP = 64 * 3 * 2  # samples to a frame


class FrameEncoder:
    """A frozen speech encoder of transformers."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.folder = find(source, "speech") or _fetch(source)
        with explain_unreadable(f"read the encoder {source}", f"a complete model that transformers knows: {_KNOWN}"):
            from transformers import AutoConfig

            self.config: Any = AutoConfig.from_pretrained(str(self.folder), **asking(local=True))
        self.kind: str = self.config.model_type
        if self.kind not in ("whisper", "moonshine") and not hasattr(self.config, "conv_stride"):
            raise UserError(f"the encoder {source} is of type {self.kind}, which gives no frames; expected {_KNOWN}")
        self.width: int = self.config.hidden_size
        self.frame_seconds = _step_samples(self.config) / SAMPLE_RATE
        self.extractor = self._read_extractor()
        self._loading = threading.Lock()

    @cached_property
    def identity(self) -> str:
        """A digest of everything that decides a state: tensors, configuration and the features in front of them."""
        expected = "complete *.safetensors: copy or install the encoder again"
        with explain_unreadable(f"read the weights of the encoder {self.source}", expected):
            return self._digest()

    def _digest(self) -> str:
        from safetensors import safe_open

        total = hashlib.sha256()
        places: dict[str, Path] = {}
        for path in _tensor_files(self.folder):
            with safe_open(path, framework="pt") as file:
                places |= dict.fromkeys(file.keys(), path)
        for path in dict.fromkeys(places.values()):
            with safe_open(path, framework="pt") as file:
                for name in sorted(name for name, place in places.items() if place == path):
                    tensor = file.get_tensor(name).contiguous()
                    total.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
                    total.update(tensor.view(-1).view(torch.uint8).numpy().data)
        config = {key: value for key, value in self.config.to_dict().items() if key not in _INCIDENTAL}
        total.update(json.dumps(config, sort_keys=True, default=str).encode())
        settings = {key: value for key, value in self.extractor.to_dict().items() if key != "mel_filters"}
        total.update(json.dumps(settings, sort_keys=True, default=str).encode())
        return total.hexdigest()

    @property
    def model(self) -> Any:
        """The encoder as a module of transformers, in 32 bits, frozen."""
        with self._loading:  # several threads may be the first to ask
            return self._model

    @cached_property
    def _model(self) -> Any:
        with explain_unreadable(
            f"read the encoder {self.source}", "the complete weights of the model that its config.json names"
        ):
            model = _load_part(self.folder, self.config) if self.kind in _PARTS else _load_whole(self.folder)
        return model.eval().requires_grad_(False)

    @property
    def layers(self) -> Any:
        """The blocks, as a list of modules."""
        return self.model.layers if self.kind in _PARTS else self.model.encoder.layers

    @property
    def longest(self) -> float:
        """Seconds of the longest utterance."""
        return self.config.max_source_positions * self.frame_seconds if self.kind == "whisper" else math.inf

    @property
    def shortest(self) -> int:
        """Samples of the shortest utterance, which gives one frame."""
        if self.kind == "whisper":
            return 400
        if self.kind == "moonshine":
            return 127 + 64 * (6 + 2 * 3)
        samples = 1
        for kernel, stride in zip(reversed(self.config.conv_kernel), reversed(self.config.conv_stride), strict=True):
            samples = (samples - 1) * stride + kernel
        return int(samples)

    @torch.no_grad()
    def stem(self, samples: np.ndarray) -> Tensor:
        """The input of the first block, of one utterance (n,) at 16 kHz."""  # (frames, width)
        found: dict[str, Tensor] = self.extractor(
            samples, sampling_rate=SAMPLE_RATE, padding=False, truncation=False, return_tensors="pt"
        )
        return self.embed(found["input_features" if self.kind == "whisper" else "input_values"])

    def embed(self, values: Tensor) -> Tensor:
        """The same of what the extractor makes: (1, mels, frames) for Whisper, else (1, n)."""  # (frames, width)
        gelu = torch.nn.functional.gelu
        if self.kind == "whisper":
            x: Tensor = gelu(self.model.conv2(gelu(self.model.conv1(values)))).transpose(1, 2)
            return x[0] + self._positions[: x.shape[1]]
        if self.kind == "moonshine":
            x = self.model.groupnorm(torch.tanh(self.model.conv1(values.unsqueeze(1))))
            return gelu(self.model.conv3(gelu(self.model.conv2(x))))[0].T
        x = self.model.feature_extractor(values).transpose(1, 2)
        projected: Any = self.model.feature_projection(x)
        x = projected[0] if isinstance(projected, tuple) else projected  # some return what they were given as well
        encoder = self.model.encoder
        x = x + encoder.pos_conv_embed(x)
        return x[0] if self._norm_last else self._norm(x[0])

    def block(self, index: int, x: Tensor, context: Context) -> Tensor:
        """Send a padded batch (batch, frames, width) through one block."""
        layer = self.layers[index]
        arguments: dict[str, Any] = {"attention_mask": context.mask}
        if self.kind == "moonshine":
            arguments["position_embeddings"] = context.positions
        if self.kind == "wavlm":
            arguments |= {"position_bias": context.positions, "index": index}
        out: Any = layer(x, **arguments)
        found: Tensor = out[0] if isinstance(out, tuple) else out
        return found

    def context(self, x: Tensor, lengths: Tensor | None) -> Context:
        """What all blocks need to know of a padded batch; without lengths nothing of it is padding."""
        frames = x.shape[1]
        mask, positions = None if lengths is None else _attention_mask(lengths, frames), None
        if self.kind == "moonshine":
            positions = self.model.rotary_emb(x, position_ids=torch.arange(frames).unsqueeze(0))
        if self.kind == "wavlm":
            bias = self.layers[0].attention.compute_bias(frames, frames)  # (heads, frames, frames)
            positions = bias.unsqueeze(0).repeat(len(x), 1, 1, 1).view(-1, frames, frames)
            mask = None if mask is None or lengths is None else (torch.arange(frames) < lengths[:, None]).long()
        return Context(mask, positions)

    def finish(self, x: Tensor) -> Tensor:
        """The norm after the last block."""
        return x if self.last_norm is None else self._norm(x)

    @property
    def last_norm(self) -> torch.nn.Module | None:
        """The module of that norm; none if the model has none there."""
        if not self._norm_last:
            return None
        norm: torch.nn.Module = self.model.layer_norm if self.kind in _PARTS else self.model.encoder.layer_norm
        return norm

    @torch.no_grad()
    def states(self, utterances: Sequence[np.ndarray], depth: int | None = None) -> list[Tensor]:
        """States of utterances after `depth` blocks, or of the whole encoder; each (frames, width), in one batch."""
        stems = [self.stem(samples) for samples in utterances]
        lengths = torch.tensor([len(stem) for stem in stems])
        x = pad_sequence(stems, batch_first=True)
        context = self.context(x, lengths)
        for index in range(len(self.layers) if depth is None else depth):
            x = self.block(index, x, context)
        if depth is None:
            x = self.finish(x)
        return [row[:length] for row, length in zip(x, lengths.tolist(), strict=True)]

    @property
    def _norm_last(self) -> bool:
        """Whether the encoder's norm comes after the blocks; some relatives of wav2vec 2.0 have it before."""
        return self.kind in _PARTS or bool(getattr(self.config, "do_stable_layer_norm", False))

    def _norm(self, x: Tensor) -> Tensor:
        norm: torch.nn.Module = self.model.layer_norm if self.kind in _PARTS else self.model.encoder.layer_norm
        found: Tensor = norm(x)
        return found

    @property
    def _positions(self) -> Tensor:
        weight: Tensor = self.model.embed_positions.weight
        return weight

    def _read_extractor(self) -> Any:
        """What brings samples into the model's form: as the folder says, else as the family usually has it."""
        import transformers

        library: Any = transformers  # it has no types
        if (self.folder / "preprocessor_config.json").is_file():
            expected = (
                "a preprocessor_config.json that transformers knows: delete it to get what the family usually has"
            )
            with explain_unreadable(f"read the encoder {self.source}", expected):
                found = library.AutoFeatureExtractor.from_pretrained(str(self.folder), **asking(local=True))
        elif self.kind == "whisper":
            found = library.WhisperFeatureExtractor(feature_size=self.config.num_mel_bins)
        else:
            scaled = self.kind != "moonshine" and getattr(self.config, "feat_extract_norm", "") == "layer"
            found = library.Wav2Vec2FeatureExtractor(do_normalize=scaled)
        if found.sampling_rate != SAMPLE_RATE:
            raise UserError(
                f"the encoder {self.source} hears {found.sampling_rate} samples a second; expected {SAMPLE_RATE}, to "
                "which all audio is brought here"
            )
        if self.kind == "whisper" and found.feature_size != self.config.num_mel_bins:
            raise UserError(
                f"the encoder {self.source} wants {self.config.num_mel_bins} mels (config.json), and its "
                f"preprocessor_config.json makes {found.feature_size}; expected files of one model"
            )
        return found


class Context:
    """Of a padded batch: which keys count, and what the model's own positions are made of."""

    def __init__(self, mask: Tensor | None, positions: Any) -> None:
        self.mask, self.positions = mask, positions


def hears(folder: Path) -> bool:
    """Whether a folder's configuration is that of an encoder of speech."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return config.get("model_type") in _PARTS or "conv_stride" in config
    except (OSError, ValueError, AttributeError):
        return False


def _attention_mask(lengths: Tensor, frames: int) -> Tensor | None:
    """A large negative number where a key is padding; none if nothing is."""  # (batch, 1, 1, frames)
    if int(lengths.min()) == frames:
        return None
    padding = torch.arange(frames) >= lengths[:, None]
    bias = torch.zeros(padding.shape).masked_fill_(padding, torch.finfo(torch.float32).min)
    return bias[:, None, None, :].expand(-1, 1, frames, -1)


_PARTS = {"whisper": "WhisperEncoder", "moonshine": "MoonshineEncoder"}
"""Of an encoder with a decoder, the class of the part that is used."""


def _step_samples(config: Any) -> int:
    if config.model_type == "whisper":
        return 2 * 160
    return _MOONSHINE_STEP if config.model_type == "moonshine" else math.prod(config.conv_stride)


def _load_part(folder: Path, config: Any) -> Any:
    """The encoder of a model that has a decoder too, whose tensors need not be there."""
    import importlib

    from safetensors.torch import load_file

    module = importlib.import_module(f"transformers.models.{config.model_type}.modeling_{config.model_type}")
    found: dict[str, Tensor] = {}
    for path in _tensor_files(folder):
        for name, tensor in load_file(path).items():
            _, marked, rest = f".{name}".partition(".encoder.")
            if marked:
                found[rest] = tensor.float()
    model = getattr(module, _PARTS[config.model_type])(config)
    model.load_state_dict(found)
    return model


def _load_whole(folder: Path) -> Any:
    from transformers import AutoModel

    model, report = AutoModel.from_pretrained(
        str(folder), dtype=torch.float32, use_safetensors=True, output_loading_info=True, **asking(local=True)
    )
    missing = sorted(name for name in report["missing_keys"] if "masked_spec_embed" not in name)
    if missing:
        raise ValueError(f"{len(missing)} tensors are missing, such as {missing[0]}")
    if not hasattr(model, "feature_projection") or not hasattr(model.encoder, "pos_conv_embed"):
        raise ValueError(f"{type(model).__name__} has other parts than wav2vec 2.0")
    return model


def _tensor_files(folder: Path) -> list[Path]:
    """The files of one model: where there is a whole one, its shards or other precisions are left alone."""
    whole = folder / "model.safetensors"
    return [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))


def _fetch(source: str) -> Path:
    """A model of the hub, in the hub's own cache: configurations and safetensors, never code or pickles."""
    from huggingface_hub import snapshot_download

    advice = "a network that reaches the hub: name a transformers folder, or one of the presets (confide encoder list)"
    with explain_unreadable(f"fetch the encoder {source}", advice):
        folder = Path(snapshot_download(source, allow_patterns=["*.json", "*.safetensors"]))
    if not _tensor_files(folder):
        raise UserError(
            f"the encoder {source} has no *.safetensors on the hub; expected one that has: pickles can run code"
        )
    return folder

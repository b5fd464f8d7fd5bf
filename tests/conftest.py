"""What the tests share: the command line in this process, a tiny recipe, a clean stop, and pictures of a folder.

For retrieval: tiny models of both kinds, made on the spot, the real ones where they are installed, published data.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

if TYPE_CHECKING:
    from confide.encoders.encoder import Encoder

# A shell that begins the tests in its background has them and their processes ignore Ctrl-C, which some of them send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Every part of a state is in use: an optimiser with moments, a mean of the last iterates, two evaluations to average.
TINY = """\
description: quadratics in six dimensions over twelve users
task: {kind: convex/quadratics, users: 12, dimension: 6, rank: 3}
sampling: {kind: poisson, cohort: 6}
local: {steps: 2, learning_rate: 0.1}
bounding: {rule: clip, bound: 1}
privacy: {mechanism: gaussian, noise_multiplier: 1, delta: 1.0e-5}
central: {kind: adam, learning_rate: 0.1}
final: {kind: mean, count: 3}
evaluation: {every: 2, last: 2}
run: {steps: 6, checkpoint_every: 2}
"""


@pytest.fixture(autouse=True)
def no_code_allowed() -> Iterator[None]:
    """Consent to code that a recipe names ends with the test that gave it."""
    os.environ.pop("CONFIDE_ALLOW_CODE", None)
    yield
    os.environ.pop("CONFIDE_ALLOW_CODE", None)


@pytest.fixture
def own_code(no_code_allowed: None) -> None:
    """For tests that bring code of their own."""
    from confide import allow_code

    allow_code()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a recipe whose whole run takes a tenth of a second."""
    path = tmp_path_factory.mktemp("recipes") / "tiny.yaml"
    path.write_text(TINY)
    return str(path)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """`confide ...` without the start of a process: exit code, standard output, standard error."""
    from confide import cli

    def call(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["confide", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        assert isinstance(end.value.code, int)
        return end.value.code, out, err

    return call


@pytest.fixture
def contents() -> Callable[[Path], dict[str, str]]:
    """Every file under a folder with a digest of its bytes; the lock, which is always empty, is left out."""

    def read(folder: Path) -> dict[str, str]:
        files = (p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != ".lock")
        return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}

    return read


@contextmanager
def _without_figures() -> Iterator[None]:
    from confide.report import headline

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(headline, "enough", lambda *_: "left out")
        yield


@pytest.fixture
def no_figures() -> Iterator[None]:
    """Leave out what takes most of a short run's time: the search for the population that its page names."""
    with _without_figures():
        yield


@pytest.fixture(scope="module")
def no_figures_here() -> Iterator[None]:
    """`no_figures` for a whole module."""
    with _without_figures():
        yield


@pytest.fixture
def warm_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the workers of an engine or a grid from a process with the modules loaded: a cold one takes seconds."""
    import torch.multiprocessing

    from confide.reproduce import grid
    from support import warm

    monkeypatch.setattr(torch.multiprocessing, "get_context", lambda _: warm.CONTEXT)
    monkeypatch.setattr(grid, "get_context", lambda _: warm.CONTEXT)


@pytest.fixture(scope="session")
def signal_after() -> Callable[..., AbstractContextManager[None]]:
    """`with signal_after(4): ...` sends this process a signal, Ctrl-C unless told otherwise, in central step 4."""

    @contextmanager
    def sending(steps: int, number: int = signal.SIGINT) -> Iterator[None]:
        from confide.run import Loop

        original = Loop.step

        def step(loop: Loop, state: Any) -> Any:
            record = original(loop, state)
            if state.step == steps:
                os.kill(os.getpid(), number)
            return record

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Loop, "step", step)
            yield

    return sending


_TEXT = "the cat sat on a mat and dogs ran far away from home while birds sang in old trees near water"
_WORDS = _TEXT.split()


def _tokeniser(folder: Path, masked: bool) -> None:
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"] if masked else ["<pad>", "<unk>", "<s>", "</s>"]
    vocabulary = {word: number for number, word in enumerate([*specials, *_WORDS])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token=specials[1]))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    names: dict[str, Any] = {"pad_token": specials[0], "unk_token": specials[1]}
    if masked:
        plain.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
        names |= {"cls_token": specials[2], "sep_token": specials[3]}
    else:
        names |= {"bos_token": specials[2], "eos_token": specials[3]}
    wrap: Any = transformers.PreTrainedTokenizerFast
    wrap(tokenizer_object=plain, **names).save_pretrained(str(folder))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Literal["causal", "masked"]], Path]:
    """The folder of a random model with two blocks, 16 wide, and a vocabulary of some twenty words."""
    made: dict[str, Path] = {}

    def make(kind: Literal["causal", "masked"]) -> Path:
        import torch
        import transformers

        library: Any = transformers

        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            _tokeniser(folder, kind == "masked")
            size: dict[str, Any] = {
                "vocab_size": len(_WORDS) + 4, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
                "intermediate_size": 32, "max_position_embeddings": 64, "initializer_range": 0.3,
            }  # fmt: skip
            with torch.random.fork_rng():
                torch.manual_seed(0)
                model: Any = (
                    library.LlamaForCausalLM(library.LlamaConfig(**size, num_key_value_heads=2))
                    if kind == "causal"
                    else library.BertModel(library.BertConfig(**size))
                )
            model.save_pretrained(str(folder))
            made[kind] = folder
        return made[kind]

    return make


_HEARING: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "conv_dim": (8, 8, 8), "conv_stride": (5, 8, 8), "conv_kernel": (10, 8, 8), "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "initializer_range": 0.5,
}  # fmt: skip
_STABLE = {"do_stable_layer_norm": True, "feat_extract_norm": "layer"}
_WITH_DECODER = {"decoder_attention_heads": 2, "decoder_layers": 1, "decoder_ffn_dim": 16}
_MARKS = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "decoder_start_token_id": 0, "vocab_size": 8}
SPEECH_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "wav2vec2": ("Wav2Vec2", _HEARING),
    "wav2vec2-stable": ("Wav2Vec2", {**_HEARING, **_STABLE}),
    "hubert": ("Hubert", _HEARING),
    "wavlm": ("WavLM", _HEARING),
    "wavlm-stable": ("WavLM", {**_HEARING, **_STABLE}),
    "data2vec": ("Data2VecAudio", _HEARING),
    "moonshine": ("Moonshine", {
        "hidden_size": 16, "intermediate_size": 32, "encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 1,
        "encoder_num_attention_heads": 2, "decoder_num_attention_heads": 2, "initializer_range": 0.5,
    }),
    "whisper": ("Whisper", {
        "d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "init_std": 0.5,
        "max_source_positions": 400, **_WITH_DECODER, **_MARKS,
    }),
}  # fmt: skip
"""Class and configuration of a random speech encoder of each family, two blocks, 16 wide."""


@pytest.fixture(scope="session")
def tiny_speech_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a random speech encoder of one of the families in SPEECH_MODELS."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        import torch
        import transformers

        from confide.encoders.weights import quiet_transformers

        library: Any = transformers
        if family not in made:
            name, config = SPEECH_MODELS[family]
            with torch.random.fork_rng(), quiet_transformers():
                torch.manual_seed(0)
                model = getattr(library, f"{name}Model")(getattr(library, f"{name}Config")(**config))
                made[family] = tmp_path_factory.mktemp(family)
                model.save_pretrained(str(made[family]))
        return made[family]

    return make


@pytest.fixture(scope="session")
def left_run() -> Callable[[Path, dict[str, Any]], Path]:
    """`left_run(folder, task)`: a run that has ended, with random tensors, without the training; speech by default."""
    rest: dict[str, Any] = {
        "sampling": {"kind": "fixed", "cohort": 1}, "local": {"steps": 1, "learning_rate": 1.0, "batch_size": 2},
        "bounding": {"rule": "clip", "bound": 1.0}, "central": {"kind": "sgd", "learning_rate": 1.0},
        "run": {"steps": 1},
    }  # fmt: skip
    nowhere = {"kind": "folder", "folder": "nowhere"}

    def make(place: Path, task: dict[str, Any]) -> Path:
        import torch

        from confide.encoders.encoder import Encoder
        from confide.privacy.ledger import FILE, Ledger
        from confide.recipe import parse
        from confide.retrieval.retriever import Retriever
        from confide.retrieval.settings import RetrievalSettings
        from confide.runs import folder
        from confide.runs.notes import serialise
        from confide.speech.network import network_of
        from confide.speech.settings import SpeechSettings
        from confide.speech.tokens import Tokens

        recipe = parse(
            {"task": {"kind": "speech", "corpus": nowhere, "test": nowhere, **task}, **rest}
            if task.get("kind") is None
            else {"task": task, **rest}
        )
        if isinstance(recipe.task, SpeechSettings):
            shapes = network_of(recipe.task, Tokens("en")).shapes()
        else:
            assert isinstance(recipe.task, RetrievalSettings)
            documents = recipe.task.data.read(0).documents
            shapes = Retriever(recipe.task, Encoder(recipe.task.encoder), documents, 0, quiet=True).parameter_shapes()
        draw = torch.Generator().manual_seed(0)
        place.mkdir()
        (place / folder.RECIPE).write_text(recipe.to_yaml())
        tensors = {name: torch.randn(shape, generator=draw) * 0.3 for name, shape in shapes.items()}
        (place / folder.MODEL).write_bytes(serialise(tensors, {"task": recipe.task.kind}))
        Ledger.create(place / FILE, {"delta": 1e-6, "accountant": "pld", "population": 10})
        return place

    return make


@pytest.fixture(scope="session")
def tiny_encoder(tiny_model: Callable[..., Path]) -> Callable[..., Encoder]:
    """`tiny_encoder("causal", "mean", max_tokens=8)`."""

    def make(kind: Literal["causal", "masked"], pooling: Literal["last", "mean"] = "last", **more: Any) -> Encoder:
        from confide.encoders.encoder import Encoder, EncoderSettings

        return Encoder(EncoderSettings(source=str(tiny_model(kind)), pooling=pooling, **more))

    return make


@pytest.fixture(scope="session")
def real_encoder() -> Callable[..., Encoder]:
    """An installed preset; the test is skipped where there is none."""

    def make(name: str, pooling: Literal["last", "mean"] = "last") -> Encoder:
        from confide.encoders.encoder import Encoder, EncoderSettings
        from confide.encoders.presets import PRESETS

        if not PRESETS[name].installed:
            pytest.skip(f"the real model {name} is not installed; run `{PRESETS[name].command}`")
        return Encoder(EncoderSettings(source=name, pooling=pooling))

    return make


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder with the published collections; the test is skipped where there is none."""
    folder = Path(os.environ.get("CONFIDE_DATA", "../shared/data"))
    if not (folder / "sms_spam").is_dir():
        pytest.skip(f"no published data in {folder}; name their folder in the environment variable CONFIDE_DATA")
    return folder


@pytest.fixture(scope="session")
def minilm() -> str:
    """The small real encoder, fetched where it is not here yet; the test is skipped where that cannot be done."""
    from confide.encoders.presets import install, preset
    from confide.errors import UserError

    try:
        install(preset("minilm"))
    except UserError as error:
        pytest.skip(f"the encoder minilm is not installed and could not be fetched: {error}")
    return "minilm"


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Debian's chromium without a window, driven by selenium, with every request on record."""
    selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install selenium")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("chromium or chromedriver is missing: apt-get install chromium chromium-driver")
    options = selenium.ChromeOptions()
    options.binary_location = chromium
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(word)
    # A microphone that hums, and nobody to ask whether it may be used.
    options.add_argument("--use-fake-device-for-media-stream")
    options.add_argument("--use-fake-ui-for-media-stream")
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    from selenium.webdriver.chrome.service import Service

    started = selenium.Chrome(options=options, service=Service(driver))
    try:
        yield started
    finally:
        started.quit()


@pytest.fixture
def requested(browser: Any) -> Callable[[], list[str]]:
    """Addresses that the browser asked for since the test began or since the last call, data: ones left out."""
    browser.get("about:blank")
    browser.get_log("performance")

    def read() -> list[str]:
        messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
        sent = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        return [url for url in sent if not url.startswith(("data:", "blob:", "about:"))]

    return read

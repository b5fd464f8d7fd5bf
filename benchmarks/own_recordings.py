"""From a stranger's folder of recordings to an exported private model, by the five commands of docs/tutorial-own.md.

    .venv/bin/python benchmarks/own_recordings.py --out results/own [--data speech_commands] [--json own.json]

Lays published recordings out as a person would keep them (recordings/SPEAKER/NAME.wav and NAME.txt), runs the commands
as they are printed there, and checks what they left: epsilon and delta in the ledger and in the model's notes, the
word error rates of the start and of the model, and that onnxruntime, on the exported file alone, writes down the same
words as `confide transcribe` for recordings of people whom `init` never saw. Prints and keeps a JSON document with the
seconds of each command (--json: as a record too); with --fresh the encoder's states and the voices of earlier runs are
not used.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jiwer
import numpy as np
import onnxruntime
import soundfile

from confide.files import cache_folder, data_folder
from confide.runs.corpus_choice import check_corpus
from confide.speech.corpora import read_corpus
from confide.speech.corpus import SAMPLE_RATE, Corpus, read_audio
from support.written import write_record

ROOT = Path(__file__).parents[1]
HEADING = "**In five commands.**"
SETS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "speech_commands": ({"kind": "tsv", "file": "train.tsv"}, {"kind": "tsv", "file": "test.tsv"}),
    "audiomnist": ({"kind": "audiomnist", "subset": "train"}, {"kind": "audiomnist", "subset": "test"}),
    "fsdd": ({"kind": "fsdd", "share": 80}, {"kind": "fsdd", "share": 20}),
    "an4": ({"kind": "tsv", "file": "train.tsv"}, {"kind": "tsv", "file": "test.tsv"}),
}
"""Which people the stranger has, and which others the exported model is tried on."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a new folder for everything")
    parser.add_argument("--data", choices=SETS, default="speech_commands")
    parser.add_argument("--recordings", type=int, default=100, help="how many are transcribed by both")
    parser.add_argument("--fresh", action="store_true", help="make the encoder's states, also where they are kept")
    parser.add_argument("--json", type=Path, help="where the record is written")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True)
    train, test = (opened(asked.data, section) for section in SETS[asked.data])
    lay_out(train, asked.out / "recordings")
    row: dict[str, Any] = {"data": asked.data, "people": len(train.speakers), "commands": []}
    environment = dict(os.environ)
    if asked.fresh:
        cache = (asked.out / "cache").resolve()
        cache.mkdir()
        (cache / "encoders").symlink_to(cache_folder() / "encoders")
        environment["CONFIDE_CACHE"] = str(cache)
    for command in printed_commands():
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", *shlex.split(command)], cwd=asked.out, env=environment, text=True,
            capture_output=True, check=False,
        )  # fmt: skip
        row["commands"].append({"command": command, "seconds": round(time.perf_counter() - began, 1)})
        print(f"$ {command}\n{done.stderr}{done.stdout}", flush=True)
        if done.returncode:
            sys.exit(f"exit code {done.returncode}")
    row["seconds"] = round(sum(each["seconds"] for each in row["commands"]), 1)
    row |= checked(asked.out, heard_of(test, asked.recordings))
    (asked.out / "own.json").write_text(json.dumps(row, indent=2) + "\n")
    if asked.json is not None:
        write_record(asked.json, [row])
    print(json.dumps(row, indent=2))


def opened(name: str, section: dict[str, Any]) -> Corpus:
    folder = data_folder() / name
    place = {"file": str(folder / section["file"])} if "file" in section else {"folder": str(folder)}
    return read_corpus(check_corpus(section["kind"], {k: v for k, v in section.items() if k != "kind"} | place))


def lay_out(corpus: Corpus, folder: Path) -> None:
    """Folders of speakers, with WAV files and a text beside each."""
    for speaker, own in corpus.speakers.items():
        (folder / speaker).mkdir(parents=True)
        for number, utterance in enumerate(own):
            path = folder / speaker / f"{number:03d}.wav"
            soundfile.write(path, read_audio(utterance), SAMPLE_RATE)
            path.with_suffix(".txt").write_text(utterance.text + "\n")


def printed_commands() -> list[str]:
    """The commands of the tutorial, as they stand there."""
    text = (ROOT / "docs" / "tutorial-own.md").read_text()
    block = re.search(r"```bash\n(.*?)```", text[text.index(HEADING) :], re.DOTALL)
    assert block is not None
    commands = [line for line in block[1].splitlines() if line]
    assert len(commands) <= 5
    assert all(command.startswith("confide ") for command in commands)
    return commands


def heard_of(corpus: Corpus, count: int) -> list[tuple[np.ndarray, str]]:
    """Samples and texts, one recording of every person in turn."""
    turns: dict[int, list[Any]] = defaultdict(list)
    for own in corpus.speakers.values():
        for number, utterance in enumerate(own):
            turns[number].append(utterance)
    chosen = [utterance for number in sorted(turns) for utterance in turns[number]][:count]
    return [(read_audio(utterance), utterance.text) for utterance in chosen]


def checked(out: Path, heard: list[tuple[np.ndarray, str]]) -> dict[str, Any]:
    """What the commands left behind, looked at without them."""
    (run,) = (place for place in (out / "runs").iterdir() if not place.name.endswith("-start"))
    (published,) = (out / "published").iterdir()
    (file,) = out.glob("*.onnx")
    files = []
    (out / "others").mkdir()
    for number, (samples, _) in enumerate(heard):
        files.append(out / "others" / f"{number:03d}.wav")
        soundfile.write(files[-1], samples, SAMPLE_RATE, subtype="FLOAT")
    words = [sys.executable, "-m", "confide", "transcribe", str(published), *map(str, files), "--json"]
    said = json.loads(subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout)
    ours = [each["text"] for each in said["files"]]
    session = onnxruntime.InferenceSession(str(file))
    notes = session.get_modelmeta().custom_metadata_map
    theirs = list(by_onnx(session, json.loads(notes["tokens"]), files))
    summary = json.loads((run / "summary.json").read_text())
    return {
        "epsilon": summary["epsilon"], "delta": summary["delta"], "population": summary["population"],
        "for_release": summary["for_release"], "epsilon_in_onnx": float(notes["epsilon"]),
        "word_error_rate": summary["metrics"]["wer"], "at_the_start": summary["start"]["metrics"]["wer"],
        "others": len(ours), "same_transcripts": sum(a == b for a, b in zip(ours, theirs, strict=True)),
        "word_error_rate_of_others": round(100 * jiwer.wer([text for _, text in heard], theirs), 2),
    }  # fmt: skip


def by_onnx(session: onnxruntime.InferenceSession, tokens: list[str], files: list[Path]) -> Iterator[str]:
    """The greedy reading that docs/use.md prints."""
    for file in files:
        samples, _ = soundfile.read(file, dtype="float32")
        best = session.run(None, {"samples": samples})[0].argmax(axis=1)
        kept = [token for token, before in zip(best, [0, *best], strict=False) if token not in (0, before)]
        yield "".join(tokens[token] for token in kept).replace("|", " ").strip()


if __name__ == "__main__":
    main()

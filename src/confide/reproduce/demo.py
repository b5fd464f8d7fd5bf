"""`confide demo`: speech recognition that is private as trained, from nothing, on voices that it makes itself.

A pretrained encoder is fetched and frozen. A small head on its states begins with some simulated Americans who say
digits, whom nothing protects. Then 5,000 simulated people with other accents (`speech/corpora/population.py`) train it:
once without privacy, and at epsilon 8, 2 and 1, each tested on other simulated people. Every epsilon in the table is
the one of the run itself, with so many people, and none is extrapolated.

Where the encoder cannot be had, the demo says so and trains the small recogniser of PFL-ASR whole, from a seed. That
has forty times as many numbers, and its table shows what the noise for an epsilon of 2 then does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from confide.encoders import presets
from confide.errors import UserError
from confide.files import write_atomically
from confide.privacy.accountant import rated
from confide.recipe import Recipe, load
from confide.report.shell import document
from confide.reproduce.frontier import Frontier, Spot, page_parts, spot_of_run
from confide.reproduce.grid import text_table, train_once
from confide.speech.beam import equal_words
from confide.speech.grammar import DIGITS

ENCODER = "whisper-tiny.en"
START, PRIVATE = "speech/voices/seed", "speech/voices/private"
SEED, WHOLE = "speech/population/seed", "speech/population/private"
LEVELS: dict[str, float | None] = {"no-privacy": None, "epsilon-8": 8.0, "epsilon-2": 2.0, "epsilon-1": 1.0}
"""The runs' folders, and the epsilon of each."""
FEWER = {
    SEED: ("run.steps=600", "evaluation.every=300"),
    WHOLE: (
        "task.corpus.people=5000", "task.corpus.utterances=1", "sampling.cohort=500", "run.steps=30",
        "central.schedule.steps=30", "task.test.people=100", "evaluation.every=30",
    ),
}  # fmt: skip
"""The whole recogniser's recipes, at a size that leaves the demo within its ten minutes."""


@dataclass(frozen=True)
class DemoRun:
    """A run of the demo: a line of the closing table."""

    name: str
    wer: float
    cer: float
    epsilon: float | None
    """As trained; none without noise."""
    delta: float | None
    people: int
    folder: Path

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "folder": str(self.folder)}


@dataclass(frozen=True)
class Demo:
    """What the demo made."""

    rows: list[DemoRun]
    page: Path
    advice: str

    def text(self) -> str:
        """The closing table and where to go from there."""
        cells = [
            {
                "": row.name, "word error rate, %": f"{row.wer:.1f}", "character error rate, %": f"{row.cer:.1f}",
                "epsilon as trained": "none" if row.epsilon is None else rated(row.epsilon, row.delta, row.people),
                "delta": "" if row.epsilon is None else f"{row.delta:g}", "people": f"{row.people:,}",
            }
            for row in self.rows
        ]  # fmt: skip
        pages = ", ".join(str(row.folder / "report.html") for row in self.rows)
        return "\n".join(
            [*text_table(cells, list(cells[0])), "", f"what privacy costs: {self.page}", f"pages: {pages}", self.advice]
        )


def demo(out: Path, workers: int, quiet: bool = False) -> Demo:
    """Make the runs in `out`, each only once, and sum them up."""
    recipes = (START, PRIVATE) if _get_encoder(quiet) else (SEED, WHOLE)
    runs = _runs(*recipes, out, workers, quiet)
    rows, spots = [], list[Spot]()
    for name, wanted in runs:
        place, level = out / name, LEVELS[name]
        _say("without privacy" if level is None else f"at epsilon {level:g}", quiet)
        summary = train_once(wanted, place, workers, quiet)
        spots.append(spot_of_run("digits", summary))
        metrics, spent = summary["metrics"], spots[-1].epsilon
        rows.append(
            DemoRun(name, metrics["wer"], metrics["cer"], spent, summary["delta"], summary["population"], place)
        )
    page = out / "index.html"
    links = "".join(f'<li><a href="{row.folder.name}/report.html">{row.name}</a></li>' for row in rows)
    parts = [*page_parts(Frontier(tuple(spots))), f"<h2>Runs</h2><ul>{links}</ul>"]
    page.write_text(document("What privacy costs", parts), encoding="utf-8")
    return Demo(rows, page, f"say some digits: confide transcribe {rows[-2].folder} recording.wav{only_digits(out)}")


def only_digits(out: Path) -> str:
    """The option by which a recording of digits is heard as digits, where beam search is installed."""
    if find_spec("flashlight") is None:
        return ""
    words = out / "digits.arpa"
    write_atomically(words, equal_words(DIGITS["en"]).encode())
    return f" --language-model {words}"


def _say(what: str, quiet: bool) -> None:
    if not quiet:
        print(f"== {what}", flush=True)


def _get_encoder(quiet: bool) -> bool:
    """Fetch the encoder, if it is not there; false where it cannot be had."""
    chosen = presets.preset(ENCODER)
    if not chosen.installed:
        _say(f"getting the encoder {chosen.model} ({chosen.megabytes} MB)", quiet)
    try:
        presets.install(chosen)
    except UserError as error:
        _say(f"the encoder cannot be had: {error}. Training the small recogniser whole, in its place", quiet)
        return False
    return True


def _runs(start: str, private: str, out: Path, workers: int, quiet: bool) -> Iterator[tuple[str, Recipe]]:
    """Train the start on voices of other people, and give the recipes of the runs that begin with it."""
    _say("a start, from simulated people who are not protected", quiet)
    train_once(load(start, FEWER.get(start, ())), out / "seed", workers, quiet)
    for name, level in LEVELS.items():
        yield name, load(private, [*FEWER.get(private, ()), f"task.start={out / 'seed'}", *_at(level)])


def _at(level: float | None) -> tuple[str, ...]:
    return ("privacy={mechanism: none}",) if level is None else (f"privacy.target_epsilon={level}",)

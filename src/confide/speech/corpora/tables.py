"""Corpora listed in tables: tab-separated UTF-8 with a header line and no quoting, as Common Voice publishes them.

A table of your own, and CMU AN4: spelled words, numbers and commands by 84 people, as 16 kHz FLAC with train.tsv and
test.tsv. AN4 is not one of PFL-ASR's corpora: a small real one, for trying its claims. Its training and test speakers
are different people.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal

from pydantic import Field

from confide.errors import UserError
from confide.settings import LocalPath
from confide.speech.corpora.listing import Entry, make_corpus
from confide.speech.corpora.settings import SpeakerSettings, find_folder
from confide.speech.corpus import OWN_LANGUAGE, AnyLanguage, Corpus, Progress, Skipped

_AN4 = (
    "http://www.speech.cs.cmu.edu/databases/an4 (as FLAC files, with tables train.tsv and test.tsv of the columns "
    "utterance, speaker, path and text)"
)


class TsvSettings(SpeakerSettings):
    """A table with the columns speaker, path, text and, if you like, utterance; tabs or, in .csv, commas between."""

    kind: Literal["tsv"] = "tsv"
    file: LocalPath = Field(description="the table; its first line names the columns")
    # Left out of a dump at their default, so that recipes from before they were there keep their digest.
    speaker_column: str = Field(
        "speaker", min_length=1, exclude_if=lambda name: name == "speaker", description="which column names the speaker"
    )
    path_column: str = Field(
        "path", min_length=1, exclude_if=lambda name: name == "path", description="which column has the audio file"
    )
    text_column: str = Field(
        "text", min_length=1, exclude_if=lambda name: name == "text", description="which column has what was said"
    )
    folder: LocalPath | None = Field(
        None, description="what paths in the table are relative to; else the table's folder"
    )
    language: AnyLanguage = Field("en", description=OWN_LANGUAGE)

    def read(self, progress: Progress | None = None) -> Corpus:
        """One row per utterance; without the column utterance, the path is its name."""
        file = self.file.expanduser()
        root = self.folder.expanduser() if self.folder is not None else file.parent
        names = {"speaker": self.speaker_column, "path": self.path_column, "text": self.text_column}
        below = entry_below(root)

        def to_entry(row: dict[str, str]) -> Entry:
            return below({**row, **{usual: row[own] for usual, own in names.items()}})

        filled = (self.speaker_column, self.path_column)
        listed = read_table(file, tuple(names.values()), to_entry, filled)
        return make_corpus(file.stem, self.language, listed, self, progress)


class An4Settings(SpeakerSettings):
    """CMU AN4: spelled words, numbers and commands, about 100 words in all."""

    kind: Literal["an4"] = "an4"
    folder: LocalPath | None = Field(
        None, description="the folder with train.tsv and test.tsv; else an4 in CONFIDE_DATA"
    )
    subset: Literal["train", "test"] = Field("train", description="train has 74 speakers, test 10 others")

    def read(self, progress: Progress | None = None) -> Corpus:
        """Read the table of the subset."""
        folder = find_folder(self.folder, "an4", "AN4", _AN4)
        columns = ("utterance", "speaker", "path", "text")
        listed = read_table(folder / f"{self.subset}.tsv", columns, entry_below(folder))
        return make_corpus(f"AN4-{self.subset}", "en", listed, self, progress)


def entry_below(root: Path) -> Callable[[dict[str, str]], Entry]:
    """A function that makes an entry of a row, whose path is relative to `root`."""

    def to_entry(row: dict[str, str]) -> Entry:
        row = {column: value.strip() for column, value in row.items()}
        return Entry(row.get("utterance") or row["path"], row["speaker"], (root / row["path"],), row["text"])

    return to_entry


def read_table(
    path: Path, columns: Sequence[str], to_entry: Callable[[dict[str, str]], Entry], filled: Sequence[str] = ()
) -> Iterator[Entry | Skipped]:
    """Read a table that has at least these columns, an utterance per row.

    A row that lacks one of the columns, or has nothing but white space in one of `filled`, is skipped.
    """
    rows = read_cells(path)
    header = [name.strip() for name in rows[0]]
    lacking = [name for name in columns if name not in header]
    if lacking:
        raise UserError(
            f"the table {path} has the columns {', '.join(header) or 'none'}; expected also {', '.join(lacking)}, "
            f"separated by {'commas' if _is_csv(path) else 'tabs'}, named in its first line"
        )
    for number, cells in enumerate(rows[1:], start=2):
        if not any(cell.strip() for cell in cells):
            continue
        row = dict(zip(header, cells, strict=False))
        faults = [f"short row: no {name}" for name in columns if name not in row]
        faults = faults or [f"no {name}" for name in filled if not row[name].strip()]
        yield Skipped(f"{path.name}:{number}", faults[0]) if faults else to_entry(row)


def read_cells(path: Path, most: int | None = None) -> list[list[str]]:
    """The cells of a table's rows, the first row among them; `most` rows, or all."""
    try:
        # Only \n ends a line: a sentence may hold other characters that Python would take for an end.
        with path.open(encoding="utf-8-sig", newline="" if _is_csv(path) else "\n") as file:
            rows = csv.reader(file) if _is_csv(path) else (line.rstrip("\r\n").split("\t") for line in file)
            return list(islice(rows, most)) or [[""]]
    except csv.Error as error:
        raise UserError(f"the table {path} is no table ({error}); expected text separated by commas") from None
    except OSError as error:
        raise UserError(f"cannot read the table {path} ({error.strerror}); expected a tab-separated file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"the table {path} is not UTF-8 ({error}); expected tab-separated text in UTF-8") from None


def _is_csv(path: Path) -> bool:
    return path.suffix.lower() == ".csv"

"""CMU AN4: spelled words, numbers and commands by 84 people, as 16 kHz FLAC with train.tsv and test.tsv.

Not one of PFL-ASR's corpora: a small real one, for trying its claims. Training and test speakers are different people.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from confide.settings import LocalPath
from confide.speech.corpora.listing import Entry, make_corpus
from confide.speech.corpora.settings import SpeakerSettings, find_folder
from confide.speech.corpora.tables import read_table
from confide.speech.corpus import Corpus, Progress

_SOURCE = (
    "http://www.speech.cs.cmu.edu/databases/an4 (as FLAC files, with tables train.tsv and test.tsv of the columns "
    "utterance, speaker, path and text)"
)


class An4Settings(SpeakerSettings):
    """CMU AN4: spelled words, numbers and commands, about 100 words in all."""

    kind: Literal["an4"] = "an4"
    folder: LocalPath | None = Field(
        None, description="the folder with train.tsv and test.tsv; else an4 in CONFIDE_DATA"
    )
    subset: Literal["train", "test"] = Field("train", description="train has 74 speakers, test 10 others")

    def read(self, progress: Progress | None = None) -> Corpus:
        """Read the table of the subset."""
        folder = find_folder(self.folder, "an4", "AN4", _SOURCE)

        def to_entry(row: dict[str, str]) -> Entry:
            return Entry(row["utterance"], row["speaker"], (folder / row["path"],), row["text"].strip())

        listed = read_table(folder / f"{self.subset}.tsv", ("utterance", "speaker", "path", "text"), to_entry)
        return make_corpus(f"AN4-{self.subset}", "en", listed, self, progress)

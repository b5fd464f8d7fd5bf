"""Common Voice in its published layout: LANGUAGE/{train,dev,test}.tsv and LANGUAGE/clips/*.mp3.

Serves PFL-ASR, section 4 and Table 2: version 13.0 in English, French and German, where a speaker is a client_id. With
share=10 the training set becomes CV-en-train-10, with share=90 the rest of it; `subset` knows the paper's names too.

Differs from the paper: a hash of their ids decides which speakers are in a share, as the paper's choice is not
published. Differs from the usual tool: see `librispeech`; lhotse's recipe also wants a folder to write to.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from confide.errors import UserError
from confide.files import data_folder
from confide.settings import LocalPath
from confide.speech.corpora.listing import Entry, make_corpus
from confide.speech.corpora.settings import SpeakerSettings
from confide.speech.corpora.tables import read_table
from confide.speech.corpus import Corpus, Language, Progress

_SOURCE = "https://commonvoice.mozilla.org/en/datasets (Common Voice Corpus 13.0)"
_RELEASE = "cv-corpus-13.0-*"
_PAPERS_NAME = re.compile(r"(?:CV-(?P<language>[a-z]{2})-)?(?P<subset>[a-z]+)(?:-(?P<share>\d{1,2}))?")


class CommonVoiceSettings(SpeakerSettings):
    """Common Voice: sentences read by volunteers on their own devices, MP3."""

    kind: Literal["common_voice"] = "common_voice"
    folder: LocalPath | None = Field(
        None,
        description="the folder of the release, of its language, or the one around it; else cv-corpus-13.0-* in "
        "CONFIDE_DATA",
    )
    language: Language = Field("en", description="en, fr or de")
    subset: Literal["train", "dev", "test"] = Field(
        "train", description="train, dev or test; CV-en-train-10 and train-10 stand for train with share 10"
    )

    @model_validator(mode="before")
    @classmethod
    def _understand_the_papers_names(cls, given: Any) -> Any:
        match = _PAPERS_NAME.fullmatch(str(given.get("subset", ""))) if isinstance(given, dict) else None
        if match is None:
            return given
        share = None if match["share"] is None else int(match["share"])
        said = {key: value for key, value in (("language", match["language"]), ("share", share)) if value is not None}
        for key, value in said.items():
            if given.get(key) not in (None, value):
                told = {"key": key, "subset": given["subset"], "value": given[key]}
                raise PydanticCustomError(
                    "corpus", "Input should be a {key} that agrees with {subset}, not {value}", told
                )
        return {**given, **said, "subset": match["subset"]}

    def read(self, progress: Progress | None = None) -> Corpus:
        """Read the table of the subset."""
        folder = _language_folder(self)

        def to_entry(row: dict[str, str]) -> Entry:
            clip = row["path"].strip()
            # Early releases list clips without their ending.
            file = folder / "clips" / (clip if Path(clip).suffix else f"{clip}.mp3")
            return Entry(file.stem, row["client_id"], (file,), row["sentence"].strip())

        listed = read_table(folder / f"{self.subset}.tsv", ("client_id", "path", "sentence"), to_entry)
        return make_corpus(f"CV-{self.language}-{self.subset}", self.language, listed, self, progress)


def _language_folder(settings: CommonVoiceSettings) -> Path:
    root = settings.folder.expanduser() if settings.folder is not None else data_folder()
    table = f"{settings.subset}.tsv"
    # Without a folder, only the version that the paper uses is taken; a folder may name any.
    releases = _RELEASE if settings.folder is None else "cv-corpus-*"
    choices = [root, *(place / settings.language for place in (root, *sorted(root.glob(releases))))]
    # A folder that holds the table itself is the language's own: en/train.tsv is not taken for French.
    found = [c for c in choices if (c / table).is_file() and (c != root or c.resolve().name == settings.language)]
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(
            f"{root} holds Common Voice more than once ({', '.join(str(f) for f in found)}); name one in folder"
        )
    raise UserError(
        f"Common Voice was looked for in {root}, but there is no {settings.language}/{table} in it, nor in a folder "
        f"{releases} in it; get it from {_SOURCE}, unpack it, and pass the folder that holds {settings.language} "
        "(folder: in a recipe, --folder on the command line), or put it into the folder that the environment variable "
        "CONFIDE_DATA names"
    )

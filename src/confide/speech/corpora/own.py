"""A corpus that a user brings: `corpus: {kind: python, factory: module:function, options: {...}}`.

The function takes the options and returns an `Entry` (or a `Skipped`) for each utterance; the checks, shares and users
of all corpora apply to them. Whoever writes the recipe chooses code that runs here, so a client refuses it from a
server.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from confide.errors import UserError
from confide.settings import FunctionName, imported
from confide.speech.corpora.listing import Entry, make_corpus
from confide.speech.corpora.settings import SpeakerSettings
from confide.speech.corpus import Corpus, Language, Progress, Skipped


class PythonCorpusSettings(SpeakerSettings):
    """A corpus of your own: a Python function, installed or in the current folder, that lists utterances."""

    kind: Literal["python"] = "python"
    factory: FunctionName = Field(description="module:function, called with the options; gives an Entry per utterance")
    options: dict[str, Any] = Field({}, description="given to the function as they are")
    language: Language = Field("en", description="en, fr or de")

    def read(self, progress: Progress | None = None) -> Corpus:
        """Call the function and check what it lists."""
        listed = list(imported(self.factory, "corpus.factory")(self.options))
        for number, entry in enumerate(listed, start=1):
            if not isinstance(entry, Entry | Skipped):
                raise UserError(
                    f"corpus.factory={self.factory}: item {number} that it gave is a {type(entry).__name__}; expected "
                    "an Entry of confide.speech.corpora.listing for each utterance"
                )
        return make_corpus(self.factory.replace(":", "-"), self.language, listed, self, progress)

"""The kinds of corpus, each in a file beside this one; the synthetic one is in `confide.speech.voices`.

To add one: write a class of settings with a method `read` in a file beside this one, and name it in `CorpusSettings`.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from confide.errors import require
from confide.speech.corpora.an4 import An4Settings
from confide.speech.corpora.common_voice import CommonVoiceSettings
from confide.speech.corpora.digits import AudioMnistSettings, FsddSettings
from confide.speech.corpora.folder import FolderSettings, TsvSettings
from confide.speech.corpora.librispeech import LibriSpeechSettings
from confide.speech.corpora.own import PythonCorpusSettings
from confide.speech.corpus import Corpus, Progress
from confide.speech.voices import SyntheticSettings

CorpusSettings = Annotated[
    LibriSpeechSettings
    | CommonVoiceSettings
    | An4Settings
    | AudioMnistSettings
    | FsddSettings
    | FolderSettings
    | TsvSettings
    | SyntheticSettings
    | PythonCorpusSettings,
    Field(discriminator="kind"),
]


def read_corpus(settings: CorpusSettings, progress: Progress | None = None) -> Corpus:
    """Read a corpus of any kind. `progress` is called with how many of how many files have been looked at."""
    require("speech", "a speech corpus")
    return settings.read(progress)


__all__ = [
    "An4Settings",
    "AudioMnistSettings",
    "CommonVoiceSettings",
    "CorpusSettings",
    "FolderSettings",
    "FsddSettings",
    "LibriSpeechSettings",
    "PythonCorpusSettings",
    "SyntheticSettings",
    "TsvSettings",
    "read_corpus",
]

"""The corpora that can be asked for by kind, each in a file beside this one; the synthetic one in `voices`.

`CorpusSettings` is the union of their settings, told apart by `kind`; `read_corpus` reads any of them.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from confide.errors import require
from confide.speech.corpora.an4 import An4Settings, an4
from confide.speech.corpora.common_voice import CommonVoiceSettings, common_voice
from confide.speech.corpora.digits import AudioMnistSettings, FsddSettings, audiomnist, fsdd
from confide.speech.corpora.folder import FolderSettings, TsvSettings, folder, tsv
from confide.speech.corpora.librispeech import LibriSpeechSettings, librispeech
from confide.speech.corpora.shares import iid
from confide.speech.corpus import Corpus, Progress
from confide.speech.voices import SyntheticSettings, synthetic_corpus

CorpusSettings = Annotated[
    LibriSpeechSettings
    | CommonVoiceSettings
    | An4Settings
    | AudioMnistSettings
    | FsddSettings
    | FolderSettings
    | TsvSettings
    | SyntheticSettings,
    Field(discriminator="kind"),
]


def read_corpus(settings: CorpusSettings, progress: Progress | None = None) -> Corpus:
    """Read a corpus of any kind. `progress` hears how many of how many files have been looked at."""
    require("speech", "a speech corpus")
    if isinstance(settings, LibriSpeechSettings):
        return librispeech(settings, progress)
    if isinstance(settings, CommonVoiceSettings):
        return common_voice(settings, progress)
    if isinstance(settings, An4Settings):
        return an4(settings, progress)
    if isinstance(settings, AudioMnistSettings):
        return audiomnist(settings, progress)
    if isinstance(settings, FsddSettings):
        return fsdd(settings, progress)
    if isinstance(settings, FolderSettings):
        return folder(settings, progress)
    if isinstance(settings, TsvSettings):
        return tsv(settings, progress)
    made = synthetic_corpus(settings)
    return iid(made, settings.seed) if settings.users == "iid" else made


__all__ = [
    "An4Settings",
    "AudioMnistSettings",
    "CommonVoiceSettings",
    "CorpusSettings",
    "FolderSettings",
    "FsddSettings",
    "LibriSpeechSettings",
    "SyntheticSettings",
    "TsvSettings",
    "read_corpus",
]

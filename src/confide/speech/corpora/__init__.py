"""The kinds of corpus, each in a file beside this one; the synthetic one is in `confide.speech.voices`.

To add one: write a class of settings with a method `read` in a file beside this one, and name it in `CorpusSettings`.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from confide.errors import require
from confide.speech.corpora.common_voice import CommonVoiceSettings
from confide.speech.corpora.datasets import DatasetsSettings
from confide.speech.corpora.digits import AudioMnistSettings, FsddSettings
from confide.speech.corpora.librispeech import LibriSpeechSettings
from confide.speech.corpora.manifests import ManifestSettings
from confide.speech.corpora.own import FolderSettings, PythonCorpusSettings
from confide.speech.corpora.population import PopulationSettings
from confide.speech.corpora.speech_commands import SpeechCommandsSettings
from confide.speech.corpora.tables import An4Settings, TsvSettings
from confide.speech.corpus import Corpus, Progress
from confide.speech.voices import SyntheticSettings

CorpusSettings = Annotated[
    LibriSpeechSettings
    | CommonVoiceSettings
    | An4Settings
    | AudioMnistSettings
    | FsddSettings
    | SpeechCommandsSettings
    | FolderSettings
    | TsvSettings
    | ManifestSettings
    | DatasetsSettings
    | SyntheticSettings
    | PopulationSettings
    | PythonCorpusSettings,
    Field(discriminator="kind"),
]


def read_corpus(settings: CorpusSettings, progress: Progress | None = None) -> Corpus:
    """Read a corpus of any kind. `progress` is called with the number of files that were opened, and of all files."""
    require("speech", "a speech corpus")
    return settings.read(progress)

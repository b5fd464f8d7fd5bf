"""Corpora of your own, which PFL-ASR does not use: a folder of recordings, or a Python function that lists them.

The folder is SPEAKER/UTTERANCE.{wav,flac,mp3,m4a} with a .txt beside each; every file that is left out is named, with
the reason. The function, `corpus: {kind: python, factory: module:function, options: {...}}`, takes the options and
returns an `Entry` (or a `Skipped`) for each utterance. Whoever writes the recipe chooses code that runs here, so a
client refuses it from a server. The checks, shares and users of all corpora apply to both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from confide.errors import UserError
from confide.settings import FunctionName, LocalPath, imported, running
from confide.speech.corpora.listing import Entry, make_corpus
from confide.speech.corpora.settings import SpeakerSettings
from confide.speech.corpus import OWN_LANGUAGE, AnyLanguage, Corpus, Progress, Skipped

AUDIO = (".wav", ".flac", ".mp3", ".ogg", ".opus", ".m4a")


class FolderSettings(SpeakerSettings):
    """A folder of speakers' folders: speaker/utterance.wav (or flac, mp3, ogg, opus, m4a) and speaker/utterance.txt."""

    kind: Literal["folder"] = "folder"
    folder: LocalPath = Field(description="the folder whose subfolders are the speakers")
    language: AnyLanguage = Field("en", description=OWN_LANGUAGE)

    def read(self, progress: Progress | None = None) -> Corpus:
        """Every folder is a speaker, with folders in it or without."""
        root = self.folder.expanduser()
        if not root.is_dir():
            raise UserError(
                f"folder={root} is no folder; expected one whose subfolders are the speakers, each with audio files "
                "and a .txt of the same name beside each"
            )
        listed = []
        for path in sorted(root.rglob("*")):
            parts = path.relative_to(root).parts
            if path.is_dir() or any(part.startswith(".") for part in parts):
                continue
            entry = _entry(path, parts)
            if entry is not None:
                listed.append(entry if isinstance(entry, Entry) else Skipped("/".join(parts), entry))
        return make_corpus(root.resolve().name, self.language, listed, self, progress)


class PythonCorpusSettings(SpeakerSettings):
    """A corpus of your own: a Python function, installed or in the current folder, that lists utterances."""

    kind: Literal["python"] = "python"
    factory: FunctionName = Field(description="module:function, called with the options; gives an Entry per utterance")
    options: dict[str, Any] = Field({}, description="given to the function as they are")
    language: AnyLanguage = Field("en", description=OWN_LANGUAGE)

    def read(self, progress: Progress | None = None) -> Corpus:
        """Call the function and check what it lists."""
        factory = imported(self.factory, "corpus.factory")
        with running("corpus.factory", self.factory):
            listed = list(factory(self.options))
        for number, entry in enumerate(listed, start=1):
            if not isinstance(entry, Entry | Skipped):
                raise UserError(
                    f"corpus.factory={self.factory}: item {number} that it gave is a {type(entry).__name__}; expected "
                    "an Entry of confide.speech.corpora.listing for each utterance"
                )
        return make_corpus(self.factory.replace(":", "-"), self.language, listed, self, progress)


def _entry(path: Path, parts: tuple[str, ...]) -> Entry | str | None:
    """The utterance of an audio file, the reason why a file cannot be used, or None for a file to pass over."""
    ending = path.suffix.lower()
    if ending == ".txt":
        spoken = any(path.with_suffix(e).exists() or path.with_suffix(e.upper()).exists() for e in AUDIO)
        return None if spoken or len(parts) == 1 else "text without audio"
    if ending not in AUDIO:
        return None if len(parts) == 1 else f"not {', '.join(e[1:] for e in AUDIO)}: {ending or 'no ending'}"
    if len(parts) == 1:
        return "no speaker: the file lies beside the speakers' folders, not in one of them"
    try:
        text = path.with_suffix(".txt").read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        return "no text: there is no .txt of the same name beside it"
    except UnicodeDecodeError:
        return "unreadable text: it is not UTF-8"
    except OSError as error:
        return f"unreadable text: {error.strerror}"
    return Entry(Path(*parts).with_suffix("").as_posix(), parts[0], (path,), " ".join(text.split()))

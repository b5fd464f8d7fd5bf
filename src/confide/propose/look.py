"""What lies in a folder or a file: recordings or rows, in which layout, and which section of a recipe reads them.

The layouts are those that people have: a folder for each speaker with texts beside the recordings, tables of paths,
Speech Commands' folders of words, LibriSpeech, Common Voice, manifests of NeMo and lhotse, spoken digits; for text,
tables with a text, a label and perhaps an owner, and the three collections of CAR; for both, what `datasets` saved.
Names decide, and the first lines of tables; no recording is opened. What fits nothing is refused with a list of what
would fit.
"""

from __future__ import annotations

import csv
import gzip
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from confide.arrow import Saved, is_saved, open_saved, splits
from confide.errors import UserError
from confide.files import data_folder
from confide.speech.corpora.manifests import form_of, read_lines
from confide.speech.corpora.own import AUDIO
from confide.speech.corpora.tables import read_cells

Section = dict[str, Any]
_ENOUGH = 2_000  # names of files that are looked at
_TABLES, _LINES = (".tsv", ".csv"), (".jsonl", ".json", ".ndjson")
_NOHASH, _DIGIT = re.compile(r"[^_]+_nohash_\d+\.\w+"), re.compile(r"\d_[^_]+_\d+\.(?:flac|wav)")
SPEAKERS = ("speaker", "speaker_id", "speakerid", "spk", "client_id", "user", "user_id", "person")
PATHS = ("path", "file", "filename", "file_name", "audio", "audio_path", "audio_filepath", "wav")
SPOKEN = ("text", "sentence", "transcript", "transcription", "transcripts", "words")
WRITTEN = ("text", "query", "message", "question", "sentence", "abstract", "body", "content")
LABELS = ("label", "class", "category", "document", "answer", "topic", "target")
_TESTS = ("test", "testing", "eval", "validation", "valid", "dev")
OWNERS = ("owner", "client", "user", "user_id", "author", "client_id", "person", "customer")
EXPECTED = """expected one of
  - a folder for each speaker in one folder: recordings (wav, flac, mp3, ogg, m4a), a .txt of the same name beside each
  - a table .tsv or .csv of recordings with columns for path, text and speaker, or a folder with train and test tables
  - a folder for each word with SPEAKER_nohash_TAKE.wav, LibriSpeech, Common Voice, digits as DIGIT_SPEAKER_TAKE.wav
  - a manifest of NeMo or lhotse (.jsonl, also .gz)
  - a table .tsv, .csv or .jsonl of texts with columns for text, label and, if you know it, owner
  - a folder that Hugging Face's `datasets` saved (save_to_disk): audio, text and speaker, or text, label and owner"""


@dataclass(frozen=True)
class Columns:
    """What the columns of a table are called, where somebody said so."""

    path: str | None = None
    speaker: str | None = None
    text: str | None = None
    label: str | None = None
    owner: str | None = None


@dataclass(frozen=True)
class Found:
    """Data of one layout. `test` is none where the layout parts no people, so that a share of them is held out."""

    task: Literal["speech", "text"]
    layout: str
    train: Section
    test: Section | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def owner(self) -> str | None:
        """The column that says whose a text is."""
        column: str | None = self.train.get("client_column")
        return column


def look(place: Path, columns: Columns, language: str) -> Found:
    """Find out what lies there."""
    place = place.expanduser()
    if not place.exists():
        near = data_folder() / place
        raise (
            UserError(f"there is nothing at {place}; {EXPECTED}")
            if not near.exists()
            else UserError(f"there is nothing at {place}, but there is at {near}; give that")
        )
    for layout in _FILES if place.is_file() else _FOLDERS:
        found = layout(place, columns, language)
        if found is not None:
            return found
    what = "file" if place.is_file() else "folder"
    raise UserError(f"the {what} {place} is in no layout that is known{_seen(place)}; {EXPECTED}")


def _seen(place: Path) -> str:
    """What there is instead: the columns of a table, or the names of some files; a damaged table is refused here."""
    if place.is_file():
        header = _read_header(place)
        return f" (its columns are {', '.join(header)})" if len(header) > 1 else ""
    files = _some_files(place)
    for table in files[:200]:
        _read_header(table)
    if not files:
        return " (it is empty)"
    spoken = [p for p in files if p.suffix.lower() in AUDIO]
    flat = [p for p in spoken if p.parent == place and p.with_suffix(".txt").exists()]
    if flat:
        return (
            f" ({len(flat):,} recordings such as {flat[0].name} lie directly in it, each with its .txt, so that nobody "
            "knows who speaks: make a folder in it for each speaker, and move them there)"
        )
    if spoken and not any(p.with_suffix(".txt").exists() for p in spoken):
        return f" (it holds {len(spoken):,} recordings such as {spoken[0].name}, and no .txt beside any of them)"
    return f" (it holds {', '.join(p.name for p in files[:3])}, ...)"


def _some_files(folder: Path) -> list[Path]:
    """Some files below a folder, without hidden ones."""
    paths = (p for p in folder.rglob("*") if not any(part.startswith(".") for part in p.relative_to(folder).parts))
    return sorted(p for p in islice(paths, _ENOUGH) if p.is_file())


def _named(header: Sequence[str], said: str | None, usual: Sequence[str]) -> str | None:
    """The column that somebody named, or the first of the usual names that the table has."""
    if said is not None:
        if said not in header:
            raise UserError(f"there is no column {said!r}; expected one of {', '.join(header) or 'none'}")
        return said
    lower = {name.lower(): name for name in header}
    return next((lower[name] for name in usual if name in lower), None)


def _header(table: Path) -> list[str]:
    """The names of a table's columns; none if it cannot be read as one."""
    try:
        return _read_header(table)
    except UserError:
        return []


def _read_header(table: Path) -> list[str]:
    """The same, but a table that is damaged is explained."""
    kind = Path(table.name.removesuffix(".gz")).suffix.lower()
    try:
        if kind in _LINES:
            return list(next(read_lines(table), (1, {}))[1])
        if table.suffix == ".gz":
            with gzip.open(table, "rt", encoding="utf-8-sig", errors="replace") as file:
                return next(csv.reader(file, delimiter="," if kind == ".csv" else "\t"), [])
        return [name.strip() for name in read_cells(table, 1)[0]] if kind in _TABLES else []
    except (OSError, csv.Error):
        return []


# Recordings


def _spoken_table(table: Path, columns: Columns, language: str) -> Found | None:
    header = _header(table)
    if Path(table.name).suffix.lower() not in _TABLES:
        return None
    path, text = _named(header, columns.path, PATHS), _named(header, columns.text, SPOKEN)
    if path is None or text is None:
        return None
    speaker = _named(header, columns.speaker, SPEAKERS)
    if speaker is None:
        raise UserError(
            f"the table {table} has the columns {', '.join(header)}, and none says who speaks; expected a column such "
            f"as {', '.join(SPEAKERS[:3])}: add it, or name it with --speaker-column. A guarantee is for people"
        )
    named = {"speaker_column": (speaker, "speaker"), "path_column": (path, "path"), "text_column": (text, "text")}
    own = {key: value for key, (value, usual) in named.items() if value != usual}
    section = {"kind": "tsv", "file": str(table), **own, **_in(language)}
    return Found("speech", f"a table of recordings ({path}, {text}, {speaker})", section)


def _in(language: str) -> Section:
    return {} if language == "en" else {"language": language}


def _tables(folder: Path, columns: Columns, language: str) -> Found | None:
    """train.tsv and test.tsv, or one table."""
    tables = sorted(p for p in folder.iterdir() if p.suffix.lower() in _TABLES and p.is_file())
    found = {table.stem.lower(): _spoken_table(table, columns, language) for table in tables}
    known = {name: each for name, each in found.items() if each is not None}
    if not known:
        return None
    train = next((known[name] for name in ("train", "training") if name in known), None)
    test = next((known[name] for name in ("test", "testing", "eval") if name in known), None)
    if train is not None and test is not None:
        return Found("speech", f"tables of recordings, for training and test, in {folder}", train.train, test.train)
    if len(known) > 1 and train is None:
        raise UserError(f"{folder} has the tables {', '.join(sorted(found))}; give the one that lists your recordings")
    return train or next(iter(known.values()))


def _common_voice(folder: Path, columns: Columns, language: str) -> Found | None:
    if not (folder / "clips").is_dir() or "client_id" not in _header(folder / "train.tsv"):
        return None
    section = {"kind": "common_voice", "folder": str(folder), "language": folder.resolve().name}
    return Found("speech", "Common Voice", {**section, "subset": "train"}, {**section, "subset": "test"})


def _librispeech(folder: Path, columns: Columns, language: str) -> Found | None:
    root = folder / "LibriSpeech" if (folder / "LibriSpeech").is_dir() else folder
    subsets = [p.name for p in sorted(root.iterdir()) if p.is_dir() and next(p.glob("*/*/*.trans.txt"), None)]
    if not subsets:
        return None
    section = {"kind": "librispeech", "folder": str(root)}
    train = next((name for name in subsets if name.startswith("train")), subsets[0])
    test = next((name for name in subsets if name.startswith(("test", "dev")) and name != train), None)
    held = None if test is None else {**section, "subset": test}
    return Found("speech", f"LibriSpeech ({train})", {**section, "subset": train}, held)


def _words(folder: Path, columns: Columns, language: str) -> Found | None:
    if not any(_NOHASH.fullmatch(p.name) for p in _some_files(folder)[:200]) or (folder / "train.tsv").exists():
        return None
    section = {"kind": "speech_commands", "folder": str(folder)}
    if (folder / "testing_list.txt").is_file() and (folder / "validation_list.txt").is_file():
        return Found("speech", "Speech Commands", {**section, "subset": "train"}, {**section, "subset": "test"})
    return Found("speech", "folders of words, SPEAKER_nohash_TAKE in each", {**section, "subset": "all"})


def _digits(folder: Path, columns: Columns, language: str) -> Found | None:
    files = _some_files(folder)[:200]
    digits = [p for p in files if _DIGIT.fullmatch(p.name)]
    if not digits or len(digits) < len(files) / 2:
        return None
    nested = all(p.parent.parent == folder and p.parent.name.isdecimal() for p in digits)
    if not nested and any(p.parent != folder for p in digits):
        return None
    section = {"kind": "audiomnist" if nested else "fsdd", "folder": str(folder)}
    if nested:
        return Found("speech", "spoken digits, a folder for each speaker", {**section, "subset": "all"})
    return Found("speech", "spoken digits, DIGIT_SPEAKER_TAKE", section)


def _speakers(folder: Path, columns: Columns, language: str) -> Found | None:
    files = _some_files(folder)
    spoken = [p for p in files if p.suffix.lower() in AUDIO]
    if not any(p.with_suffix(".txt").exists() and len(p.relative_to(folder).parts) > 1 for p in spoken):
        return None
    return Found("speech", "a folder for each speaker", {"kind": "folder", "folder": str(folder), **_in(language)})


def _manifest(file: Path, columns: Columns, language: str) -> Found | None:
    if Path(file.name.removesuffix(".gz")).suffix.lower() not in _LINES:
        return None
    try:
        form = form_of(next(read_lines(file), (1, {}))[1])
    except UserError:
        return None
    if form is None:
        return None
    section: Section = {"kind": "manifest", "file": str(file), **_in(language)}
    if form == "supervision":
        beside = [p for p in file.parent.iterdir() if "recordings" in p.name and ".jsonl" in p.name]
        if len(beside) != 1:
            raise UserError(
                f"{file} has lhotse's supervisions, and there are {len(beside)} files *recordings*.jsonl beside it; "
                "expected one, or a file of cuts"
            )
        section["recordings"] = str(beside[0])
    return Found("speech", f"a manifest of {'NeMo' if form == 'nemo' else 'lhotse'}", section)


def _manifests(folder: Path, columns: Columns, language: str) -> Found | None:
    files = sorted(p for p in folder.iterdir() if p.is_file() and "recordings" not in p.name)
    found = {p.name.lower(): each for p in files if (each := _manifest(p, columns, language)) is not None}
    train = next((each for name, each in found.items() if "train" in name), None)
    test = next((each for name, each in found.items() if "test" in name), None)
    if train is not None and test is not None:
        return Found("speech", train.layout, train.train, test.train)
    return next(iter(found.values())) if len(found) == 1 else None


# Text


def _written_table(table: Path, columns: Columns, language: str) -> Found | None:
    header = _header(table)
    text, label = _named(header, columns.text, WRITTEN), _named(header, columns.label, LABELS)
    if text is None or label is None:
        return None
    owner = _named(header, columns.owner, OWNERS)
    section: Section = {"kind": "table", "queries": str(table), "query_column": text, "document_column": label}
    if owner is not None:
        section |= {"client_column": owner, "test_by": "clients"}
    whose = f"owned by {owner}" if owner is not None else "of nobody in particular"
    return Found("text", f"a table of texts ({text}, {label}), {whose}", section)


def _arxiv(table: Path, columns: Columns, language: str) -> Found | None:
    fits = {"primary_category", "title", "abstract"} <= set(_header(table))
    return Found("text", "arXiv metadata", {"kind": "arxiv", "file": str(table)}) if fits else None


def _sms(file: Path, columns: Columns, language: str) -> Found | None:
    if file.suffix not in ("", ".txt"):
        return None
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            first = [line.partition("\t")[0] for line in islice(lines, 20)]
    except OSError:
        return None
    if not first or not set(first) <= {"ham", "spam"}:
        return None
    return Found("text", "SMS Spam Collection", {"kind": "sms_spam", "file": str(file)})


def _ag_news(folder: Path, columns: Columns, language: str) -> Found | None:
    if not (folder / "test.csv").is_file() or not (folder / "classes.txt").is_file():
        return None
    return Found("text", "AG News", {"kind": "ag_news", "folder": str(folder)})


def _one_file(folder: Path, columns: Columns, language: str) -> Found | None:
    """A folder with a single file of texts in it."""
    files = [p for p in sorted(folder.iterdir()) if p.is_file() and not p.name.startswith(".")]
    found = [each for p in files for each in _each(p, columns, language)]
    if len(found) > 1:
        raise UserError(f"{folder} has more than one table of texts; give the one to train on")
    return found[0] if found else None


def _each(file: Path, columns: Columns, language: str) -> Iterator[Found]:
    for layout in (_arxiv, _written_table, _sms):
        found = layout(file, columns, language)
        if found is not None:
            yield found
            return


# What `datasets` saved


def _saved(folder: Path, columns: Columns, language: str) -> Found | None:
    """One data set, or splits of one: train, and test if there is one."""
    parts = splits(folder)
    if is_saved(folder):
        train, test = open_saved(folder), None
    elif parts:
        first = next((name for name in ("train", "training") if name in parts), parts[0])
        other = next((name for name in _TESTS if name in parts and name != first), None)
        train = open_saved(folder / first)
        test = None if other is None else open_saved(folder / other)
    else:
        return None
    audio = columns.path or next(iter(train.named("Audio")), None)
    if audio is not None:
        return _saved_speech(train, test, audio, columns, language)
    text = _column(train, columns.text, "--text-column", WRITTEN, "has the texts")
    classes = [name.lower() for name in train.named("ClassLabel")]
    label = _column(train, columns.label, "--label-column", [*LABELS, *classes[:1]], "has their labels")
    owner = _named(list(train.features), columns.owner, OWNERS)
    whose = f"owned by {owner}" if owner is not None else "of nobody in particular"
    section: Section = {
        "kind": "table", "queries": str(train.folder), "query_column": text, "document_column": label
    }  # fmt: skip
    section |= {} if test is None else {"test": str(test.folder)}
    section |= {} if owner is None else {"client_column": owner}
    section |= {} if owner is None or test is not None else {"test_by": "clients"}
    return Found("text", f"a saved data set of texts ({text}, {label}), {whose}", section)


def _saved_speech(train: Saved, test: Saved | None, audio: str, columns: Columns, language: str) -> Found:
    _named(list(train.features), audio, ())
    text = _column(train, columns.text, "--text-column", SPOKEN, "has what was said")
    why = ". A guarantee is for people"
    speaker = _column(train, columns.speaker, "--speaker-column", SPEAKERS, "says who speaks", why)
    named = {"audio_column": (audio, "audio"), "text_column": (text, "text"), "speaker_column": (speaker, "speaker_id")}
    own = {key: value for key, (value, usual) in named.items() if value != usual} | _in(language)
    section: Section = {"kind": "datasets", "folder": str(train.folder), **own}
    held = None if test is None else {**section, "folder": str(test.folder)}
    return Found("speech", f"a saved data set of recordings ({audio}, {text}, {speaker})", section, held)


def _column(
    saved: Saved, said: str | None, option: str, usual: Sequence[str], what: str, why: str = ""
) -> str:  # fmt: skip
    """The column that somebody named or that has a usual name; a data set without one is refused."""
    header = list(saved.features)
    found = _named(header, said, usual)
    if found is None:
        raise UserError(
            f"the data set {saved.folder} has the columns {', '.join(header) or 'none'}, and none {what}; expected one "
            f"such as {', '.join(usual[:3])}: add it, or name it with {option}{why}"
        )
    return found


Layout = Callable[[Path, Columns, str], Found | None]
_FILES: tuple[Layout, ...] = (_manifest, _spoken_table, _arxiv, _written_table, _sms)
_FOLDERS: tuple[Layout, ...] = (
    _saved, _common_voice, _librispeech, _tables, _words, _manifests, _ag_news, _digits, _speakers, _one_file,
)  # fmt: skip

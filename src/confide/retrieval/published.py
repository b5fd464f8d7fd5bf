"""The paper's three collections (CAR section 6.1): SMS Spam Collection, AG News and arXiv metadata, as published.

Differs from the paper: it counts 126,700 AG News texts and 345,657 arXiv abstracts in 173 categories without saying
how they were chosen; here a collection is whatever lies in the files. An arXiv paper's class is its first category.
"""

from __future__ import annotations

import csv
import html
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from confide.errors import UserError
from confide.files import DATA_ENV, data_folder
from confide.retrieval.data import Document, RetrievalCorpus, Row, SplitSettings, assemble
from confide.retrieval.lines import text_lines
from confide.settings import Local, LocalPath, is_path

_SMS_SOURCE = "https://archive.ics.uci.edu/dataset/228/sms+spam+collection"
_AG_SOURCE = "the character-level ConvNet paper's collection (train.csv, test.csv, classes.txt)"
_ARXIV_SOURCE = "https://www.kaggle.com/datasets/Cornell-University/arxiv"
_AG_SUBSET = "extra_train_subset.csv"
_AG_CLASSES: tuple[str, ...] = ("World", "Sports", "Business", "Sci/Tech")
_ARXIV_COLUMNS = ("primary_category", "title", "abstract")
# AG News lost the ampersand of its character references: " #39;s" is "'s".
_REFERENCE = re.compile(r" ?&?#(\d+);")


class SmsSpamSettings(SplitSettings):
    """SMS Spam Collection: 5,574 messages, ham or spam."""

    kind: Literal["sms_spam"] = "sms_spam"
    file: LocalPath | None = Field(None, description="SMSSpamCollection: label, tab, text; none: under CONFIDE_DATA")

    def read(self, seed: int) -> RetrievalCorpus:
        path = _find_file(self.file, "sms_spam/SMSSpamCollection", "the SMS Spam Collection", _SMS_SOURCE)
        rows = []
        with text_lines(path) as lines:
            for number, line in enumerate(lines, start=1):
                label, tab, text = line.rstrip("\r\n").partition("\t")
                if not line.strip():
                    continue
                if not tab or label not in {"ham", "spam"}:
                    raise UserError(
                        f"{path}, line {number} begins with {line[:40]!r}; expected ham or spam, a tab and the "
                        f"message: get the file from {_SMS_SOURCE}"
                    )
                rows.append(Row(text, label))
        documents = [
            Document("ham", "ham: an ordinary personal text message"),
            Document("spam", "spam: an unwanted advertising text message"),
        ]
        return assemble("sms_spam", self, seed, rows, _keep_present(documents, rows))


class AgNewsSettings(SplitSettings):
    """AG News: headlines with their first sentences in four classes; test.csv is the test."""

    kind: Literal["ag_news"] = "ag_news"
    folder: LocalPath | None = Field(
        None, description="holds train.csv (or a subset) and test.csv; none: under CONFIDE_DATA"
    )
    train: Annotated[str, Local(is_path)] | None = Field(
        None, description="the training file's name; none: train.csv, else the subset"
    )

    def read(self, seed: int) -> RetrievalCorpus:
        folder = self.folder.expanduser() if self.folder is not None else data_folder() / "ag_news"
        if not folder.is_dir():
            raise UserError(
                f"AG News was looked for in {folder}, but that is no folder; get it from {_AG_SOURCE} and pass its "
                f"folder, or name the folder that holds ag_news in the environment variable {DATA_ENV}"
            )
        usual = "train.csv" if (folder / "train.csv").is_file() else _AG_SUBSET
        train = _find_file(folder / (self.train or usual), "", "AG News", _AG_SOURCE)
        test = _find_file(folder / "test.csv", "", "AG News", _AG_SOURCE)
        names = _AG_CLASSES
        if (folder / "classes.txt").is_file():
            lines = (folder / "classes.txt").read_text(encoding="utf-8").split("\n")
            names = tuple(line.strip() for line in lines if line.strip())
        rows = list(_ag_rows(train, names))
        documents = _keep_present([Document(name, f"{name} news") for name in names], rows)
        return assemble("ag_news", self, seed, rows, documents, _ag_rows(test, names))


class ArxivSettings(SplitSettings):
    """arXiv metadata: JSON lines as published, or a table with tabs; also compressed (.gz)."""

    kind: Literal["arxiv"] = "arxiv"
    file: LocalPath | None = Field(
        None, description=".json, .jsonl, .tsv, each also .gz; none: the sample under CONFIDE_DATA"
    )
    text: Literal["abstract", "title", "both"] = Field("abstract", description="what the query is")
    per_category: Annotated[int, Field(ge=2)] | None = Field(None, description="at most so many papers of a category")
    min_per_category: int = Field(2, ge=2, description="categories with fewer papers are left out")

    def read(self, seed: int) -> RetrievalCorpus:
        path = _find_file(self.file, "arxiv/arxiv_sample.tsv.gz", "the arXiv metadata", _ARXIV_SOURCE)
        counts: Counter[str] = Counter()
        kept: Counter[str] = Counter()
        rows = []
        plain = path.name.removesuffix(".gz")
        read = _arxiv_table if plain.endswith((".tsv", ".txt")) else _arxiv_json
        for category, title, abstract in read(path):
            if self.per_category is not None and kept[category] >= self.per_category:
                counts["beyond per_category"] += 1
                continue
            kept[category] += 1
            chosen = {"title": title, "abstract": abstract, "both": f"{title}. {abstract}"}[self.text]
            rows.append(Row(" ".join(chosen.split()), category))
        rare = {category for category, count in kept.items() if count < self.min_per_category}
        counts["rare category"] += sum(kept[category] for category in rare)
        usable = [row for row in rows if row.document not in rare]
        return assemble("arxiv", self, seed, usable, left_out=+counts)


def _ag_rows(path: Path, names: tuple[str, ...]) -> Iterator[Row]:
    """class, title, description as published; class, text, source in the subset."""
    texts = slice(1, 2) if path.name == _AG_SUBSET else slice(1, 3)
    with text_lines(path) as lines:
        for number, cells in enumerate(csv.reader(lines), start=1):
            if not cells:
                continue
            if len(cells) < 2 or not cells[0].isdigit() or not 1 <= int(cells[0]) <= len(names):
                raise UserError(
                    f"{path}, row {number} begins with {cells[0][:40]!r}; expected a class from 1 to {len(names)}, "
                    "then title and description, separated by commas"
                )
            text = " ".join(cells[texts]).replace("\\n", " ").replace("\\", " ")
            text = html.unescape(_REFERENCE.sub(lambda found: chr(int(found[1])), text))
            yield Row(" ".join(text.split()), names[int(cells[0]) - 1])


def _arxiv_table(path: Path) -> Iterator[tuple[str, str, str]]:
    with text_lines(path) as lines:
        table = csv.DictReader(lines, delimiter="\t")
        missing = [name for name in _ARXIV_COLUMNS if name not in (table.fieldnames or ())]
        if missing:
            raise UserError(
                f"{path} has the columns {', '.join(table.fieldnames or ()) or 'none'}; expected "
                f"{', '.join(_ARXIV_COLUMNS)} in its first line: {', '.join(missing)} is missing"
            )
        for row in table:
            yield row["primary_category"] or "", row["title"] or "", row["abstract"] or ""


def _arxiv_json(path: Path) -> Iterator[tuple[str, str, str]]:
    with text_lines(path) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                paper = json.loads(line)
                category = (paper["categories"].split() or [""])[0]
                yield category, paper.get("title") or "", paper["abstract"]
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(
                    f"{path}, line {number} is not a paper of the arXiv metadata ({type(error).__name__}: {error}); "
                    "expected one JSON object a line with categories, title and abstract"
                ) from None


def _keep_present(documents: list[Document], rows: list[Row]) -> list[Document]:
    """Keep only the classes that occur: one class alone must be noticed."""
    found = {row.document for row in rows}
    return [document for document in documents if document.id in found]


def _find_file(given: Path | None, usual: str, title: str, source: str) -> Path:
    path = given.expanduser() if given is not None else data_folder() / usual
    if not path.is_file():
        raise UserError(
            f"{title} was looked for in {path}, but there is no such file; get it from {source} and name it in the "
            f"recipe, or name the folder that holds the data in the environment variable {DATA_ENV}"
        )
    return path

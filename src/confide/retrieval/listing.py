"""The documents of a model beside it: `documents.jsonl`, in the order in which the model numbers them.

    {"id": "invoice", "text": "Questions about bills and refunds"}

A published folder has it only at its owner's word, with names alone or with texts (`confide publish --documents`).
Names are enough where a head gives scores; search and experts compare a query with the documents' texts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from confide.errors import UserError
from confide.retrieval.data import Document
from confide.retrieval.lines import text_lines
from confide.retrieval.settings import RetrievalSettings

FILE = "documents.jsonl"
Listed = Literal["names", "texts"]


def listing(documents: Sequence[Document], listed: Listed) -> str:
    """The content of the file."""
    rows = ({"id": one.id} if listed == "names" else {"id": one.id, "text": one.text} for one in documents)
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def needs_texts(task: RetrievalSettings) -> bool:
    """Whether the model answers only where the documents' texts are there."""
    return not task.has_head or task.experts is not None


def read_listing(path: Path, task: RetrievalSettings) -> list[Document]:
    """The documents that a file lists; one without a text has its name for it."""
    if not path.is_file():
        raise UserError(f"--documents {path}: there is no such file; expected {FILE}, as `confide publish` writes it")
    documents: list[Document] = []
    with text_lines(path) as lines:
        for number, line in enumerate((line for line in lines if line.strip()), start=1):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            name, text = (row.get("id"), row.get("text")) if isinstance(row, dict) else (None, None)
            if not isinstance(name, str) or not isinstance(text, str | None):
                raise UserError(
                    f"{path}, line {number} is {line.strip()[:40]!r}; expected a document as JSON, such as "
                    '{"id": "invoice", "text": "about bills"}, in the order of the model: get the file from its owner'
                )
            if text is None and needs_texts(task):
                raise UserError(
                    f"{path}, line {number} has no text, and this model compares a query with the documents' texts; "
                    "expected a text in each line: its owner writes them with `confide publish --documents texts`"
                )
            documents.append(Document(name, name if text is None else text))
    return documents

"""A user's own corpus: a table of queries, each with its document (CAR section 3.2).

A table is CSV, TSV or JSON lines, or a folder that Hugging Face's `datasets` saved (`confide.arrow`).

Either the document column holds the document's text, and equal texts are one document; or it holds an id, and a second
file has the documents with their ids and texts. A column may say whose a query is, for the split by column.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from confide.arrow import open_saved
from confide.errors import UserError
from confide.retrieval.data import Document, RetrievalCorpus, Row, SplitSettings, assemble
from confide.retrieval.lines import text_lines
from confide.settings import LocalPath


class TableSettings(SplitSettings):
    """Your own queries and documents, as CSV, TSV or JSON lines (each also .gz), or as `datasets` saves them."""

    kind: Literal["table"] = "table"
    queries: LocalPath = Field(description="a row for each query: a file, or a folder that `datasets` saved")
    documents: LocalPath | None = Field(
        None, description="a row for each document; none: the queries' file has their texts"
    )
    test: LocalPath | None = Field(
        None, description="test queries in a file of their own; none: a share of the queries"
    )
    query_column: str = Field("query", min_length=1, description="which column of `queries` holds the query")
    document_column: str = Field(
        "document", min_length=1, description="the document's text, or its id if documents is given"
    )
    id_column: str = Field("id", min_length=1, description="of the documents' file")
    text_column: str = Field("text", min_length=1, description="of the documents' file")
    client_column: str | None = Field(None, description="whose a query is")
    documents_as_queries: bool = Field(False, description="train on each document's own text too: none goes untrained")

    def read(self, seed: int) -> RetrievalCorpus:
        counts: Counter[str] = Counter()
        documents = None if self.documents is None else _documents(self, self.documents, counts)
        rows = list(_queries(self, self.queries))
        test_rows = None if self.test is None else list(_queries(self, self.test))
        if documents is None:
            # The distinct texts of the document column, in the order of their first row.
            texts = dict.fromkeys(row.document for row in rows if row.document.strip())
            documents = [Document(text, text) for text in texts]
        if self.documents_as_queries:
            if self.client_column is not None:
                raise UserError(
                    "documents_as_queries with a client_column: a document belongs to no client; expected one of the "
                    "two"
                )
            known = {row.text for row in rows}
            rows += [Row(document.text, document.id) for document in documents if document.text not in known]
        asked = {row.document for row in rows}
        untrained = sum(document.id not in asked for document in documents)
        if untrained:
            counts["document without a query"] += untrained
        return assemble(self.queries.name, self, seed, rows, documents, test_rows, counts)


def _documents(settings: TableSettings, path: Path, counts: Counter[str]) -> list[Document]:
    found: dict[str, Document] = {}
    for number, cells in _records(path, (settings.id_column, settings.text_column)):
        identity, text = cells[settings.id_column].strip(), cells[settings.text_column].strip()
        if not identity or not text:
            counts["document without id or text"] += 1
        elif identity not in found:
            found[identity] = Document(identity, text)
        elif found[identity].text == text:
            counts["duplicate document"] += 1
        else:
            raise UserError(
                f"{path}, row {number} has the id {identity!r} a second time, with another text; expected one text for "
                "each id: give one of them another id"
            )
    same = len(found) - len({document.text for document in found.values()})
    if same:
        counts["document with the text of another"] += same  # kept, as somebody gave them ids of their own
    return list(found.values())


def _queries(settings: TableSettings, path: Path) -> Iterator[Row]:
    needed = (settings.query_column, settings.document_column)
    column = settings.client_column
    for number, cells in _records(path, needed if column is None else (*needed, column)):
        group = None if column is None else cells[column].strip()
        if group == "":
            raise UserError(f"{path}, row {number} has nothing in {column!r}; expected the client whose query it is")
        yield Row(cells[settings.query_column].strip(), cells[settings.document_column].strip(), group)


def _records(path: Path, needed: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    """Rows by column name, counted from 1, with the columns that are needed."""
    place = path.expanduser()
    if place.is_dir():
        rows = open_saved(place).rows(needed)
        yield from ((number, _as_text(place, number, cells)) for number, (_, _, cells) in enumerate(rows, start=1))
        return
    if not place.is_file():
        raise UserError(
            f"there is no file {place}; expected a table as .csv, .tsv or .jsonl (each also .gz), or a folder that "
            "`datasets` saved"
        )
    kind = Path(place.name.removesuffix(".gz")).suffix.lower()
    with text_lines(place) as lines:
        if kind in {".jsonl", ".json", ".ndjson"}:
            yield from _json_records(place, lines, needed)
        elif kind in {".csv", ".tsv"}:
            yield from _csv_records(place, lines, needed, "\t" if kind == ".tsv" else ",")
        else:
            raise UserError(f"{place} ends in {kind or 'nothing'}; expected .csv, .tsv or .jsonl (each also .gz)")


def _csv_records(
    path: Path, lines: Iterator[str], needed: tuple[str, ...], delimiter: str
) -> Iterator[tuple[int, dict[str, str]]]:
    reader = csv.DictReader(lines, delimiter=delimiter)
    names = reader.fieldnames or ()
    _check_columns(path, names, needed)
    for number, row in enumerate(reader, start=1):
        if any(row[name] is None for name in needed):
            raise UserError(
                f"{path}, row {number} has fewer cells than the {len(names)} columns; expected one for each"
            )
        yield number, {name: row[name] for name in needed}


def _json_records(path: Path, lines: Iterator[str], needed: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    for number, line in enumerate((line for line in lines if line.strip()), start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}, row {number} is not JSON ({error}); expected one JSON object a line") from None
        if not isinstance(record, dict):
            raise UserError(f"{path}, row {number} is {line.strip()[:40]}; expected one JSON object a line")
        _check_columns(path, tuple(record), needed)
        yield number, _as_text(path, number, {name: record[name] for name in needed})


def _as_text(path: Path, number: int, cells: dict[str, Any]) -> dict[str, str]:
    wrong = [name for name, value in cells.items() if not isinstance(value, str | int)]
    if wrong:
        raise UserError(f"{path}, row {number} has no text in {wrong[0]!r}; expected a string")
    return {name: str(value) for name, value in cells.items()}


def _check_columns(path: Path, given: Sequence[str], needed: tuple[str, ...]) -> None:
    missing = [name for name in needed if name not in given]
    if missing:
        raise UserError(
            f"{path} has the columns {', '.join(given) or 'none'}; expected {', '.join(needed)}: "
            f"{', '.join(missing)} is missing; rename it, or say in the recipe what it is called"
        )

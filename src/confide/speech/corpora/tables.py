"""Tables of utterances: tab-separated UTF-8 with a header line and no quoting, as Common Voice publishes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from confide.errors import UserError
from confide.speech.corpus import Skipped


@dataclass(frozen=True)
class Row:
    line: int
    values: dict[str, str]

    def __getitem__(self, column: str) -> str:
        return self.values[column]


def read_table(path: Path, columns: Sequence[str]) -> Iterator[Row | Skipped]:
    """The rows of a table that has at least these columns; a row that lacks one of them comes as `Skipped`."""
    try:
        lines = _lines(path)
    except OSError as error:
        raise UserError(f"cannot read the table {path} ({error.strerror}); expected a tab-separated file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"the table {path} is not UTF-8 ({error}); expected tab-separated text in UTF-8") from None
    header = [name.strip() for name in lines[0].split("\t")]
    lacking = [name for name in columns if name not in header]
    if lacking:
        raise UserError(
            f"the table {path} has the columns {', '.join(header) or 'none'}; expected also {', '.join(lacking)}, "
            "separated by tabs, named in its first line"
        )
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        values = dict(zip(header, line.split("\t"), strict=False))
        empty = [name for name in columns if name not in values]
        yield Skipped(f"{path.name}:{number}", f"short row: no {empty[0]}") if empty else Row(number, values)


def _lines(path: Path) -> list[str]:
    # Only \n ends a line: a sentence may hold other characters that Python would take for an end.
    with path.open(encoding="utf-8-sig", newline="\n") as file:
        return [line.rstrip("\r\n") for line in file] or [""]

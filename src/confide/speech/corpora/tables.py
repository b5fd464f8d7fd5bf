"""Tables of utterances: tab-separated UTF-8 with a header line and no quoting, as Common Voice publishes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from confide.errors import UserError
from confide.speech.corpora.listing import Entry
from confide.speech.corpus import Skipped


def read_table(
    path: Path, columns: Sequence[str], to_entry: Callable[[dict[str, str]], Entry], filled: Sequence[str] = ()
) -> Iterator[Entry | Skipped]:
    """Read a table that has at least these columns, an utterance per row.

    A row that lacks one of the columns, or has nothing but white space in one of `filled`, is skipped.
    """
    try:
        # Only \n ends a line: a sentence may hold other characters that Python would take for an end.
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            lines = [line.rstrip("\r\n") for line in file] or [""]
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
        row = dict(zip(header, line.split("\t"), strict=False))
        faults = [f"short row: no {name}" for name in columns if name not in row]
        faults = faults or [f"no {name}" for name in filled if not row[name].strip()]
        yield Skipped(f"{path.name}:{number}", faults[0]) if faults else to_entry(row)

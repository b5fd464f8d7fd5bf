"""Reads lines of text files, plain or compressed, and says in which line a file is damaged."""

from __future__ import annotations

import csv
import gzip
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from confide.errors import UserError

# A long document is a long cell; csv's own limit is 128 kB.
_LONGEST_CELL = 2**31 - 1


@contextmanager
def text_lines(path: Path) -> Iterator[Iterator[str]]:
    """Read the lines of a UTF-8 file, decompressed if its name ends in .gz, with their ends kept for csv."""
    csv.field_size_limit(_LONGEST_CELL)
    if not os.access(path, os.R_OK):
        raise UserError(f"cannot read {path}; expected a text file that exists and may be read")
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as opened:
        yield _decode(path, cast(IO[bytes], opened))


def _decode(path: Path, binary: IO[bytes]) -> Iterator[str]:
    number = 0
    try:
        for number, line in enumerate(binary, start=1):
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}, line {number} is not UTF-8 ({error.reason}); expected text in UTF-8: convert the file"
        ) from None
    except (OSError, EOFError) as error:
        raise UserError(
            f"{path} breaks off after line {number} ({error}); expected a complete file: fetch it again"
        ) from None

"""Data sets on disk as Hugging Face's `datasets` saves them (`save_to_disk`), read by pyarrow (extra `arrow`).

A folder has `state.json`, which names its files of Arrow streams, and `dataset_info.json`, which says what the columns
are. A `DatasetDict` has such a folder for each split, and `dataset_dict.json` beside them. Files are mapped, not read
into memory: a row is copied when somebody asks for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from confide.errors import UserError, require

_STATE, _INFO, _SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"


@dataclass(frozen=True)
class Saved:
    """One data set, or one split of several."""

    folder: Path
    files: tuple[Path, ...]
    features: dict[str, Any]
    """What each column is, in the words of `datasets`."""

    def named(self, kind: str) -> list[str]:
        """The columns whose type has this name, such as Audio."""
        return [name for name, each in self.features.items() if isinstance(each, dict) and each.get("_type") == kind]

    def rows(self, columns: tuple[str, ...]) -> Iterator[tuple[Path, int, dict[str, Any]]]:
        """The file, the place in it, and the cells in these columns, of every row. Numbers of classes are names."""
        lacking = [name for name in columns if name not in self.features]
        if lacking:
            raise UserError(
                f"{self.folder} has the columns {', '.join(self.features) or 'none'}; expected also "
                f"{', '.join(lacking)}: say in the recipe what they are called"
            )
        classes = {name: self.features[name].get("names") for name in self.named("ClassLabel") if name in columns}
        if any(not isinstance(names, list) for names in classes.values()):
            raise UserError(f"{self.folder / _INFO} does not list the names of classes; save the data set anew")
        for file in self.files:
            table = _table(file)
            wrong = [name for name in columns if table.column_names.count(name) != 1]
            if wrong:
                raise UserError(f"{file} lacks, or has twice, {', '.join(wrong)}; save the data set anew")
            parts = [table.column(name) for name in columns]
            for row in range(table.num_rows):
                cells = {name: part[row].as_py() for name, part in zip(columns, parts, strict=True)}
                for name, names in classes.items():
                    if isinstance(cells[name], int) and 0 <= cells[name] < len(names):
                        cells[name] = names[cells[name]]
                yield file, row, cells


def is_saved(folder: Path) -> bool:
    """Whether `datasets` saved one data set here."""
    return (folder / _STATE).is_file() and (folder / _INFO).is_file()


def splits(folder: Path) -> list[str]:
    """The splits of a `DatasetDict` that was saved here; none where it is something else."""
    return list(_json(folder / _SPLITS).get("splits", [])) if (folder / _SPLITS).is_file() else []


def open_saved(folder: Path) -> Saved:
    """Find the files and columns of a data set. Nothing but JSON is read."""
    if not is_saved(folder):
        parts = splits(folder)
        wanted = f"it has the splits {', '.join(parts)}: give {folder / parts[0]}" if parts else "there is none"
        raise UserError(f"{folder}: expected a folder that `datasets` saved (save_to_disk), with {_STATE}; {wanted}")
    try:
        files = tuple(folder / each["filename"] for each in _json(folder / _STATE)["_data_files"])
        features = dict(_json(folder / _INFO)["features"])
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{folder / _STATE} or {_INFO} is not as `datasets` writes it ({error}); save it anew"
        ) from None
    if any(file.parent != folder for file in files):
        raise UserError(f"{folder / _STATE} names files outside of its folder; save the data set anew")
    return Saved(folder, files, features)


def cell(file: Path, row: int, column: str) -> Any:
    """One cell of a file."""
    return _table(file).column(column)[row].as_py()


@lru_cache(maxsize=64)
def _table(file: Path) -> Any:
    require("arrow", f"the data set {file.parent}")
    import pyarrow

    if not file.is_file():  # a pipe would be waited for
        raise UserError(f"{file} is no file; expected an Arrow stream: save the data set anew")
    try:
        table = pyarrow.ipc.open_stream(pyarrow.memory_map(str(file))).read_all()
        table.validate(full=True)  # a file may say that a cell lies anywhere in this process, and Arrow believes it
        _check_names(table.schema)
        return table
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        said = str(error).partition("\n")[0]
        raise UserError(f"{file} cannot be read ({said}); expected an Arrow stream: save the data set anew") from None


def _check_names(fields: Any) -> None:
    """Decode the name of every field, also of those inside others; Arrow decodes them only when they are asked for."""
    for field in fields:
        if field.name and field.type.num_fields:
            _check_names([field.type.field(number) for number in range(field.type.num_fields)])


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); save the data set anew") from None
    return found if isinstance(found, dict) else {}

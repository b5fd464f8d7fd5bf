"""Parcels as Flower's records and back.

A flat array travels as Flower `Array`s of up to 64 MB, which Flower cuts into objects of 5 MB
(FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE): no single gRPC message comes near its limit of 2 GB, however large the model, and
the copies that Flower makes of an `Array` while it is put together are of a part and not of the whole. Bytes are read
with numpy's raw type and shape, never with pickle.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from confide.deploy.parcels import Parcel

_FACTS, _ARRAYS, _RAW = "facts", "arrays", "confide.raw"
_PART = 1 << 26
"""Bytes of an array that travel as one `Array`."""
Flat = np.ndarray[Any, np.dtype[Any]]


def to_records(parcel: Parcel) -> RecordDict:
    arrays = {}
    for name, array in parcel.arrays.items():
        length = _PART // array.itemsize
        for number, start in enumerate(range(0, max(len(array), 1), length)):
            part = np.ascontiguousarray(array[start : start + length])
            arrays[f"{name}/{number}"] = Array(part.dtype.str, part.shape, _RAW, part.tobytes())
    return RecordDict({_FACTS: ConfigRecord(dict(parcel.facts)), _ARRAYS: ArrayRecord(arrays)})


def from_records(records: RecordDict) -> Parcel:
    """What is no parcel becomes an empty one, which a round counts as malformed. The records lose their arrays."""
    facts = dict(records.config_records[_FACTS]) if _FACTS in records.config_records else {}
    held: Any = records.array_records.get(_ARRAYS, {})
    counts = Counter(key.rpartition("/")[0] for key in held)
    found = {name: _joined(held, [f"{name}/{number}" for number in range(count)]) for name, count in counts.items()}
    return Parcel(facts, {name: array for name, array in found.items() if array is not None})


def _joined(held: Any, keys: list[str]) -> Flat | None:
    """Numbers only: a type that could hold an object, or bytes that do not fill the shape, are no array."""
    try:
        kinds = {(held[key].dtype, held[key].stype) for key in keys}
        kind = np.dtype(held[keys[0]].dtype)
        if len(kinds) > 1 or held[keys[0]].stype != _RAW or kind.kind not in "fiu":
            return None
        whole, at = np.empty(sum(len(held[key].data) for key in keys) // kind.itemsize, kind), 0
        for key in keys:
            array = held.pop(key)  # let go as soon as it was read: a model may fill half of the memory
            part = np.frombuffer(array.data, kind)
            if part.shape != tuple(array.shape):
                return None
            whole[at : at + len(part)] = part
            at += len(part)
    except (KeyError, TypeError, ValueError):
        return None
    return whole

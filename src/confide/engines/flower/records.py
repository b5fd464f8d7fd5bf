"""Parcels as Flower's records and back.

A flat array travels as one Flower `Array`, which Flower itself cuts into objects of 5 MB
(FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE): no single gRPC message comes near its limit of 2 GB, however large the model. The
array's bytes are read with numpy's raw type and shape, never with pickle.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from confide.engines.flower.parcels import Parcel

_FACTS, _ARRAYS, _RAW = "facts", "arrays", "confide.raw"


def to_records(parcel: Parcel) -> RecordDict:
    arrays = {
        name: Array(dtype=array.dtype.str, shape=tuple(array.shape), stype=_RAW, data=_bytes(array))
        for name, array in parcel.arrays.items()
    }
    return RecordDict({_FACTS: ConfigRecord(dict(parcel.facts)), _ARRAYS: ArrayRecord(arrays)})


def from_records(records: RecordDict) -> Parcel:
    """What is no parcel becomes an empty one, which a round counts as malformed."""
    facts = dict(records.config_records[_FACTS]) if _FACTS in records.config_records else {}
    held: Any = records.array_records.get(_ARRAYS, {})
    arrays: dict[str, Any] = {}
    for name, array in held.items():
        read = _read(array)
        if read is not None:
            arrays[name] = read
    return Parcel(facts, arrays)


def _bytes(array: np.ndarray[Any, np.dtype[Any]]) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def _read(array: Array) -> np.ndarray[Any, np.dtype[Any]] | None:
    """Numbers only: a type that could hold an object, or bytes that do not fill the shape, are no array."""
    try:
        kind = np.dtype(array.dtype)
        if array.stype != _RAW or kind.kind not in "fiu":
            return None
        return np.frombuffer(array.data, dtype=kind).reshape(tuple(array.shape))
    except (TypeError, ValueError):
        return None

"""Parcels on a stream of bytes: one head, then the arrays in parts of 1 MiB.

    head   msgpack of [ticket, kind, facts, [[name, type, length], ...]]; from a client `kind` is "" or a refusal's code
    part   raw bytes of the arrays, one array after the other; every part but an array's last is 1 MiB

A head is numbers, text, bytes and lists of them: nothing that arrives is code. A part needs no header, since a stream
keeps its order. Who reads says before how many bytes of arrays it takes, and refuses a head that announces more, so
memory is given only for what is expected. A head takes some seventy times its bytes once it is unpacked, if it is made
for that; so an answer's is as long as its question allows, and only those that name many users may be long.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np

from confide.deploy.parcels import Parcel
from confide.deploy.remote import JOIN, SUM, TRAIN
from confide.privacy.trust.secure import CONFIRM, KEYS, MASKED, SHARES, UNMASK
from confide.privacy.trust.shamir import SHARE

METHOD, SERVICE = "Join", "confide.Deploy"
PART, HEAD = 1 << 20, 1 << 21
LARGEST = HEAD + 1024
"""Bytes of the longest message that either side takes from gRPC."""
_HEAD, _USER = 1 << 16, 5
_EACH = {
    **dict.fromkeys((TRAIN, KEYS, SHARES, CONFIRM), 0),  # neighbours at most, who are few
    **dict.fromkeys((JOIN, SUM, MASKED), _USER),
    UNMASK: _USER + SHARE + 2,
}
"""Bytes of an answer's head for each user of a federation, by the kind of its question."""
_TYPES = ("<f4", "<f8", "<f2", "<i8", "<u8")
_MOST_ARRAYS = 8


class Malformed(Exception):
    """What arrived is no parcel. Whoever sent it is not listened to any more: the stream has lost its place."""


def largest_head(kind: str, users: int) -> int:
    """Bytes that the head of an answer may have in a federation of so many users; `kind` is that of its question.

    An answer that is late belongs to a question that is known no more: any other `kind` stands for that of the longest.
    """
    return min(HEAD, _HEAD + _EACH.get(kind, max(_EACH.values())) * users)


def ticket_of(frame: object) -> int:
    """Read of a head only to what it is an answer."""
    reader = msgpack.Unpacker()
    try:
        reader.feed(frame[:10] if isinstance(frame, bytes) else b"")
        reader.read_array_header()
        ticket = reader.unpack()
    except Exception as error:
        raise Malformed(f"the head cannot be read ({type(error).__name__})") from None
    if type(ticket) is not int:
        raise Malformed("the head has other fields")
    return ticket


def frames(ticket: int, kind: str, parcel: Parcel) -> Iterator[bytes]:
    """Cut a parcel into messages, one by one as they are sent: the arrays are never copied whole."""
    arrays = {name: np.ascontiguousarray(array).reshape(-1) for name, array in parcel.arrays.items()}
    about = [[name, array.dtype.str, len(array)] for name, array in arrays.items()]
    head: bytes = msgpack.packb([ticket, kind, dict(parcel.facts), about])
    if len(head) > HEAD:
        raise ValueError(f"a head of {len(head)} bytes; at most {HEAD} fit")
    yield head
    for array in arrays.values():
        raw = array.view(np.uint8)
        for at in range(0, len(raw), PART):
            yield raw[at : at + PART].tobytes()


@dataclass
class Incoming:
    """A parcel while it arrives."""

    ticket: int
    kind: str
    facts: dict[str, Any]
    about: list[tuple[str, np.dtype[Any], int]]
    arrays: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    taken: int = 0
    kept: bool = True

    @staticmethod
    def begin(frame: object, limit: int, most: int = HEAD) -> Incoming:
        """Read a head, which may have `most` bytes itself and announce `limit` bytes of arrays."""
        if not isinstance(frame, bytes) or len(frame) > most:
            raise Malformed(f"the head is too long: at most {most} bytes are taken here")
        try:
            ticket, kind, facts, about = msgpack.unpackb(frame)
            arrays = [(name, np.dtype(kind_of), length) for name, kind_of, length in about if kind_of in _TYPES]
        except Exception as error:  # msgpack has many, and a mapping unpacks too
            raise Malformed(f"the head cannot be read ({type(error).__name__})") from None
        if type(ticket) is not int or type(kind) is not str or type(facts) is not dict:
            raise Malformed("the head has other fields")
        if any(type(name) is not str for name in facts) or len(arrays) != len(about) or len(arrays) > _MOST_ARRAYS:
            raise Malformed("facts or arrays of another kind")
        if any(type(name) is not str or type(length) is not int or length < 0 for name, _, length in arrays):
            raise Malformed("arrays without a name or a length")
        made = Incoming(ticket, kind, facts, arrays)
        if made.size > limit or len({name for name, _, _ in arrays}) < len(arrays):
            raise Malformed(f"arrays of {made.size} bytes; at most {limit} are taken here")
        return made

    @property
    def size(self) -> int:
        return sum(kind.itemsize * length for _, kind, length in self.about)

    @property
    def complete(self) -> bool:
        return self.taken == self.size

    def drop(self) -> None:
        """Keep nothing of what is to come; it is read all the same."""
        self.kept, self.arrays = False, {}

    def add(self, frame: object) -> None:
        """Take the next part."""
        at, place = self.taken, 0
        while at >= (size := self.about[place][1].itemsize * self.about[place][2]):
            at, place = at - size, place + 1
        name, kind, length = self.about[place]
        if not isinstance(frame, bytes) or len(frame) != min(PART, size - at):
            raise Malformed("a part of another length")
        if self.kept:
            if name not in self.arrays:
                self.arrays[name] = np.empty(length, kind)
            self.arrays[name].view(np.uint8)[at : at + len(frame)] = np.frombuffer(frame, np.uint8)
        self.taken += len(frame)

    @property
    def parcel(self) -> Parcel:
        empty = {name: np.empty(0, kind) for name, kind, length in self.about if length == 0}
        arrays: Mapping[str, Any] = empty | self.arrays
        return Parcel(self.facts, arrays)

"""The port that clients reach: it passes bytes on to gRPC, and ends whoever does not say in time who it is.

gRPC answers anybody who connects. This stands before it and knows three limits, all for connections that have not yet
been admitted: how many there are from one address, how many in all, and how long each may take. A connection that is
half open, drips its handshake byte by byte, says nothing or never ends a header is cut when its time is over. Where
there are too many, a newcomer takes the place of the oldest, so that nobody can shut the door by standing in it; those
who were admitted go on. An address is a whole /64 with IPv6, since that is what one line has. Every connection needs
three open files, so there are never more than leave enough of them for ledger and checkpoints.

Who is admitted is said by the hub, when a client has shown its key and its hello: gRPC sees the connection that was
made to it here, and its port is the name of the pair.

Differs from a proxy: it opens nothing and changes nothing. With TLS a client without a key never comes further than
the handshake.
"""

from __future__ import annotations

import asyncio
import ipaddress
import resource
from collections import Counter
from dataclasses import dataclass, replace
from typing import cast

from confide.deploy.address import Address

_LINGERS = 2.0
_FILES, _RESERVE = 3, 256
"""Open files of a connection: the client's side, the side to gRPC, and gRPC's own; and what all else may need."""


@dataclass(frozen=True)
class Limits:
    """What those may use who have not yet shown who they are."""

    from_address: int = 64
    """Connections of one address that are not admitted."""
    in_all: int = 1024
    seconds: float = 15.0
    """Until a connection has to be admitted."""
    admitted: int = 16_384
    """Connections that are held at all."""
    settling: float = 2.0
    """Seconds in which a connection is not cut for another, or those who come at once would only cut each other."""

    def within_open_files(self) -> Limits:
        """No more connections than the system allows files, after asking it for as many as are needed."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = self.admitted * _FILES + _RESERVE
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft not in (resource.RLIM_INFINITY, most) and soft < most:
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
                soft = most
            except (ValueError, OSError):  # macOS refuses what it has announced
                pass
        if soft == resource.RLIM_INFINITY:
            return self
        return replace(self, admitted=min(self.admitted, max(1, (soft - _RESERVE) // _FILES)))


class Gate:
    """Passes connections on to a port of this machine."""

    def __init__(self, behind: Address, limits: Limits, turned_away: Counter[str]) -> None:
        """`turned_away` counts who was refused or cut, by why."""
        self.behind, self.limits, self.turned_away = behind, limits, turned_away
        self.waiting: dict[str, dict[Pair, None]] = {}
        """Who is not admitted, by address, the oldest first."""
        self.pairs: set[Pair] = set()
        self.by_port: dict[int, Pair] = {}

    def take(self) -> asyncio.Protocol:
        return _Half(self)

    def allows(self, host: str) -> bool:
        """Whether one more may come from there, perhaps for the oldest that is not admitted; who goes is counted."""
        crowd = self._crowd(host)
        if crowd is None:
            return True
        self.turned_away["too many connections"] += 1
        oldest = next(iter(crowd), None)
        if oldest is None or oldest.age < self.limits.settling:
            return False
        oldest.end()
        return True

    def _crowd(self, host: str) -> dict[Pair, None] | None:
        """Among whom somebody has to go before another may come from there; none where there is a place."""
        limits, own = self.limits, self.waiting.get(host, {})
        if len(own) >= limits.from_address:
            return own
        if sum(map(len, self.waiting.values())) >= limits.in_all or len(self.pairs) >= limits.admitted:
            return max(self.waiting.values(), key=len, default={})
        return None

    def admit(self, port: int) -> None:
        """The connection that gRPC knows by this port has shown who it is."""
        pair = self.by_port.get(port)
        if pair is not None:
            pair.admitted()

    def close(self) -> None:
        for pair in list(self.pairs):
            pair.end()


class Pair:
    """A client's connection and the one to gRPC."""

    def __init__(self, gate: Gate, outside: asyncio.Transport, host: str) -> None:
        self.gate, self.outside, self.host = gate, outside, host
        self.inside: asyncio.Transport | None = None
        self.port = 0
        gate.pairs.add(self)
        gate.waiting.setdefault(host, {})[self] = None
        loop = asyncio.get_running_loop()
        self.began = loop.time()
        self.alarm: asyncio.TimerHandle | None = loop.call_later(gate.limits.seconds, self._too_slow)
        self.connecting = loop.create_task(self._connect())

    async def _connect(self) -> None:
        behind, loop = self.gate.behind, asyncio.get_running_loop()
        try:
            made, _ = await loop.create_connection(lambda: _Half(self.gate, self), behind.host, behind.port)
        except OSError:
            self.end()
            return
        self.inside, self.port = made, made.get_extra_info("sockname")[1]
        self.gate.by_port[self.port] = self
        self.outside.resume_reading()

    def admitted(self) -> None:
        if self.alarm is not None:
            self.alarm.cancel()
            self.alarm = None
            own = self.gate.waiting[self.host]
            del own[self]
            if not own:
                del self.gate.waiting[self.host]

    @property
    def age(self) -> float:
        return asyncio.get_running_loop().time() - self.began

    def _too_slow(self) -> None:
        self.gate.turned_away["not known in time"] += 1
        self.end()

    def end(self) -> None:
        """Cut both sides. What is on its way is still delivered, to whoever takes it within seconds."""
        if self not in self.gate.pairs:
            return
        self.gate.pairs.discard(self)
        self.gate.by_port.pop(self.port, None)
        self.admitted()
        self.connecting.cancel()
        for side in (self.outside, self.inside):
            if side is not None:
                side.close()
                asyncio.get_running_loop().call_later(_LINGERS, side.abort)


class _Half(asyncio.Protocol):
    """One side of a pair; a pair is made by the side that a client opens."""

    def __init__(self, gate: Gate, pair: Pair | None = None) -> None:
        self.gate, self.pair, self.is_outside = gate, pair, pair is None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        made = cast(asyncio.Transport, transport)
        if not self.is_outside:
            return
        host = line_of(str((made.get_extra_info("peername") or ("?",))[0]))
        if not self.gate.allows(host):
            made.abort()
            return
        made.pause_reading()  # until gRPC can take it
        self.pair = Pair(self.gate, made, host)

    @property
    def other(self) -> asyncio.Transport | None:
        if self.pair is None:
            return None
        return self.pair.inside if self.is_outside else self.pair.outside

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.write(data)

    def pause_writing(self) -> None:
        if self.other is not None and not self.other.is_closing():
            self.other.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and not self.other.is_closing():
            self.other.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        if self.pair is not None:
            self.pair.end()


def line_of(host: str) -> str:
    """Whose connections count together: an address of IPv4, or the /64 around one of IPv6."""
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if found.version == 4 or found.ipv4_mapped is not None:
        return str(found if found.version == 4 else found.ipv4_mapped)
    return str(ipaddress.ip_network((int(found) >> 64 << 64, 64)))

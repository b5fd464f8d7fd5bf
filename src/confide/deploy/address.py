"""Where a server listens, and how a client reaches it."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from confide.errors import UserError


@dataclass(frozen=True)
class Address:
    """A host and a port, as people write them."""

    host: str
    port: int

    @staticmethod
    def parse(text: str) -> Address:
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise UserError(f"address {text!r} is not of the form HOST:PORT, for example 0.0.0.0:9092")
        return Address(host.removeprefix("[").removesuffix("]"), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def listen(self) -> socket.socket:
        """Open the port, so that a wrong address is refused before anything else is done."""
        opened = socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind((self.host, self.port))
            opened.listen(1024)
        except OSError as error:
            opened.close()
            raise UserError(
                f"cannot listen on {self}: {error.strerror}; choose another --listen address, or end what uses it"
            ) from None
        return opened


@dataclass(frozen=True)
class Access:
    """How to reach a server. Without `ca` everything is plain and the client has no name."""

    server: Address
    ca: Path | None
    key: Path | None

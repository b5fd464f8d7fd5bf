"""Where a service listens, and whether an address stays on this machine."""

from __future__ import annotations

import ipaddress
import os
import socket

from confide.errors import UserError


def is_loopback(host: str) -> bool:
    """Whether what is sent to this host stays on this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int) -> socket.socket:
    """Open a socket that takes connections, so that a wrong address is refused before anything else is done."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # TCP has to be named: asyncio sends small answers without delay only where it sees the name (Nagle's algorithm).
    opened = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if os.name == "posix":  # elsewhere it would let another program take the port
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((host, port))
        opened.listen()
    except (OSError, OverflowError) as error:
        opened.close()
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UserError(
            f"cannot listen on {host} port {port} ({why}); expected an address of this machine and a free port from 0 "
            "to 65535: choose another --port (0 takes any free one) or another --host"
        ) from None
    return opened

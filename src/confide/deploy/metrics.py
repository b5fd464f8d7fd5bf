"""What an operator watches: `/metrics` in Prometheus's text form, and `/health`.

Sampling amplifies privacy only while cohorts are secret from whoever sees the models, and no guarantee covers what a
page like this tells. So nothing on it moves with a cohort: no answers, losses, norms, bytes, processor or memory of a
round. What is on it is known to anybody who gets the models (steps, epsilon), or comes from who is connected and from
what knocks at the port. A metric that somebody adds is held to the same rule.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from confide import __version__
from confide.deploy.address import Address
from confide.errors import UserError

_BEATS = 15.0
"""Seconds after which streams that nobody looks after are no longer healthy."""
_TAIL = 1 << 16
_Row = tuple[str, str, str, dict[str, float]]


@dataclass
class Meter:
    """What is counted; each number is written by one thread and read by others."""

    connected: int = 0
    users: int = 0
    """Users whose client was let in."""
    refused: int = 0
    """Clients that are connected and do not take part: another version, or a policy that says no."""
    turned_away: Counter[str] = field(default_factory=Counter)
    """Connections and streams that were ended, by why."""
    expires: dict[str, float] = field(default_factory=dict)
    """When certificates end, as seconds since 1970."""
    beat: float = field(default_factory=time.monotonic)
    """When the streams were last looked after."""

    def rows(self) -> Iterator[_Row]:
        """Name, kind, help, and the values by their labels."""
        yield "up", "gauge", "1 while the streams are looked after.", {"": float(self.healthy)}
        yield "info", "gauge", "The version that runs.", {f'version="{__version__}"': 1}
        yield "connected_clients", "gauge", "Clients that hold a stream.", {"": self.connected}
        yield "connected_users", "gauge", "Users whose client takes part.", {"": self.users}
        yield "refused_clients", "gauge", "Connected clients that do not take part.", {"": self.refused}
        why = {f'reason="{name}"': float(count) for name, count in sorted(self.turned_away.items())}
        yield "turned_away_total", "counter", "Connections that were ended, by why.", why
        ends = {f'file="{name}"': value for name, value in self.expires.items()}
        yield "certificate_expires_timestamp_seconds", "gauge", "When a certificate ends.", ends

    @property
    def healthy(self) -> bool:
        return time.monotonic() - self.beat < _BEATS


def page(meter: Meter, record: Path | None = None) -> str:
    """The metrics as Prometheus reads them. `record`: the run's metrics.jsonl, for its step and its epsilon."""
    rows = [*meter.rows(), *_of_run(record)]
    return "".join(
        f"# HELP confide_{name} {said}\n# TYPE confide_{name} {kind}\n"
        + "".join(f"confide_{name}{f'{{{labels}}}' if labels else ''} {value!r}\n" for labels, value in values.items())
        for name, kind, said, values in rows
        if values
    )


def _of_run(record: Path | None) -> Iterator[_Row]:
    found: dict[str, float] = {}
    if record is not None and record.exists():
        with record.open("rb") as file:
            file.seek(max(record.stat().st_size - _TAIL, 0))
            for line in file.read().split(b"\n"):
                try:
                    found |= {n: v for n, v in json.loads(line).items() if n in ("step", "epsilon") and v is not None}
                except ValueError:  # the first of them is cut off, and the last may be under way
                    continue
    for name, said in (("step", "Central steps that were made."), ("epsilon", "Epsilon when it was last computed.")):
        yield name, "gauge", said, {"": found[name]} if name in found else {}


@contextmanager
def watched(where: str | None, meter: Meter, record: Path | None = None) -> Iterator[None]:
    """Serve the page at PORT of this machine, or at HOST:PORT; without either do nothing."""
    if where is None:
        yield
        return
    from confide.web.answers import Json, application, route
    from confide.web.server import WebServer

    def metrics(_: Request) -> Response:
        return PlainTextResponse(page(meter, record), media_type="text/plain; version=0.0.4")

    def health(_: Request) -> Response:
        return Json({"status": "ok" if meter.healthy else "stalled"}, 200 if meter.healthy else 503)

    try:
        at = Address.parse(where if ":" in where else f"127.0.0.1:{where}")
    except UserError:
        raise UserError(f"--watch {where!r}: expected a port of this machine, for example 9094, or HOST:PORT") from None
    app = application([route("GET", "/metrics", metrics), route("GET", "/health", health)], lambda _: None, {})
    server = WebServer(app, at.host, at.port)
    thread = threading.Thread(target=server.run, daemon=True, name="watch")
    thread.start()
    try:
        yield
    finally:
        server.stop()
        thread.join(5)

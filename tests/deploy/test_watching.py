"""What an operator watches tells when something is wrong, and nothing of who is in a cohort."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("grpc", reason="deployment needs gRPC: pip install 'confide[deploy]'")

from confide.deploy import keys
from confide.deploy.metrics import Meter, page, watched
from confide.deploy.parcels import Parcel
from confide.errors import UserError
from confide.recipe import load
from support.loopback import free_port
from support.rehearsal import engine, loop_over
from support.streams import Streams

PUBLIC = {
    "confide_up", "confide_info", "confide_connected_clients", "confide_connected_users", "confide_refused_clients",
    "confide_turned_away_total", "confide_certificate_expires_timestamp_seconds", "confide_step", "confide_epsilon",
}  # fmt: skip
"""Each of these was held against the rule of `deploy/metrics.py`; another one has to be, too."""


def values(text: str) -> dict[str, float]:
    return {
        name: float(value) for name, value in re.findall(r"^(confide_\w+(?:{[^}]*})?) (\S+)$", text, flags=re.MULTILINE)
    }


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_question_to_some_clients_changes_nothing_on_the_page(tmp_path: Path) -> None:
    """Whoever reads it between two rounds cannot tell a cohort of one from a cohort of three, or an empty one."""
    with Streams(tmp_path, 3) as here:
        names = [f"client-{number}" for number in range(3)]
        for name in names:
            here.start(name)
        before = page(here.hub.meter)
        assert values(before)["confide_connected_clients"] == 3
        for cohort in (names[:1], names, []):
            parcel = Parcel({}, {"model": np.zeros(300_000, np.float32)})
            assert len(here.ask(*cohort, parcel=parcel)) == len(cohort)
            assert page(here.hub.meter) == before


@pytest.mark.parametrize("trust", ["central", "local", "distributed"])
def test_a_whole_round_shows_nothing_of_its_cohort(trust: str) -> None:
    pages = set()
    for seed in (0, 1, 2):
        wanted = load(
            "convex/quadratics",
            ["task={kind: convex/quadratics, users: 8, dimension: 6, rank: 3}", "sampling={kind: poisson, cohort: 4}",
             f"privacy={{mechanism: gaussian, noise_multiplier: 1, delta: 1.0e-5, accountant: rdp, trust: {trust}}}",
             "bounding={rule: clip, bound: 1}", "run.steps=2", f"run.seed={seed}"],
        )  # fmt: skip
        loop = loop_over(wanted, engine(8))
        state = loop.start()
        loop.step(state)
        link = loop.engine.link  # type: ignore[attr-defined]
        assert len(loop.plan.cohort(0)) in range(1, 8)
        assert link.meter.users == 8
        pages.add(page(link.meter))
    assert len(pages) == 1


def test_the_page_has_the_metrics_that_were_thought_about_and_no_other(tmp_path: Path) -> None:
    record = tmp_path / "metrics.jsonl"
    lines = [{"step": 1, "loss": 0.5, "cohort": 7, "epsilon": 0.25}, {"step": 2, "loss": 0.4, "epsilon": None}]
    record.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "lo')
    meter = Meter(connected=2, expires={"server.pem": 1.5e9})
    meter.turned_away["no hello"] += 1
    text = page(meter, record)
    found = values(text)
    assert {name.partition("{")[0] for name in found} == PUBLIC
    assert found["confide_step"] == 2
    assert found["confide_epsilon"] == 0.25
    assert found['confide_turned_away_total{reason="no hello"}'] == 1
    for name in PUBLIC:
        assert f"# HELP {name} " in text
        assert re.search(rf"^# TYPE {name} (gauge|counter)$", text, flags=re.MULTILINE)


def test_the_page_is_served_on_this_machine_and_says_when_nobody_looks_after_the_streams() -> None:
    meter, port = Meter(), free_port()
    with watched(str(port), meter):
        place = f"http://127.0.0.1:{port}"
        assert get(f"{place}/health") == (200, '{"status": "ok"}')
        code, text = get(f"{place}/metrics")
        assert code == 200
        assert values(text)["confide_up"] == 1
        meter.beat = time.monotonic() - 60
        assert get(f"{place}/health") == (503, '{"status": "stalled"}')
        assert values(get(f"{place}/metrics")[1])["confide_up"] == 0
        assert get(f"{place}/other")[0] == 404
    with pytest.raises(urllib.error.URLError):
        get(f"{place}/health")
    with pytest.raises(UserError, match="expected a port of this machine"), watched("everywhere", meter):
        pass


def test_strangers_are_counted_by_why_they_were_turned_away(tmp_path: Path) -> None:
    with Streams(tmp_path, 2) as here:
        keys.revoke(here.keys, "client-1")
        asked = here.run(_end(here, "client-1"))
        assert "does not let this client in" in asked.result(20)
        here.until(lambda: values(page(here.hub.meter)).get('confide_turned_away_total{reason="unknown key"}') == 1)
        ends = values(page(here.hub.meter))['confide_certificate_expires_timestamp_seconds{file="server.pem"}']
        assert 89 < (ends - time.time()) / 86_400 < 91


async def _end(here: Streams, name: str) -> str:
    from confide.deploy.node import live
    from support.streams import Echo

    try:
        await live(here.access(name), Echo(), 5)
    except UserError as error:
        return str(error)
    return ""

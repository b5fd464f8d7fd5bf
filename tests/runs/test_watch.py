"""Watching a run from outside: it is followed to its end and never disturbed."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from confide import recipe
from confide.errors import UserError
from confide.runs import folder, watch

Command = Callable[..., tuple[int, str, str]]


def unfinished(place: Path, tiny: str, steps: int) -> Path:
    """A run's folder as it is in the middle of a run."""
    place.mkdir()
    (place / folder.RECIPE).write_text(recipe.load(tiny).to_yaml())
    with (place / folder.METRICS).open("w") as file:
        for step in range(1, steps + 1):
            file.write(json.dumps({"step": step, "seconds": 2.0 * step, "loss": 1.0 / step, "cohort": 5}) + "\n")
    (place / ".lock").touch()
    return place


def test_a_finished_run_is_shown_and_the_page_is_named(tmp_path: Path, tiny: str, command: Command) -> None:
    folder.train(recipe.load(tiny), tmp_path / "run", quiet=True)
    code, out, _ = command("watch", tmp_path / "run")
    assert code == 0
    assert "step 6/6" in out
    assert "report.html" in out


def test_a_stopped_run_is_said_to_be_stopped_with_what_to_do(tmp_path: Path, tiny: str, command: Command) -> None:
    run = unfinished(tmp_path / "run", tiny, 3)
    code, out, _ = command("watch", run)
    assert code == 0
    assert f"stopped after step 3 of 6; `confide resume {run}`" in out


def test_a_run_is_followed_while_it_is_made_and_the_watching_ends_with_it(tmp_path: Path, tiny: str) -> None:
    run = unfinished(tmp_path / "run", tiny, 1)
    seen: list[str] = []
    with (run / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=lambda: seen.append(watch.follow(run, every=0.02)))
        thread.start()
        with (run / folder.METRICS).open("a") as file:
            file.write('{"step": 2, "seconds": 4, "lo')
            file.flush()
            time.sleep(0.1)
            assert thread.is_alive()
            file.write('ss": 0.5, "cohort": 5}\n')
    thread.join(timeout=120)
    assert seen == ["stopped"]


def test_half_a_line_waits_for_its_rest_and_a_run_taken_up_again_is_read_anew(tmp_path: Path, tiny: str) -> None:
    run = unfinished(tmp_path / "run", tiny, 4)
    found = watch.read_run(run)
    with (run / folder.METRICS).open("a") as file:
        file.write('{"step": 5')
    found.look()
    assert found.step == 4
    assert found.seconds_left == pytest.approx(4.0)
    kept = (run / folder.METRICS).read_text().splitlines()[:2]
    (run / folder.METRICS).write_text("\n".join(kept) + "\n")
    found.look()
    assert [record["step"] for record in found.records] == [1, 2]


def test_looking_at_a_run_does_not_keep_a_process_from_working_in_it(tmp_path: Path, tiny: str) -> None:
    run, stop, seen = tmp_path / "run", threading.Event(), set[bool]()
    run.mkdir()
    (run / ".lock").touch()

    def look() -> None:
        while not stop.is_set():
            seen.add(watch.busy(run))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        summary = folder.train(recipe.load(tiny), run, quiet=True)
    finally:
        stop.set()
        thread.join()
    assert summary["steps"] == 6
    assert True in seen


def test_ctrl_c_ends_the_watching_and_changes_nothing(tmp_path: Path, tiny: str) -> None:
    run = unfinished(tmp_path / "run", tiny, 2)
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    with (run / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        words = [sys.executable, "-m", "confide", "watch", str(run)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
        assert process.stdout is not None
        assert "step 2/6" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert err.strip() == "no longer watching; the run goes on"
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run"):
        watch.read_run(tmp_path)


@pytest.mark.parametrize(
    ("values", "drawn"), [([], ""), ([1.0], "▁"), ([0.0, 1.0], "▁█"), ([3.0, 2.0, 1.0, 0.0], "█▆▃▁")]
)
def test_a_curve_in_one_line(values: list[float], drawn: str) -> None:
    assert watch.spark(values) == drawn
    assert len(watch.spark([float(i) for i in range(1000)])) <= 40


def test_the_panel_of_a_terminal_says_what_matters(tmp_path: Path, tiny: str) -> None:
    from rich.console import Console

    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(watch._panel(watch.read_run(unfinished(tmp_path / "run", tiny, 3))))
    text = console.export_text()
    for said in ("stopped", "3 of 6", "about 6 s left", "5 users", "loss"):
        assert said in text

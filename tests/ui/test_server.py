"""The page's server: it answers its own page and nobody else, whatever it is sent."""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from confide import recipe
from confide.errors import UserError
from confide.privacy import accountant
from confide.runs import folder
from confide.ui import planning
from confide.ui.server import MOST_SOUND, Server, make_server
from confide.ui.shelf import Shelf

pytestmark = pytest.mark.usefixtures("no_figures_here")
POINT = {"noise_multiplier": 1, "cohort": 100, "population": 10_000, "rounds": 100, "delta": 1e-6}
TOKEN = "sixteen-letters-or-more"


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory, tiny: str, no_figures_here: None) -> Shelf:
    root = tmp_path_factory.mktemp("shelf") / "runs"
    for name in ("a", "deeper/b & <c>"):
        folder.train(recipe.load(tiny), root / name, quiet=True)
    secret = root.parent / "outside"
    folder.train(recipe.load(tiny), secret, quiet=True)
    (root / "link").symlink_to(secret, target_is_directory=True)
    (root / "sly").mkdir()
    (root / "sly" / "recipe.yaml").symlink_to(secret / "recipe.yaml")
    return Shelf(root)


def serve(server: Server) -> Iterator[Server]:
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    yield server
    server.stop()
    thread.join()


@pytest.fixture(scope="module")
def server(shelf: Shelf) -> Iterator[Server]:
    yield from serve(make_server(shelf, "127.0.0.1", 0, None))


@pytest.fixture(scope="module")
def guarded(shelf: Shelf) -> Iterator[Server]:
    yield from serve(make_server(shelf, "127.0.0.1", 0, TOKEN))


def ask(
    server: Server, path: str, method: str = "GET", body: bytes | None = None, **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def found(server: Server, path: str) -> Any:
    status, _, body = ask(server, path)
    assert status == 200, body
    return json.loads(body)


# Planner


def test_a_plan_is_what_the_planner_says(server: Server) -> None:
    answer = found(server, f"/api/plan?{urlencode(POINT)}")
    assert answer["epsilon"] == planning.point_of({n: str(v) for n, v in POINT.items()}).spent("pld")
    assert "% of the time" in answer["meaning"]
    assert found(server, f"/api/plan/rdp?{urlencode(POINT)}")["epsilon"] > answer["epsilon"]
    assert "with these users" in found(server, f"/api/plan/enough?{urlencode(POINT)}")["said"]
    drawn = found(server, f"/api/plan/curve?{urlencode({**POINT, 'axis': 'cohort', 'hold': 's'})}")["svg"]
    assert drawn.startswith("<figure class=chart>")
    assert "noise per user held" in drawn


def test_what_is_known_already_is_not_computed_again(server: Server) -> None:
    first = found(server, f"/api/plan?{urlencode(POINT)}")
    computed = accountant._epsilon.cache_info().misses
    assert [found(server, f"/api/plan?{urlencode(POINT)}") for _ in range(3)] == [first] * 3
    assert accountant._epsilon.cache_info().misses == computed
    found(server, f"/api/plan?{urlencode(POINT | {'rounds': 101})}")
    assert accountant._epsilon.cache_info().misses > computed


def test_the_presets_are_the_table_and_none_is_above_what_the_paper_prints(server: Server) -> None:
    rows = found(server, "/api/presets")
    assert len(rows) == 19
    row = next(row for row in rows if row["population"] == 69_506_000 and row["sigma"] == 3)
    assert found(server, f"/api/plan?{urlencode({n: row[n] for n in POINT})}")["epsilon"] <= row["published"]


@pytest.mark.parametrize(
    "change",
    [
        {"cohort": 10**6}, {"delta": 2}, {"rounds": "nan"}, {"noise_multiplier": "inf"}, {"population": 10**12},
        {"cohort": "x" * 3000}, {"noise_multiplier": -1}, {"rounds": 10**9},
    ],
)  # fmt: skip
def test_impossible_numbers_are_refused_with_a_sentence(server: Server, change: dict[str, Any]) -> None:
    status, _, body = ask(server, f"/api/plan?{urlencode({**POINT, **change})}")
    assert status == 400
    assert len(json.loads(body)["error"]) > 20


# Runs


def test_runs_are_listed_with_what_they_came_to(server: Server, shelf: Shelf) -> None:
    rows = found(server, "/api/runs")["runs"]
    assert [row["name"] for row in rows] == ["a", "deeper/b & <c>"]
    summary = folder.summary_of(shelf.root / "a")
    assert rows[0]["state"] == "finished"
    assert (rows[0]["value"], rows[0]["epsilon"]) == (summary["metrics"]["suboptimality"], summary["epsilon"])


def test_a_report_and_a_comparison_are_served_in_a_sandbox(server: Server) -> None:
    for path, said in (
        (f"/report?run={quote('deeper/b & <c>')}", b"b &amp; &lt;c&gt;"),
        (f"/compare?run=a&run={quote('deeper/b & <c>')}", b"Comparison"),
    ):
        status, headers, body = ask(server, path)
        assert status == 200
        assert said in body
        assert headers["Content-Security-Policy"].startswith("sandbox allow-scripts")
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert b"<c>" not in body


@pytest.mark.parametrize(
    "name",
    ["../outside", "link", "sly", "..", ".", "", "/etc/passwd", "a/../../outside", "a\0b", "%2e%2e/outside", "a/"],
)
def test_no_name_leads_out_of_the_folder(server: Server, name: str) -> None:
    status, _, body = ask(server, f"/report?run={quote(name, safe='')}")
    assert status == 400
    assert b"there is no run" in body
    status, _, _ = ask(server, f"/api/transcribe?run={quote(name, safe='')}&file=a.wav", "POST", b"x", X_Confide="1")
    assert status == 400


@pytest.mark.parametrize(
    "path", ["/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/assets/../server.py", "/app.js/..", "//etc/passwd"]
)
def test_no_path_is_opened_that_is_not_one_of_ours(server: Server, path: str) -> None:
    status, _, body = ask(server, path)
    assert status == 404
    assert b"root:" not in body


def test_a_damaged_run_does_not_hide_the_others(tmp_path: Path, tiny: str, no_figures: None) -> None:
    folder.train(recipe.load(tiny), tmp_path / "good", quiet=True)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "recipe.yaml").write_text("task: [")
    (tmp_path / "worse").mkdir()
    (tmp_path / "worse" / "recipe.yaml").write_text((tmp_path / "good" / "recipe.yaml").read_text())
    (tmp_path / "worse" / "metrics.jsonl").write_text("not json\n")
    states = {row["name"]: row["state"] for row in Shelf(tmp_path).listing()}
    assert states == {"bad": "damaged", "good": "finished", "worse": "damaged"}


def test_a_folder_with_a_bomb_a_pipe_or_a_link_neither_holds_up_the_list_nor_is_written_through(
    tiny: str, tmp_path: Path
) -> None:
    target, root = tmp_path / "precious", tmp_path / "runs"
    target.write_text("keep me")
    folder.train(recipe.load(tiny), root / "ok", quiet=True)
    for name in ("bomb", "pipe", "linked"):
        shutil.copytree(root / "ok", root / name)
    nested = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9))
    (root / "bomb" / "recipe.yaml").write_text(f"a0: &a0 [{', '.join('x' * 9)}]\n{nested}")
    (root / "pipe" / "metrics.jsonl").unlink()
    os.mkfifo(root / "pipe" / "metrics.jsonl")
    (root / "linked" / ".lock").unlink(missing_ok=True)
    (root / "linked" / ".lock").symlink_to(target)
    for server in serve(make_server(Shelf(root), "127.0.0.1", 0, None)):
        assert "ok" in json.dumps(found(server, "/api/runs"))
        for name in ("bomb", "pipe", "linked"):
            ask(server, f"/report?run={name}")
        assert ask(server, "/report?run=ok")[0] == 200
    assert target.read_text() == "keep me"


# Who may ask


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8765", "127.0.0.1", "", "localhost:1"])
def test_another_name_for_this_machine_is_refused(server: Server, host: str) -> None:
    assert ask(server, "/api/runs", Host=host)[0] == 421


def test_other_pages_are_refused(server: Server) -> None:
    assert ask(server, "/api/runs", Origin="http://evil.example")[0] == 403
    assert ask(server, "/api/runs", Origin="null")[0] == 403
    assert ask(server, "/api/runs", Sec_Fetch_Site="cross-site")[0] == 403
    own = f"http://127.0.0.1:{server.port}"
    assert ask(server, "/api/runs", Origin=own, Sec_Fetch_Site="same-origin")[0] == 200
    assert ask(server, "/api/transcribe?run=a&file=a.wav", "POST", b"x")[0] == 403


VISIT: dict[str, Any] = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "document"}


@pytest.mark.parametrize("path", ["/", "/report?run=a"])
def test_a_link_from_anywhere_opens_the_page_and_a_run_and_changes_nothing(
    server: Server, shelf: Shelf, contents: Callable[[Path], dict[str, str]], path: str
) -> None:
    before = contents(shelf.root)
    assert ask(server, path, **VISIT)[0] == 200
    assert contents(shelf.root) == before


@pytest.mark.parametrize(
    "change",
    [
        {"Sec_Fetch_Dest": "iframe"}, {"Sec_Fetch_Dest": "object"}, {"Sec_Fetch_Dest": "image"},
        {"Sec_Fetch_Mode": "no-cors"}, {"Sec_Fetch_Mode": "cors", "Sec_Fetch_Dest": "empty"}, {"Origin": "null"},
        {"Origin": "http://evil.example"},
    ],
)  # fmt: skip
def test_what_another_site_could_read_or_frame_is_no_link(server: Server, change: dict[str, str]) -> None:
    for path in ("/", "/report?run=a"):
        assert ask(server, path, **(VISIT | change))[0] == 403


@pytest.mark.parametrize("path", ["/api/runs", "/api/presets", "/compare?run=a&run=deeper/b", "/app.js"])
def test_no_link_of_another_site_opens_anything_else(server: Server, path: str) -> None:
    assert ask(server, path, **VISIT)[0] == 403


def test_no_form_of_another_site_posts_anything(server: Server) -> None:
    for headers in (VISIT, VISIT | {"Origin": "http://evil.example"}, VISIT | {"X_Confide": "1"}):
        assert ask(server, "/api/transcribe?run=a&file=a.wav", "POST", b"x", **headers)[0] == 403
        assert ask(server, "/", "POST", b"x", **headers)[0] == 403


def test_the_page_of_a_run_that_stopped_no_longer_loads_itself_again(tmp_path: Path, tiny: str) -> None:
    run = tmp_path / "run"
    folder.train(recipe.load(tiny), run, quiet=True)
    (run / folder.SUMMARY).unlink()
    shelf = Shelf(tmp_path)
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "http-equiv=refresh" in shelf.report("run")
    assert "http-equiv=refresh" not in shelf.report("run")


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "HEAD", "TRACE"])
def test_other_methods_are_not_allowed(server: Server, method: str) -> None:
    status, headers, _ = ask(server, "/api/runs", method)
    assert (status, headers["Allow"]) == (405, "GET")


def test_bodies_have_a_limit_and_a_length(server: Server) -> None:
    path = "/api/transcribe?run=a&file=a.wav"
    assert ask(server, path, "POST", b"", X_Confide="1", Content_Length=str(MOST_SOUND + 1))[0] == 413
    assert ask(server, path, "POST", b"", X_Confide="1", Content_Length="0")[0] == 400
    assert ask(server, path, "POST", b"", X_Confide="1", Content_Length="many")[0] == 400
    assert ask(server, path, "POST", b"0\r\n\r\n", X_Confide="1", Transfer_Encoding="chunked")[0] == 411
    assert ask(server, "/api/retrieve", "POST", b"{}", X_Confide="1")[0] == 400
    assert ask(server, "/api/retrieve", "POST", b"[" * 5000, X_Confide="1")[0] == 400


@pytest.mark.parametrize("file", ["a.exe", "a", "../../x.sh", "a.wav\0.sh"])
def test_an_upload_that_is_no_recording_is_refused(server: Server, file: str) -> None:
    path = f"/api/transcribe?{urlencode({'run': 'a', 'file': file})}"
    status, _, body = ask(server, path, "POST", b"RIFF", X_Confide="1")
    assert status == 400
    assert b"expected one of" in body


@given(st.binary(min_size=1, max_size=400))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_noise_on_the_line_does_not_stop_the_server(server: Server, raw: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as line:
        line.sendall(raw + b"\r\n\r\n")
        line.shutdown(socket.SHUT_WR)
        while line.recv(4096):
            pass
    assert ask(server, "/page.css")[0] == 200


def test_answers_are_not_kept_sniffed_framed_or_followed(server: Server) -> None:
    _, headers, body = ask(server, "/")
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert b"http:" not in body
    assert b"https:" not in body


# The token


def test_beyond_loopback_a_token_is_made_and_in_the_address(shelf: Shelf) -> None:
    server = make_server(shelf, "0.0.0.0", 0, None)
    try:
        assert server.token is not None
        assert len(server.token) >= 32
        assert f"token={server.token}" in server.url
    finally:
        server.socket.close()


def test_nothing_is_answered_without_the_token(guarded: Server) -> None:
    for path in ("/", "/api/runs", "/api/presets", "/report?run=a", "/app.js"):
        assert ask(guarded, path)[0] == 401
        assert ask(guarded, path, Cookie="confide=wrong")[0] == 401
        assert ask(guarded, path, Cookie="=;;; \\")[0] == 401
    assert ask(guarded, "/?token=wrong")[0] == 401
    assert ask(guarded, "/api/retrieve", "POST", b"{}", X_Confide="1")[0] == 401


def test_the_token_becomes_a_cookie_that_opens_the_page(guarded: Server) -> None:
    status, headers, _ = ask(guarded, f"/?token={TOKEN}")
    assert (status, headers["Location"]) == (303, "/")
    assert "HttpOnly" in headers["Set-Cookie"]
    assert "SameSite=Lax" in headers["Set-Cookie"]
    assert ask(guarded, "/api/runs", Cookie=headers["Set-Cookie"].partition(";")[0])[0] == 200


@pytest.mark.parametrize("token", ["short", "with spaces in it ok", "ümlaut-and-enough-letters", "a;b=c;dddddddddddd"])
def test_a_weak_or_odd_token_is_refused(shelf: Shelf, token: str) -> None:
    with pytest.raises(UserError, match="CONFIDE_UI_TOKEN"):
        make_server(shelf, "127.0.0.1", 0, token)


def test_a_port_that_is_taken_or_impossible_is_said_so(shelf: Shelf, server: Server) -> None:
    with pytest.raises(UserError, match="choose another --port"):
        make_server(shelf, "127.0.0.1", server.port, None)
    with pytest.raises(UserError, match="0 to 65535"):
        make_server(shelf, "127.0.0.1", 99_999, None)


def test_the_command_serves_until_ctrl_c(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "confide", "ui", str(tmp_path), "--port", "0", "--no-browser"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("open http://127.0.0.1:")
    port = int(line.split(":")[2].partition("/")[0])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/api/runs")
    assert json.loads(connection.getresponse().read())["runs"] == []
    process.send_signal(2)
    process.communicate(timeout=60)
    assert process.returncode == 0

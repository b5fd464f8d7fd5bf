"""The page in a real browser: planner, runs and models, by mouse and by keyboard, without a request to anyone else.

Pictures of every view are written where CONFIDE_SCREENSHOTS names a folder, for people to look at.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from confide import recipe
from confide.report import shell
from confide.runs import folder
from confide.ui.server import Server, make_server
from confide.ui.shelf import Shelf

pytestmark = pytest.mark.usefixtures("no_figures_here")
ALL = 7  # runs in the list
SCREENS = {
    "wide-light": (1400, "light"),
    "wide-dark": (1400, "dark"),
    "phone-light": (420, "light"),
    "phone-dark": (420, "dark"),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path], no_figures_here: None) -> Path:
    """Convex runs of two tasks and of two recipes with two seeds, a small recogniser, and a small retriever."""
    pytest.importorskip("soundfile", reason="the extra speech is not installed")
    pytest.importorskip("faiss", reason="the extra retrieval is not installed")
    root = tmp_path_factory.mktemp("explore")
    short = ["run.steps=12", "evaluation={every: 4}"]
    for seed in (0, 1):
        for name, sets in (("digits", []), ("clipped", ["bounding.rule=clip", "privacy.target_epsilon=1"])):
            made = recipe.load("convex/digits", [*short, f"run.seed={seed}", *sets])
            folder.train(made, root / f"{name}-{seed}", quiet=True)
    folder.train(recipe.load("convex/quadratics", short), root / "quadratics", quiet=True)
    voices = {"kind": "synthetic", "speakers": 2, "utterances": 2, "sentences": "digits", "digits": [1, 2],
              "cache": str(root / ".cache" / "voices")}  # fmt: skip
    common = {"bounding": {"rule": "clip", "bound": 1}, "central": {"kind": "sgd", "learning_rate": 1},
              "evaluation": {"every": 1}, "run": {"steps": 1}}  # fmt: skip
    hears = {
        "task": {
            "kind": "speech", "corpus": {**voices, "population": "federated"}, "test": {**voices, "population": "test"},
            "model": {"layers": 1, "width": 16, "mlp": 32, "heads": 2}, "cache": str(root / ".cache" / "features"),
        },
        "sampling": {"kind": "poisson", "cohort": 2}, "local": {"steps": 1, "batch_seconds": 4, "learning_rate": 0.1},
        **common,
    }  # fmt: skip
    folder.train(recipe.parse(hears), root / "speech", quiet=True)
    finds = {
        "task": {
            "kind": "retrieval", "encoder": {"source": str(tiny_model("masked")), "pooling": "mean"},
            "data": {"kind": "embedded", "documents": 6, "queries_per_document": 4, "households": 2},
            "clients": {"kind": "even", "clients": 2}, "cache": str(root / ".cache" / "states"),
        },
        "sampling": {"kind": "poisson", "cohort": 2}, "local": {"epochs": 1, "batch_size": 4, "learning_rate": 0.1},
        **common,
    }  # fmt: skip
    folder.train(recipe.parse(finds), root / "retrieval", quiet=True)
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Server]:
    with serving(root, None) as made:
        yield made


@contextmanager
def serving(root: Path, token: str | None) -> Iterator[Server]:
    made = make_server(Shelf(root), "127.0.0.1", 0, token)
    thread = threading.Thread(target=made.run, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.stop()
        thread.join()


@contextmanager
def under_way(root: Path) -> Iterator[Callable[[int], None]]:
    """A run that somebody works on, called `going`; what is given writes the record of a step."""
    place = root / "going"
    place.mkdir()
    try:
        for name in ("recipe.yaml", "ledger.jsonl"):
            (place / name).write_text((root / "digits-0" / name).read_text())
        with (place / ".lock").open("w") as lock, (place / "metrics.jsonl").open("w") as metrics:
            fcntl.flock(lock, fcntl.LOCK_EX)

            def record(step: int) -> None:
                line: dict[str, Any] = {
                    "step": step,
                    "seconds": 2.0 * step,
                    "cohort": 3,
                    "loss": 1.0,
                    "epsilon": 0.5 * step,
                }
                line |= {"evaluation": {"accuracy": 50.0 + step}} if step % 2 else {}
                metrics.write(json.dumps(line) + "\n")
                metrics.flush()

            yield record
    finally:
        shutil.rmtree(place)


@pytest.fixture
def page(browser: Any, server: Server, requested: Callable[[], list[str]]) -> Iterator[Any]:
    """The page, watched: nothing but this server may have been asked, and no error may have been logged."""
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", _size(1200))
    browser.get_log("browser")
    browser.get(server.url)
    yield browser
    strangers = [u for u in requested() if not u.startswith((server.url, "chrome:"))]
    assert strangers == []
    assert [e for e in browser.get_log("browser") if "Refused" in e["message"] or "TypeError" in e["message"]] == []


def text(page: Any, id_: str) -> str:
    return str(page.execute_script("return document.getElementById(arguments[0]).textContent", id_))


def until(claim: Callable[[], Any], seconds: float = 60) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = claim()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"it did not happen in time; the last look gave {value!r}")


def press(page: Any, *keys: str) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(page).send_keys(*keys).perform()


def focus(page: Any, id_: str) -> None:
    page.execute_script("document.getElementById(arguments[0]).focus()", id_)


def test_a_slider_moves_epsilon_by_keyboard_and_the_curves_follow(page: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    before = until(lambda: (shown := text(page, "epsilon")) != "…" and shown)
    assert until(lambda: page.execute_script("return document.querySelectorAll('#curves svg').length") == 4)
    focus(page, "r-noise_multiplier")
    press(page, *[Keys.ARROW_RIGHT] * 6)
    after = until(lambda: (shown := text(page, "epsilon")) not in (before, "…") and shown)
    assert float(after) < float(before)
    assert float(page.execute_script("return document.getElementById('n-noise_multiplier').value")) == pytest.approx(2)


def test_a_preset_fills_the_sliders_and_shows_what_the_paper_prints(page: Any) -> None:
    until(lambda: page.execute_script("return document.getElementById('presets').options.length") == 20)
    script = (
        "const s = document.getElementById('presets');"
        "const fits = (o) => o.textContent.includes('69,510,000') && o.textContent.includes('7.2');"
        "s.value = [...s.options].findIndex(fits) - 1;"
        "s.dispatchEvent(new Event('change'));"
    )
    page.execute_script(script)
    until(lambda: text(page, "epsilon") == "6.295")
    assert "PFL-ASR prints 7.2" in text(page, "published")
    assert page.execute_script("return document.getElementById('n-rounds').value") == "2034"


def test_a_larger_cohort_keeps_the_noise_per_user(page: Any) -> None:
    script = "const e = document.getElementById('n-cohort'); e.value = '2,000'; e.dispatchEvent(new Event('change'));"
    page.execute_script(script)
    assert page.execute_script("return document.getElementById('n-noise_multiplier').value") == "2"
    assert "0.001 per user" in until(lambda: "rate 0.002" in text(page, "per-user") and text(page, "per-user"))


def test_an_impossible_plan_is_explained(page: Any) -> None:
    script = "const e = document.getElementById('n-cohort'); e.value = '9e6'; e.dispatchEvent(new Event('change'));"
    page.execute_script(script)
    assert "cohort=9000000" in until(lambda: "larger than the population" in (said := text(page, "meaning")) and said)


def test_runs_are_chosen_and_compared_by_keyboard(page: Any, server: Server) -> None:
    from selenium.webdriver.common.keys import Keys

    page.get(f"{server.url}#runs")
    until(lambda: page.execute_script("return document.querySelectorAll('#runs tbody tr').length") == ALL)
    for name in ("digits-0", "digits-1"):
        page.execute_script('document.querySelector(`input[data-run="${arguments[0]}"]`).focus()', name)
        press(page, Keys.SPACE)
    focus(page, "compare")
    press(page, Keys.ENTER)
    until(lambda: page.title.startswith("Comparison: digits-0, digits-1"))
    assert page.execute_script("return document.querySelectorAll('figure.chart').length") >= 2
    # The page of a run is sandboxed: it cannot ask the server for anything.
    script = "const d = arguments[0]; fetch('/api/runs').then(() => d('answered'), () => d('refused'))"
    assert page.execute_async_script(script) == "refused"
    page.get_log("browser")


def names(page: Any) -> list[str]:
    script = "return [...document.querySelectorAll('#runs tbody input')].map((box) => box.dataset.run)"
    return list(page.execute_script(script))


def test_runs_are_sorted_and_filtered_and_say_rule_date_and_delta(page: Any, server: Server) -> None:
    page.get(f"{server.url}#runs")
    until(lambda: len(names(page)) == ALL)
    page.execute_script("document.querySelector('#runs button[data-key=name]').click()")
    assert names(page) == sorted(names(page)) != []
    page.execute_script("document.querySelector('#runs button[data-key=name]').click()")
    assert names(page) == sorted(names(page), reverse=True)
    page.execute_script("document.querySelector('#runs button[data-key=epsilon]').click()")
    assert set(names(page)[-2:]) == {"speech", "retrieval"}, "no epsilon comes last"
    script = "const e = document.getElementById('find'); e.value = arguments[0]; e.dispatchEvent(new Event('input'));"
    page.execute_script(script, "digits- normalise finished")
    assert sorted(names(page)) == ["digits-0", "digits-1"]
    row = page.execute_script("return document.querySelector('#runs tbody tr').textContent")
    assert "normalise" in row
    assert "1e-5" in row
    assert "moderate" in row
    page.execute_script(script, "nothing is called so")
    assert names(page) == []


@pytest.mark.parametrize(("what", "low", "high"), [("noise_multiplier", 0.3, 1.0), ("rounds", 1001, 99_999)])
def test_epsilon_is_fixed_and_the_rest_is_found(page: Any, what: str, low: float, high: float) -> None:
    until(lambda: text(page, "epsilon") != "…")
    script = (
        "document.getElementById('target').value = '2'; document.getElementById('solve-for').value = arguments[0];"
        "document.getElementById('solve').click()"
    )
    page.execute_script(script, what)
    until(lambda: text(page, "solve-said").startswith(what.replace("_", " ")))
    value = float(page.execute_script(f"return document.getElementById('n-{what}').value"))
    assert low < value < high
    until(lambda: (shown := text(page, "epsilon")).startswith(("1.9", "2")) and shown)
    key = {"noise_multiplier": "noise_multiplier", "rounds": "steps"}[what]
    assert f"{key}: {value:g}" in text(page, "lines")


def test_a_page_leads_back_and_unlike_epsilons_are_warned_of(page: Any, server: Server) -> None:
    from selenium.webdriver.common.by import By

    page.get(f"{server.url}compare?run=digits-0&run=digits-1")
    until(lambda: page.find_elements(By.ID, "verdicts"))
    cells = page.execute_script("return [...document.querySelectorAll('#verdicts td')].map((c) => c.textContent)")
    assert cells[0] == cells[3] == ""
    assert cells[1] == "not shown" or cells[1].startswith(("better by", "worse by"))
    page.find_element(By.CSS_SELECTOR, ".back a").click()
    until(lambda: page.find_elements(By.CSS_SELECTOR, "#runs tbody tr"))
    assert page.current_url.endswith("/#runs")
    page.get(f"{server.url}compare?run=digits-0&run=speech")
    until(lambda: "spent unlike epsilons" in page.find_element(By.TAG_NAME, "main").text)


def test_the_worst_utterances_stand_on_the_page_with_reference_and_answer(page: Any, server: Server) -> None:
    from selenium.webdriver.common.by import By

    page.get(f"{server.url}report?run=speech")
    until(lambda: page.find_elements(By.ID, "worst"))
    order = page.execute_script("return [...document.querySelectorAll('h2[id]')].map((h) => h.id)")
    assert order.index("curves") < order.index("worst") < order.index("groups")
    assert order[0] == "curves", "the headline has the promise, and nothing stands between it and the curves"
    assert order.index("groups") < order.index("results") < order.index("tensors") < order.index("time")
    assert not page.execute_script(
        "return document.querySelectorAll('.cards ~ table, .cards ~ .scroll')[0]"
        ".compareDocumentPosition(document.getElementById('curves')) & 4"
    )
    assert not page.execute_script("return document.querySelector('#tensors + details').open")
    first = page.execute_script(
        "return [...document.querySelector('#worst ~ .wrap tbody tr').cells].map((c) => c.textContent)"
    )
    assert first[0] != first[1]


def test_a_report_opens_from_the_listing(page: Any, server: Server) -> None:
    from selenium.webdriver.common.by import By

    page.get(f"{server.url}#runs")
    link = until(lambda: page.find_elements(By.LINK_TEXT, "digits-0"))[0]
    # Looking again changes nothing on the page while nothing changed, so that a click never misses.
    again = "dispatchEvent(new Event('hashchange')); fetch('/api/runs').then(() => setTimeout(arguments[0], 300))"
    page.execute_async_script(again)
    link.click()
    until(lambda: "digits-0" in page.title)
    assert "What" not in page.title
    assert page.find_element(By.CSS_SELECTOR, ".card .big").text


def test_a_run_under_way_is_followed(page: Any, server: Server, root: Path) -> None:
    find = "[...document.querySelectorAll('#runs tbody tr')].find(r => r.textContent.includes('going'))"

    def row() -> str:
        return str(page.execute_script(f"return {find}?.textContent") or "")

    with under_way(root) as record:
        page.get(f"{server.url}#runs")
        for step in (1, 2, 3):
            record(step)
            until(partial(lambda wanted: wanted in row(), f"{step} of 12"))
        assert "running" in row()
        assert "about 18 s left" in row()


@pytest.mark.parametrize("token", [None, "sixteen-letters-or-more"])
def test_the_page_of_a_run_follows_it_and_leads_back_to_the_list(
    browser: Any, root: Path, requested: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, token: str | None
) -> None:
    from selenium.webdriver.common.by import By

    monkeypatch.setattr(shell, "RELOAD", 1)
    with serving(root, token) as server, under_way(root) as record:
        browser.get(server.url)  # with a token, this leaves the cookie
        address = f"{server.url.partition('?')[0]}report?run="
        record(1)
        record(2)
        browser.get(f"{address}going")
        shown = "return document.querySelector('.card .big')?.textContent"
        until(lambda: browser.execute_script(shown) == "2 of 12")
        record(3)
        until(lambda: browser.execute_script(shown) == "3 of 12")
        for name in ("going", "digits-0"):
            browser.get(address + name)
            until(partial(browser.find_elements, By.CSS_SELECTOR, ".back a"))[0].click()
            until(partial(browser.find_elements, By.CSS_SELECTOR, "#runs tbody tr"))
            assert browser.current_url.endswith("/#runs")
            browser.refresh()
            until(partial(browser.find_elements, By.CSS_SELECTOR, "#runs tbody tr"))
        browser.back()
        until(lambda: "digits-0" in browser.title)
        assert [
            url for url in requested() if not url.startswith((address.removesuffix("report?run="), "chrome:"))
        ] == []


def test_a_recording_is_uploaded_and_written_down(page: Any, server: Server, tmp_path: Path) -> None:
    import soundfile
    from selenium.webdriver.common.by import By

    page.get(f"{server.url}#try")
    until(lambda: page.execute_script("return document.getElementById('speech-run').value") == "speech")
    soundfile.write(tmp_path / "tone.wav", 0.1 * np.sin(np.arange(32_000) / 10), 16_000)
    page.find_element(By.ID, "upload").send_keys(str(tmp_path / "tone.wav"))
    until(lambda: "2.0 s of audio" in text(page, "transcripts"))
    assert page.find_element(By.CSS_SELECTOR, "#transcripts .quote").text
    # What was uploaded can be played.
    until(lambda: page.execute_script("return document.getElementById('player').duration") == 2)
    assert page.find_element(By.ID, "player").is_displayed()
    (tmp_path / "broken.wav").write_bytes(b"RIFF but nothing else")
    page.find_element(By.ID, "upload").send_keys(str(tmp_path / "broken.wav"))
    until(lambda: "cannot be read" in text(page, "transcripts"))
    assert str(Path("/tmp")) not in text(page, "transcripts")


def test_two_runs_answer_side_by_side_and_one_mistake_leaves_the_other(page: Any, server: Server, root: Path) -> None:
    for name in ("speech", "retrieval"):
        shutil.copytree(root / name, root / f"{name}-again")
    try:
        page.get(f"{server.url}#try")
        choose = (
            "const s = document.getElementById(`${arguments[0]}-beside`);"
            "s.value = `${arguments[0]}-again`; return s.value && document.getElementById(`${arguments[0]}-run`).value"
        )
        shown = "return [...document.querySelectorAll(`#${arguments[0]} section`)].map((s) => s.innerText)"
        until(lambda: page.execute_script(choose, "retrieval") == "retrieval")
        page.execute_script(
            "document.getElementById('query').value = 'my fridge'; document.forms.retrieval.requestSubmit()"
        )
        until(lambda: len(page.execute_script(shown, "documents")) == 2)
        first, second = page.execute_script(shown, "documents")
        assert first.splitlines()[1:] == second.splitlines()[1:], "the same model finds the same"
        assert (first.splitlines()[0], second.splitlines()[0]) == ("retrieval", "retrieval-again")
        (root / "speech-again" / "model.safetensors").write_bytes(b"no model")
        assert page.execute_script(choose, "speech") == "speech"
        soundfile = pytest.importorskip("soundfile")
        soundfile.write(root / ".cache" / "tone.wav", 0.1 * np.sin(np.arange(16_000) / 10), 16_000)
        page.find_element("id", "upload").send_keys(str(root / ".cache" / "tone.wav"))
        until(lambda: len(page.execute_script(shown, "transcripts")) == 2)
        good, bad = page.execute_script(shown, "transcripts")
        assert "1.0 s of audio" in good
        assert page.execute_script("return document.querySelectorAll('#transcripts .error').length") == 1, bad
        assert "speech-again/model.safetensors" in bad
        assert str(root.parent) not in bad
        keep_picture(page, "side-by-side")
    finally:
        for name in ("speech", "retrieval"):
            shutil.rmtree(root / f"{name}-again")


def test_the_microphone_is_recorded_and_written_down(page: Any, server: Server) -> None:
    from selenium.webdriver.common.keys import Keys

    page.get(f"{server.url}#try")
    until(lambda: page.execute_script("return document.getElementById('speech-run').value") == "speech")
    focus(page, "record")
    press(page, Keys.ENTER)
    until(lambda: text(page, "record") == "Stop")
    time.sleep(1.0)
    press(page, Keys.ENTER)
    until(lambda: "s of audio in" in text(page, "transcripts"))


def test_documents_are_found_for_a_query(page: Any, server: Server) -> None:
    from selenium.webdriver.common.keys import Keys

    page.get(f"{server.url}#try")
    until(lambda: page.execute_script("return document.getElementById('retrieval-run').value") == "retrieval")
    focus(page, "query")
    press(page, "my fridge is too loud", Keys.ENTER)
    until(lambda: page.execute_script("return document.querySelectorAll('#documents li').length") == 5)
    assert "probability" in text(page, "documents")


@pytest.mark.parametrize("screen", SCREENS)
def test_every_view_fits_its_screen_and_can_be_looked_at(page: Any, server: Server, root: Path, screen: str) -> None:
    width, scheme = SCREENS[screen]
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", _size(width))
    page.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    with under_way(root) as record:
        record(1)
        record(2)
        look_at_every_view(page, server, width, screen)


def look_at_every_view(page: Any, server: Server, width: int, screen: str) -> None:
    two = "&".join(f"run={name}-{seed}" for name in ("digits", "clipped") for seed in (0, 1))
    charts = "return document.querySelectorAll('figure.chart').length > "
    for view, ready in {
        "#planner": "return document.querySelectorAll('#curves svg').length === 4",
        "#runs": "return document.querySelectorAll('#runs tbody tr').length === " + str(ALL + 1),
        "#try": "return document.getElementById('speech-run').value === 'speech'",
        "report?run=digits-0": charts + "5",
        "report?run=speech": charts + "5",
        "report?run=going": charts + "1",
        "compare?run=digits-0&run=digits-1": charts + "1",
        "compare?run=digits-0&run=quadratics&run=speech": charts + "1",
        f"compare?{two}": charts + "1",
    }.items():
        page.get(server.url + view)
        until(partial(page.execute_script, ready))
        assert page.execute_script("return document.documentElement.scrollWidth") <= width
        if width > 1200:  # nothing is cut off; on a telephone tables are moved sideways
            boxes = "[...document.querySelectorAll('.scroll')].map((box) => box.scrollWidth - box.clientWidth)"
            assert max(page.execute_script(f"return {boxes}"), default=0) <= 0, view
        name = view.strip("#").replace("?run=", "-").replace("&run=", "-")
        assert keep_picture(page, f"{name}-{screen}")[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_tab_key_reaches_every_view_first(page: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    page.execute_script("document.activeElement.blur(); window.focus()")
    seen = []
    for _ in range(4):
        press(page, Keys.TAB)
        seen.append(page.execute_script("return document.activeElement.textContent"))
    assert seen == ["Skip to the content", "Planner", "Runs", "Try it"]
    press(page, Keys.ENTER)
    until(lambda: not page.execute_script("return document.getElementById('view-try').hidden"))
    assert page.execute_script("return document.querySelector('[aria-current=page]').textContent") == "Try it"


def keep_picture(page: Any, name: str) -> bytes:
    """Take a picture, of the whole page where CONFIDE_SCREENSHOTS says where to keep it."""
    kept = os.environ.get("CONFIDE_SCREENSHOTS")
    whole = {"captureBeyondViewport": True} if kept else {}
    picture = base64.b64decode(page.execute_cdp_cmd("Page.captureScreenshot", whole)["data"])
    if kept:
        (Path(kept) / f"{name}.png").write_bytes(picture)
    return picture


def _size(width: int) -> dict[str, Any]:
    return {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}

"""The page of a run: what it says, how large it is, and how it behaves in a browser that may ask for nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from confide import recipe
from confide.federated import items
from confide.federated.items import Items
from confide.privacy import planner, wording
from confide.privacy.accountant import shown
from confide.report import headline
from confide.report.page import write_report
from confide.runs import folder
from confide.speech.model import ModelSettings, parameter_shapes

SUMMARY: dict[str, Any] = {
    "task": "speech", "metric": "wer", "metrics": {"wer": 40.0, "cer": 10.0}, "metrics_mean_of_last": {},
    "epsilon": 3.0, "delta": 1e-9, "accountant": "pld", "adjacency": "add-or-remove one user", "noise_source": "seeded",
    "for_release": False, "releases": 2000, "mechanism": "gaussian", "trust": "central", "sampler": "poisson",
    "noise_multiplier": 1.0, "cohort": 1024, "population": 34_753, "steps": 2000, "seconds": 1e4, "skipped": {},
    "seed": 0, "recipe": "x", "ledger_head": "y", "environment": {"torch": "2"},
}  # fmt: skip


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2,000 steps of the full model's 296 tensors and 800 speakers, as such a run would have recorded them."""
    run, draw = tmp_path_factory.mktemp("long") / "a <run> & more", np.random.default_rng(0)
    run.mkdir()
    names = list(parameter_shapes(ModelSettings(preset="baseline")))
    assert len(names) == 296
    with (run / "metrics.jsonl").open("w") as file, (run / "times.jsonl").open("w") as spent:
        for step in range(1, 2001):
            record: dict[str, Any] = {
                "step": step, "seconds": 5.0 * step, "cohort": int(draw.poisson(1024)), "loss": 40 / math.sqrt(step),
                "update_norm": 1 + draw.random(), "bounded_norm": 0.01, "share_bounded": draw.random(), "bound": 0.01,
                "snr": draw.random(), "epsilon": step / 700, "signal": 1.0, "noise": 1.0, "not_finite": 0,
            }  # fmt: skip
            if step % 10 == 0:
                record["evaluation"] = {"wer": 100 * draw.random(), "cer": 40 * draw.random(), "test_loss": 3.0}
            file.write(json.dumps(record) + "\n")
            parts = {"train": 4.5, "release": 0.4, "move": 0.1, "evaluate": 1.0}
            spent.write(json.dumps({"step": step, **parts}) + "\n")
    with (run / "layers.jsonl").open("w") as file:
        file.write(json.dumps({"step": 0, "names": names, "sizes": [1] * 296}) + "\n")
        for step in range(10, 2001, 10):
            fields = ("delta", "delta_deviation", "bounded", "signal", "noise", "weights")
            values = {field: draw.random(296).round(6).tolist() for field in fields}
            file.write(json.dumps({"step": step, "users": 1024, **values}) + "\n")
    owner = np.repeat(np.arange(800), 5)
    errors, words = draw.binomial(20, 0.4, 4000).astype(float), np.full(4000, 20.0)
    speakers = tuple(f"speaker-{i}" for i in range(800))
    items.write(run, Items("wer", "lower", 100.0, "speaker", True, speakers, owner, errors, words, "t"))
    return run


@pytest.fixture(scope="module")
def page(long_run: Path) -> Path:
    return write_report(long_run, recipe.load("speech/embedded/federated"), SUMMARY)


def test_the_page_of_a_long_run_is_small(page: Path) -> None:
    assert page.stat().st_size < 3_000_000


def test_the_page_has_every_part_that_a_reader_needs(page: Path) -> None:
    text = page.read_text()
    for said in (
        "users needed for epsilon below 10", "privacy spent", "share bounded", "signal-to-noise ratio by kind",
        "users in the cohort", "By speaker", "users train", "The slowest steps", "kind: lamb", "<h3>wqkv</h3>",
        "confide train &#x27;", "updates over depth", "95 % interval", "torch",
    ):  # fmt: skip
        assert said in text, said
    assert "<run>" not in text


def test_the_page_is_light_to_open_and_asks_nobody(
    page: Path, browser: Any, requested: Callable[[], list[str]]
) -> None:
    browser.get_log("browser")  # what pages before this one left
    browser.get(page.as_uri())
    assert browser.execute_script("return document.readyState") == "complete"
    assert 500 < browser.execute_script("return document.getElementsByTagName('*').length") < 20_000
    assert [url for url in requested() if not url.startswith(("file:", "chrome:"))] == []
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


@pytest.mark.parametrize("width", [360, 1200])
def test_the_page_fits_its_screen(page: Path, browser: Any, width: int) -> None:
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(page.as_uri())
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    small = "return Math.min(...[...document.querySelectorAll('svg text')].map(t => t.getBoundingClientRect().height))"
    assert browser.execute_script(small) >= 9  # pixels: a phone's reader can still read the ticks


def test_light_and_dark_follow_the_system_and_both_can_be_read(page: Path, browser: Any) -> None:
    seen = {}
    for scheme in ("light", "dark"):
        wanted = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", wanted)
        browser.get(page.as_uri())
        script = "const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]"
        ink, paper = (_luminance(colour) for colour in browser.execute_script(script))
        assert (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) > 7  # WCAG's contrast, level AAA
        seen[scheme] = paper
    assert seen["dark"] < 0.1 < 0.9 < seen["light"]


def test_on_paper_the_page_is_dark_on_white_whatever_the_screen_is(page: Path, browser: Any) -> None:
    wanted = {"media": "print", "features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", wanted)
    try:
        browser.get(page.as_uri())
        script = "const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]"
        assert browser.execute_script(script) == ["rgb(0, 0, 0)", "rgb(255, 255, 255)"]
        assert browser.execute_script("return getComputedStyle(document.querySelector('.toc')).display") == "none"
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})


def test_a_chart_says_its_values_to_the_keyboard_and_hides_a_line(page: Path, browser: Any) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    browser.get(page.as_uri())
    figure = next(f for f in browser.find_elements(By.CSS_SELECTOR, "figure.chart") if "norm of a user" in f.text)
    svg = figure.find_element(By.TAG_NAME, "svg")
    svg.send_keys(Keys.HOME)
    tip = figure.find_element(By.CSS_SELECTOR, ".tip")
    assert tip.text.startswith("central step 1\n")
    assert "after bounding: 0.01" in tip.text
    svg.send_keys(Keys.ARROW_RIGHT)
    assert not tip.text.startswith("central step 1\n")
    svg.send_keys(Keys.ESCAPE)
    assert not tip.is_displayed()
    key = figure.find_element(By.CSS_SELECTOR, ".key")
    key.send_keys(Keys.ENTER)
    assert key.get_attribute("aria-pressed") == "false"
    svg.send_keys(Keys.HOME)
    assert "before bounding" not in tip.text


def test_the_speakers_can_be_sorted_and_found(page: Path, browser: Any) -> None:
    from selenium.webdriver.common.by import By

    browser.get(page.as_uri())
    section = browser.find_element(By.XPATH, "//section[h2[@id='groups']]")
    head = section.find_elements(By.CSS_SELECTOR, "th button")[1]

    def first() -> float:
        return float(section.find_element(By.CSS_SELECTOR, "tbody tr td.n").get_attribute("data-v"))

    worst = first()
    head.click()
    assert first() < worst
    section.find_element(By.CSS_SELECTOR, "input[type=search]").send_keys("speaker-77")
    shown = "return [...arguments[0].querySelectorAll('tbody tr')].filter(row => !row.hidden).length"
    assert browser.execute_script(shown, section) == 11  # 77 and 770 to 779


@pytest.mark.parametrize(
    ("sets", "change", "said"),
    [
        (["privacy={}"], {"epsilon": None}, "nothing to extrapolate"),
        (["privacy.trust=local"], {}, "own noise"),
        (["privacy.trust=distributed"], {}, "distributed trust"),
        (["privacy.mechanism=banded", "sampling.kind=cyclic"], {"sampler": "cyclic"}, "Not extrapolated for banded"),
        ([], {"noise_multiplier": 1e-7}, "Cannot be extrapolated"),
    ],
)
def test_where_no_population_can_be_named_the_page_says_why(sets: list[str], change: dict[str, Any], said: str) -> None:
    found = headline.enough(recipe.load("convex/digits", sets), {**SUMMARY, **change})
    assert isinstance(found, str)
    assert said in found


def test_the_population_that_is_named_is_enough_and_not_far_too_large() -> None:
    small = {**SUMMARY, "noise_multiplier": 0.05, "cohort": 16, "population": 60, "steps": 50}
    found = headline.enough(recipe.load("convex/digits"), small)
    assert isinstance(found, planner.Point)
    assert found.spent("pld") <= headline.TARGET
    assert found.noise_multiplier / found.cohort == pytest.approx(0.05 / 16)
    less = int(found.cohort / 1.1)
    fewer = planner.Point(0.05 / 16 * less, less, round(less * 60 / 16), 50, 1e-9)
    assert fewer.spent("pld") > headline.TARGET


def test_a_run_that_is_private_enough_needs_no_more_users() -> None:
    assert headline.enough(recipe.load("convex/digits"), {**SUMMARY, "noise_multiplier": 5.0}) == planner.Point(
        5.0, 1024, 34_753, 2000, 1e-9
    )


@given(st.floats(0, 1000), st.floats(1e-12, 1e-3))
def test_a_guess_is_better_than_a_coin_and_never_better_than_certain(epsilon: float, delta: float) -> None:
    assert 0.5 <= wording.guess(epsilon, delta) <= 1
    assert wording.guess(epsilon, delta) <= wording.guess(epsilon + 0.1, delta)


def test_the_best_guess_at_epsilon_zero_is_a_coin_and_its_sentence_rounds_up() -> None:
    assert wording.guess(0, 0) == 0.5
    assert "at most 73.2 %" in wording.meaning(1.0, 1e-9)  # e / (1 + e) is 73.106 %
    assert "practically always" in wording.meaning(20.0, 1e-9)


def test_distributed_trust_is_not_said_to_hide_the_cohort_from_the_server(tmp_path: Path, no_figures: None) -> None:
    pages = {}
    for trust in ("central", "distributed"):
        wanted = recipe.load("convex/digits", ["run.steps=5", f"privacy.trust={trust}"])
        folder.train(wanted, tmp_path / trust, quiet=True, page=write_report)
        pages[trust] = (tmp_path / trust / "report.html").read_text()
    spent = folder.check_ledger(tmp_path / "distributed")
    assert f"epsilon {shown(spent['epsilon_server'])} against the server" in pages["distributed"]
    assert spent["epsilon_server"] > 2 * spent["epsilon"]
    assert "against the server" not in pages["central"]


def test_scores_of_a_run_are_those_of_its_summary(tmp_path: Path, no_figures: None) -> None:
    wanted = recipe.load("convex/digits", ["run={steps: 3}", "evaluation={every: 3}"])
    summary = folder.train(wanted, tmp_path / "run", quiet=True)
    found = items.read(tmp_path / "run")
    assert found is not None
    assert found.value == pytest.approx(summary["metrics"]["accuracy"])
    assert len(found.names) == 10


def test_the_page_says_how_settings_were_chosen_and_the_run_keeps_its_name(tmp_path: Path, no_figures: None) -> None:
    few = ["run={steps: 1}", "evaluation={every: 1}"]
    wanted = recipe.load("convex/digits", [*few, "chosen=the rate on <others>"])
    folder.train(wanted, tmp_path / "run", quiet=True, page=write_report)
    assert "How settings were chosen: the rate on &lt;others&gt;." in (tmp_path / "run" / "report.html").read_text()
    assert wanted.digest == recipe.load("convex/digits", few).digest


def _luminance(colour: str) -> float:
    parts = [int(p) / 255 for p in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

"""Error against epsilon: what was trained, and what the planner says between and beyond."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from confide.privacy.accountant import shown, strength
from confide.privacy.planner import Point
from confide.report.figures.frontier import draw_frontier
from confide.reproduce import frontier
from confide.reproduce.frontier import Frontier, Spot, charts, page_parts, sentences

Command = Callable[..., tuple[int, str, str]]
FREE = Spot("head", None, (1.0, 3.0), "wer", 0.0, 100, 1_000, 50, None, True)


def spot(z: float, value: float) -> Spot:
    spent = Point(z, 100, 1_000, 50, 1e-4).spent("pld")
    return replace(FREE, epsilon=spent, values=(value,), noise_multiplier=z, delta=1e-4)


FOUND = Frontier((FREE, spot(1.0, 4.0), spot(4.0, 10.0)))


def test_a_curve_goes_through_what_was_measured() -> None:
    for one in FOUND.spots[1:]:
        assert FOUND.at("head", one.epsilon or 0.0) == pytest.approx(one.value, abs=0.01)


def test_between_two_spots_the_error_is_that_of_the_planned_noise() -> None:
    middle = Point(2.5, 100, 1_000, 50, 1e-4).spent("pld")  # half-way from 1 to 4
    assert FOUND.at("head", middle) == pytest.approx(7.0, abs=0.01)


def test_nothing_is_said_at_more_noise_than_was_tried() -> None:
    assert FOUND.at("head", 0.9 * (FOUND.spots[-1].epsilon or 0.0)) is None


def test_more_users_buy_a_smaller_epsilon_at_the_same_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontier, "EPSILONS", (0.5, 2.0, 8.0))
    here, more = (dict(FOUND.curve("head", factor)) for factor in (1, 16))
    assert min(more) < min(here)
    assert all(more[epsilon] <= error for epsilon, error in here.items())
    assert all(FREE.value <= error <= 10.0 for error in more.values())


def test_other_samplers_have_spots_and_no_curve() -> None:
    fixed = Frontier(tuple(replace(one, poisson=False) for one in FOUND.spots))
    assert fixed.curve("head", 1) == []


def test_the_cost_is_said_in_words() -> None:
    (said,) = sentences(FOUND)
    assert "from 2 to 10" in said
    assert "1,000 users" in said


def test_several_recipes_have_a_chart_for_each_population_and_dots_only_where_they_were_trained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(frontier, "EPSILONS", (2.0, 8.0))
    both = Frontier((*FOUND.spots, *(replace(one, recipe="whole", values=(20.0,)) for one in FOUND.spots)))
    here, more, most = charts(both)
    assert [chart.title.rpartition(", ")[2] for chart in (here, more, most)] == [
        "1,000 users", "4,000 users", "16,000 users"
    ]  # fmt: skip
    assert {(line.label, line.colour) for line in here.lines if line.dots} == {
        ("head, trained", 0), ("whole, trained", 1)
    }  # fmt: skip
    for chart in (more, most):
        assert [(line.label, line.dots) for line in chart.lines] == [
            ("head, planned", False),
            ("whole, planned", False),
        ]
    (alone,) = charts(FOUND)
    assert alone.level == FREE.value
    assert draw_frontier(tmp_path / "both.png", charts(both)).read_bytes()[1:4] == b"PNG"


def test_each_epsilon_has_its_word_and_its_delta_on_the_page_and_in_the_terminal() -> None:
    said, page = FOUND.text().splitlines(), "".join(page_parts(FOUND))
    for line, one in zip(said[1:], FOUND.spots, strict=True):
        if one.epsilon is None:
            assert "no privacy" in line
            continue
        word = strength(one.epsilon, one.delta, one.population)
        assert f"{shown(one.epsilon)} {word}  0.0001" in line
        assert f"<td class='n {word}' data-v={one.epsilon!r}>{shown(one.epsilon)} {word}</td><td>0.0001</td>" in page


@pytest.mark.usefixtures("no_figures")
def test_recipes_that_are_far_apart_are_drawn_on_a_logarithmic_scale(tmp_path: Path) -> None:
    far = replace(FREE, recipe="whole", values=(17.0,))  # 8.5 times the best
    near = replace(far, values=(15.0,))
    for other, log in ((far, True), (near, False)):
        drawn = charts(Frontier((*FOUND.spots, other, replace(FOUND.spots[1], recipe="whole", values=other.values))))
        assert [chart.log for chart in drawn] == [log] * len(drawn)
        assert [chart.from_zero for chart in drawn] == [not log] * len(drawn)
        assert draw_frontier(tmp_path / f"{log}.png", drawn).read_bytes()[1:4] == b"PNG"


def test_the_command_trains_writes_a_page_and_goes_on_where_it_was(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frontier, "EPSILONS", (20.0, 50.0))
    asked = ("plan", "frontier", "convex/digits", "--set", "run.steps=5", "--out", tmp_path, "--workers", 1)
    code, out, _ = command(*asked, "--epsilons", "50")
    assert code == 0
    assert "no privacy" in out
    cells = (tmp_path / "cells.jsonl").read_text().splitlines()
    assert len(cells) == 2
    code, out, _ = command(*asked, "--epsilons", "50,20", "--json")
    assert code == 0
    found = json.loads(out)
    assert [one["epsilon"] is None for one in found["measured"]] == [True, False, False]
    assert all(one["epsilon"] <= level for one, level in zip(found["measured"][1:], (50, 20), strict=True))
    assert (tmp_path / "cells.jsonl").read_text().splitlines()[:2] == cells  # only the third was trained
    page = (tmp_path / "frontier.html").read_text()
    assert "<svg" in page
    assert "users, trained" in page


def test_a_recipe_without_noise_is_refused_with_what_to_do(command: Command, tmp_path: Path) -> None:
    code, _, said = command("plan", "frontier", "retrieval/embedded", "--set", "privacy={mechanism: none}",
                            "--out", tmp_path)  # fmt: skip
    assert code == 2
    assert "mechanism: gaussian" in said
    code, _, said = command("plan", "frontier", "convex/digits", "--epsilons", "8,x", "--out", tmp_path)
    assert code == 2
    assert "for example 8,2" in said

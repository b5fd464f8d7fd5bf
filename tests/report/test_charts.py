"""Charts: nothing is lost in thinning, values lie inside the frame, axes are round, and strings cannot break out."""

from __future__ import annotations

import json
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from confide.report.charts import HEIGHT, WIDTH, Axis, Chart, Line, as_script, number, thin

VALUES = st.floats(-1e12, 1e12, allow_nan=False)
SERIES = st.lists(VALUES, min_size=1, max_size=80)


@given(st.lists(VALUES, min_size=1, max_size=400), st.integers(4, 100))
def test_thinning_keeps_ends_and_extremes_and_no_more_points_than_asked(ys: list[float], points: int) -> None:
    kept = thin(range(len(ys)), ys, points)
    assert kept == sorted(set(kept))
    assert (kept[0], kept[-1]) == (0, len(ys) - 1)
    assert len(kept) <= max(points, 2) or len(ys) <= points
    assert {min(ys), max(ys)} <= {ys[i] for i in kept}


@given(SERIES)
@settings(deadline=None)
def test_every_curve_lies_inside_the_frame(ys: list[float]) -> None:
    drawn = Chart("t", "s", [Line("a", list(range(len(ys))), ys, dots=True)]).svg()
    places = [(float(x), float(y)) for x, y in re.findall(r"cx=([-.\d]+) cy=([-.\d]+)", drawn)]
    assert len(places) == len(ys)
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in places)


@given(st.floats(-1e9, 1e9), st.floats(1e-4, 1e9), st.booleans())
def test_ticks_are_few_inside_the_axis_and_in_order(low: float, span: float, log: bool) -> None:
    low = abs(low) + 1e-6 if log else low
    axis = Axis(low, low + span * max(abs(low), 1e-6), log, 0, 100)
    ticks = axis.ticks()
    assert 1 <= len(ticks) <= 12
    assert ticks == sorted(ticks)
    assert all(-1e-6 <= axis.at(t) <= 100 + 1e-6 for t in ticks)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (0.25, "0.25"), (1500, "1500"), (2e6, "2M"), (12_345_678, "1.23e7"), (1e-5, "1e-5"), (-2.5e4, "-25k")],
)
def test_numbers_are_short(value: float, shown: str) -> None:
    assert number(value) == shown


def test_values_that_cannot_be_drawn_are_gaps_and_a_chart_of_nothing_is_nothing() -> None:
    gaps = [None, math.nan, math.inf, 0.0, -1.0]
    assert Chart("t", "s", [Line("a", range(5), gaps)], log=True).svg() == ""
    drawn = Chart("t", "s", [Line("a", range(6), [*gaps, 2.0])], log=True).svg()
    assert drawn.count("<circle") == 1


def test_a_curve_that_never_changes_and_one_of_a_single_point_are_drawn() -> None:
    for ys in ([0.0, 0.0, 0.0], [5.0], [1e-300, 1e-300]):
        assert "<svg" in Chart("t", "s", [Line("a", range(len(ys)), ys)]).svg()


def test_names_from_outside_cannot_become_markup() -> None:
    evil = "</script><script>alert(1)</script>\"'&"
    drawn = Chart(evil, evil, [Line(evil, [1], [1]), Line("b", [1], [2])], x=evil).svg()
    assert "<script>alert" not in drawn
    assert drawn.count("</script>") == 1
    assert json.loads(as_script([evil])) == [evil]


def test_the_numbers_behind_a_curve_are_in_the_page_to_five_digits() -> None:
    drawn = Chart("t", "s", [Line("a", [1, 2], [math.pi, 1e-7])]).svg()
    held = json.loads(re.search(r"<script type=application/json>(.*?)</script>", drawn)[1])  # type: ignore[index]
    assert held["lines"][0]["y"] == [3.1416, 1e-7]

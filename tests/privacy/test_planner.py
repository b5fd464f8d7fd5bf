"""The planner gives back what went in, never exceeds a target, and agrees with PFL-ASR's published epsilons."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from confide.commands.plan import app
from confide.errors import UserError
from confide.privacy import accountant as accounting
from confide.privacy import planner
from confide.privacy.accountant import Accountant, strength
from confide.privacy.planner import Answer, Noise, Point
from confide.report.figures import plan as plan_figures

DELTA = 1e-9
# PFL-ASR Tables 1, 17, 18 and 20: z, cohort, population, steps, printed epsilon; then RDP by opacus 1.6.0 and PLD by
# dp-accounting 0.6.0 on a fine grid, computed once.
PUBLISHED = [
    (0.1024, 1024, 34753, 2006, 33000, 32100, 4860),
    (1.024, 10240, 347530, 2006, 13, 12.6, 11.921),
    (5.12, 51200, 1737650, 2006, 1.6, 1.55, 1.473),
    (0.0512, 1024, 34753, 2006, 350000, 343000, 20547),
    (0.512, 10240, 347530, 2006, 72, 70.3, 66.186),
    (2.56, 51200, 1737650, 2006, 3.5, 3.38, 3.213),
    (0.03072, 1024, 34753, 2006, 1100000, 1090000, 57736),
    (0.3072, 10240, 347530, 2006, 370, 329, 307.668),
    (1.536, 51200, 1737650, 2006, 6.5, 6.51, 6.175),
    (0.02048, 1024, 34753, 2006, 2600000, 2550000, 130378),
    (2.048, 102400, 3475300, 2006, 4.5, 4.44, 4.215),
    (0.01024, 1024, 34753, 2006, 11000000, 10400000, 523198),
    (0.512, 51200, 17376500, 2034, 13, 12.7, 11.302),
    (2.048, 204800, 69506000, 2006, 0.75, 0.456, 0.373),
    (0.6144, 204800, 6950600, 2006, 42, 41.9, 39.392),
    (0.6144, 204800, 69506000, 2034, 7.2, 7.22, 6.294),
    (0.6144, 204800, 695060000, 3390, 3.7, 3.7, 2.625),
    (0.2048, 204800, 6950600, 2006, 1100, 1090, 960.79),
    (0.2048, 204800, 69506000, 2034, 270, 230, 203.284),
    (0.2048, 204800, 695060000, 3390, 94, 93.6, 84.025),
    (1.024, 204800, 69506000, 2006, 2.1, 1.92, 1.152),
    (1.024, 204800, 695060000, 3390, 1.2, 1.1, 0.133),
    (2.56, 256000, 1542750, 2002, 24, 23.3, 22.327),
    (2.56, 256000, 15427500, 2013, 1.9, 1.85, 1.749),
    (0.768, 256000, 46282500, 1991, 5.5, 5.29, 4.662),
    (0.768, 256000, 48112500, 2068, 5.4, 5.21, 4.579),
    (0.768, 256000, 1542750, 2002, 180, 171, 164.865),
    (0.768, 256000, 15427500, 2013, 14, 13.2, 12.301),
]
HEADLINE = ["--noise-multiplier", "0.6144", "--cohort", "204800", "--population", "69506000", "--rounds", "2034"]


def rounding(printed: float) -> float:
    """Half a unit of the second digit."""
    return float(10 ** (math.floor(math.log10(printed)) - 1)) / 2


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"z{row[0]}-K{row[2]}")
def test_published_epsilons(row: tuple[float, int, int, int, float, float, float]) -> None:
    z, cohort, population, steps, printed, rdp, pld = row
    found = planner.epsilon(Noise(z), cohort, population, steps, DELTA).epsilon
    assert found["pld"] <= found["rdp"] <= printed + rounding(printed)
    if printed < 100:
        assert found["rdp"] == pytest.approx(rdp, rel=0.01)
        assert found["pld"] == pytest.approx(pld, rel=0.02)
    else:
        # In two rows (370, 270) opacus itself is more than a tenth below the printed value.
        assert found["rdp"] >= 0.9 * min(printed, rdp)


def test_table_1_is_met_but_for_its_erratum() -> None:
    for point, printed, note in plan_figures.published_points(DELTA):
        rdp = point.spent("rdp")
        assert (rdp <= printed + rounding(printed)) == (note == "")
        if not note:
            assert rdp > 0.6 * printed


def test_opacus_example() -> None:
    found = planner.epsilon(Noise(1.5), 4, 100, 2250, 1e-5).epsilon
    assert found["rdp"] == pytest.approx(7.329, abs=0.01)
    assert found["pld"] < found["rdp"]


points = st.builds(
    Point,
    st.floats(0.8, 3),
    st.integers(40, 400),
    st.integers(2_000, 40_000),
    st.integers(50, 900),
    st.sampled_from([1e-6, 1e-5]),
)
accountants: st.SearchStrategy[Accountant] = st.sampled_from(["rdp", "pld"])
few = settings(max_examples=3, deadline=None, derandomize=True)


def checked(answer: Answer, target: float) -> Point:
    assert answer.epsilon[answer.accountant] <= target
    assert answer.epsilon == answer.point.both()
    return answer.point


@few
@given(points, accountants)
def test_noise_round_trip(point: Point, by: Accountant) -> None:
    target = point.spent(by)
    found = checked(planner.noise(target, point.cohort, point.population, point.rounds, point.delta, by), target)
    assert found.noise_multiplier == pytest.approx(point.noise_multiplier, rel=1e-3)


@few
@given(points, accountants)
def test_cohort_round_trip(point: Point, by: Accountant) -> None:
    target, noise = point.spent(by), Noise(point.noise_multiplier)
    found = checked(planner.cohort(target, noise, point.population, point.rounds, point.delta, by), target)
    assert abs(found.cohort - point.cohort) <= 1


@few
@given(points, accountants)
def test_population_round_trip(point: Point, by: Accountant) -> None:
    target, noise = point.spent(by), Noise(point.noise_multiplier)
    found = checked(planner.population(target, noise, point.cohort, point.rounds, point.delta, by), target)
    assert abs(found.population - point.population) <= 1


@few
@given(points, accountants)
def test_rounds_round_trip(point: Point, by: Accountant) -> None:
    target, noise = point.spent(by), Noise(point.noise_multiplier)
    found = checked(planner.rounds(target, noise, point.cohort, point.population, point.delta, by), target)
    assert abs(found.rounds - point.rounds) <= 1


@few
@given(points)
def test_at_a_fixed_noise_per_user_the_smallest_cohort_is_found(point: Point) -> None:
    noise = Noise(per_user=point.noise_multiplier / point.cohort)
    target = point.spent("pld")
    found = checked(planner.cohort(target, noise, point.population, point.rounds, point.delta), target)
    assert abs(found.cohort - point.cohort) <= 1
    assert found.noise_multiplier == pytest.approx(noise.at(found.cohort))


@few
@given(points, accountants, st.sampled_from([1.02, 1.5]))
def test_epsilon_is_monotone(point: Point, by: Accountant, factor: float) -> None:
    z, cohort, population, rounds = point.noise_multiplier, point.cohort, point.population, point.rounds

    def spent(z: float, cohort: int, population: int, rounds: int) -> float:
        return Point(z, cohort, population, rounds, point.delta).spent(by)

    here = point.spent(by)
    assert spent(z * factor, cohort, population, rounds) < here
    assert spent(z, cohort, math.ceil(population * factor), rounds) < here
    assert spent(z, math.ceil(cohort * factor), population, rounds) > here
    assert spent(z, cohort, population, math.ceil(rounds * factor)) > here


def test_epsilon_stays_monotone_where_the_grid_of_pld_changes() -> None:
    found = [Point(z / 100, 300, 10_000, 1_000, 1e-6).spent("pld") for z in range(60, 200, 7)]
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: planner.epsilon(Noise(-1), 10, 100, 5, 1e-5), "no guarantee"),
        (lambda: planner.epsilon(Noise(0.0), 10, 100, 5, 1e-5), "no guarantee"),
        (lambda: planner.epsilon(Noise(1, 1), 10, 100, 5, 1e-5), "give the noise once"),
        (lambda: planner.epsilon(Noise(1e-9), 10, 100, 5, 1e-5), "out of range"),
        (lambda: planner.epsilon(Noise(1), 0, 100, 5, 1e-5), "has no users"),
        (lambda: planner.epsilon(Noise(1), 101, 100, 5, 1e-5), "larger than the population of 100"),
        (lambda: planner.epsilon(Noise(1), 10, 100, 0, 1e-5), "rounds=0.*1 to 100,000"),
        (lambda: planner.epsilon(Noise(1), 10, 100, 5, 0), "delta=0"),
        (lambda: planner.epsilon(Noise(1), 10, 100, 5, math.nan), "delta=nan"),
        (lambda: planner.noise(0, 10, 100, 5, 1e-5), "cannot be reached"),
        (lambda: planner.noise(1e9, 10, 100, 5, 1e-5), "down to 0.001"),
        (lambda: planner.noise(1e-3, 10, 100, 5, 1e-9, "rdp"), "end at 1,000,000.*the other accountant would help"),
        (lambda: planner.population(1, Noise(1e-5), 10, 500, 1e-9), "no bound with so little noise"),
        (lambda: planner.cohort(0.01, Noise(0.5), 100, 5, 1e-5), "at least one user.*more noise"),
        (lambda: planner.cohort(0.01, Noise(per_user=1e-3), 100, 5, 1e-5), "all 100 users take part already"),
        (lambda: planner.population(1, Noise(0.2), 10_000, 500, 1e-12), "end at 10,000,000,000 users.*smaller cohort"),
        (lambda: planner.rounds(0.1, Noise(0.5), 50, 100, 1e-5), "at least one round.*larger population"),
        (lambda: planner.rounds(50, Noise(500), 5, 10_000, 1e-5), "not used up after 100,000 rounds"),
    ],
)
def test_what_cannot_be_is_refused_after_few_computations(call: Callable[[], Answer], said: str) -> None:
    computed = accounting._epsilon.cache_info().misses
    with pytest.raises(UserError, match=said):
        call()
    assert accounting._epsilon.cache_info().misses - computed <= 20


def test_a_delta_too_small_for_pld_is_answered_by_rdp() -> None:
    found = planner.noise(1, 10, 100, 500, 1e-20)
    assert found.epsilon["pld"] == found.epsilon["rdp"] <= 1


def test_warnings_are_sentences_and_only_where_due() -> None:
    assert planner.epsilon(Noise(2), 10, 10_000, 5, 1e-6).warnings == ()
    loud = planner.epsilon(Noise(0.5), 60, 100, 20, 0.05)
    assert [w for w in loud.warnings if w.endswith(".")] == list(loud.warnings)
    assert [any(word in w for w in loud.warnings) for word in ("above 0.5", "above 1/K", "above 10")] == [True] * 3
    assert "proves nothing" in planner.epsilon(Noise(1e-5), 5, 100, 10, 1e-6).warnings[0]
    assert "both epsilons are by RDP" in planner.epsilon(Noise(1), 5, 100, 10, 1e-30).warnings[0]


def test_everybody_taking_part_is_the_plain_gaussian() -> None:
    from dp_accounting import get_epsilon_gaussian

    found = planner.epsilon(Noise(40), 100, 100, 400, 1e-6)
    exact = get_epsilon_gaussian(40 / math.sqrt(400), 1e-6)
    assert exact <= found.epsilon["pld"] <= 1.01 * exact
    assert found.to_json()["sampler"] == "everyone"


def test_a_scaled_run_keeps_its_noise_per_user() -> None:
    small = Point(0.01024, 1024, 34753, 2006, DELTA)
    scaled = plan_figures.scaled_points(small, [1, 200], [1, 10])
    assert [p.cohort for p in scaled] == [1024, 1024, 204800, 204800]
    assert [p.population for p in scaled] == [34753, 347530, 6950600, 69506000]
    assert {round(p.noise_multiplier / p.cohort, 12) for p in scaled} == {1e-5}
    with pytest.raises(UserError, match="above 0"):
        plan_figures.scaled_points(small, [-1], [1])


def run(*words: object) -> str:
    result = CliRunner().invoke(app, [str(w) for w in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_headline_by_command_without_torch() -> None:
    code = "import sys; from confide.commands.plan import app; app(standalone_mode=False)"
    code += "; assert 'torch' not in sys.modules"
    words = [sys.executable, "-c", code, "epsilon", *HEADLINE, "--delta", "1e-9", "--json"]
    found = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    assert found["epsilon"] == {"rdp": pytest.approx(7.22, abs=0.01), "pld": pytest.approx(6.29, abs=0.01)}
    assert {"accountant", "adjacency", "sampler", "rate", "delta", "warnings", "noise_multiplier"} <= set(found)


@pytest.mark.parametrize(
    ("asked", "options", "key", "expected"),
    [
        ("noise", ["--cohort", 100, "--population", 9_000, "--rounds", 300], "noise_multiplier", 1),
        ("cohort", ["--noise-multiplier", 1, "--population", 9_000, "--rounds", 300], "cohort", 100),
        ("cohort", ["--noise-per-user", 0.01, "--population", 9_000, "--rounds", 300], "cohort", 100),
        ("population", ["--noise-multiplier", 1, "--cohort", 100, "--rounds", 300], "population", 9_000),
        ("rounds", ["--noise-multiplier", 1, "--cohort", 100, "--population", 9_000], "rounds", 300),
    ],
)
def test_every_question_by_command(asked: str, options: list[object], key: str, expected: float) -> None:
    target = Point(1, 100, 9_000, 300, 1e-5).spent("pld") * (1 + 1e-9)
    found = json.loads(run(asked, *options, "--delta", 1e-5, "--target-epsilon", target, "--json"))
    assert found[key] == pytest.approx(expected, rel=1e-3, abs=1 if isinstance(found[key], int) else 0)
    assert found["epsilon"]["pld"] <= target == found["target_epsilon"]


def test_text_names_accountants_adjacency_and_sampler_and_warns_on_standard_error() -> None:
    words = ["epsilon", "--noise-multiplier", "1", "--cohort", "60", "--population", "100", "--rounds", "5"]
    result = CliRunner().invoke(app, [*words, "--delta", "1e-5"])
    assert all(word in result.stdout for word in ("PLD", "RDP", "add-or-remove one user", "poisson"))
    assert ("above 0.5" in result.stderr, "above 0.5" in result.stdout) == (True, False)


def test_no_population_is_offered_in_which_delta_alone_hides_a_user() -> None:
    """With next to no noise a user is safe only where it is hardly ever drawn: in S T / delta users."""
    with pytest.raises(UserError, match=r"more than 1,000,000 users delta would be above 1 / population"):
        planner.population(1.0, Noise(0.05), 100, 50, 1e-6)
    words = ["extrapolate", "--target-epsilon", 1, "--noise-multiplier", 0.05, "--cohort", 100, "--population", 1000]
    words += ["--rounds", 50, "--delta", 1e-6, "--cohort-factors", 1, "--population-factors", 1, "--json"]
    (row,) = json.loads(run(*words))["rows"]
    assert row["least_population"] is None


def test_extrapolate_scales_a_run_of_ones_own() -> None:
    words = ["extrapolate", "--noise-per-user", 0.01, "--cohort", 50, "--population", 500, "--rounds", 50]
    words += ["--delta", 1e-6, "--cohort-factors", "1,4", "--population-factors", "1", "--target-epsilon", 5]
    rows = json.loads(run(*words, "--json"))["rows"]
    assert [(r["cohort"], r["population"]) for r in rows] == [(50, 500), (200, 2000)]
    assert rows[0]["epsilon"]["pld"] > rows[1]["epsilon"]["pld"]
    for row in rows:
        at_least = Point(row["noise_multiplier"], row["cohort"], row["least_population"], 50, 1e-6)
        assert at_least.spent("pld") <= 5
    table = run(*words)
    assert "K for 5" in table
    for row, line in zip(rows, table.splitlines()[4:], strict=False):
        assert f" {strength(row['epsilon']['pld'], 1e-6, row['population'])} " in line
    with pytest.raises(UserError, match="needs --cohort"):
        run("extrapolate", "--cohort", 5)
    with pytest.raises(UserError, match="separated by commas"):
        run(*words, "--cohort-factors", "a")


def test_curve_draws_and_prints_its_points(tmp_path: Path) -> None:
    words = ["curve", "--noise-multiplier", 1, "--cohort", 50, "--population", 300, "--rounds", 20, "--delta", 1e-5]
    drawn = json.loads(run(*words, "--points", 3, "--json", "--out", tmp_path / "a" / "curve.png"))["curves"]
    assert (tmp_path / "a" / "curve.png").read_bytes().startswith(b"\x89PNG")
    for name, sign in {"rounds": 1, "noise_multiplier": -1, "cohort": 1, "population": -1}.items():
        for by in ("rdp", "pld"):
            values = [sign * p[by] for p in drawn[name]]
            assert values == sorted(values)
    assert max(p["x"] for p in drawn["cohort"]) <= 300  # never above the population
    with pytest.raises(UserError, match="nothing to show"):
        run(*words)


def test_no_population_is_offered_for_which_delta_alone_would_hide_a_user() -> None:
    point = Point(1.0, 50, 500, 50, 1e-4)
    offered = plan_figures.scaled_points(point, [1, 10], [1, 10, 100])
    assert [each.population for each in offered] == [500, 5000, 5000]
    with pytest.raises(UserError, match="populations of at most 10,000"):
        plan_figures.scaled_points(point, [100], [100])
    assert planner.grow(Point(0.02, 50, 500, 50, 1e-4), 0.5) is None
    assert "delta of 0.0001 would be above" in planner.too_few(1e-4)
    grown = planner.grow(Point(0.5, 50, 500, 50, 1e-4), 5.0)
    assert grown is not None
    assert grown.population <= 10_000

"""Claims about the comparison of mechanisms: errors are those of the noise itself, and the advice is the least one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from confide.cli import app
from confide.errors import UserError
from confide.privacy import advice, factorisation
from confide.privacy.accountant import noise_multiplier
from confide.privacy.advice import Choice, Row
from confide.privacy.events import Event
from confide.privacy.mechanisms import Privacy
from confide.privacy.mechanisms.banded import Banded
from confide.privacy.plan import make_plan
from confide.privacy.sampling import Sampling

SMALL = ["--cohort", "50", "--population", "1000", "--rounds", "40", "--delta", "1e-4"]


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return list(advice.compare(50, 1000, 40, 1e-4, [4.0], most_bands=2))


def test_every_choice_is_the_noise_that_a_run_of_it_would_have(rows: list[Row]) -> None:
    """The plan of a recipe with these words, and the noise in its prefix sums, written out."""
    for row in rows:
        for one in row.choices:
            privacy = {
                "mechanism": one.recipe["privacy.mechanism"], "bands": one.recipe.get("privacy.bands"),
                "target_epsilon": row.epsilon, "delta": 1e-4,
            }  # fmt: skip
            sampling = Sampling.model_validate({"kind": one.kind, "cohort": 50})
            plan = make_plan(Privacy.model_validate(privacy), sampling, np.full(1000, 1e-3), 1.0, 40, 0)
            assert plan.event.noise_multiplier == pytest.approx(one.noise_multiplier, rel=1e-9)
            assert plan.event.sensitivity is not None
            deviation, inverse = plan.event.noise_multiplier * plan.event.sensitivity, np.eye(40)
            if isinstance(plan.mechanism, Banded):
                deviation *= plan.mechanism.column
                c = plan.mechanism.coefficients
                inverse = np.linalg.inv(sum(value * np.eye(40, k=-lag) for lag, value in enumerate(c)))
            variance = np.square(deviation * np.cumsum(inverse, axis=0)).sum(axis=1)
            assert one.rms == pytest.approx(float(np.sqrt(variance.mean())), rel=1e-6)
            assert one.last == pytest.approx(float(np.sqrt(variance[-1])), rel=1e-6)


@pytest.mark.slow
def test_correlated_noise_gains_more_the_weaker_the_guarantee() -> None:
    rows = list(advice.compare(50, 1000, 40, 1e-4, [1.0, 16.0], most_bands=8))
    shares = [row.choices[2].rms / row.choices[0].rms for row in rows]
    assert shares[1] < shares[0]
    assert rows[1].best.kind != "poisson"
    assert rows[0].choices[2].rms < 0.8 * rows[0].choices[1].rms, "amplification counts for more at a strong one"


@pytest.mark.slow
def test_the_best_bands_are_found_by_the_rough_bound() -> None:
    [row] = advice.compare(50, 1000, 40, 1e-4, [4.0], most_bands=8)
    found = row.choices[2]
    for bands in (2, 4, 8):
        event = Event("cyclic_poisson", 0.05, 50, 1000, 0.0, 1.0, separation=bands, rounds=40, bands=bands)
        z = noise_multiplier(4.0, 1e-4, 1, "pld", event)
        c = factorisation.optimised_coefficients(bands, 40)
        rms = z * np.linalg.norm(c) * np.sqrt(factorisation.prefix_variance(c, 40).mean()) / 50
        assert found.rms <= rms * (1 + 1e-9)


def test_independent_noise_is_advised_unless_another_is_clearly_better() -> None:
    plain, near, far = (Choice("poisson", 1, 1.0, 1.0, 1.0), *(Choice("cyclic", 8, 1.0, e, e) for e in (0.99, 0.9)))
    assert Row(1.0, (plain, near)).best is plain
    assert Row(1.0, (plain, near, far)).best is far
    said = advice.sentence([Row(1.0, (plain, near)), Row(2.0, (plain, near)), Row(4.0, (plain, far))])
    assert said.startswith(
        "Take Poisson, independent noise at epsilon 1, 2; turns, correlated noise at epsilon 4 (8 bands: 10 % less"
    )


def test_the_command_prints_a_table_a_sentence_json_and_a_figure(tmp_path: Path) -> None:
    cli, asked = CliRunner(), ["plan", "mechanism", *SMALL, "--epsilons", "4", "--most-bands", "2"]
    shown = cli.invoke(app, asked)
    assert shown.exit_code == 0, shown.output
    assert "Take sampled turns, correlated noise at epsilon 4 (" in shown.output
    drawn = cli.invoke(app, [*asked, "--json", "--out", str(tmp_path / "figure.png")])
    document = json.loads(drawn.stdout)
    assert document["rows"][0]["best"] == "cyclic_poisson"
    assert [one["kind"] for one in document["rows"][0]["choices"]] == ["poisson", "cyclic", "cyclic_poisson"]
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_bad_questions_are_refused() -> None:
    for wrong in ({"epsilons": [0.0]}, {"epsilons": [float("nan")]}, {"cohort": 2000}, {"most_bands": 0}):
        given = {"cohort": 50, "population": 1000, "rounds": 40, "delta": 1e-4, "epsilons": [1.0], **wrong}
        with pytest.raises(UserError):
            list(advice.compare(**given))  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_table_of_the_page_is_what_the_command_answers() -> None:
    """One row of it: calibrating all three mechanisms for 2,000 steps takes ten seconds and more."""
    page = (Path(__file__).parents[2] / "docs" / "guarantee.md").read_text()
    (row,) = advice.compare(1000, 100_000, 2000, 1e-6, [4.0])
    plain, turns, sampled = row.choices
    less = 1 - sampled.rms / plain.rms
    told = f"| 4 | {plain.rms:.4f} | {turns.rms:.4f} | {sampled.rms:.4f} ({sampled.bands} bands) | {100 * less:.0f} % |"
    assert told in page

"""Claims about PFL-ASR's tables at our scale: every cell is a sound recipe, results are kept, and rows say what ran."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from confide import recipe
from confide.errors import UserError
from confide.privacy.plan import Plan
from confide.reproduce import pfl_asr, speech_claims, speech_tables

Command = Callable[..., tuple[int, str, str]]
OURS = {
    "imbalance", "groups", "bounds", "transfer", "pretrained", "weighted", "figure13", "optimisers", "product", "local",
    "central", "precision", "natural", "local-clip", "local-optimisers", "whisper",
}  # fmt: skip
"""Tables that the paper does not have, or has only as a figure without numbers."""
VOICES = "{kind: synthetic, speakers: 4, utterances: 3, sentences: digits, digits: [1, 2]"
SMALL = f"""\
task:
  kind: speech
  corpus: {VOICES}, population: POPULATION}}
  test: {VOICES}, population: test}}
  POOL
  model: {{preset: tiny, layers: 1, width: 32, mlp: 32}}
  augment: null
sampling: {{kind: KIND, cohort: 2}}
local: {{steps: 1, learning_rate: 0.1, batch_seconds: 4}}
bounding: {{rule: clip, bound: 0.01}}
central: {{kind: lamb, learning_rate: 0.01}}
run: {{steps: 2}}
"""


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A base whose seed and federated runs take a second."""
    base = tmp_path / "base"
    base.mkdir()
    (base / "seed").write_text(SMALL.replace("POPULATION", "seed").replace("POOL", "pool: 2").replace("KIND", "fixed"))
    (base / "federated").write_text(
        SMALL.replace("POPULATION", "federated").replace("POOL", "").replace("KIND", "poisson")
    )
    monkeypatch.setitem(pfl_asr.BASES, "synthetic", str(base))
    return tmp_path


@pytest.mark.parametrize("base", pfl_asr.BASES.values())
@pytest.mark.parametrize("name", speech_tables.TABLES)
def test_every_cell_of_every_table_is_a_sound_recipe_of_its_own(name: str, base: str) -> None:
    digests = []
    for cell in (cell for cell in speech_tables.TABLES[name]() if not cell.chosen_by):
        for tried in cell.best_of:
            place = base if cell.recipe == "federated" else "speech/digits"
            start = "task.start=null" if cell.start == speech_tables.FRESH else f"task.start={cell.start}"
            found = recipe.load(f"{place}/{cell.recipe}", [start, *pfl_asr.resolve(cell.changes), *tried])
            digests.append(found.digest)
    assert len(set(digests)) == len(digests)
    assert name in OURS or any(cell.paper for cell in speech_tables.TABLES[name]())


def test_the_noise_of_a_cell_is_the_papers_sigma_on_the_average() -> None:
    found = recipe.load("speech/embedded/federated", [*speech_tables.noisy(1e-3)])
    assert (found.privacy.noise_scale, found.privacy.placement) == (1e-3, "average")


def test_the_noise_of_table_1_has_the_papers_signal_over_noise_and_xi_stays_in_its_place() -> None:
    """1 / (s sqrt d) is 62 at 1e-6 for the paper's 255.8M numbers, and its xi is 1.6 times C / sqrt d."""
    size = 443_744
    for sigma, ratio in ((1e-6, 62.5), (3e-6, 20.8), (1e-5, 6.25), (3e-5, 2.08), (1e-4, 0.625)):
        found = recipe.load("speech/digits/federated", [*speech_tables.scaled_noise(sigma)])
        scale = found.privacy.noise_scale
        assert scale is not None
        assert 1 / (scale * size**0.5) == pytest.approx(ratio, rel=0.01)
        assert found.central.epsilon / (0.01 / size**0.5) == pytest.approx(1.6, rel=0.01)  # type: ignore[union-attr]


def test_a_transferred_rate_is_the_one_that_was_best_elsewhere() -> None:
    table = [cell for cell in speech_tables.transfer() if cell.row["optimiser"] == "adam"]
    losses = {(3, 4): (1.0, 2.0, 3.0), (3, 16): (3.0, 1.0, 2.0), (12, 4): (3.0, 2.0, 1.0), (12, 16): (1.0, 2.0, 3.0)}
    tuned = [
        [] if cell.chosen_by else [{"test_loss": loss} for loss in losses[cell.row["blocks"], cell.row["cohort"]]]
        for cell in table
    ]
    chosen = {
        (cell.row["blocks"], cell.row["cohort"], cell.row["rate"]): cell.best_of.index(best)
        for cell, best in zip(table, pfl_asr._choose(table, tuned), strict=True)
    }
    assert {chosen[blocks, cohort, "transferred"] for blocks, cohort in losses} == {1}
    assert [chosen[blocks, cohort, "best"] for blocks, cohort in losses] == [0, 1, 2, 0]


def rows_of(gap: float, deviation: float | str) -> list[dict[str, Any]]:
    """The table of imbalances, where per-layer clipping is ahead by a gap that grows with c."""
    return [
        {"c": c, "noise": s, "clipping": rule, "norms": 10.0, "deviation": deviation, "runs": 3,
         "wer": 20.0 + (gap * c if s and rule == "global" and isinstance(c, int) else 0.0)}
        for c in (1, 3, 5, "balanced") for s in (0.0, 3e-4, 1e-3) for rule in speech_tables.CLIPPING
    ]  # fmt: skip


def test_claims_hold_only_where_the_difference_is_clear() -> None:
    def held(gap: float, deviation: float | str) -> dict[str, bool]:
        return {one["claim"]: one["holds"] for one in speech_claims.claims_of("imbalance", rows_of(gap, deviation))}

    ahead = "c = 5: dim is ahead of global at noise 0.001"
    assert held(2.0, 0.5)[ahead]
    assert held(2.0, "")[ahead]
    assert not held(2.0, 10.0)[ahead], "twice the standard error is 16 points"
    assert not held(-2.0, 0.5)[ahead]
    level = "c = 1: global and dim are level at noise 1e-3"
    assert held(0.5, 0.1)[level]
    assert not held(2.0, 0.1)[level]


@pytest.mark.usefixtures("warm_processes")
@pytest.mark.usefixtures("no_figures")
def test_every_table_with_runs_says_what_it_claims() -> None:
    """Each cell gets a word error rate of its own; a claim has a value, a threshold and whether it holds."""
    for name, cells in speech_tables.TABLES.items():
        made = [
            {**cell.row, "start": 100.0, "wer": 50.0 - number, "deviation": 0.5, "runs": 3, "norms": 1.0,
             "test_loss": 10.0 + number, "test_loss_deviation": 0.5, "gradient": 3.0, "update": 0.5, "bounded": 0.01,
             "aggregate": 0.01, "noisy": 0.02}
            for number, cell in enumerate(cells())
        ]  # fmt: skip
        claims = speech_claims.claims_of(name, made)
        assert claims, name
        assert all(one.keys() == {"claim", "value", "threshold", "holds"} for one in claims)
        assert len({one["claim"] for one in claims}) == len(claims)


def test_table_7_and_the_clients_read_their_own_rows() -> None:
    def row(wer: float, **own: Any) -> dict[str, Any]:
        return {**own, "wer": wer, "deviation": 1.0, "runs": 3}

    table7 = [row(70, norm="pre", warmup=0), row(90, norm="post", warmup=0), row(70.5, norm="post", warmup=15)]
    assert [one["holds"] for one in speech_claims.claims_of("table7", table7)] == [True, True]
    clients = [row(60, users="speakers", mu=0.0), row(50, users="iid", mu=0.0), row(59, users="speakers", mu=0.1)]
    assert [one["holds"] for one in speech_claims.claims_of("clients", clients)] == [True, False]


def test_a_lower_test_loss_and_more_of_the_bound_count_only_where_the_difference_is_clear() -> None:
    def row(loss: float, **own: Any) -> dict[str, Any]:
        return {**own, "wer": 99.0, "deviation": 1.0, "runs": 3, "test_loss": loss, "test_loss_deviation": 1.0}

    def held(better: float) -> list[bool]:
        rows = [
            row(20.0 - better * (kind == "lamb"), blocks=blocks, cohort=cohort, optimiser=kind, rate=rate)
            for kind in speech_tables.TRANSFER for blocks in (3, 12) for cohort in (4, 16)
            for rate in ("best", "transferred")
        ]  # fmt: skip
        return [one["holds"] for one in speech_claims.claims_of("transfer", rows)]

    assert held(2.0) == [False, False, *[True] * 8], "no optimiser loses by transfer, so none loses less"
    assert held(1.0) == [False] * 10, "twice the standard error is 1.6"
    rows = [row(0.0, beta=beta) | {"wer": wer} for beta, wer in ((1.0, 35.0), (2.0, 34.0), (10.0, 33.0))]
    assert [one["holds"] for one in speech_claims.claims_of("weighted", rows)] == [True, False]


@pytest.mark.usefixtures("warm_processes")
def test_the_course_of_the_norms_is_kept_and_drawn(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = ("local.gradient_norms=true", "evaluation.every=2", "run.steps=3")
    cells = [
        speech_tables.Cell(
            {"sigma": s, "clipping": rule}, (*watched, speech_tables.CLIPPING[rule], *speech_tables.noisy(s))
        )
        for rule in ("global", "dim") for s in (0.0, 1e-4)
    ]  # fmt: skip
    monkeypatch.setitem(speech_tables.TABLES, "figure13", lambda: cells)
    monkeypatch.setattr(pfl_asr, "claims_of", lambda *_: [])
    quiet, loud, *_ = pfl_asr.reproduce("figure13", small / "out" / "x", "synthetic", 1, 1, quiet=True).rows
    assert quiet["gradient"] > 0
    assert quiet["update"] > quiet["bounded"] > 0
    assert quiet["noisy"] == quiet["aggregate"]
    assert loud["noisy"] > loud["aggregate"]
    assert (small / "out" / "x" / "figure13.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.usefixtures("warm_processes")
@pytest.mark.usefixtures("no_figures")
def test_seeds_by_lars_are_made_and_their_updates_measured(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pfl_asr, "SMALL", ())
    monkeypatch.setattr("confide.encoders.weights.find", lambda *_: None)
    found = pfl_asr.reproduce("starts", small / "out" / "x", "synthetic", 1, 1, quiet=True)
    fresh, adam, *lars, behind = found.rows
    assert [row["start"].endswith(f"LARS at 0.5, {n} times as many steps") for row, n in zip(lars, (1, 3), strict=True)]
    kept = small / "out" / "synthetic-seeds"
    models = [kept / name / "model.safetensors" for name in ("seed", "seed-lars", "seed-lars-long", "seed-post")]
    assert len({path.read_bytes() for path in models}) == 4
    assert behind["start"].endswith("LayerNorms behind")
    assert all(row["norms"] > 0 and row["wer after"] > 0 for row in found.rows)
    made = recipe.load(str(kept / "seed-lars-long" / "recipe.yaml"))
    assert (made.central.kind, made.central.learning_rate, made.run.steps) == ("lars", 0.5, 6)
    assert fresh["start"].startswith("fresh")
    assert adam["start"].endswith("Adam")


def test_an_unbalanced_seed_computes_what_the_seed_computes(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = speech_tables.CLIPPING
    cells = [
        speech_tables.Cell({"c": c, "noise": 0.0, "clipping": "global"}, (rules["global"],), f"seed-c{c}")
        for c in (1, 5)
    ]
    even = rules["global"].replace("}", ", balance: true}")
    cells.append(speech_tables.Cell({"c": "balanced", "noise": 0.0, "clipping": "global"}, (even,), "seed-c5"))
    monkeypatch.setitem(speech_tables.TABLES, "imbalance", lambda: cells)
    monkeypatch.setattr(pfl_asr, "claims_of", lambda *_: [])
    monkeypatch.setattr(pfl_asr, "draw_imbalance", lambda *_: None)
    one, five, even_row = pfl_asr.reproduce("imbalance", small / "out" / "x", "synthetic", 1, 1, quiet=True).rows
    assert one["start"] == five["start"] == even_row["start"]
    assert five["norms"] > 3 * one["norms"]
    assert five["imbalance"] > one["imbalance"] > 1
    assert even_row["imbalance"] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.usefixtures("warm_processes")
@pytest.mark.usefixtures("no_figures")
def test_a_table_trains_its_seed_once_and_keeps_its_cells(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [
        speech_tables.Cell(
            {"sigma": s, "clipping": "dim"}, (speech_tables.CLIPPING["dim"], *speech_tables.noisy(s)), paper="1.0"
        )
        for s in (0.0, 0.1)
    ]
    tried = (("central.learning_rate=0.01",), ("central.learning_rate=0.02",))
    cells.append(speech_tables.Cell({"sigma": 0.0, "clipping": "fresh"}, (), speech_tables.FRESH, "", tried))
    monkeypatch.setitem(speech_tables.TABLES, "table1", lambda: cells)
    monkeypatch.setattr(pfl_asr, "claims_of", lambda *_: [])
    out = small / "results" / "table1"
    first = pfl_asr.reproduce("table1", out, "synthetic", 2, 1, quiet=True)
    assert [row["epsilon"] == "none" for row in first.rows] == [True, False, True]
    assert "wqkv" in first.rows[1]["snr"]
    assert first.rows[2]["chosen"] in {t[0] for t in tried}
    assert (small / "results" / "synthetic-seeds" / "seed" / "model.safetensors").exists()
    lines = (out.parent / "synthetic-cells" / "cells.jsonl").read_text()
    assert len(lines.splitlines()) == 2 * 2 + 2 + 2, (
        "two rates are tried on other people, and the better one is run twice"
    )
    again = pfl_asr.reproduce("table1", out, "synthetic", 2, 1, quiet=True)
    assert (out.parent / "synthetic-cells" / "cells.jsonl").read_text() == lines
    assert again.rows == first.rows
    with (out / "rows.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 3
    assert "paper" in first.text


def test_unknown_tables_and_corpora_are_refused(command: Command, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="table1, imbalance, table4"):
        pfl_asr.reproduce("table2", tmp_path, "synthetic", 1, 1)
    with pytest.raises(UserError, match="audiomnist"):
        pfl_asr.reproduce("table1", tmp_path, "digits", 1, 1)
    assert command("reproduce", "pfl-asr/table2", "--out", tmp_path / "x")[0] == 2


def test_what_is_not_ahead_and_what_dominates_is_read_from_the_right_rows() -> None:
    def row(wer: float, norms: float = 1.0) -> dict[str, Any]:
        return {"wer": wer, "deviation": 1.0, "runs": 3, "norms": norms}

    def held(what: str, *rows: dict[str, Any]) -> list[bool]:
        return [one["holds"] for one in speech_claims.claims_of(what, list(rows))]

    assert held("local", row(60), row(70), row(59)) == [True, True, True]
    assert held("local", row(60), row(50), row(70)) == [False, False, False]
    assert held("product", row(35), row(60), row(36)) == [False, True]
    assert held("central", row(50, 2.0), row(90, 0.5)) == [True, True]
    assert held("central", row(50, 0.5), row(90, 2.0)) == [False, False]
    assert held("precision", row(20), row(23)) == [False]


def test_half_of_the_bound_and_the_same_c_sigma_is_the_same_noise() -> None:
    whole, alike, *_ = (
        recipe.load("speech/digits/federated", [*cell.changes]) for cell in speech_tables.TABLES["product"]()
    )
    noise = [found.privacy.noise_scale * found.bounding.bound for found in (whole, alike)]  # type: ignore[operator]
    assert noise[0] == pytest.approx(noise[1])
    assert whole.bounding.bound == 2 * alike.bounding.bound  # type: ignore[operator]


def test_a_cell_whose_noise_proves_nothing_can_be_kept(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plan, "epsilon", lambda *_: math.inf)
    noise = ["local.gradient_clip=1", *speech_tables.noisy(0.1)]
    found = pfl_asr.measure(recipe.load(str(small / "base" / "federated"), noise))
    assert json.loads(json.dumps(found, allow_nan=False))["epsilon"] is None

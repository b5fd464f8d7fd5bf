"""Norms of each tensor over a run: they are recorded right, read back, and drawn where there is enough to compare."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.torch import load_file
from torch import Tensor

from confide import recipe
from confide.federated.cohort import PartTrainer
from confide.recipe import Recipe
from confide.report.figures.layer import draw_layers
from confide.report.layers import Layers, depth, kind, over_steps, read_layers
from confide.report.page import write_report
from confide.runs import folder
from confide.runs.simulation import simulate
from confide.speech.model import ModelSettings, parameter_shapes

torch.set_num_threads(1)
SETS = ["bounding={rule: per_layer_clip, split: dim, bound: 2}", "evaluation={every: 2}", "run={steps: 5}"]
SETS += ["privacy={mechanism: gaussian, noise_multiplier: 1, delta: 1.0e-5}"]
FIELDS = ("delta", "delta_deviation", "bounded", "clipped", "signal", "weights", "noise", "noisy")


def digits(*sets: str) -> Recipe:
    return recipe.load("convex/digits", [*SETS, *sets])


def watched(*sets: str) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    simulate(digits(*sets), watch=lambda loop, state, record: records.append(record))
    return records


def write_lines(path: Path, names: list[str], steps: int, noise: bool = True, noisy: str = "") -> Path:
    """A record with a few plain values: tensor i has norms of about i + 1."""
    sizes = np.arange(1.0, len(names) + 1)
    lines: list[dict[str, Any]] = [{"step": 0, "names": names, "sizes": sizes.tolist()}]
    for step in range(1, steps + 1):
        line: dict[str, Any] = {"step": 2 * step, "users": 10 * step}
        line |= {field: (sizes / step).tolist() for field in FIELDS if noise or not field.startswith("nois")}
        if noise:
            line["noise"] = [1.0 if noisy in name else 0.0 for name in names]
        lines.append(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


# What is recorded


def test_a_line_is_recorded_where_the_model_is_evaluated_and_nowhere_else() -> None:
    records = watched()
    assert (
        [r["step"] for r in records if "layers" in r] == [r["step"] for r in records if "evaluation" in r] == [2, 4, 5]
    )
    assert all(set(r["layers"]) == {"step", "users", *FIELDS} for r in records if "layers" in r)
    assert all(r["layers"]["step"] == r["step"] for r in records if "layers" in r)


def test_the_norms_of_the_tensors_are_those_of_the_whole_model() -> None:
    for record in watched("bounding={rule: clip, bound: 2}"):
        if "layers" in record:
            layers = record["layers"]
            # The root mean square over users is additive over tensors, whatever the users are.
            square = sum(m * m + d * d for m, d in zip(layers["delta"], layers["delta_deviation"], strict=True))
            assert square == pytest.approx(record["update_norm"] ** 2 + record["update_norm_deviation"] ** 2, rel=1e-4)
            assert math.hypot(*layers["signal"]) == pytest.approx(record["signal"], rel=1e-5)
            assert math.hypot(*layers["noise"]) == pytest.approx(record["noise"], rel=1e-5)
            assert layers["users"] == record["cohort"]


def test_the_norms_are_those_of_the_updates_that_the_users_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Tensor, Tensor]] = []
    original = PartTrainer._add

    def add(trainer: PartTrainer, updates: Any, users: Any, into: Tensor, rule: Any, *others: Any) -> Any:
        seen.append((updates.norms, updates.norms * rule.factors(updates.norms)))
        return original(trainer, updates, users, into, rule, *others)

    monkeypatch.setattr(PartTrainer, "_add", add)
    (record,) = watched("run.steps=1", "bounding.bound=28")
    before, after = (torch.cat(norms) for norms in zip(*seen, strict=True))  # (users, tensors)
    layers = record["layers"]
    assert layers["delta"] == pytest.approx(before.mean(dim=0).tolist(), rel=1e-5)
    assert layers["delta_deviation"] == pytest.approx(before.std(dim=0, correction=0).tolist(), rel=1e-4)
    assert layers["bounded"] == pytest.approx(after.mean(dim=0).tolist(), rel=1e-5)
    limits = [28 * math.sqrt(640 / 650), 28 * math.sqrt(10 / 650)]
    assert all(norm <= limit for norm, limit in zip(layers["bounded"], limits, strict=True))
    beyond = before > torch.tensor(limits)
    assert 0 < int(beyond.sum()) < beyond.numel()
    assert layers["clipped"] == pytest.approx(beyond.double().mean(dim=0).tolist(), abs=1e-6)


def test_noise_is_spread_over_the_tensors_by_their_sizes() -> None:
    layers = watched("run.steps=1")[0]["layers"]
    assert layers["noise"][0] / layers["noise"][1] == pytest.approx(8.0, rel=1e-5)  # 640 and 10 coordinates


def test_without_noise_none_is_recorded() -> None:
    assert "noise" not in watched("privacy={mechanism: none}", "run.steps=1")[0]["layers"]


def test_the_weights_are_those_that_the_users_started_from(tmp_path: Path, no_figures: None) -> None:
    folder.train(digits("run.steps=4"), tmp_path / "four", quiet=True)
    folder.train(digits("run.steps=3"), tmp_path / "three", quiet=True)
    layers = read_layers(tmp_path / "four" / folder.LAYERS)
    assert layers is not None
    started_from = load_file(tmp_path / "three" / folder.MODEL)
    norms = [float(started_from[name].double().norm()) for name in layers.names]
    assert layers.values["weights"][-1].tolist() == pytest.approx(norms, rel=1e-5)


def test_the_file_of_a_run_has_the_names_once_and_a_line_for_each_evaluated_step(
    tmp_path: Path, no_figures: None
) -> None:
    folder.train(digits(), tmp_path / "run", quiet=True)
    first, *rest = map(json.loads, (tmp_path / "run" / folder.LAYERS).read_text().splitlines())
    assert first == {"step": 0, "names": ["weight", "bias"], "sizes": [640, 10]}
    assert [line["step"] for line in rest] == [2, 4, 5]


def test_recording_does_not_change_a_run() -> None:
    _, often = simulate(digits("evaluation={every: 1}"))
    _, seldom = simulate(digits("evaluation={every: 100}"))
    assert torch.equal(often.parameters, seldom.parameters)


# What is read


@pytest.mark.parametrize("content", ["", '{"step": 0, "names": ["a"], "sizes": [1]}\n', '{"step": 0, "na'])
def test_a_record_without_a_step_is_none(content: str, tmp_path: Path) -> None:
    (tmp_path / "layers.jsonl").write_text(content)
    assert read_layers(tmp_path / "layers.jsonl") is None
    assert read_layers(tmp_path / "absent.jsonl") is None


def test_a_torn_last_line_and_numbers_that_are_not_finite_are_no_obstacle(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "layers.jsonl", ["a", "b"], 2)
    path.write_text(path.read_text().replace("1.0", "null", 1) + '{"step": 9, "us')
    layers = read_layers(path)
    assert layers is not None
    assert layers.steps.tolist() == [2, 4]
    assert int(np.isnan(layers.values["delta"]).sum()) <= 1


def test_kinds_are_the_papers_and_depth_is_the_block() -> None:
    names = tuple(parameter_shapes(ModelSettings()))
    layers = Layers(names, np.array([1]), np.array([1.0]), {})
    assert {what: len(places) for what, places in layers.kinds.items()} == {
        "utterance": 2, "conv": 2, "ln1": 6, "wqkv": 3, "wf": 3, "ln2": 6, "w1": 3, "w2": 3, "norm": 2, "head": 2,
    }  # fmt: skip
    assert [kind(name) for name in ("weight", "bias", "adapter.weight")] == ["weight", "bias", "adapter"]
    assert [depth(n) for n in ("blocks.07.mlp.w1", "12.w", "conv.weight", "w1")] == [7, 12, None, None]


def test_the_norm_of_a_kind_is_that_of_its_tensors_together() -> None:
    layers = Layers(("x.w", "y.w"), np.array([1, 2]), np.ones(2), {"signal": np.array([[3.0, 4.0], [0.0, 2.0]])})
    assert layers.norm("signal", layers.kinds["w"]).tolist() == [5.0, 2.0]


@settings(deadline=None)
@given(arrays(np.float64, (12, 3), elements=st.floats(0, 100)), st.lists(st.integers(1, 4), min_size=3, max_size=3))
def test_mean_and_deviation_over_steps_are_those_of_all_users_together(norms: Any, sizes: list[int]) -> None:
    """Users of several steps, seen only through each step's mean and deviation."""
    groups = np.split(norms[: sum(sizes)], np.cumsum(sizes)[:-1])  # of each step (users, tensors)
    values = {
        "delta": np.array([g.mean(axis=0) for g in groups]),
        "delta_deviation": np.array([g.std(axis=0) for g in groups]),
    }
    mean, deviation = over_steps(Layers(("a", "b", "c"), np.arange(3), np.array(sizes, dtype=float), values))
    everybody = np.concatenate(groups)
    np.testing.assert_allclose(mean, everybody.mean(axis=0), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(np.square(deviation), everybody.var(axis=0), rtol=1e-6, atol=1e-6)


# What is drawn


NAMES = ["conv.weight"] + [f"blocks.{i:02}.{name}" for i in (0, 1) for name in ("ln1.scale", "ln1.bias", "mlp.w1")]


@pytest.mark.parametrize("steps", [1, 3])
def test_a_model_of_blocks_gets_four_figures(steps: int, tmp_path: Path) -> None:
    write_lines(tmp_path / "layers.jsonl", NAMES, steps)
    drawn = draw_layers(tmp_path)
    assert [path.name for path, _ in drawn] == [
        "layers_depth.png",
        "layers_norms.png",
        "layers_clipped.png",
        "layers_snr.png",
    ]
    assert all(path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and said.endswith(".") for path, said in drawn)
    assert f"{steps} recorded steps" in drawn[0][1]


def test_without_noise_there_is_no_ratio_to_draw(tmp_path: Path) -> None:
    write_lines(tmp_path / "layers.jsonl", NAMES, 2, noise=False)
    assert [path.name for path, _ in draw_layers(tmp_path)] == [
        "layers_depth.png",
        "layers_norms.png",
        "layers_clipped.png",
    ]


def test_nobody_clipped_is_no_figure_of_it(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "layers.jsonl", NAMES, 1)
    first, line = map(json.loads, path.read_text().splitlines())
    path.write_text("".join(json.dumps(each) + "\n" for each in (first, line | {"clipped": [0.0] * len(NAMES)})))
    assert [path.name for path, _ in draw_layers(tmp_path)] == [
        "layers_depth.png",
        "layers_norms.png",
        "layers_snr.png",
    ]


def test_noise_on_some_tensors_and_a_model_without_blocks_can_be_drawn(tmp_path: Path) -> None:
    write_lines(tmp_path / "layers.jsonl", ["a.x", "a.y", "b.x", "c", "d", "e"], 2, noisy="a.")
    assert len(draw_layers(tmp_path)) == 4


def test_an_empty_cohort_is_a_gap_and_nothing_but_empty_cohorts_is_no_figure(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "layers.jsonl", NAMES, 2)
    first, line, other = map(json.loads, path.read_text().splitlines())
    empty = {"users": 0} | {f: [0.0] * len(NAMES) for f in ("delta", "delta_deviation", "bounded", "signal")}
    path.write_text("".join(json.dumps(each) + "\n" for each in (first, line | empty, other)))
    assert len(draw_layers(tmp_path)) == 4
    path.write_text("".join(json.dumps(each) + "\n" for each in (first, line | empty)))
    assert draw_layers(tmp_path) == []


def test_a_model_of_a_few_tensors_is_left_to_the_curves(tmp_path: Path) -> None:
    write_lines(tmp_path / "layers.jsonl", ["a", "b", "c", "d"], 2)
    assert draw_layers(tmp_path) == []
    assert not (tmp_path / "figures").exists()


def test_the_page_has_the_tensors_in_it_and_says_that_they_are_not_covered(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "cohort": 3}\n')
    write_lines(tmp_path / "layers.jsonl", NAMES, 2)
    page = write_report(tmp_path, digits(), None).read_text()
    assert page.index("<h2 id=tensors>") < page.index("<b>not</b> covered by the privacy guarantee")
    (tmp_path / "layers.jsonl").unlink()
    assert "<h2 id=tensors>" not in write_report(tmp_path, digits(), None).read_text()

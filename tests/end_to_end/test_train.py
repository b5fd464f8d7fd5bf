"""Runs as a user makes them: what a folder holds at the end, and that the model depends on nothing but the recipe."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from itertools import pairwise
from pathlib import Path
from signal import SIGINT, SIGTERM
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from confide import recipe
from confide.build import make_task
from confide.errors import Stopped, UserError
from confide.federated.parameters import flatten
from confide.federated.task import Task
from confide.privacy.ledger import Ledger
from confide.recipe import Recipe
from confide.report.page import write_report
from confide.runs import checkpoint, folder
from confide.runs.simulation import simulate
from support.keyless import ledger_without_key, summary_without_key

Command = Callable[..., tuple[int, str, str]]
Contents = Callable[[Path], dict[str, str]]
Sender = Callable[..., AbstractContextManager[None]]

DIGITS = [
    "privacy={mechanism: gaussian, noise_multiplier: 1, delta: 1.0e-5}",
    "evaluation={every: 3, last: 2}",
    "run={steps: 6, checkpoint_every: 2}",
]
NO_PRIVACY = ["privacy={mechanism: none}"]


def digits(*sets: str) -> Recipe:
    return recipe.load("convex/digits", [*DIGITS, *sets])


@cache
def digits_task(seed: int) -> Task:
    return make_task(digits().task, seed)


def simulated(*sets: str) -> tuple[Tensor, list[dict[str, Any]]]:
    """The final model and the records of a run on the digits that is not written anywhere."""
    wanted, records = digits(*sets), list[dict[str, Any]]()
    loop, state = simulate(wanted, digits_task(wanted.run.seed), lambda loop, state, record: records.append(record))
    return loop.final.model(state).clone(), records


def model_of(run: Path) -> bytes:
    return (run / folder.MODEL).read_bytes()


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / folder.METRICS).read_text().splitlines()]


def stated(pattern: str, text: str) -> float:
    """The number that a text gives where the pattern has its group."""
    found = re.search(pattern, text)
    assert found, text
    return float(found[1])


# What a run leaves


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "finished"
    folder.train(digits(), run, quiet=True, page=write_report)
    return run


def test_a_run_leaves_every_file_and_no_temporary_one(finished: Path, contents: Contents) -> None:
    names = set(contents(finished))
    events = {n for n in names if n.startswith("events.out.tfevents")}
    assert len(events) == 1
    assert names - events == {
        "recipe.yaml", "metrics.jsonl", "layers.jsonl", "times.jsonl", "scores.json", "start.json", "summary.json",
        "model.safetensors", "ledger.jsonl", "checkpoint.safetensors", "report.html", "secret.key",
    }  # fmt: skip


def test_the_recipe_in_the_folder_is_the_resolved_one(finished: Path) -> None:
    assert recipe.load(str(finished / "recipe.yaml")) == digits()


def test_metrics_have_a_line_for_every_step_with_every_named_value(finished: Path) -> None:
    records = lines(finished)
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5, 6]
    named = {
        "seconds", "cohort", "loss", "update_norm", "bounded_norm", "share_bounded", "snr", "epsilon", "not_finite",
    }  # fmt: skip
    for record in records:
        assert named <= set(record)
        assert all(math.isfinite(record[name]) for name in named)
        assert 0 <= record["share_bounded"] <= 1
        assert record["snr"] == pytest.approx(record["signal"] / record["noise"])
        assert record["bounded_norm"] == pytest.approx(31.25, rel=1e-4)  # normalised to C
        assert record["not_finite"] == 0
    assert [r["step"] for r in records if "evaluation" in r] == [3, 5, 6]
    assert all(set(r["evaluation"]) == {"accuracy", "test_loss"} for r in records if "evaluation" in r)
    seconds = [r["seconds"] for r in records]
    assert seconds == sorted(seconds)


def test_the_cohorts_in_the_metrics_are_those_of_poisson_sampling(finished: Path) -> None:
    loop, _ = simulate(digits(), digits_task(0))
    sizes = [r["cohort"] for r in lines(finished)]
    assert sizes == [len(loop.plan.cohort(t)) for t in range(6)]
    assert len(set(sizes)) > 1


def test_epsilon_grows_to_what_the_summary_and_the_ledger_say(finished: Path, command: Command) -> None:
    spent = [r["epsilon"] for r in lines(finished)]
    assert all(a < b for a, b in pairwise(spent))
    summary = json.loads((finished / folder.SUMMARY).read_text())
    assert spent[-1] == summary["epsilon"]
    code, out, _ = command("ledger", finished, "--json")
    assert code == 0
    found = json.loads(out)
    assert {k: found[k] for k in ("epsilon", "delta", "accountant", "releases", "steps")} == {
        "epsilon": summary["epsilon"], "delta": 1e-5, "accountant": "pld", "releases": 6, "steps": 6,
    }  # fmt: skip
    code, out, _ = command("ledger", finished)
    assert code == 0
    assert stated(r"epsilon (\S+) at delta 1e-05", out) == pytest.approx(summary["epsilon"], rel=1e-3)
    assert stated(r"epsilon (\S+) at delta 1e-05", out) >= summary["epsilon"]
    assert "6 releases over 6 central steps" in out


def test_the_summary_says_what_was_run_and_what_came_out(finished: Path) -> None:
    summary = json.loads((finished / folder.SUMMARY).read_text())
    assert (summary["task"], summary["steps"], summary["seed"]) == ("convex/logistic", 6, 0)
    assert (summary["delta"], summary["accountant"]) == (1e-5, "pld")
    assert 0 < summary["epsilon"] < 20
    assert summary["seconds"] > 0
    evaluations = [r["evaluation"] for r in lines(finished) if "evaluation" in r]
    assert summary["metrics"] == pytest.approx(evaluations[-1])
    assert summary["metrics_mean_of_last"]["accuracy"] == pytest.approx(
        (evaluations[-1]["accuracy"] + evaluations[-2]["accuracy"]) / 2
    )


def test_the_model_in_the_folder_scores_what_the_summary_says(finished: Path) -> None:
    model = load_file(finished / folder.MODEL)
    assert {name: tuple(t.shape) for name, t in model.items()} == {"weight": (10, 64), "bias": (10,)}
    summary = json.loads((finished / folder.SUMMARY).read_text())
    assert digits_task(0).evaluate(model) == pytest.approx(summary["metrics"])
    assert summary["metrics"]["accuracy"] > 0.3  # ten classes: this has learned something


def test_tensorboard_shows_the_values_of_the_metrics(finished: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    board = EventAccumulator(str(finished))
    board.Reload()
    assert {"loss", "cohort", "snr", "epsilon", "evaluation/accuracy"} <= set(board.Tags()["scalars"])
    for name in ("loss", "snr", "epsilon"):
        shown = [(event.step, event.value) for event in board.Scalars(name)]
        assert [step for step, _ in shown] == [1, 2, 3, 4, 5, 6]
        assert [value for _, value in shown] == pytest.approx([r[name] for r in lines(finished)], rel=1e-6)
    assert [event.step for event in board.Scalars("evaluation/accuracy")] == [0, 3, 5, 6]


def test_figures_are_png_files_where_they_are_asked_for(finished: Path, tmp_path: Path, command: Command) -> None:
    run = tmp_path / "copy"
    shutil.copytree(finished, run)
    code, out, _ = command("report", run, "--figures")
    drawn = {path.name for path in (run / "figures").iterdir()}
    assert code == 0
    assert drawn == {f"{n}.png" for n in ("metric", "loss", "norms", "snr", "epsilon", "cohort")}
    assert len(out.splitlines()) == 1 + len(drawn)
    for path in (run / "figures").iterdir():
        content = path.read_bytes()
        assert content[:8] == b"\x89PNG\r\n\x1a\n"
        assert content[-8:-4] == b"IEND"


def test_the_page_states_the_guarantee_and_needs_no_network(finished: Path) -> None:
    page, summary = (finished / "report.html").read_text(), json.loads((finished / folder.SUMMARY).read_text())
    epsilon = stated(r"<b>\((\S+), 1e-05\)</b>-differentially private for every simulated client", page)
    assert summary["epsilon"] <= epsilon <= summary["epsilon"] * 1.001
    assert "6 releases with noise multiplier 1;" in page
    assert "For research, not for a release to others." in page
    assert page.count("<figure class=chart>") == 11
    assert "<img" not in page
    assert set(re.findall(r"https?://[^\s\"']*", page)) == {"http://www.w3.org/2000/svg"}  # a name, never fetched


def test_the_report_can_be_drawn_again_the_same(finished: Path, command: Command) -> None:
    page = (finished / "report.html").read_bytes()
    code, out, _ = command("report", finished)
    assert (code, out.strip()) == (0, str(finished / "report.html"))
    assert (finished / "report.html").read_bytes() == page


def test_a_run_without_noise_promises_nothing(tmp_path: Path, command: Command, no_figures: None) -> None:
    words = [word for change in (*DIGITS, *NO_PRIVACY, "run.steps=2") for word in ("--set", change)]
    code, out, _ = command("train", "convex/digits", "--out", tmp_path / "run", *words)
    assert code == 0
    assert "no privacy guarantee" in " ".join(out.replace("│", " ").split())
    assert json.loads((tmp_path / "run" / folder.SUMMARY).read_text())["epsilon"] is None
    assert [r["epsilon"] for r in lines(tmp_path / "run")] == [None, None]
    assert "<b>no privacy guarantee</b>" in (tmp_path / "run" / "report.html").read_text()
    assert "no privacy guarantee" in command("ledger", tmp_path / "run")[1]


def test_json_is_the_only_thing_on_standard_output(
    tmp_path: Path, tiny: str, command: Command, no_figures: None
) -> None:
    run = tmp_path / "run"
    for words in (("train", tiny, "--out", run), ("train", tiny, "--out", run), ("resume", run)):
        again = run.exists()
        code, out, err = command(*words, "--json")
        assert code == 0
        assert json.loads(out) == json.loads((run / folder.SUMMARY).read_text())
        assert err.endswith("finished; nothing was trained\n") if again else err == ""


def test_without_json_a_table_closes_the_run_and_progress_is_on_standard_error(
    tmp_path: Path, tiny: str, command: Command, no_figures: None
) -> None:
    code, out, err = command("train", tiny, "--out", tmp_path / "run")
    summary = json.loads((tmp_path / "run" / folder.SUMMARY).read_text())
    assert code == 0
    assert f"{summary['metrics']['suboptimality']:.4g}" in out
    assert summary["epsilon"] <= stated(r"(\S+) at delta 1e-05", out) <= summary["epsilon"] * 1.001
    assert "PLD" in out
    assert "convex/quadratics 6/6" in err
    assert stated(r"epsilon (\S+)", err) == pytest.approx(summary["epsilon"], abs=0.01)
    assert "s left" in err


def test_train_on_a_finished_folder_answers_at_once_and_changes_nothing(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {p: p.stat().st_mtime_ns for p in [finished, *finished.rglob("*")]}
    monkeypatch.setattr(folder, "make_loop", lambda *_: pytest.fail("the run was made again"))
    assert folder.train(digits(), finished) == json.loads((finished / folder.SUMMARY).read_text())
    assert folder.resume(finished) == folder.summary_of(finished)
    assert {p: p.stat().st_mtime_ns for p in [finished, *finished.rglob("*")]} == before


# The same recipe, the same bytes


def test_two_runs_of_a_recipe_leave_the_same_bytes(finished: Path, tmp_path: Path, no_figures: None) -> None:
    folder.train(digits(), tmp_path / "again", quiet=True)
    assert model_of(tmp_path / "again") == model_of(finished)
    assert ledger_without_key(tmp_path / "again") == ledger_without_key(finished)


def test_another_seed_gives_another_model_other_cohorts_and_other_noise(finished: Path) -> None:
    model, records = simulated("run.seed=1")
    assert not torch.equal(model, flatten(dict(sorted(load_file(finished / folder.MODEL).items(), reverse=True))))
    assert [r["cohort"] for r in records] != [r["cohort"] for r in lines(finished)]
    assert [r["noise"] for r in records] != [r["noise"] for r in lines(finished)]


@pytest.mark.usefixtures("warm_processes")
@pytest.mark.parametrize(
    ("workers", "sets"),
    [(2, ["privacy.placement=client"]), (3, ["local.batch_size=2", "local.steps=2"])],
    ids=["2, noise on clients", "3, plain path"],
)
def test_the_number_of_workers_does_not_change_a_byte(
    workers: int, sets: list[str], tmp_path: Path, no_figures: None
) -> None:
    # About 286 users: three parts where many are trained at once, more than there are workers, and many otherwise.
    wanted = digits("sampling.cohort=286", "run={steps: 3}", "evaluation.last=1", *sets)
    for count in (1, workers):
        folder.train(wanted, tmp_path / str(count), count, quiet=True)
    assert model_of(tmp_path / "1") == model_of(tmp_path / str(workers))
    norms = [(tmp_path / str(count) / folder.LAYERS).read_bytes() for count in (1, workers)]
    assert norms[0] == norms[1]
    timeless = [
        [{k: v for k, v in r.items() if k != "seconds"} for r in lines(tmp_path / str(n))] for n in (1, workers)
    ]
    assert timeless[0] == timeless[1]


@pytest.mark.parametrize("after", [1, 4, 5])
@pytest.mark.parametrize("number", [SIGINT, SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_run_that_is_stopped_and_resumed_ends_as_if_it_had_not_been(
    after: int, number: int, tmp_path: Path, tiny: str, command: Command, signal_after: Sender, no_figures: None
) -> None:
    assert command("train", tiny, "--out", tmp_path / "straight")[0] == 0
    run = tmp_path / "stopped"
    with signal_after(after, number):
        code, out, err = command("train", tiny, "--out", run)
    assert (code, out) == (130, "")
    assert f"stopped after step {after} of 6" in err
    assert f"confide resume {run}" in err
    assert checkpoint.load(run).state.step == after
    assert not (run / folder.SUMMARY).exists()
    assert command("resume", run)[0] == 0
    assert model_of(run) == model_of(tmp_path / "straight")
    assert ledger_without_key(run) == ledger_without_key(tmp_path / "straight")
    assert summary_without_key(run) == summary_without_key(tmp_path / "straight")
    assert [r["step"] for r in lines(run)] == [1, 2, 3, 4, 5, 6]


def test_a_stop_asked_for_in_the_last_step_is_a_finished_run(
    tmp_path: Path, tiny: str, command: Command, signal_after: Sender, no_figures: None
) -> None:
    with signal_after(6):
        assert command("train", tiny, "--out", tmp_path / "run")[0] == 0
    assert folder.summary_of(tmp_path / "run")["steps"] == 6


def test_a_second_ctrl_c_ends_the_run_at_once_and_it_can_be_resumed(
    tmp_path: Path, tiny: str, command: Command, signal_after: Sender, no_figures: None
) -> None:
    with signal_after(3), signal_after(3):
        code, _, err = command("train", tiny, "--out", tmp_path / "run")
    assert code == 130
    assert "confide resume" in err
    assert command("resume", tmp_path / "run")[0] == 0


def test_signal_handlers_are_put_back_after_a_run(tmp_path: Path, tiny: str, no_figures: None) -> None:
    import signal

    before = signal.getsignal(SIGINT), signal.getsignal(SIGTERM)
    folder.train(recipe.load(tiny), tmp_path / "run", quiet=True)
    assert (signal.getsignal(SIGINT), signal.getsignal(SIGTERM)) == before


# Everything that a recipe can ask for


RULES = ["clip", "per_layer_clip", "normalise", "per_layer_normalise", "none"]
OPTIMISERS = {
    "sgd": "{kind: sgd, learning_rate: 0.01, momentum: 0.8}",
    "adam": "{kind: adam, learning_rate: 0.01}",
    "adagrad": "{kind: adagrad, learning_rate: 0.01}",
    "lars": "{kind: lars, learning_rate: 0.01}",
    "lamb": "{kind: lamb, learning_rate: 0.01}",
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_every_bounding_rule_runs_with_every_central_optimiser(rule: str, optimiser: str) -> None:
    bounding = ["bounding={rule: none}", *NO_PRIVACY] if rule == "none" else [f"bounding={{rule: {rule}, bound: 10}}"]
    model, records = simulated(f"central={OPTIMISERS[optimiser]}", "run={steps: 2}", *bounding)
    assert bool(torch.isfinite(model).all())
    assert float(model.norm()) > 0
    for record in records:
        if rule == "none":
            assert record["bounded_norm"] == pytest.approx(record["update_norm"])
        else:
            assert 0 < record["bounded_norm"] <= 10


@pytest.mark.parametrize("split", ["uniform", "dim", "weighted"])
def test_the_splits_of_a_per_layer_bound_give_different_models_within_the_bound(split: str) -> None:
    weights = ", layer_weights: {bias: 50}" if split == "weighted" else ""
    model, records = simulated(
        f"bounding={{rule: per_layer_clip, bound: 5, split: {split}{weights}}}", "run={steps: 2}"
    )
    other, _ = simulated("bounding={rule: clip, bound: 5}", "run={steps: 2}")
    assert all(0 < r["bounded_norm"] <= 5 for r in records)
    assert not torch.equal(model, other)


def iterates(*sets: str) -> tuple[list[Tensor], Tensor]:
    """w_0 to w_T, and the final model."""
    wanted = digits(*sets)
    kept = [flatten(digits_task(wanted.run.seed).initial_parameters())]
    loop, state = simulate(
        wanted, digits_task(wanted.run.seed), lambda loop, state, record: kept.append(state.parameters.clone())
    )
    return kept, loop.final.model(state)


@pytest.mark.parametrize("count", [1, 3, 6])
def test_the_mean_model_is_the_mean_of_the_last_iterates(count: int) -> None:
    kept, final = iterates(f"final={{kind: mean, count: {count}}}")
    torch.testing.assert_close(final, torch.stack(kept[-count:]).mean(dim=0), rtol=1e-6, atol=1e-7)


def test_the_random_model_is_an_iterate_that_the_seed_chooses() -> None:
    chosen = []
    for seed in range(5):
        kept, final = iterates("final.kind=random", f"run.seed={seed}")
        (index,) = [i for i, w in enumerate(kept) if torch.equal(w, final)]
        chosen.append(index)
    assert max(chosen) < 6  # NORM draws from the iterates before the last step
    assert len(set(chosen)) > 1


def test_choosing_a_final_model_does_not_change_the_iterates() -> None:
    last, mean = iterates(), iterates("final={kind: mean, count: 3}")
    assert all(torch.equal(a, b) for a, b in zip(last[0], mean[0], strict=True))
    assert torch.equal(last[1], last[0][-1])


def test_fedprox_keeps_users_closer_to_the_central_model() -> None:
    pulled, free = (simulated("run={steps: 2}", f"local.proximal={mu}")[1][0]["update_norm"] for mu in (20, 0))
    assert 0 < pulled < 0.9 * free


@pytest.mark.parametrize("path", [[], ["local.batch_size=2"]], ids=["full batch", "mini-batches"])
def test_a_clipped_local_gradient_moves_a_user_by_at_most_the_clip_each_step(path: list[str]) -> None:
    sets = ["run={steps: 2}", "local.steps=4", "local.divide_by_learning_rate=false", "local.learning_rate=0.5", *path]
    (first, *_), (free, *_) = simulated(*sets, "local.gradient_clip=0.1")[1], simulated(*sets)[1]
    assert 0 < first["update_norm"] <= 4 * 0.5 * 0.1 * (1 + 1e-5)
    assert free["update_norm"] > 4 * 0.5 * 0.1


def test_an_epoch_is_a_step_on_everything_or_as_many_as_there_are_mini_batches() -> None:
    whole = [simulated("run={steps: 2}", "local.steps=null", "local.epochs=3")[0]]
    whole.append(simulated("run={steps: 2}", "local.steps=3")[0])
    assert torch.equal(*whole)
    # A user holds five digits: three mini-batches of two at most.
    parts = [simulated("run={steps: 2}", "local.batch_size=2", "local.steps=null", "local.epochs=2")[0]]
    parts.append(simulated("run={steps: 2}", "local.batch_size=2", "local.steps=6")[0])
    assert torch.equal(*parts)
    assert not torch.allclose(parts[0], whole[0])


def test_a_mini_batch_as_large_as_the_data_is_the_whole_of_it() -> None:
    sets = ["run={steps: 2}", "local.steps=3"]
    assert torch.equal(simulated(*sets, "local.batch_size=5")[0], simulated(*sets)[0])


def test_weights_by_examples_are_uniform_where_all_users_hold_equally_many() -> None:
    by_examples, uniform = (simulated(f"users={{weights: {w}, public: true}}")[0] for w in ("examples", "uniform"))
    torch.testing.assert_close(by_examples, uniform, rtol=1e-5, atol=1e-6)


def test_a_run_says_that_it_takes_the_numbers_of_examples_as_public(
    tmp_path: Path, tiny: str, command: Command, no_figures: None
) -> None:
    public = ("--set", "users={weights: examples, public: true}")
    said = "how many examples each user has"
    code, out, _ = command("train", tiny, *public, "--out", tmp_path / "by_examples")
    assert code == 0
    page = (tmp_path / "by_examples" / "report.html").read_text()
    summary, ledger = folder.summary_of(tmp_path / "by_examples"), command("ledger", tmp_path / "by_examples")[1]
    assert summary["public_weights"] is True
    assert all(said in each for each in (out, page, summary["guarantee"], ledger))
    assert command("train", tiny, "--out", tmp_path / "uniform")[0] == 0
    assert "public_weights" not in folder.summary_of(tmp_path / "uniform")
    assert said not in (tmp_path / "uniform" / "report.html").read_text()


def test_a_finished_run_that_would_not_be_begun_today_can_still_be_read(
    tmp_path: Path, tiny: str, command: Command, signal_after: Sender, no_figures: None
) -> None:
    """Weights that follow from data were not always refused."""
    with pytest.MonkeyPatch.context() as older:
        older.setattr(recipe, "refusals", lambda asked: [])
        wanted = recipe.load(tiny, ["users.weights=examples"])
        folder.train(wanted, tmp_path / "finished", quiet=True)
        with pytest.raises(Stopped), signal_after(2):
            folder.train(wanted, tmp_path / "stopped", quiet=True)
    assert folder.held_recipe(tmp_path / "finished") == wanted
    assert command("ledger", tmp_path / "finished")[0] == 0
    with pytest.raises(UserError, match=r"removing a user would change everybody's weight"):
        folder.resume(tmp_path / "stopped", quiet=True)


def test_a_list_of_weights_counts_by_proportion() -> None:
    ones, twos = (simulated(f"users.weights={[w] * 287}")[0] for w in (1.0, 2.0))
    assert torch.equal(ones, twos)


def test_the_heaviest_user_sets_the_sensitivity_in_the_ledger(tmp_path: Path, no_figures: None) -> None:
    weights = [3.0] + [1.0] * 286
    folder.train(digits(f"users.weights={weights}", "run={steps: 2}"), tmp_path / "run", quiet=True)
    book = Ledger.read(tmp_path / "run" / "ledger.jsonl")
    expected = 31.25 * (3 / sum(weights)) / (57 / 287)
    assert [entry.event.sensitivity for entry in book.entries] == pytest.approx([expected] * 2)
    noise = [r["noise"] for r in lines(tmp_path / "run")]
    assert np.mean(noise) == pytest.approx(expected * math.sqrt(650), rel=0.1)


def test_noise_calibrated_to_a_target_spends_it_and_no_more(tmp_path: Path, tiny: str, no_figures: None) -> None:
    privacy = "privacy={mechanism: gaussian, target_epsilon: 2, delta: 1.0e-5}"
    summary = folder.train(recipe.load(tiny, [privacy]), tmp_path / "run", quiet=True)
    assert 1.99 < summary["epsilon"] <= 2


def test_a_fixed_cohort_is_accounted_for_by_rdp_with_replacement_of_a_user(
    tmp_path: Path, tiny: str, no_figures: None
) -> None:
    wanted = recipe.load(tiny, ["sampling.kind=fixed", "privacy.accountant=rdp"])
    summary = folder.train(wanted, tmp_path / "run", quiet=True)
    assert {r["cohort"] for r in lines(tmp_path / "run")} == {6}
    assert (summary["sampler"], summary["adjacency"]) == ("fixed", "replace one user")

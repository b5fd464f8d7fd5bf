"""The retrieval task: what a batch holds, what the loss is, who the users are, and whole runs on a real encoder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from confide import build
from confide.build import user_weights
from confide.errors import Stopped, UserError
from confide.federated.local import LocalTraining, PlainTrainer
from confide.federated.parameters import Layout, flatten
from confide.randomness import generator
from confide.recipe import Users, load, parse
from confide.retrieval import experts, head
from confide.retrieval.metrics import ranks_from_scores, summarise
from confide.retrieval.search import training_logits
from confide.retrieval.settings import RetrievalSettings
from confide.retrieval.task import Retrieval
from confide.runs import folder
from confide.runs.simulation import simulate

pytestmark = pytest.mark.usefixtures("no_figures_here")
DATA = {"kind": "embedded", "documents": 6, "queries_per_document": 6, "households": 3}
DRAW = generator(0, "test")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("retrieval")


@pytest.fixture
def task(tiny_model: Callable[..., Path], place: Path) -> Callable[..., Retrieval]:
    """`task(method="head", ...)` on a random model, 16 wide."""

    def make(**more: Any) -> Retrieval:
        given = {"encoder": {"source": str(tiny_model("masked")), "pooling": "mean"}, "data": DATA, **more}
        return Retrieval(RetrievalSettings.model_validate({"cache": place / "states", **given}), 0, quiet=True)

    return make


# Batches and losses


@pytest.mark.parametrize("local", [{}, {"optimiser": {"kind": "adam"}}])
def test_vectors_are_made_before_workers_start(
    task: Callable[..., Retrieval], local: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, there = task(), []
    monkeypatch.setattr(build, "Processes", lambda *given: there.append("states" in vars(made)))
    wanted = load(
        "retrieval/embedded", ["sampling.cohort=2", *(f"local.{k}={json.dumps(v)}" for k, v in local.items())]
    )
    build.make_loop(wanted, workers=2, task=made)
    assert there == [True]


def test_when_only_the_head_trains_a_batch_is_the_vectors_of_its_texts(task: Callable[..., Retrieval]) -> None:
    made = task()
    labels, _, hidden = made.batch(1, np.array([3, 0]), DRAW)
    chosen = made.clients[1][[3, 0]]
    texts = [made.corpus.train.texts[i] for i in chosen]
    torch.testing.assert_close(hidden, made.encoder.hidden(made.encoder.tokens(texts)), atol=1e-5, rtol=1e-4)
    assert labels.tolist() == made.corpus.train.labels[chosen].tolist()
    assert len(made.batch(1, None, DRAW)[0]) == made.examples[1]


def test_with_the_adapter_at_the_identity_the_loss_is_that_of_the_fixed_vectors(task: Callable[..., Retrieval]) -> None:
    fixed, soft = task(), task(method="adapter_head")
    start = soft.initial_parameters()
    assert torch.equal(start["adapter"], torch.eye(16))
    whole = [made.loss(start, made.batch(0, None, generator(0, "x"))) for made in (fixed, soft)]
    torch.testing.assert_close(whole[0], whole[1], atol=1e-5, rtol=1e-4)


def test_search_compares_with_all_documents_through_the_same_adapter(task: Callable[..., Retrieval]) -> None:
    made = task(method="adapter_search", search={"temperature": 0.5})
    adapter = torch.eye(16) + 0.1 * torch.from_numpy(generator(1, "adapter").standard_normal((16, 16))).float()
    texts = [made.corpus.train.texts[i] for i in made.clients[0][:4]]
    labels = torch.from_numpy(made.corpus.train.labels[made.clients[0][:4]])
    documents = made.encoder.hidden(made.encoder.tokens([d.text for d in made.corpus.documents]), adapter)
    queries = made.encoder.hidden(made.encoder.tokens(texts), adapter)
    expected = head.loss(training_logits(made.settings.search, queries, documents), labels)
    found = made.loss({"adapter": adapter}, made.batch(0, np.arange(4), DRAW))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_few_negatives_keep_the_right_document_of_every_query(task: Callable[..., Retrieval]) -> None:
    made = task(method="adapter_search", negatives=1)
    batch = made.batch(0, np.arange(2), DRAW)
    labels, documents = batch[0], batch[5]
    right = made.corpus.train.labels[made.clients[0][:2]]
    assert documents.shape[0] == len(set(right.tolist())) + 1
    for place_among, number in zip(labels.tolist(), right.tolist(), strict=True):
        own = made.encoder.tokens([made.corpus.documents[number].text]).ids[0]
        assert torch.equal(documents[place_among, : len(own)], own)


@pytest.mark.parametrize("method", ["head", "adapter_head", "adapter_search"])
def test_everything_that_travels_is_trained_and_nothing_else_travels(
    task: Callable[..., Retrieval], method: str
) -> None:
    made = task(method=method)
    start = made.initial_parameters()
    wanted = {
        "head": {"head.weight": (6, 16), "head.bias": (6,)},
        "adapter_head": {"adapter": (16, 16), "head.weight": (6, 16), "head.bias": (6,)},
        "adapter_search": {"adapter": (16, 16)},
    }
    assert {name: tuple(tensor.shape) for name, tensor in start.items()} == wanted[method]
    layout, flat = Layout.of(start), flatten(start)
    update = PlainTrainer(made, layout, LocalTraining(steps=1, batch_size=4, learning_rate=0.1), 0, flat)
    assert (update.update(flat, 0, 0).norms > 0).all()
    assert not any(tensor.requires_grad for tensor in made.encoder.model.parameters())


def test_dropout_is_drawn_from_the_batch_and_absent_from_evaluation(task: Callable[..., Retrieval]) -> None:
    made = task(head={"dropout": 0.5})
    start = made.initial_parameters()
    losses = [float(made.loss(start, made.batch(0, None, generator(0, "x", step)))) for step in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]
    assert made.evaluate(start) == task().evaluate(start)


# Evaluation


def test_evaluation_says_what_the_ranks_say(task: Callable[..., Retrieval]) -> None:
    made = task(k=2)
    start = made.initial_parameters()
    labels = made.corpus.test.labels
    hidden = made.encoder.hidden(made.encoder.tokens(made.corpus.test.texts))
    ranks = ranks_from_scores(head.forward(made.settings.head, start, hidden), torch.from_numpy(labels))
    scores = summarise(ranks, labels, list("abcdef"), 2)
    found = made.evaluate(start)
    items = made.scored(start)[1]
    assert items.value == pytest.approx(found["accuracy"])
    assert len(items.counts) == len(made.corpus.test)
    assert found["accuracy"] == scores.top_1
    assert (found["top_k"], found["mrr"], found["ndcg10"]) == pytest.approx((scores.top_k, scores.mrr, scores.ndcg_10))
    assert next(iter(found)) == made.metric


@pytest.mark.parametrize("method", ["head", "adapter_head", "adapter_search"])
def test_a_clients_own_accuracy_is_that_of_its_queries(task: Callable[..., Retrieval], method: str) -> None:
    made = task(method=method, clients={"kind": "even", "clients": 3})
    start, everybody = made.initial_parameters(), np.arange(3)
    with torch.no_grad():
        found = made.own_accuracy(start, everybody)
        for user in everybody:
            own = made.clients[user]
            hidden = made.encoder.hidden(made.encoder.tokens([made.corpus.train.texts[i] for i in own]))
            labels = torch.from_numpy(made.corpus.train.labels[own])
            ranks, _ = made.retriever.ranks(start, hidden, labels, made.retriever.document_vectors(start))
            assert float(found[user]) == (ranks == 1).mean()
    assert len(set(found.tolist())) > 1


def test_with_every_expert_active_the_ranks_are_those_of_all_probabilities(task: Callable[..., Retrieval]) -> None:
    made = task(experts={"clusters": 3, "active": 3})
    start = made.initial_parameters()
    assert set(start) == {"gate.weight", "gate.bias", "experts.weight", "experts.bias"}
    clusters = made.retriever.clusters
    assert clusters is not None
    labels = torch.from_numpy(made.corpus.test.labels)
    hidden = made.encoder.hidden(made.encoder.tokens(made.corpus.test.texts))
    every = experts.log_probabilities(clusters, start, hidden)
    ranks, loss = made.rank(start)
    assert ranks.tolist() == ranks_from_scores(every, labels).tolist()
    assert loss == pytest.approx(-float(every.gather(1, labels.unsqueeze(1)).mean()), rel=1e-4)


# Users


def test_clients_share_the_training_queries_and_count_by_how_many_they_hold(task: Callable[..., Retrieval]) -> None:
    made = task(clients={"kind": "dirichlet", "clients": 4, "alpha": 0.3})
    together = np.sort(np.concatenate(made.clients))
    assert together.tolist() == list(range(len(made.corpus.train)))
    weights = user_weights(Users(weights="examples"), made)
    assert weights.tolist() == pytest.approx((made.examples / len(made.corpus.train)).tolist())


def test_a_client_without_a_query_is_left_out_and_counted(task: Callable[..., Retrieval]) -> None:
    made = task(clients={"kind": "dirichlet", "clients": 20, "alpha": 0.05, "min_examples": 0})
    assert made.left_out["client without a query"] == 20 - len(made.clients) > 0
    assert made.examples.min() > 0


def test_households_are_the_users_of_the_split_by_column(task: Callable[..., Retrieval]) -> None:
    made = task(clients={"kind": "column"})
    groups = made.corpus.train.groups
    assert groups is not None
    assert [{groups[i] for i in own} for own in made.clients] == [{name} for name in sorted(set(groups))]


# Mistakes


def test_training_plain_search_is_refused_before_anything_is_read() -> None:
    settings = RetrievalSettings.model_validate({"method": "search", "encoder": {"source": "no/such/encoder"}})
    with pytest.raises(UserError, match=r"nothing to train; .* `confide evaluate RECIPE --set task.method=search`"):
        Retrieval(settings, 0)


def test_an_encoder_that_is_not_installed_is_named_with_the_command_that_gets_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CONFIDE_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="confide encoder get minilm"):
        Retrieval(RetrievalSettings(), 0)


@pytest.mark.parametrize(
    ("task_says", "local_says", "message"),
    [
        ({"method": "adapter_search", "experts": {}}, {"batch_size": 4}, "task.experts: only used with method head"),
        ({"experts": {}, "head": {"dropout": 0.1}}, {}, "task.head: has no meaning beside task.experts"),
        ({"negatives": 3}, {}, "task.negatives: only used with method adapter_search, not head"),
        ({"method": "adapter_head"}, {}, "local.batch_size: required with task.method=adapter_head"),
        ({"clients": {"kind": "even", "clients": 1}}, {}, "lower it or raise task.clients.clients"),
        ({"methot": "head"}, {}, "task.methot: there is no such key; did you mean 'method'?"),
        ({"data": {"kind": "sms"}}, {}, "did you mean 'sms_spam'?"),
        ({}, {"batch_seconds": 3.0}, "examples of retrieval have no length in time"),
    ],
)
def test_a_recipe_that_contradicts_itself_is_refused(
    task_says: dict[str, Any], local_says: dict[str, Any], message: str
) -> None:
    wrong = document("minilm", Path("states"))
    wrong["task"] |= task_says
    del wrong["local"]["batch_size"]
    wrong["local"] |= local_says
    with pytest.raises(UserError) as error:
        parse(wrong)
    assert message in str(error.value)


# Whole runs


def document(source: str, cache: Path, **task_says: Any) -> dict[str, Any]:
    """Two clients, four rounds of two epochs."""
    return {
        "task": {
            "kind": "retrieval", "encoder": {"source": source, "pooling": "mean"}, "data": DATA,
            "clients": {"kind": "even", "clients": 2}, "head": {"scale": "layer"}, "k": 2, "cache": str(cache),
            **task_says,
        },
        "users": {"weights": "examples"},
        "sampling": {"kind": "fixed", "cohort": 2},
        "local": {"epochs": 2, "batch_size": 4, "learning_rate": 0.3},
        "bounding": {"rule": "none"},
        "central": {"kind": "sgd", "learning_rate": 1},
        "evaluation": {"every": 2},
        "run": {"steps": 4, "checkpoint_every": 1},
    }  # fmt: skip


@pytest.fixture(scope="module")
def finished(place: Path, minilm: str, no_figures_here: None) -> Path:
    """A whole run in one process."""
    folder.train(parse(document(minilm, place / "states")), place / "finished", quiet=True)
    return place / "finished"


def test_a_run_learns_to_retrieve(finished: Path) -> None:
    metrics = folder.summary_of(finished)["metrics"]
    assert metrics["accuracy"] >= 0.5  # of six documents
    assert metrics["accuracy"] <= metrics["top_k"] <= 1
    assert folder.summary_of(finished)["epsilon"] is None


@pytest.mark.usefixtures("warm_processes")
def test_two_workers_give_the_very_model_of_one(finished: Path, place: Path, minilm: str) -> None:
    folder.train(parse(document(minilm, place / "states")), place / "two", workers=2, quiet=True)
    assert (place / "two" / "model.safetensors").read_bytes() == (finished / "model.safetensors").read_bytes()


def test_a_stopped_run_ends_as_if_it_had_never_been(
    finished: Path, place: Path, minilm: str, signal_after: Callable[..., AbstractContextManager[None]]
) -> None:
    stopped = place / "stopped"
    with signal_after(2), pytest.raises(Stopped):
        folder.train(parse(document(minilm, place / "states")), stopped, quiet=True)
    folder.resume(stopped, quiet=True)
    assert (stopped / "model.safetensors").read_bytes() == (finished / "model.safetensors").read_bytes()
    assert folder.summary_of(stopped)["metrics"] == folder.summary_of(finished)["metrics"]


@pytest.mark.parametrize("method", ["adapter_head", "adapter_search"])
def test_the_adapter_trains_through_the_frozen_encoder(place: Path, minilm: str, method: str) -> None:
    wanted = document(minilm, place / "states", method=method, search={"normalise": True, "temperature": 0.05})
    wanted["local"] |= {"epochs": 1, "gradient_clip": 1.0, "batch_size": 8}
    wanted["run"]["steps"] = 2
    folder.train(parse(wanted), place / method, quiet=True)
    left = load_file(place / method / "model.safetensors")
    assert not torch.equal(left["adapter"], torch.eye(384))
    losses = [json.loads(line)["loss"] for line in (place / method / "metrics.jsonl").read_text().splitlines()]
    assert losses[1] < losses[0]


def made_from(wanted: dict[str, Any], seed: int = 0) -> Retrieval:
    return Retrieval(RetrievalSettings.model_validate(wanted["task"]), seed)


def test_adapter_and_head_begin_from_a_head_that_was_trained_alone(
    finished: Path, place: Path, minilm: str, command: Callable[..., tuple[int, str, str]]
) -> None:
    wanted = document(minilm, place / "states", method="adapter_head", start=str(finished))
    task = made_from(wanted)
    begun = task.starting_parameters()
    assert torch.equal(begun["adapter"], torch.eye(384))
    alone = load_file(finished / "model.safetensors")
    assert begun.keys() == {"adapter", *alone}
    assert all(torch.equal(begun[name], alone[name]) for name in alone)
    accuracy = task.evaluate(begun)["accuracy"]
    assert accuracy == pytest.approx(folder.summary_of(finished)["metrics"]["accuracy"], abs=1e-9)
    wanted["bounding"] = {"rule": "clip", "bound": 1}
    wanted["privacy"] = {"mechanism": "gaussian", "noise_multiplier": 1, "delta": 1e-5}
    wanted["users"]["public"] = True
    wanted["run"]["steps"] = 1
    path = place / "begun.yaml"
    path.write_text(json.dumps(wanted))
    code, out, _ = command("train", path, "--out", place / "begun")
    assert code == 0
    ledger = command("ledger", place / "begun")[1]
    summary, page = folder.summary_of(place / "begun"), (place / "begun" / "report.html").read_text()
    for said in (out, ledger, summary["guarantee"], page):
        assert "what the starting model was trained on" in said, "the epsilon is of this run alone"
    assert "starting model" not in folder.summary_of(finished)["guarantee"]


def test_a_model_to_begin_from_has_to_fit(finished: Path, place: Path, minilm: str) -> None:
    def begin(seed: int = 0, **task_says: Any) -> None:
        made_from(
            document(minilm, place / "states", **{"start": str(finished), **task_says}), seed
        ).starting_parameters()

    with pytest.raises(UserError, match=r"task.head or task.experts of that run are not this one's"):
        begin(head={"pre_classifier": 16})
    with pytest.raises(UserError, match=r"tensor pre.weight should be \(16, 384\) but nothing was found"):
        begin(head={"pre_classifier": 16}, start=str(finished / "model.safetensors"))
    with pytest.raises(UserError, match=r"tensor head.bias should be nothing but \(6,\) was found"):
        begin(method="adapter_search")
    with pytest.raises(UserError, match=r"the test data of that run are not this one's"):
        begin(seed=1)
    with pytest.raises(UserError, match="no model could be read from"):
        begin(start=str(place / "nowhere"))
    shutil.copytree(finished, place / "published", ignore=shutil.ignore_patterns("secret.key"))
    with pytest.raises(UserError, match=r"published/secret\.key is missing.*name the file of tensors"):
        begin(start=str(place / "published"))
    begin(start=str(place / "published" / "model.safetensors"))


def test_a_run_goes_on_when_the_model_it_began_from_is_gone(
    finished: Path, place: Path, minilm: str, signal_after: Callable[..., AbstractContextManager[None]]
) -> None:
    begun, run = shutil.copytree(finished, place / "before"), place / "later"
    with signal_after(2), pytest.raises(Stopped):
        folder.train(parse(document(minilm, place / "states", start=str(begun))), run, quiet=True)
    shutil.rmtree(begun)
    folder.resume(run, quiet=True)
    assert folder.summary_of(run)["steps"] == 4


def test_local_noise_prints_the_epsilon_that_it_buys(
    place: Path, minilm: str, command: Callable[..., tuple[int, str, str]]
) -> None:
    wanted = document(minilm, place / "states")
    wanted["bounding"] = {"rule": "clip", "bound": 1}
    wanted["privacy"] = {"mechanism": "gaussian", "trust": "local", "noise_multiplier": 0.1, "delta": 1e-5}
    wanted["users"]["public"] = True
    path = place / "local.yaml"
    path.write_text(json.dumps(wanted))
    code, out, _ = command("train", path, "--out", place / "local")
    assert code == 0
    assert "epsilon" in out
    summary = folder.summary_of(place / "local")
    assert summary["adjacency"] == "replace one user's data, against the server itself"
    # Four releases of a Gaussian with z / 2: a very weak guarantee, and said to be one.
    assert 500 < summary["epsilon"] < 5000


def test_central_noise_with_a_private_quantile_meets_its_epsilon(place: Path, minilm: str) -> None:
    wanted = document(minilm, place / "states", clients={"kind": "even", "clients": 12})
    wanted["users"] = {"weights": "uniform"}
    wanted["sampling"] = {"kind": "poisson", "cohort": 6}
    wanted["bounding"] = {"rule": "clip", "bound": 1, "adaptive": {}}
    wanted["privacy"] = {"mechanism": "gaussian", "target_epsilon": 8, "delta": 1e-3, "accountant": "rdp"}
    loop, _ = simulate(parse(wanted))
    assert loop.plan.epsilon(4) == pytest.approx(8, rel=1e-2)

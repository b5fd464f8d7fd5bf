"""The retrieval task: users are clients, the model is adapter and head, the encoder is frozen (CAR section 3.3).

Only adapter and head travel. A client's batch is its queries' vectors, computed once, when only a head trains; when the
adapter trains it is their tokens, and the loss runs the frozen blocks. For `adapter_search` a batch also has the tokens
of the documents to compare with, because they go through the same adapter.

Weights by the number of examples, local epochs, bounding and noise are the loop's (`users.weights: examples` is the
paper's n_i / n). Clients without a single query are left out and counted.

Differs from the paper: on the optimiser the paper is silent; here a client does plain gradient descent, and what is
central can be any optimiser of the loop.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from confide.encoders.encoder import Batch
from confide.encoders.remote import open_encoder
from confide.encoders.states import HiddenStates, hidden_states
from confide.errors import UserError, require
from confide.federated.chain import Affine, Chain
from confide.federated.items import Items
from confide.federated.start import load_start
from confide.federated.task import BasicTask
from confide.files import SECRET, digest, read_secret, seal
from confide.randomness import generator
from confide.retrieval.data import digest_documents
from confide.retrieval.head import scaled
from confide.retrieval.metrics import first_hits, ndcg, reciprocal
from confide.retrieval.retriever import ADAPTER, Retriever
from confide.retrieval.settings import RetrievalSettings
from confide.retrieval.splits import by_client
from confide.settings import read_yaml


class Retrieval(BasicTask):
    """The task that the loop trains."""

    name = "retrieval"
    metric = "accuracy"
    on_gpu = False  # an adapter's loss runs the encoder; kept vectors and a head are too small to gain from it

    def __init__(self, settings: RetrievalSettings, seed: int, quiet: bool = False) -> None:
        if settings.method == "search":
            raise UserError(
                "task.method=search: plain inner-product search has nothing to train; expected head, adapter_head or "
                "adapter_search. To score it, name the recipe: `confide evaluate RECIPE --set task.method=search`"
            )
        require("retrieval", "retrieval")
        self.settings, self.seed, self._quiet = settings, seed, quiet
        self.corpus = settings.data.read(seed)
        self.encoder = open_encoder(settings.encoder)
        self.retriever = Retriever(settings, self.encoder, self.corpus.documents, seed, quiet)
        train = self.corpus.train
        dealt = by_client(settings.clients, train.labels, train.groups, generator(seed, "clients"))
        self.clients = [own for own in dealt if len(own)]
        """Each client's training examples."""
        self.examples = np.array([len(own) for own in self.clients], dtype=np.int64)
        self.left_out = dict(self.corpus.left_out)
        """What was not used, by reason; the summary says so."""
        if len(self.clients) < len(dealt):
            self.left_out["client without a query"] = len(dealt) - len(self.clients)
        self._labels = torch.from_numpy(train.labels)

    @cached_property
    def states(self) -> HiddenStates | None:
        """Vectors of all texts, where only a head trains: of the whole corpus at once, so that workers find them."""
        if self.settings.trains_adapter:
            return None
        texts = [*self.corpus.train.texts, *self.corpus.test.texts]
        return hidden_states(self.encoder, texts, self.settings.cache, self._quiet)

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        corpus = self.corpus
        return {
            "the users' data": digest([*corpus.train.texts, corpus.train.labels, *self.clients]),
            "the test data": digest([*corpus.test.texts, corpus.test.labels]),
            "the documents": digest_documents(corpus.documents),
            "the encoder": self.encoder.identity[:32],
        }

    @cached_property
    def _document_tokens(self) -> Batch:
        return self.encoder.tokens([document.text for document in self.corpus.documents])

    def initial_parameters(self) -> dict[str, Tensor]:
        return self.retriever.initial_parameters()

    def starting_parameters(self) -> dict[str, Tensor]:
        fresh = self.initial_parameters()
        if self.settings.start is None:
            return fresh
        self._check_start(self.settings.start)
        return load_start(self.settings.start, fresh, (ADAPTER,), self.encoder.identity)

    @property
    def begins_elsewhere(self) -> bool:
        return self.settings.start is not None

    def _check_start(self, run: Path) -> None:
        """Of a run's folder: it was trained on nothing that tests this one, and its numbers mean the same here."""
        if not (run / "summary.json").exists():
            return
        recipe = read_yaml((run / "recipe.yaml").read_text())
        summary, key = json.loads((run / "summary.json").read_text()), b""
        if summary.get("inputs_keyed"):
            key = read_secret(run) or b""
            if not key:
                raise UserError(
                    f"task.start={run}: {run / SECRET} is missing, and without it nobody can tell whether that run was "
                    "trained on this one's test data; put it back, or name the file of tensors in that folder"
                )
        held, now = summary.get("inputs", {}), seal(self.fingerprint, key)
        others = [name for name in ("the test data", "the documents", "the encoder") if held.get(name) != now[name]]
        if recipe["task"]["kind"] != self.settings.kind or others:
            raise UserError(
                f"task.start={run}: {' and '.join(others) or 'the task'} of that run are not this one's; a model that "
                "has seen this run's test queries would be judged too well: give both the same data, and one "
                "run.seed or task.data.deal"
            )
        theirs, seed = RetrievalSettings.model_validate(recipe["task"]), recipe["run"]["seed"]
        mine = self.settings.head.form, self.settings.experts, self.settings.experts and self.seed
        if mine != (theirs.head.form, theirs.experts, theirs.experts and seed):
            raise UserError(
                f"task.start={run}: task.head or task.experts of that run are not this one's; its tensors would mean "
                "something else"
            )

    def batch(self, user: int, examples: np.ndarray | None, draw: np.random.Generator) -> tuple[Tensor, ...]:
        """Labels and a seed for dropout, then vectors or tokens, then the tokens of documents."""
        own = self.clients[user]
        chosen = own if examples is None else own[examples]
        labels, seed = self._labels[torch.from_numpy(chosen)], torch.tensor(int(draw.integers(2**63 - 1)))
        if self.states is not None:
            return labels, seed, self.states.rows(chosen)
        queries = self.encoder.tokens([self.corpus.train.texts[i] for i in chosen])
        if self.settings.method == "adapter_head":
            return labels, seed, *_tensors(queries)
        labels, documents = self._choose_documents(labels, draw)
        return labels, seed, *_tensors(queries), *_tensors(documents)

    def loss(self, parameters: Mapping[str, Tensor], batch: tuple[Tensor, ...]) -> Tensor:
        labels, seed, *rest = batch
        dropout = self.settings.has_head and self.settings.experts is None and self.settings.head.dropout > 0
        randomness = torch.Generator().manual_seed(int(seed)) if dropout else None
        if self.states is not None:
            return self.retriever.loss(parameters, rest[0], labels, randomness=randomness)
        adapter = parameters[ADAPTER]
        hidden = self.encoder.hidden(_batch(rest[:3]), adapter)
        documents = self.encoder.hidden(_batch(rest[3:]), adapter) if len(rest) > 3 else None
        return self.retriever.loss(parameters, hidden, labels, documents, randomness)

    def evaluate(self, parameters: Mapping[str, Tensor]) -> dict[str, float]:
        """Shares of the test queries, and the mean loss."""
        return self.scored(parameters)[0]

    def scored(self, parameters: Mapping[str, Tensor]) -> tuple[dict[str, float], Items]:
        """The evaluation, and which queries find their document first."""
        ranks, loss = self.rank(parameters)
        metrics = {
            "accuracy": float((ranks == 1).mean()),
            "top_k": float((ranks <= self.settings.k).mean()),
            "mrr": float(reciprocal(ranks).mean()),
            "ndcg10": float(ndcg(ranks).mean()),
            "test_loss": loss,
        }
        test, names = self.corpus.test, [document.id for document in self.corpus.documents]
        items = first_hits(ranks, test.labels, names, digest([*names, *test.texts, test.labels.tobytes()]))
        return metrics, items

    @torch.no_grad()
    def rank(self, parameters: Mapping[str, Tensor]) -> tuple[np.ndarray, float]:
        """Find the rank of the right document of each test query, and the mean loss."""
        test = self.corpus.test
        if self.states is not None:
            hidden = self.states.rows(np.arange(len(self.corpus.train), len(self.states)))
        else:
            hidden = self.retriever.vectors(parameters, test.texts)
        documents = self.retriever.document_vectors(parameters)
        return self.retriever.ranks(parameters, hidden, torch.from_numpy(test.labels), documents)

    def own_accuracy(self, parameters: Mapping[str, Tensor], users: np.ndarray) -> Tensor:
        """Of each client, the share of its queries that find their document first."""
        documents, found = self.retriever.document_vectors(parameters), torch.empty(len(users), dtype=torch.float64)
        for place, user in enumerate(users.tolist()):
            own = self.clients[user]
            if self.states is not None:
                hidden = self.states.rows(own)
            else:
                hidden = self.retriever.vectors(parameters, [self.corpus.train.texts[i] for i in own])
            ranks = self.retriever.ranks(parameters, hidden, self._labels[torch.from_numpy(own)], documents)[0]
            found[place] = float((ranks == 1).mean())
        return found

    def chain(self) -> Chain | None:
        """A head on fixed vectors is one or two linear layers; with dropout or experts it is something else."""
        settings = self.settings
        if self.states is None or not settings.has_head or settings.experts is not None or settings.head.dropout:
            return None
        layers: tuple[Affine, ...] = (Affine("head.weight", "head.bias"),)
        if settings.head.pre_classifier is not None:
            layers = (Affine("pre.weight", "pre.bias", settings.head.activation), *layers)
        return Chain(layers, lambda draw: draw.integers(2**63 - 1))  # the seed of a batch, which `batch` draws

    def rows(self, user: int) -> np.ndarray:
        return self.clients[user]

    def inputs(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        if self.states is None:
            raise ValueError("the encoder runs in every step: there are no fixed vectors")
        return scaled(self.settings.head.scale, self.states.rows(rows)), self._labels[torch.from_numpy(rows)]

    def _choose_documents(self, labels: Tensor, draw: np.random.Generator) -> tuple[Tensor, Batch]:
        """Choose the documents that a step compares with: the labels' places among them, and their tokens."""
        right = np.unique(labels.numpy())
        others = np.setdiff1d(np.arange(len(self.corpus.documents)), right)
        if self.settings.negatives is None or self.settings.negatives >= len(others):
            return labels, self._document_tokens
        numbers = np.sort(np.concatenate([right, draw.choice(others, self.settings.negatives, replace=False)]))
        places = torch.from_numpy(np.searchsorted(numbers, labels.numpy()))
        return places, self.encoder.tokens([self.corpus.documents[i].text for i in numbers])


def _tensors(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    return batch.ids, batch.mask, batch.owner


def _batch(tensors: list[Tensor]) -> Batch:
    ids, mask, owner = tensors
    return Batch(ids, mask, owner, texts=int(owner[-1]) + 1)

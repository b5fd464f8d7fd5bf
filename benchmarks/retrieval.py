"""What retrieval's short cuts are worth, measured in processor seconds of one thread, the compared ways in turn.

    python benchmarks/retrieval.py cached    # an epoch of a head: kept hidden states, or the encoder in the loop
    python benchmarks/retrieval.py adapter   # the adapter's gradient, or plain forward and backward through the model
    python benchmarks/retrieval.py lengths   # vectors of texts sorted by length, or in the order of their arrival
    python benchmarks/retrieval.py experts   # 10,000 documents: a flat head, or experts and their gate

Needs the encoder (`confide encoder get minilm`) and CONFIDE_DATA. Options: `--encoder smollm2`, `--texts 256`.

`experts`: the documents are AG News's training texts; a query is ten words of one. The head is trained on the documents
themselves and on the words 11 to 20 of each, and tested on the first ten words, which it has not seen as a query. The
rates are chosen on a tenth of the training queries by their top 10. Both begin as search over the documents' vectors.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from confide.encoders.encoder import Batch, Encoder, EncoderSettings
from confide.encoders.states import BATCH_TOKENS, batches_by_length, hidden_states
from confide.recipe import Recipe, parse
from confide.retrieval import head
from confide.retrieval.experts import multiply_adds
from confide.retrieval.published import AgNewsSettings, SmsSpamSettings
from confide.runs.simulation import simulate

BATCH, RATE = 16, 0.1


def seconds(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median processor seconds of each way; they take turns, so that a busy machine is busy for all of them."""
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            began = time.process_time()
            way()
            spent[name].append(time.process_time() - began)
    return {name: median(found) for name, found in spent.items()}


def cached(encoder: Encoder, texts: list[str], labels: torch.Tensor, rounds: int) -> dict[str, float]:
    """Seconds of an epoch of the head."""
    with tempfile.TemporaryDirectory() as place:
        states = hidden_states(encoder, texts, Path(place), quiet=True)
        settings = head.HeadSettings()

        def epoch(vectors: Callable[[np.ndarray], torch.Tensor]) -> None:
            draw = np.random.default_rng(0)
            weights = head.initial_parameters(settings, encoder.width, 2, draw)
            own = {name: tensor.requires_grad_() for name, tensor in weights.items()}
            for chosen in np.array_split(draw.permutation(len(texts)), -(-len(texts) // BATCH)):
                loss = head.loss(head.forward(settings, own, vectors(chosen)), labels[torch.from_numpy(chosen)])
                gradients = torch.autograd.grad(loss, list(own.values()))
                with torch.no_grad():
                    for tensor, gradient in zip(own.values(), gradients, strict=True):
                        tensor.sub_(gradient, alpha=RATE)

        def encoded(chosen: np.ndarray) -> torch.Tensor:
            with torch.no_grad():
                return encoder.hidden(encoder.tokens([texts[i] for i in chosen]))

        return seconds({"kept": lambda: epoch(states.rows), "encoder": lambda: epoch(encoded)}, rounds)


def adapter(encoder: Encoder, texts: list[str], rounds: int) -> dict[str, float]:
    """Seconds of a pass over the texts: with the adapter's gradient, and with that of the embeddings themselves."""
    batches = [encoder.tokens(texts[i : i + BATCH]) for i in range(0, len(texts), BATCH)]
    matrix = encoder.adapter().requires_grad_()

    def soft(batch: Batch) -> None:
        torch.autograd.grad(encoder.hidden(batch, matrix).square().sum(), matrix)

    def plain(batch: Batch) -> None:
        embeddings = encoder.embeddings(batch).detach().requires_grad_()
        torch.autograd.grad(encoder.blocks(embeddings, batch.mask).square().sum(), embeddings)

    def over_all(way: Callable[[Batch], None]) -> None:
        for batch in batches:
            way(batch)

    return seconds({"adapter": lambda: over_all(soft), "plain": lambda: over_all(plain)}, rounds)


def lengths(encoder: Encoder, texts: list[str], rounds: int) -> dict[str, float]:
    """Seconds to encode all texts, and the largest difference of a vector."""
    found: dict[str, torch.Tensor] = {}
    sizes = encoder.lengths(texts)
    fair = max(1, round(BATCH_TOKENS / sizes.mean()))  # as many texts to a batch as the sorted batches have

    def run(name: str, batches: Sequence[np.ndarray]) -> None:
        vectors = torch.empty(len(texts), encoder.width)
        with torch.no_grad():
            for chosen in batches:
                batch = encoder.tokens([texts[i] for i in chosen])
                vectors[torch.from_numpy(chosen)] = encoder.run(encoder.embeddings(batch), batch.mask)
        found[name] = vectors

    arrival = np.array_split(np.arange(len(texts)), -(-len(texts) // fair))
    ordered = list(batches_by_length(sizes))
    spent = seconds({"sorted": lambda: run("sorted", ordered), "arrival": lambda: run("arrival", arrival)}, rounds)
    return spent | {"difference": float((found["sorted"] - found["arrival"]).abs().max())}


def experts(encoder: str, documents: int, epochs: int, rates: Sequence[float]) -> dict[str, Any]:
    """Top 1 and top 10 of the flat head and of mixtures, each at its best rate, and the share of weights touched."""
    texts = [text for text in AgNewsSettings(drop_duplicates=True).read(0).train.texts if len(text.split()) >= 24]
    texts = texts[:documents]
    with tempfile.TemporaryDirectory() as place:
        files = _tables(Path(place), texts)
        answer: dict[str, Any] = {"documents": len(texts)}
        ways = {"flat": {"head": _SEARCH}, "one level": {"experts": _mixture(len(texts), encoder, None)}}
        for name, more in (ways | {"two levels": {"experts": _mixture(len(texts), encoder, _RANK)}}).items():
            tried = (
                {rate: _score(_recipe(encoder, files, more, rate, epochs, held_out=0.1))[1] for rate in rates}
                if len(rates) > 1
                else {rates[0]: 0.0}
            )
            best = max(tried, key=lambda rate: tried[rate])
            top_1, top_10, loop = _score(_recipe(encoder, files, more, best, epochs))
            answer[name] = {"top_1": 100 * top_1, "top_10": 100 * top_10, "rate": best}
            retriever = loop.task.retriever
            if retriever.clusters is not None:
                answer[name] |= more["experts"] | multiply_adds(retriever.clusters, retriever.encoder.width)
        return answer


def _mixture(documents: int, encoder: str, rank: int | None) -> dict[str, Any]:
    """As many active experts as touch a tenth of the flat head's weights together with the gate."""
    width = Encoder(EncoderSettings(source=encoder)).width
    clusters = -(-documents // (_ROWS if rank else 25))
    gate = clusters if rank is None else rank * (1 + clusters / width)
    active = int((documents / 10 - gate) // -(-documents // clusters))
    return {"clusters": clusters, "active": active, **_SEARCH} | ({"gate_rank": rank} if rank else {})


_RANK, _ROWS = 64, 10
_SEARCH = {"scale": "unit", "start": "documents"}


def _tables(place: Path, texts: list[str]) -> dict[str, str]:
    rows: dict[str, list[dict[str, str]]] = {"documents": [], "queries": [], "test": []}
    for number, text in enumerate(texts):
        words = text.split()
        rows["documents"].append({"id": str(number), "text": text})
        rows["queries"].append({"query": " ".join(words[10:20]), "document": str(number)})
        rows["test"].append({"query": " ".join(words[:10]), "document": str(number)})
    for name, own in rows.items():
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    return {name: str(place / f"{name}.jsonl") for name in rows}


def _recipe(
    encoder: str, files: dict[str, str], more: dict[str, Any], rate: float, epochs: int, held_out: float | None = None
) -> Recipe:
    data = {"kind": "table", **files, "documents_as_queries": True, "held_out": held_out}
    # The rows behind the projection are ten long, and so its gradient is ten times that of a row.
    slower = {"rates": {"gate.project": 0.01}} if "gate_rank" in more.get("experts", {}) else {}
    return parse(
        {
            "task": {
                "kind": "retrieval", "encoder": {"source": encoder, "pooling": "mean"}, "data": data, "k": 10,
                "clients": {"kind": "even", "clients": 1}, **more,
            },
            "sampling": {"kind": "fixed", "cohort": 1},
            "local": {"epochs": epochs, "batch_size": 64, "learning_rate": rate} | slower,
            "bounding": {"rule": "none"},
            "central": {"kind": "sgd", "learning_rate": 1},
            "run": {"steps": 1},
        }
    )  # fmt: skip


def _score(recipe: Recipe) -> tuple[float, float, Any]:
    loop, state = simulate(recipe)
    end = loop.task.evaluate(loop.layout.views(loop.final.model(state)))
    return end["accuracy"], end["top_k"], loop


def main() -> None:
    wanted = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    wanted.add_argument("what", choices=["cached", "adapter", "lengths", "experts"])
    wanted.add_argument("--encoder", default="minilm")
    wanted.add_argument(
        "--texts", type=int, default=256, help="SMS messages; of experts: documents, 10,000 unless told"
    )
    wanted.add_argument("--rounds", type=int, default=3)
    wanted.add_argument("--epochs", type=int, default=10, help="of experts")
    wanted.add_argument("--rates", default="1,3,10", help="of experts: to choose from; one alone is taken")
    asked = wanted.parse_args()
    torch.set_num_threads(1)
    if asked.what == "experts":
        texts, rates = 10_000 if asked.texts == 256 else asked.texts, [float(rate) for rate in asked.rates.split(",")]
        print(json.dumps(experts(asked.encoder, texts, asked.epochs, rates), indent=2))
        return
    corpus = SmsSpamSettings().read(0).train
    texts, labels = corpus.texts[: asked.texts], torch.from_numpy(corpus.labels[: asked.texts])
    encoder = Encoder(EncoderSettings(source=asked.encoder, pooling="mean"))
    if asked.what == "cached":
        spent = cached(encoder, texts, labels, asked.rounds)
        print(f"{spent} seconds an epoch: {spent['encoder'] / spent['kept']:.0f} times faster from kept states")
    elif asked.what == "adapter":
        spent = adapter(encoder, texts, asked.rounds)
        print(f"{spent} seconds a pass: the adapter costs {spent['adapter'] / spent['plain']:.3f} times the plain pass")
    else:
        spent = lengths(encoder, texts, asked.rounds)
        print(f"{spent}: {spent['arrival'] / spent['sorted']:.2f} times the throughput, sorted by length")


if __name__ == "__main__":
    main()

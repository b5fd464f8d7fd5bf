"""Plain PyTorch without any federated system, as what can be had by hand: the floors of the comparison.

`plain`: one loop over the cohort with a module and a reused optimiser, on all threads. `flat`: hand-written SGD on flat
buffers in two processes of one thread each, with the sum in shared memory. For workload C: one subtraction, one norm
and one addition over the same memory, by as many threads as this project takes, and `normal_` on one thread.

PYTHONPATH=src:benchmarks python -m peers.floors A flat
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from confide.bench.protocol import Gate, serve
from confide.workloads import data

CLIP, NOISE, RATE = 0.5, 1.0, 0.1
COHORT = {"A": 100, "B": 16, "D": 312, "E": 4459}
USERS_OF_D = 1560
Batches = Callable[[int, np.random.Generator], list[tuple[Tensor, ...]]]


class SpeechModel(nn.Module):
    """Workload B's model as PyTorch's own layers give it."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Conv1d(80, 144, 7, stride=3, padding=2)
        block = nn.TransformerEncoderLayer(144, 4, 576, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 4, nn.LayerNorm(144), enable_nested_tensor=False)
        self.head = nn.Linear(144, 29)

    def forward(self, features: Tensor) -> Tensor:
        frames = self.front(features.transpose(1, 2)).transpose(1, 2)
        out: Tensor = self.head(self.blocks(frames))
        return out


def ctc(logits: Tensor, labels: Tensor) -> Tensor:
    count, frames, _ = logits.shape
    lengths, sizes = torch.full((count,), frames), torch.full((count,), labels.shape[1])
    return nn.functional.ctc_loss(logits.log_softmax(2).transpose(0, 1), labels, lengths, sizes, zero_infinity=True)


def workload(name: str) -> tuple[nn.Module, Callable[[Tensor, Tensor], Tensor], Batches, int]:
    """Model, loss, a user's batches, and how many users there are."""
    torch.manual_seed(0)
    if name == "A":
        features, labels = map(torch.from_numpy, data.small_clients())
        model: nn.Module = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))

        def batches(user: int, draw: np.random.Generator) -> list[tuple[Tensor, ...]]:
            order = torch.from_numpy(draw.permutation(20))
            return [(features[user][half], labels[user][half]) for half in torch.split(order, 10)]

        return model, nn.functional.cross_entropy, batches, len(features)
    if name == "D":
        states, targets = map(torch.from_numpy, data.kept_states())
        held = [(own, its) for own, its in zip(states, targets, strict=True)]
        return nn.Linear(384, 29), ctc, lambda user, _: [held[user % len(held)]], USERS_OF_D
    if name == "E":
        pairs = list(zip(*map(torch.from_numpy, data.query_vectors()), strict=True))
        return nn.Linear(384, 2), nn.functional.cross_entropy, lambda user, _: [pairs[user]], len(pairs)
    features, labels = map(torch.from_numpy, data.speech_clients())
    return SpeechModel(), ctc, lambda user, _: [(features[user], labels[user])] * 2, len(features)


def plain(name: str) -> None:
    """One process, all threads."""
    model, loss, batches, users = workload(name)
    weights, draw = list(model.parameters()), np.random.default_rng(0)
    optimiser = torch.optim.SGD(weights, lr=RATE)
    central = [weight.detach().clone() for weight in weights]

    def one_round() -> None:
        total = [torch.zeros_like(weight) for weight in central]
        for user in draw.choice(users, COHORT[name], replace=False).tolist():
            with torch.no_grad():
                for weight, start in zip(weights, central, strict=True):
                    weight.copy_(start)
            for inputs, labels in batches(user, draw):
                optimiser.zero_grad()
                loss(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
                optimiser.step()
            with torch.no_grad():
                delta = [start - weight for start, weight in zip(central, weights, strict=True)]
                norm = torch.stack([each.norm() for each in delta]).norm()
                factor = min(1.0, CLIP / float(norm))
                for part, each in zip(total, delta, strict=True):
                    part.add_(each, alpha=factor)
        for start, part in zip(central, total, strict=True):
            start.sub_(part.add_(torch.randn_like(part), alpha=NOISE * CLIP).div_(COHORT[name]))

    serve(one_round)


class FlatClient:
    """Hand-written SGD on one flat buffer."""

    def __init__(self, name: str) -> None:
        self.model, self.loss, self.batches, self.users = workload(name)
        self.names = [n for n, _ in self.model.named_parameters()]
        shapes = [p.shape for p in self.model.parameters()]
        self.flat = torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])
        pieces = torch.split(self.flat, [shape.numel() for shape in shapes])
        self.leaves = [p.view(s).requires_grad_() for p, s in zip(pieces, shapes, strict=True)]
        self.delta = torch.empty_like(self.flat)

    def add(self, central: Tensor, user: int, draw: np.random.Generator, total: Tensor) -> None:
        with torch.no_grad():
            self.flat.copy_(central)
        for inputs, labels in self.batches(user, draw):
            out = torch.func.functional_call(self.model, dict(zip(self.names, self.leaves, strict=True)), (inputs,))
            gradients = torch.autograd.grad(self.loss(out, labels), self.leaves)
            with torch.no_grad():
                for leaf, gradient in zip(self.leaves, gradients, strict=True):
                    leaf.sub_(gradient, alpha=RATE)
        with torch.no_grad():
            torch.sub(central, self.flat, out=self.delta)
            total.add_(self.delta, alpha=min(1.0, CLIP / float(self.delta.norm())))


def _flat_worker(name: str, pipe: Connection[Any, Any], central: Tensor, total: Tensor) -> None:
    torch.set_num_threads(1)
    client, draw = FlatClient(name), np.random.default_rng(os.getpid())
    pipe.send_bytes(b"ready")
    while users := pipe.recv_bytes():
        total.zero_()
        for user in np.frombuffer(users, dtype=np.int64).tolist():
            client.add(central, user, draw, total)
        pipe.send_bytes(b"done")


def flat(name: str, workers: int = 2) -> None:
    torch.set_num_threads(1)
    gate = Gate()
    context = torch.multiprocessing.get_context("spawn")
    client = FlatClient(name)
    central = client.flat.detach().clone().share_memory_()  # type: ignore[no-untyped-call]
    sums = [torch.zeros_like(central).share_memory_() for _ in range(workers)]  # type: ignore[no-untyped-call]
    pipes, processes = [], []
    for total in sums:
        mine, theirs = context.Pipe()
        processes.append(context.Process(target=_flat_worker, args=(name, theirs, central, total), daemon=True))
        processes[-1].start()
        mine.recv_bytes()
        pipes.append(mine)
    draw = np.random.default_rng(0)

    def one_round() -> None:
        cohort = draw.choice(client.users, COHORT[name], replace=False).astype(np.int64)
        for number, pipe in enumerate(pipes):
            pipe.send_bytes(cohort[number::workers].tobytes())
        for pipe in pipes:
            pipe.recv_bytes()
        total = sums[0]
        for other in sums[1:]:
            total.add_(other)
        central.sub_(total.add_(torch.randn_like(total), alpha=NOISE * CLIP).div_(COHORT[name]))

    serve(one_round, gate)
    for pipe in pipes:
        pipe.send_bytes(b"")


def large(parameters: int) -> None:
    """C: the three passes over memory, and the noise."""
    torch.set_num_threads(1)
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    central, local = torch.full((parameters,), 1e-3), torch.full((parameters,), 1.1e-3)
    delta, total = torch.zeros(parameters), torch.zeros(parameters)
    ends = np.linspace(0, parameters, threads + 1).astype(int)
    pool = ThreadPoolExecutor(threads)

    def over(work: Callable[[slice], object]) -> None:
        list(pool.map(work, [slice(a, b) for a, b in pairwise(ends.tolist())]))

    def one_round() -> dict[str, float]:
        times = [time.perf_counter()]
        over(lambda s: torch.sub(central[s], local[s], out=delta[s]))
        over(lambda s: torch.linalg.vector_norm(delta[s]))
        over(lambda s: total[s].add_(delta[s]))
        times.append(time.perf_counter())
        delta.normal_()
        times.append(time.perf_counter())
        return {"client": times[1] - times[0], "noise": times[2] - times[1]}

    serve(one_round)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("workload", choices=["A", "B", "C", "D", "E"])
    options.add_argument("kind", choices=["plain", "flat"])
    options.add_argument("--parameters", type=int, default=255_000_000)
    given = options.parse_args()
    if given.workload == "C":
        large(given.parameters)
    elif given.kind == "plain":
        plain(given.workload)
    else:
        flat(given.workload)


if __name__ == "__main__":
    main()

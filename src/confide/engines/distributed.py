"""Train a cohort on the ranks of torch.distributed, with the very result of one process.

`torchrun --nproc-per-node 2 -m confide train RECIPE --out RUN`. Rank 0 alone samples, adds noise, keeps the ledger, the
checkpoint and the metrics; the others train parts and take part in the sum. In a central step rank 0 broadcasts the
cohort, who trains what, and the central model, once. It deals parts longest first, by expected cost and by how fast
each rank has been so far. Then, for one window of parts after the other, as many as the ranks have slots for:

1. every rank trains its parts, each into a slot of its own;
2. one all-to-all sends slice r of every sum to rank r, which adds the slices in the order of the parts;

and at the end rank 0 gathers the slices of the total. Every coordinate is added up in the order in which one process
adds it, so the model is the same, bit for bit, with any number of ranks; and memory does not grow with the cohort.

What that costs: for each part a rank sends and receives one sum, half of what an all-reduce moves, where sums over each
rank's own users would need one all-reduce for the whole step. With a cohort of m, parts of s users and R ranks it is
m / (2 s R) times as much. The one all-reduce is not offered: its rounding depends on the number of ranks, so a step
that is made again after a loss, with other ranks, would release another value under the same line of the ledger and
with the same noise, and their difference has no protection.

A rank that is lost ends the step before anything of it is released: the checkpoint and the ledger are those of the
steps before, and `confide resume` goes on with any number of ranks or workers.

Ranks train on CPUs or GPUs (`ranks.device`). The central model is copied to where each rank trains, sums are exchanged
there, and the total is copied back to where rank 0 adds the noise. Some kernels of GPUs do not repeat themselves to the
last bit, so a step that is made again after a restart counts as a new release there, with noise and a line of its own.
"""

from __future__ import annotations

import hashlib
import json
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from confide.engines import ranks
from confide.engines.costs import deal, expected_costs
from confide.engines.engine import Traits
from confide.engines.environment import environment, software
from confide.engines.processes import LINE, WorkerFailed
from confide.engines.ranks import Answer, LostRank, Place, together
from confide.errors import UserError
from confide.federated.cohort import PartTrainer, Tally, parts

_SLOTS, _SLOT_BYTES = 64, 1 << 27

Row = tuple[float, Tally] | None
"""How the training of a part went: seconds and tally; none if it failed."""


@dataclass(frozen=True)
class RankStep:
    """One central step as every rank knows it."""

    step: int
    parts: list[np.ndarray]
    owners: np.ndarray  # (parts,) the rank that trains each
    bounds: Tensor | None


class RankTrainer:
    """What all ranks do alike: train their parts of a step, and sum."""

    def __init__(self, trainer: PartTrainer, here: Place) -> None:
        self.trainer, self.here = trainer, here
        like = trainer.plain.theta
        self.size, line = like.numel(), LINE // like.itemsize
        self.width = -(-self.size // (here.ranks * line)) * line  # of the slice that a rank adds up
        self.part_size = trainer.part_size
        self.slots = max(1, min(_SLOTS, _SLOT_BYTES // (here.ranks * self.width * like.itemsize)))
        self.sums = like.new_empty((self.slots, here.ranks * self.width))
        self.arrived = like.new_empty(here.ranks * self.slots * self.width)
        self.slice = like.new_empty(self.width)
        self.central = like.new_empty(self.size)  # unused where rank 0 keeps its own model on the same device
        self.failure: Exception | None = None

    def receive(self, central: Tensor | None) -> Tensor:
        """Broadcast the central model from rank 0, which gives it, to where each rank trains."""
        here = self.central
        if central is not None and central.device == here.device:
            here = central
        elif central is not None:
            here.copy_(central)
        dist.broadcast(here, src=0)
        return here

    def windows(self, count: int) -> list[np.ndarray]:
        """Cut the parts into consecutive windows of about equal length that the slots of all ranks can hold."""
        return np.array_split(np.arange(count), -(-count // (self.here.ranks * self.slots))) if count else []

    def train(self, central: Tensor, job: RankStep) -> tuple[Tally, np.ndarray, int | None]:
        """Add the cohort up into the slices. Also returns the seconds of each part, and a rank that failed, if any."""
        tally, seconds, when = Tally(), np.zeros(len(job.parts)), f"in central step {job.step + 1}"
        self.slice.zero_()
        for window in self.windows(len(job.parts)):
            owners = job.owners[window]
            mine = self._train_mine(central, job, window[owners == self.here.rank])
            with together(when):
                rows = [iter(_unpack(text)) for text in self._share(_pack(mine))]
            for part in window:
                row = next(rows[job.owners[part]])
                if row is None:
                    return tally, seconds, int(job.owners[part])
                seconds[part] = row[0]
                tally.add(row[1])
            with together(when):
                self._add(owners)
        return tally, seconds, None

    def _train_mine(self, central: Tensor, job: RankStep, mine: np.ndarray) -> list[Row]:
        """Train my parts in order, each sum into its slot. After a failure the others are not trained."""
        done: list[Row] = []
        self.failure = None
        for slot, part in enumerate(mine):
            began, part_sum = time.perf_counter(), self.sums[slot, : self.size].zero_()
            try:
                tally = self.trainer.add_part(central, job.parts[part], job.step, part_sum, job.bounds)
            except Exception as error:
                # The others wait for this rank's sums; they have to hear of it in the same exchange.
                self.failure = error
                ranks.write_answer(ranks.FAULT, _answer(self.here.rank, error))
                return [*done, *[None] * (len(mine) - slot)]
            done.append((time.perf_counter() - began, tally))
        return done

    def _share(self, mine: Tensor) -> list[Tensor]:
        """The bytes of every rank, in the order of the ranks."""
        sizes = [torch.empty(1, dtype=torch.int64) for _ in range(self.here.ranks)]
        dist.all_gather(sizes, torch.tensor([len(mine)]))
        most = int(max(sizes))
        texts = [torch.empty(most, dtype=torch.uint8) for _ in sizes]
        dist.all_gather(texts, functional.pad(mine, (0, most - len(mine))))
        return [text[: int(size)] for text, size in zip(texts, sizes, strict=True)]

    def _add(self, owners: np.ndarray) -> None:
        """Add my slice of every part of the window to the total, in the order of the parts."""
        counts = np.bincount(owners, minlength=self.here.ranks)
        own, width = int(counts[self.here.rank]), self.width
        # (rows, ranks, width) -> (ranks, rows, width): a single row lies as it is sent, and a large model has only one
        sent = self.sums[:own].view(own, self.here.ranks, width).transpose(0, 1).reshape(-1)
        arrived = self.arrived[: len(owners) * width]
        dist.all_to_all_single(arrived, sent, (counts * width).tolist(), [own * width] * self.here.ranks)
        rows, places = arrived.view(-1, width), np.cumsum(counts) - counts  # of each rank, its next part that arrived
        for rank in owners:
            self.slice.add_(rows[places[rank]])
            places[rank] += 1

    def collect(self, total: Tensor | None, when: str) -> None:
        """Send the slices to rank 0, which gives a `total` to put them into."""
        whole = self.sums[0]  # as long as all slices, and no longer needed
        with together(when):
            dist.gather(self.slice, None if total is None else list(whole.view(self.here.ranks, -1)), dst=0)
        if total is not None:
            total.copy_(whole[: self.size])


class Distributed:
    """Engine of rank 0."""

    def __init__(self, recipe_json: str, trainer: PartTrainer, here: Place) -> None:
        self.here, self.in_step = here, False
        ranks.give_order(ranks.RECIPE, recipe_json)
        answers = [ranks.read_answer(ranks.READY, rank) for rank in range(1, here.ranks)]
        _check(answers, fingerprint(trainer))
        # Other processors may take other kernels, and who trains a part follows the clock: no step repeats its bits.
        self.traits = Traits(repeatable=all(answer.environment == environment(trainer.kernels) for answer in answers))
        ranks.give_order(ranks.BEGIN)
        ranks.join(here, trainer.device)
        self.member = RankTrainer(trainer, here)
        self.costs = expected_costs(trainer.task, trainer.local)
        self.spent = np.zeros((2, here.ranks))  # costs and seconds of each rank so far

    def gather(self, cohort: np.ndarray, step: int) -> None:
        pass

    def train(
        self, central: Tensor, cohort: np.ndarray, step: int, total: Tensor, bounds: Tensor | None = None
    ) -> Tally:
        work = parts(cohort, self.member.part_size)
        costs, when = self.costs(work), f"in central step {step + 1}"
        owners = np.zeros(len(work), dtype=np.int64)
        for window in self.member.windows(len(work)):
            owners[window] = deal(costs[window], self._speeds(), self.member.slots)
        self.in_step = True
        with together(when):
            limits = None if bounds is None else bounds.tolist()
            _send({"step": step, "cohort": cohort.tolist(), "owners": owners.tolist(), "bounds": limits})
            here = self.member.receive(central)
        tally, seconds, failed = self.member.train(here, RankStep(step, work, owners, bounds))
        if failed is not None:
            self.in_step = False  # everybody has left the step at the same place
            own = self.member.failure if failed == 0 else None
            raise own or _error(ranks.read_answer(ranks.FAULT, failed))
        self.member.collect(total, when)
        self.in_step = False
        self.spent += [np.bincount(owners, each, self.here.ranks) for each in (costs, seconds)]
        return tally

    def close(self) -> None:
        """Send the others home. In the middle of a step they cannot be told, and end when the connection breaks."""
        if self.in_step or not dist.is_initialized():
            return
        try:
            _send(None)
            ranks.leave()
        except RuntimeError:
            pass  # somebody has gone already

    def _speeds(self) -> np.ndarray:
        """Costs per second of each rank; the mean of the others for one that has trained nothing yet."""
        known = (self.spent > 0).all(axis=0)
        if not known.any():
            return np.ones(self.here.ranks)
        speeds = np.divide(self.spent[0], self.spent[1], out=np.zeros(self.here.ranks), where=known)
        return np.asarray(np.where(known, speeds, speeds[known].mean()))


def follow(here: Place, make: Callable[[str, torch.device], PartTrainer]) -> int:
    """Train what rank 0 orders until it sends this rank home; the exit code. Prints only that a rank was lost.

    `make` builds the trainer from the recipe that rank 0 sends, on this rank's device.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is rank 0's to handle
    torch.set_num_threads(1)
    recipe_json = ranks.wait_for_order(ranks.RECIPE, here)
    if recipe_json is None:
        return 0
    try:
        trainer = make(recipe_json, ranks.device())
        ranks.write_answer(ranks.READY, Answer(here.rank, fingerprint(trainer), environment(trainer.kernels)))
    except Exception as error:
        ranks.write_answer(ranks.READY, _answer(here.rank, error))
    if ranks.wait_for_order(ranks.BEGIN, here) is None:
        return 0
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # rank 0 saves, and then sends everybody home
    try:
        ranks.join(here, trainer.device)
        member = RankTrainer(trainer, here)
        while (job := _receive(member.part_size)) is not None:
            with together(f"in central step {job.step + 1}"):
                central = member.receive(None)
            if member.train(central, job)[2] is None:
                member.collect(None, f"in central step {job.step + 1}")
    except LostRank as lost:
        print(f"rank {here.rank}: {lost}", file=sys.stderr, flush=True)
        return 1
    ranks.leave()
    return 0


def fingerprint(trainer: PartTrainer) -> str:
    """What ranks must have in common for the sum to be one process's: machine, versions, model and users."""
    users = hashlib.sha256(np.ascontiguousarray(trainer.task.examples).tobytes()).hexdigest()[:16]
    model = hashlib.sha256(repr((trainer.layout.names, trainer.layout.shapes)).encode()).hexdigest()[:16]
    found = f"processor and versions {software(trainer.kernels)}, users {users}, model {model}"
    return found if trainer.device.type == "cpu" else f"{found}, {torch.cuda.get_device_name(trainer.device)}"


def _check(answers: list[Answer], expected: str) -> None:
    for answer in answers:
        if answer.error:
            raise _error(answer)
        if answer.fingerprint != expected:
            raise UserError(
                f"rank {answer.rank} has {answer.fingerprint}, but rank 0 has {expected}; every rank needs the same "
                "versions of confide, torch and numpy, the same data and the same kind of processor "
                "(ATEN_CPU_CAPABILITY=avx2 and CONFIDE_KERNELS=off on all make different ones alike)"
            )


def _answer(rank: int, error: Exception) -> Answer:
    mistake = isinstance(error, UserError)
    return Answer(rank, error=str(error) if mistake else "".join(traceback.format_exception(error)), mistake=mistake)


def _error(answer: Answer) -> Exception:
    if answer.mistake:
        return UserError(f"rank {answer.rank}: {answer.error}")
    return WorkerFailed(f"rank {answer.rank} failed:\n{answer.error}")


def _send(job: dict[str, Any] | None) -> None:
    """Rank 0: tell the others what the next step is; none sends them home."""
    text = _to_bytes(job)
    dist.broadcast(torch.tensor([len(text)]), src=0)
    dist.broadcast(text, src=0)


def _receive(part_size: int) -> RankStep | None:
    size = torch.empty(1, dtype=torch.int64)
    with together("between two central steps"):
        dist.broadcast(size, src=0)
        text = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(text, src=0)
    job = _from_bytes(text)
    if job is None:
        return None
    cohort, owners = (np.array(job[name], dtype=np.int64) for name in ("cohort", "owners"))
    bounds = None if job["bounds"] is None else torch.tensor(job["bounds"], dtype=torch.float64)
    return RankStep(job["step"], parts(cohort, part_size), owners, bounds)


def _to_bytes(document: Any) -> Tensor:
    """JSON, which holds every number exactly."""
    return torch.frombuffer(bytearray(json.dumps(document).encode()), dtype=torch.uint8)


def _from_bytes(text: Tensor) -> Any:
    return json.loads(text.numpy().tobytes())


def _pack(rows: list[Row]) -> Tensor:
    return _to_bytes([row and (row[0], asdict(row[1])) for row in rows])


def _unpack(text: Tensor) -> list[Row]:
    return [row and (row[0], Tally(**row[1])) for row in _from_bytes(text)]

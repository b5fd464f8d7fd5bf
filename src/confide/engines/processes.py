"""Train a cohort in several processes of one thread each, with the very result of one process.

Workers build the task themselves and share two kinds of memory with the parent: the central model, and a few slots,
each for the sum of one part. Parts go to whichever worker is free, those that are expected to take longest first. The
parent adds their sums in the order of the parts, so the model does not depend on the number of workers, on their speed
or on the schedule. A sum that comes before its turn waits in its slot while its worker goes on with another part. There
are as many slots as workers for a large model, whose parts are then trained about in order, and up to 16 per worker for
a small one: memory grows with the workers, not with the cohort. A worker ends when its pipe closes, so none outlives
the parent.
"""

from __future__ import annotations

import json
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
import torch.multiprocessing
from torch import Tensor

from confide.engines.costs import Costs, LongestFirst
from confide.engines.engine import Traits
from confide.federated.cohort import PartTrainer, Tally, parts

_SLOTS_PER_WORKER, _SLOT_BYTES = 16, 1 << 27
LINE = 64
"""Bytes of a cache line. Every sum begins on one: products of matrices may depend on how memory is aligned."""


class WorkerFailed(RuntimeError):
    """A worker process ended or raised."""


class Processes:
    """Engine over `workers` spawned processes. `make` builds the trainer of one, and has to be importable there."""

    traits = Traits()

    def __init__(
        self, make: Callable[[], PartTrainer], workers: int, like: Tensor, part_size: int, costs: Costs,
        kernels: str = "none",
    ) -> None:  # fmt: skip
        self.part_size, self.costs, self.size = part_size, costs, like.numel()
        context = torch.multiprocessing.get_context("spawn")
        self.central = _shared(like)
        line = LINE // like.itemsize
        wide = -(-self.size // line) * line
        slots = max(workers, min(_SLOTS_PER_WORKER * workers, _SLOT_BYTES // (wide * like.itemsize)))
        self.sums = _shared(like.new_empty((slots, wide)))
        self.pipes: list[Connection[Any, Any]] = []
        self.processes: list[BaseProcess] = []
        for _ in range(workers):
            mine, theirs = context.Pipe()
            process = context.Process(target=_work, args=(make, theirs, self.central, self.sums, kernels), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def gather(self, cohort: np.ndarray, step: int) -> None:
        pass

    def train(
        self, central: Tensor, cohort: np.ndarray, step: int, total: Tensor, bounds: Tensor | None = None
    ) -> Tally:
        self.central.copy_(central)
        total.zero_()
        tally = Tally()
        work = parts(cohort, self.part_size)
        idle, free = list(range(len(self.pipes))), list(range(len(self.sums)))
        # Without a slot for every part, one for each worker is kept for those whose turn it is.
        spare = len(work) if len(work) <= len(free) else len(free) - len(idle)
        order = LongestFirst(self.costs(work), spare)
        busy: dict[int, int] = {}  # worker -> part
        slots: dict[int, int] = {}  # part -> where its sum is or will be
        done: dict[int, Tally] = {}  # part -> its tally, until it is added
        next_part = 0
        held = None if bounds is None else bounds.tolist()
        while next_part < len(work):
            while idle and free and (part := order.take(slots)) is not None:
                worker, slots[part] = idle.pop(), free.pop()
                self._send(worker, {"step": step, "users": work[part].tolist(), "bounds": held, "slot": slots[part]})
                busy[worker] = part
            if next_part in done:  # while the workers are busy again
                tally.add(done.pop(next_part))
                slot = slots.pop(next_part)
                total.add_(self.sums[slot, : self.size])
                free.append(slot)
                next_part += 1
                continue
            for worker, answer in self._answers(list(busy)):
                done[busy.pop(worker)] = answer
                idle.append(worker)
        return tally

    def _send(self, worker: int, job: dict[str, Any]) -> None:
        with _noticing_its_end(worker):
            self.pipes[worker].send_bytes(json.dumps(job).encode())

    def _answers(self, workers: list[int]) -> Iterator[tuple[int, Tally]]:
        """Wait until a worker answers, and hand out all answers that are there."""
        ready = wait([self.pipes[worker] for worker in workers])
        for worker in workers:
            if self.pipes[worker] in ready:
                with _noticing_its_end(worker):
                    answer = json.loads(self.pipes[worker].recv_bytes())
                if "error" in answer:
                    raise WorkerFailed(f"worker {worker} failed:\n{answer['error']}")
                yield worker, Tally(**answer)

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()


@contextmanager
def _noticing_its_end(worker: int) -> Iterator[None]:
    try:
        yield
    except (EOFError, ConnectionError):
        raise WorkerFailed(f"worker {worker} ended unexpectedly; its own message is above") from None


def _shared(like: Tensor) -> Tensor:
    return torch.empty_like(like).share_memory_()  # type: ignore[no-untyped-call,no-any-return]


def _work(
    make: Callable[[], PartTrainer], pipe: Connection[Any, Any], central: Tensor, sums: Tensor, kernels: str
) -> None:
    """What a worker does: take users, train them, leave their sum in shared memory, answer how it went."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    torch.set_num_threads(1)
    try:
        trainer = make()
        if trainer.kernels != kernels:  # other bits than those that the ledger's lines stand for
            raise RuntimeError(f"this worker has the compiled kernels {trainer.kernels}, and its parent {kernels}")
    except Exception:
        pipe.send_bytes(json.dumps({"error": traceback.format_exc()}).encode())
        return
    while True:
        try:
            job = json.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            bounds = None if job["bounds"] is None else torch.tensor(job["bounds"], dtype=torch.float64)
            users = np.array(job["users"], dtype=np.int64)
            part_sum = sums[job["slot"], : len(central)].zero_()
            tally = trainer.add_part(central, users, job["step"], part_sum, bounds)
            pipe.send_bytes(json.dumps(asdict(tally)).encode())
        except BrokenPipeError:
            return
        except Exception:
            pipe.send_bytes(json.dumps({"error": traceback.format_exc()}).encode())

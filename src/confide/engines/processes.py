"""The cohort over several processes of one thread each, with the very result of one process.

Workers build the task from the recipe themselves and share two kinds of memory with the parent: the central model, and
for every worker one vector for the sum of the part it has just trained. Parts go to whichever worker is free; their
sums are added in the order of the parts, so the model does not depend on the number of workers or on their speed.
Memory grows with the workers, not with the cohort. A worker ends when its pipe closes, so none outlives the parent.
"""

from __future__ import annotations

import json
import signal
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
import torch.multiprocessing
from torch import Tensor

from confide.federated.cohort import Tally, parts


class WorkerFailed(RuntimeError):
    """A worker process ended or raised."""


class Processes:
    """Engine over `workers` spawned processes."""

    def __init__(self, recipe_json: str, workers: int, like: Tensor, part_size: int) -> None:
        self.part_size = part_size
        context = torch.multiprocessing.get_context("spawn")
        self.central = _shared(like)
        self.sums = [_shared(like) for _ in range(workers)]
        self.pipes: list[Connection[Any, Any]] = []
        self.processes: list[BaseProcess] = []
        for part_sum in self.sums:
            mine, theirs = context.Pipe()
            process = context.Process(target=_work, args=(recipe_json, theirs, self.central, part_sum), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def train(
        self, central: Tensor, cohort: np.ndarray, step: int, total: Tensor, bounds: Tensor | None = None
    ) -> Tally:
        self.central.copy_(central)
        total.zero_()
        tally = Tally()
        waiting = list(enumerate(parts(cohort, self.part_size)))[::-1]
        busy: dict[int, int] = {}  # worker -> part
        done: dict[int, tuple[int, Tally]] = {}  # part -> worker that holds its sum, tally
        free = list(range(len(self.pipes)))
        next_part = 0
        held = None if bounds is None else bounds.tolist()
        while waiting or busy or done:
            while waiting and free:
                worker, (part, users) = free.pop(), waiting.pop()
                self._send(worker, {"step": step, "users": users.tolist(), "bounds": held})
                busy[worker] = part
            if busy:
                for worker, answer in self._answers(list(busy)):
                    done[busy.pop(worker)] = (worker, answer)
            # A worker is free again only when its sum has been added: at most one sum per worker is ever held.
            while next_part in done:
                worker, answer = done.pop(next_part)
                total.add_(self.sums[worker])
                tally.add(answer)
                free.append(worker)
                next_part += 1
        return tally

    def _send(self, worker: int, job: dict[str, Any]) -> None:
        try:
            self.pipes[worker].send_bytes(json.dumps(job).encode())
        except (BrokenPipeError, ConnectionError):
            raise WorkerFailed(f"worker {worker} ended unexpectedly; its own message is above") from None

    def _answers(self, workers: list[int]) -> list[tuple[int, Tally]]:
        ready = wait([self.pipes[w] for w in workers])
        answers = []
        for worker in workers:
            if self.pipes[worker] in ready:
                try:
                    answer = json.loads(self.pipes[worker].recv_bytes())
                except (EOFError, ConnectionError):
                    raise WorkerFailed(f"worker {worker} ended unexpectedly; its own message is above") from None
                if "error" in answer:
                    raise WorkerFailed(f"worker {worker} failed:\n{answer['error']}")
                answers.append((worker, Tally(**answer)))
        return answers

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()


def _shared(like: Tensor) -> Tensor:
    return torch.empty_like(like).share_memory_()  # type: ignore[no-untyped-call,no-any-return]


def _work(recipe_json: str, pipe: Connection[Any, Any], central: Tensor, part_sum: Tensor) -> None:
    """A worker's life: take users, train them, leave their sum in shared memory, say how it went."""
    import traceback

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    torch.set_num_threads(1)
    from confide.recipe import Recipe
    from confide.run import make_trainer

    try:
        trainer = make_trainer(Recipe.model_validate_json(recipe_json))
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
            tally = trainer.add_part(central, users, job["step"], part_sum.zero_(), bounds)
            pipe.send_bytes(json.dumps(asdict(tally)).encode())
        except BrokenPipeError:
            return
        except Exception:
            pipe.send_bytes(json.dumps({"error": traceback.format_exc()}).encode())

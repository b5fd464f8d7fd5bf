"""Requests that arrive within milliseconds of each other are joined into common passes of the encoder."""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from confide.encoders.encoder import Encoder
from confide.encoders.states import BATCH_TOKENS, batches_by_length
from confide.encoders.wire import Pooling


class Refused(Exception):
    """A request that gets an error for an answer."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status, self.headers = status, {name.replace("_", "-"): value for name, value in headers.items()}


@dataclass(eq=False)
class Job:
    """Windows to send through the blocks, forward, or with a gradient forward and backward."""

    pooling: Pooling
    embeddings: Tensor  # (tokens, embedding width), packed
    lengths: Tensor  # (windows,)
    gradient: Tensor | None = None  # (windows, width)
    answer: Future[Tensor] = field(default_factory=Future)  # (windows, width), or (tokens, embedding width), packed


class Batcher:
    """One thread that computes; jobs of all clients that wait at the same time share its passes."""

    def __init__(self, encoder: Encoder, batch_tokens: int = BATCH_TOKENS, window: float = 0.005) -> None:
        self.encoder, self.batch_tokens, self.window = encoder, batch_tokens, window
        self.passes = 0
        self._waiting: deque[Job] = deque()
        self._change = threading.Condition()
        self._open = True
        self._views = {pooling: view(encoder, pooling=pooling) for pooling in ("last", "mean")}
        self._thread = threading.Thread(target=self._work, name="encoder", daemon=True)
        self._thread.start()

    def compute(self, job: Job) -> Tensor:
        """Wait for the answer to a job."""
        with self._change:
            if not self._open:
                raise Refused(503, "the server is stopping; ask again later", Retry_After="1")
            self._waiting.append(job)
            self._change.notify()
        return job.answer.result()

    def close(self) -> None:
        """Finish what waits, then end the thread."""
        with self._change:
            self._open = False
            self._change.notify()
        self._thread.join()

    def _work(self) -> None:
        while jobs := self._next():
            for pooling, backward in sorted({(job.pooling, job.gradient is not None) for job in jobs}):
                alike = [job for job in jobs if (job.pooling, job.gradient is not None) == (pooling, backward)]
                self._answer(alike)

    def _next(self) -> list[Job]:
        """Jobs for the next passes: those that come within the window, up to the tokens of a pass; none at the end."""
        with self._change:
            while not self._waiting and self._open:
                self._change.wait()
            end = time.monotonic() + self.window
            while self._open and self._tokens() < self.batch_tokens and (left := end - time.monotonic()) > 0:
                self._change.wait(left)
            jobs: list[Job] = []
            tokens = 0
            while self._waiting and (not jobs or tokens + len(self._waiting[0].embeddings) <= self.batch_tokens):
                jobs.append(self._waiting.popleft())
                tokens += len(jobs[-1].embeddings)
            return jobs

    def _tokens(self) -> int:
        return sum(len(job.embeddings) for job in self._waiting)

    def _answer(self, jobs: list[Job]) -> None:
        try:
            answers = self._run(jobs)
        except Exception as error:
            if len(jobs) > 1:  # whoever is to blame, the others shall not suffer
                for job in jobs:
                    self._answer([job])
            else:
                jobs[0].answer.set_exception(error)
            return
        for job, answer in zip(jobs, answers, strict=True):
            job.answer.set_result(answer)

    def _run(self, jobs: list[Job]) -> list[Tensor]:
        """Passes over windows of similar length, whosoever they are; answers in the order of the jobs."""
        rows = [row for job in jobs for row in torch.split(job.embeddings, job.lengths.tolist())]
        gradients = [gradient for job in jobs if job.gradient is not None for gradient in job.gradient]
        lengths = torch.cat([job.lengths for job in jobs])
        answers: list[Tensor] = [torch.empty(0)] * len(rows)
        for chosen in batches_by_length(lengths.numpy(), self.batch_tokens):
            padded = pad_sequence([rows[i] for i in chosen], batch_first=True)  # (windows, longest, embedding width)
            mask = (torch.arange(padded.shape[1]) < lengths[chosen].unsqueeze(1)).long()
            self.passes += 1
            if gradients:
                found = self._back(jobs[0].pooling, padded, mask, torch.stack([gradients[i] for i in chosen]))
                done = [row[:length] for row, length in zip(found, lengths[chosen].tolist(), strict=True)]
            else:
                with torch.no_grad():
                    done = list(self._views[jobs[0].pooling].blocks(padded, mask))
            for index, answer in zip(chosen, done, strict=True):
                answers[index] = answer
        join = torch.cat if gradients else torch.stack
        counts = np.cumsum([0, *(len(job.lengths) for job in jobs)])
        return [join(answers[start:end]) for start, end in pairwise(counts.tolist())]

    def _back(self, pooling: Pooling, padded: Tensor, mask: Tensor, gradient: Tensor) -> Tensor:
        with torch.enable_grad():
            padded.requires_grad_()
            (found,) = torch.autograd.grad(self._views[pooling].blocks(padded, mask), padded, gradient)
        return found


def view(encoder: Encoder, **settings: Any) -> Encoder:
    """The same model with another pooling or other windows; the weights are shared."""
    other = copy.copy(encoder)
    other.settings = encoder.settings.model_copy(update=settings)
    if other.settings != encoder.settings:
        other.__dict__.pop("identity", None)  # it was computed for the others, if it was
    other.max_tokens = min(other.settings.max_tokens, encoder.context or other.settings.max_tokens)
    other._room = other.max_tokens - len(encoder._before) - len(encoder._after)
    return other

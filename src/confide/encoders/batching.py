"""Joins requests that arrive within milliseconds of each other into common passes of the encoder."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from confide.encoders.encoder import Encoder
from confide.encoders.states import BATCH_TOKENS, batches_by_length
from confide.encoders.wire import Pooling


@dataclass(eq=False)
class Pass:
    """Windows to send through the blocks, forward, or with a gradient forward and backward."""

    pooling: Pooling
    embeddings: Tensor  # (tokens, embedding width), packed
    lengths: Tensor  # (windows,)
    gradient: Tensor | None = None  # (windows, width)
    answer: Future[Tensor] = field(default_factory=Future)  # (windows, width), or (tokens, embedding width), packed

    @property
    def kind(self) -> tuple[Pooling, bool]:
        """Windows of one kind can share a pass."""
        return self.pooling, self.gradient is not None


class Batcher:
    """Computes in one thread; jobs of all clients that wait at the same time share its passes.

    One thread, whichever request asks: each thread that calls torch would start processor threads of its own.
    """

    def __init__(self, encoder: Encoder, batch_tokens: int = BATCH_TOKENS, window: float = 0.005) -> None:
        self.batch_tokens, self.window = batch_tokens, window
        self.passes = 0
        self._waiting: deque[Pass] = deque()
        self._change = threading.Condition()
        self._thread = ThreadPoolExecutor(1, "encoder")
        poolings: tuple[Pooling, ...] = ("last", "mean")
        settings = encoder.settings
        self._views = {each: encoder.with_settings(settings.model_copy(update={"pooling": each})) for each in poolings}

    def compute(self, job: Pass) -> Tensor:
        """Wait for the answer to a job."""
        with self._change:
            self._waiting.append(job)
            self._change.notify()
        self._thread.submit(self._work)
        return job.answer.result()

    def _work(self) -> None:
        """Compute the jobs that wait. Called once for each job, so an earlier call may have taken them all."""
        jobs = self._next()
        for kind in sorted({job.kind for job in jobs}):
            self._answer([job for job in jobs if job.kind == kind])

    def _next(self) -> list[Pass]:
        """Take the jobs that come within the window, up to the tokens of a pass."""
        with self._change:
            self._change.wait_for(lambda: not 0 < _tokens(self._waiting) < self.batch_tokens, self.window)
            jobs: list[Pass] = []
            while self._waiting and (not jobs or _tokens([*jobs, self._waiting[0]]) <= self.batch_tokens):
                jobs.append(self._waiting.popleft())
            return jobs

    def _answer(self, jobs: list[Pass]) -> None:
        try:
            answers = self._run(jobs)
        except Exception as error:
            if len(jobs) > 1:  # the one that failed shall not fail the others
                for job in jobs:
                    self._answer([job])
            else:
                jobs[0].answer.set_exception(error)
            return
        for job, answer in zip(jobs, answers, strict=True):
            job.answer.set_result(answer)

    def _run(self, jobs: list[Pass]) -> list[Tensor]:
        """Run passes over windows of similar length, whichever job they belong to; answer in the order of the jobs."""
        rows = [row for job in jobs for row in torch.split(job.embeddings, job.lengths.tolist())]
        gradients = [gradient for job in jobs if job.gradient is not None for gradient in job.gradient]
        lengths = torch.cat([job.lengths for job in jobs])
        answers: list[Tensor] = [torch.empty(0)] * len(rows)
        for chosen in batches_by_length(lengths.numpy(), self.batch_tokens):
            padded = pad_sequence([rows[i] for i in chosen], batch_first=True)  # (windows, longest, embedding width)
            mask = (torch.arange(padded.shape[1]) < lengths[chosen].unsqueeze(1)).long()
            self.passes += 1
            with torch.set_grad_enabled(bool(gradients)):
                hidden = self._views[jobs[0].pooling].blocks(padded.requires_grad_(bool(gradients)), mask)
            done = list(hidden)
            if gradients:
                (found,) = torch.autograd.grad(hidden, padded, torch.stack([gradients[i] for i in chosen]))
                done = [row[:length] for row, length in zip(found, lengths[chosen].tolist(), strict=True)]
            for index, answer in zip(chosen, done, strict=True):
                answers[index] = answer
        join = torch.cat if gradients else torch.stack
        counts = np.cumsum([0, *(len(job.lengths) for job in jobs)])
        return [join(answers[start:end]) for start, end in pairwise(counts.tolist())]


def _tokens(jobs: Iterable[Pass]) -> int:
    return sum(len(job.embeddings) for job in jobs)

"""What the adapter costs and what sorting by length saves, counted and not timed: a busy machine changes no count."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from confide.encoders.encoder import Batch, Encoder, length_groups
from confide.encoders.states import batches_by_length, hidden_states
from confide.retrieval.published import SmsSpamSettings

TEXTS = ["Ok", "See you at six?", "WINNER!! You have been selected", "Free entry in 2 a wkly comp to win tkts"]


def _operations(run: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


def test_the_adapter_costs_at_most_15_percent_more_than_a_plain_forward_and_backward(
    real_encoder: Callable[..., Encoder],
) -> None:
    encoder = real_encoder("minilm", "mean")
    batch, matrix = encoder.tokens(TEXTS), encoder.adapter().requires_grad_()
    embeddings = encoder.embeddings(batch).detach().requires_grad_()
    soft = _operations(lambda: torch.autograd.grad(encoder.hidden(batch, matrix).sum(), matrix))
    plain = _operations(lambda: torch.autograd.grad(encoder.blocks(embeddings, batch.mask).sum(), embeddings))
    assert 1 < soft / plain <= 1.15


def test_messages_sorted_by_length_have_a_third_less_to_encode(
    real_encoder: Callable[..., Encoder], data: Path
) -> None:
    """Tokens with padding, which is what an encoder's time goes with; arrival order in batches as large on average."""
    texts = SmsSpamSettings(file=data / "sms_spam" / "SMSSpamCollection").read(0).train.texts
    lengths = real_encoder("minilm", "mean").lengths(texts)
    ordered = [len(rows) * int(lengths[rows].max()) for rows in batches_by_length(lengths)]
    arrival = np.array_split(np.arange(len(texts)), len(ordered))
    assert sum(len(rows) * int(lengths[rows].max()) for rows in arrival) / sum(ordered) >= 1.5
    # A batch of training is cut into passes of similar lengths, to the same end.
    batches = np.array_split(np.random.default_rng(0).permutation(len(texts)), len(texts) // 16)
    whole = sum(len(rows) * int(lengths[rows].max()) for rows in batches)
    cut = sum(len(own) * int(lengths[rows][own].max()) for rows in batches for own in length_groups(lengths[rows]))
    assert whole / cut >= 1.3


def test_an_epoch_over_kept_states_computes_nothing(
    real_encoder: Callable[..., Encoder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`benchmarks/retrieval.py` measures what that is in seconds."""
    encoder = real_encoder("minilm", "mean")
    plain, spent = encoder.hidden, list[int]()

    def counted(batch: Batch, adapter: torch.Tensor | None = None) -> torch.Tensor:
        """A counter sees only its own thread, and states are made by several."""
        found: list[torch.Tensor] = []
        spent.append(_operations(lambda: found.append(plain(batch, adapter))))
        return found[0]

    monkeypatch.setattr(encoder, "hidden", counted)
    hidden_states(encoder, TEXTS * 4, tmp_path, quiet=True)
    first = sum(spent)
    assert first >= _operations(lambda: plain(encoder.tokens(TEXTS))) > 0
    assert _operations(lambda: hidden_states(encoder, TEXTS * 4, tmp_path, quiet=True).rows(np.arange(16))) == 0
    assert sum(spent) == first

"""What the adapter costs and what sorting by length saves, counted and not timed: a busy machine changes no count."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from confide.encoders.encoder import Encoder, length_groups
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


def test_kept_states_make_an_epoch_much_faster_than_the_encoder(
    real_encoder: Callable[..., Encoder], tmp_path: Path
) -> None:
    """A hundred times and more is measured by the benchmark; here a tenth of that, in processor time, has to hold."""
    encoder = real_encoder("minilm", "mean")
    states = hidden_states(encoder, TEXTS * 4, tmp_path, quiet=True)
    ways: dict[str, Callable[[], object]] = {
        "kept": lambda: states.rows(np.arange(16)),
        "encoder": lambda: encoder.hidden(encoder.tokens(TEXTS * 4)),
    }
    spent = {}
    for name, run in ways.items():
        began = time.process_time()
        with torch.no_grad():
            for _ in range(3):
                run()
        spent[name] = time.process_time() - began
    assert spent["encoder"] > 10 * spent["kept"]

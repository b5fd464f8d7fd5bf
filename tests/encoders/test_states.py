"""Hidden states are computed once, survive a stop, and never come from a damaged file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from confide.encoders import kept, states
from confide.encoders.encoder import Batch, Encoder
from confide.encoders.states import batches_by_length, hidden_states

TEXTS = [
    f"{a} {b}" for a in ("the cat", "old trees sang in water", "dogs") for b in ("ran", "ran far away", "on a mat")
]


@pytest.fixture
def counting(tiny_encoder: Callable[..., Encoder], monkeypatch: pytest.MonkeyPatch) -> tuple[Encoder, list[int]]:
    """An encoder, and how many texts it has been asked for, call by call."""
    encoder, asked = tiny_encoder("causal", "mean"), []
    original = encoder.hidden

    def hidden(batch: Batch, adapter: torch.Tensor | None = None) -> torch.Tensor:
        asked.append(batch.texts)
        return original(batch, adapter)

    monkeypatch.setattr(encoder, "hidden", hidden)
    return encoder, asked


def test_states_are_those_of_the_encoder_in_the_order_of_the_texts(
    counting: tuple[Encoder, list[int]], tmp_path: Path
) -> None:
    encoder, _ = counting
    texts = [*TEXTS, TEXTS[0]]
    held = hidden_states(encoder, texts, tmp_path, quiet=True, batch_tokens=16)
    alone = torch.cat([encoder.hidden(encoder.tokens([text])) for text in texts])
    torch.testing.assert_close(held.rows(), alone, atol=1e-5, rtol=0)
    torch.testing.assert_close(held.rows([3, 0, 3]), alone[[3, 0, 3]], atol=1e-5, rtol=0)


def test_a_second_call_computes_only_what_is_new(counting: tuple[Encoder, list[int]], tmp_path: Path) -> None:
    encoder, asked = counting
    first = hidden_states(encoder, TEXTS[:5], tmp_path, quiet=True).rows()
    asked.clear()
    again = hidden_states(encoder, TEXTS, tmp_path, quiet=True)
    assert sum(asked) == len(TEXTS) - 5
    assert torch.equal(again.rows(range(5)), first)
    asked.clear()
    hidden_states(encoder, TEXTS[::-1], tmp_path, quiet=True)
    assert asked == []


def test_a_stopped_computation_goes_on_where_it_was(
    counting: tuple[Encoder, list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, asked = counting
    monkeypatch.setattr(states, "_BLOCK_TEXTS", 2)
    monkeypatch.setattr(kept, "usable_cores", lambda: 1)
    original = encoder.hidden

    def stop(batch: Batch, adapter: torch.Tensor | None = None) -> torch.Tensor:
        if len(asked) == 4:
            raise KeyboardInterrupt
        return original(batch, adapter)

    with monkeypatch.context() as patch:
        patch.setattr(encoder, "hidden", stop)
        with pytest.raises(KeyboardInterrupt):
            hidden_states(encoder, TEXTS, tmp_path, quiet=True, batch_tokens=1)
    asked.clear()
    hidden_states(encoder, TEXTS, tmp_path, quiet=True, batch_tokens=1)
    assert sum(asked) == len(TEXTS) - 4


def test_a_damaged_block_is_computed_again(counting: tuple[Encoder, list[int]], tmp_path: Path) -> None:
    encoder, asked = counting
    before = hidden_states(encoder, TEXTS, tmp_path, quiet=True).rows()
    (block,) = tmp_path.rglob("*.kept")
    content = bytearray(block.read_bytes())
    content[len(content) // 2] ^= 255
    block.write_bytes(content)
    asked.clear()
    assert torch.equal(hidden_states(encoder, TEXTS, tmp_path, quiet=True).rows(), before)
    assert sum(asked) == len(TEXTS)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=80), st.integers(1, 200))
def test_batches_hold_every_text_once_within_the_budget(lengths: list[int], budget: int) -> None:
    sizes = np.array(lengths, dtype=np.int64)
    batches = list(batches_by_length(sizes, budget))
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
    assert all(len(b) == 1 or len(b) * sizes[b].max() <= budget for b in batches)


def test_sorting_by_length_leaves_little_padding() -> None:
    sizes = np.random.default_rng(0).geometric(0.03, 2000)
    sorted_cost = sum(len(b) * sizes[b].max() for b in batches_by_length(sizes, 2048))
    arrival = sum(32 * sizes[i : i + 32].max() for i in range(0, 2000, 32))
    assert sorted_cost < 1.15 * sizes.sum()
    assert arrival > 2 * sorted_cost

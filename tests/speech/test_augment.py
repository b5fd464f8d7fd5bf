"""SpecAugment: never more than the paper allows, uniform widths, the same masks from the same generator."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from confide.speech.augment import SpecAugment, augment

PAPER = SpecAugment()


def _masked(lengths: list[int], chosen: SpecAugment, seed: int, frames: int | None = None) -> Tensor:
    """Ones where nothing is hidden."""
    longest = max(lengths) if frames is None else frames
    ones = torch.ones(len(lengths), longest, 80)
    return augment(ones, torch.tensor(lengths), chosen, np.random.default_rng(seed))


def _runs(hidden: np.ndarray) -> list[int]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], hidden.astype(int), [0]])))
    return [int(b - a) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def test_the_defaults_are_the_papers() -> None:
    assert PAPER.model_dump() == {
        "frequency_masks": 2, "frequency_width": 30, "time_masks": 10, "time_width": 50, "time_ratio": 0.1,
    }  # fmt: skip


@given(st.lists(st.integers(0, 700), min_size=1, max_size=4), st.integers(0, 10_000))
@settings(max_examples=50, deadline=None)
def test_never_more_is_hidden_than_allowed(lengths: list[int], seed: int) -> None:
    masked = _masked(lengths, PAPER, seed, frames=max(lengths) + 3)
    assert bool(((masked == 0) | (masked == 1)).all())
    for row, length in zip(masked.numpy(), lengths, strict=True):
        assert (row[length:] == 1).all()  # beyond the utterance nothing changes
        inside = row[:length] == 0
        if not length or inside.all():
            continue
        mels, frames = inside.all(axis=0), inside.all(axis=1)
        assert (inside == (frames[:, None] | mels[None, :])).all()
        assert len(_runs(mels)) <= 2
        assert mels.sum() <= 2 * 29
        limit = max(min(50, int(0.1 * length + 1e-9)) - 1, 0)
        assert len(_runs(frames)) <= 10
        assert frames.sum() <= 10 * limit


@given(st.integers(1, 400), st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_a_single_mask_is_one_band_below_its_width(length: int, seed: int) -> None:
    alone = SpecAugment(frequency_masks=1, frequency_width=7, time_masks=0)
    mels = (_masked([length], alone, seed)[0] == 0).all(dim=0).numpy()
    assert len(_runs(mels)) <= 1
    assert mels.sum() < 7
    alone = SpecAugment(frequency_masks=0, time_masks=1, time_width=20, time_ratio=0.25)
    frames = (_masked([length], alone, seed)[0] == 0).all(dim=1).numpy()
    assert len(_runs(frames)) <= 1
    assert frames.sum() < max(1, min(20, int(0.25 * length)))


def test_widths_are_uniform_and_places_reach_both_ends() -> None:
    alone = SpecAugment(frequency_masks=1, frequency_width=10, time_masks=0)
    hidden = (_masked([1] * 20_000, alone, 3) == 0)[:, 0].numpy()  # (20000, mels)
    counts = np.bincount(hidden.sum(axis=1), minlength=10)
    assert len(counts) == 10
    # Each width is drawn about 2,000 times, with a deviation of 42; one width more or fewer would move all by 180.
    assert np.abs(counts - 2000).max() < 4 * 42
    assert hidden[:, 0].any()
    assert hidden[:, -1].any()


def test_the_same_generator_gives_the_same_masks() -> None:
    features = torch.randn(3, 200, 80, generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([200, 150, 90])
    before = features.clone()
    first, second, other = (augment(features, lengths, PAPER, np.random.default_rng(s)) for s in (5, 5, 6))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(features, before)
    assert torch.equal(first[first != 0], features[first != 0])


def test_utterances_of_a_batch_have_masks_of_their_own() -> None:
    masked = _masked([300] * 4, PAPER, 0)
    assert all(not torch.equal(masked[0], masked[i]) for i in range(1, 4))


def test_no_masks_change_nothing() -> None:
    off = SpecAugment(frequency_masks=0, time_masks=0)
    assert bool((_masked([120, 40], off, 0) == 1).all())


@pytest.mark.parametrize("mels", [1, 8])
def test_a_mask_wider_than_the_features_is_cut(mels: int) -> None:
    ones = torch.ones(2, 50, mels)
    masked = augment(ones, torch.tensor([50, 50]), PAPER, np.random.default_rng(0))
    assert masked.shape == ones.shape

"""SpecAugment as PFL-ASR uses it (appendix F): two frequency masks, ten time masks, no time warping.

A frequency mask has a width drawn uniformly from 0, 1, ..., F - 1; a time mask from 0, 1, ..., t - 1 with
t = min(T, floor(p * frames)), which are the half-open ranges of the released code. Its place is uniform among all where
it fits. Masked values become 0, which is the mean of normalised features.

Differs from the released code, whose masks never cover the last filter or the last frame.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from confide.settings import Section


class SpecAugment(Section):
    """How much of the features is hidden in training; the defaults are the paper's."""

    frequency_masks: int = Field(2, ge=0, description="how many frequency masks")
    frequency_width: int = Field(30, ge=0, description="F: a frequency mask is narrower than so many filters")
    time_masks: int = Field(10, ge=0, description="how many time masks")
    time_width: int = Field(50, ge=0, description="T: a time mask is shorter than so many frames")
    time_ratio: float = Field(0.1, ge=0, le=1, description="p: and than this share of the utterance")


def augment(features: Tensor, lengths: Tensor, settings: SpecAugment, draw: np.random.Generator) -> Tensor:
    """A copy of features (batch, frames, mels) with bands set to 0; frames beyond an utterance's length stay."""
    batch, frames, mels = features.shape
    valid = lengths.cpu().numpy().astype(np.int64)  # (batch,)
    every_mel = np.full(batch, mels)
    longest = np.minimum(settings.time_width, np.floor(settings.time_ratio * valid + 1e-9))
    widest = np.minimum(settings.frequency_width, every_mel)
    hidden_mels = _bands(mels, every_mel, widest, settings.frequency_masks, draw)  # (batch, mels)
    hidden_frames = _bands(frames, valid, longest, settings.time_masks, draw)  # (batch, frames)
    inside = np.arange(frames) < valid[:, None]
    hidden = (hidden_frames[:, :, None] | hidden_mels[:, None, :]) & inside[:, :, None]  # (batch, frames, mels)
    return features.masked_fill(torch.from_numpy(hidden).to(features.device), 0.0)


def _bands(
    size: int, extent: NDArray[np.int64], below: np.ndarray, masks: int, draw: np.random.Generator
) -> NDArray[np.bool_]:
    """Which of `size` places are hidden by bands narrower than `below`, lying within `extent`."""  # (batch, size)
    batch = len(extent)
    # One block of uniform numbers for each utterance, so that the first ones do not depend on the later ones.
    chance = draw.random((batch, 2, masks))
    widths = np.floor(chance[:, 0] * below[:, None])  # (batch, masks)
    begins = np.floor(chance[:, 1] * (extent[:, None] - widths + 1))
    place = np.arange(size)
    bands = (place >= begins[:, :, None]) & (place < (begins + widths)[:, :, None])  # (batch, masks, size)
    return np.asarray(bands.any(axis=1))

"""What feature extractors compute, in operations that a graph can hold (`confide export`).

Extractors of transformers are numpy code, which ONNX knows nothing of. Here the Fourier transform is a product with its
matrix, since not every runtime has the operation itself, and frames are cut by an index. The tests hold each module
against the extractor that it stands for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from confide.encoders.frames import FrameEncoder


class Spectrum(nn.Module):
    """Magnitudes of the Fourier transform of windowed frames."""

    matrix: Tensor  # (window, 2 bins): cosines, then sines

    def __init__(self, window: np.ndarray, fft: int) -> None:
        super().__init__()
        angles = 2 * np.pi / fft * np.outer(np.arange(len(window)), np.arange(fft // 2 + 1))
        both = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * window[:, None].astype(np.float64)
        self.register_buffer("matrix", torch.from_numpy(both.astype(np.float32)))

    def forward(self, frames: Tensor) -> Tensor:  # (frames, window)
        """The squares of the magnitudes."""  # (frames, bins)
        real, imaginary = (frames @ self.matrix).chunk(2, dim=1)
        return real.square() + imaginary.square()


class WhisperFeatures(nn.Module):
    """Whisper's log-mel: reflected at both ends, power, log10, eight decades below the loudest at most."""

    filters: Tensor  # (bins, mels)

    def __init__(self, extractor: Any) -> None:
        super().__init__()
        self.fft, self.hop = int(extractor.n_fft), int(extractor.hop_length)
        self.spectrum = Spectrum(torch.hann_window(self.fft, dtype=torch.float64).numpy(), self.fft)
        self.register_buffer("filters", torch.from_numpy(np.asarray(extractor.mel_filters, dtype=np.float32)))

    def forward(self, samples: Tensor) -> Tensor:
        """Features of one utterance (n,)."""  # (1, mels, frames)
        around = functional.pad(samples[None], (self.fft // 2, self.fft // 2), mode="reflect")[0]
        power = self.spectrum(around.unfold(0, self.fft, self.hop)[:-1])
        found = torch.clamp(power @ self.filters, min=1e-10).log10()
        found = torch.maximum(found, found.max() - 8.0)
        return ((found + 4.0) / 4.0).T[None]


class Normalised(nn.Module):
    """Samples with mean 0 and variance 1, where the extractor does that."""

    def __init__(self, extractor: Any) -> None:
        super().__init__()
        self.scaled = bool(extractor.do_normalize)

    def forward(self, samples: Tensor) -> Tensor:
        """Values of one utterance (n,)."""  # (1, n)
        if not self.scaled:
            return samples[None]
        centred = samples - samples.mean()
        return (centred / torch.sqrt(centred.square().mean() + 1e-7))[None]


class States(nn.Module):
    """A frozen encoder from samples to its states after `depth` blocks, or to the end."""

    def __init__(self, encoder: FrameEncoder, depth: int | None) -> None:
        super().__init__()
        self.encoder, self.depth, self.model = encoder, depth, encoder.model
        whisper = encoder.kind == "whisper"
        self.features = WhisperFeatures(encoder.extractor) if whisper else Normalised(encoder.extractor)

    def forward(self, samples: Tensor) -> Tensor:
        """States of one utterance (n,)."""  # (1, frames, width)
        x = self.encoder.embed(self.features(samples))[None]
        context = self.encoder.context(x, None)
        for index in range(len(self.encoder.layers) if self.depth is None else self.depth):
            x = self.encoder.block(index, x, context)
        return self.encoder.finish(x) if self.depth is None else x

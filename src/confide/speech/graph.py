"""A recogniser as one graph, from samples to log-probabilities of tokens (`confide export`).

One utterance at a time, at its own length: nothing is padded, so that nothing has to be masked. The network is the one
that training and transcription use; only the features are computed anew, in operations that ONNX has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from confide.encoders.graph import Spectrum, States
from confide.errors import UserError
from confide.speech.corpus import SAMPLE_RATE
from confide.speech.features import FeatureSettings, filters_of
from confide.speech.network import Network, Pretrained, Whole


class LogMelGraph(nn.Module):
    """`features.log_mel` for samples that have the settings' rate already."""

    filters: Tensor

    def __init__(self, settings: FeatureSettings) -> None:
        super().__init__()
        self.settings = settings
        self.spectrum = Spectrum(np.hamming(settings.window_samples) * settings.scale, settings.fft)
        self.register_buffer("filters", torch.from_numpy(filters_of(settings)))

    def forward(self, samples: Tensor) -> Tensor:  # (n,)
        """Features of one utterance."""  # (1, frames, mels)
        chosen = self.settings
        raw = samples.unfold(0, chosen.window_samples, chosen.step_samples)  # (frames, window)
        before = torch.cat([raw[:, :1], raw[:, :-1]], dim=1)  # the first sample counts as its own predecessor
        power = self.spectrum(raw - chosen.pre_emphasis * before)
        found = torch.clamp(power.sqrt() @ self.filters, min=chosen.floor).log()
        if chosen.normalise:
            found = found - found.mean()
            found = found * torch.rsqrt(found.square().mean() + chosen.epsilon)
        return found[None]


class Silence(nn.Module):
    """Samples with silence around them, as utterances for a frozen encoder have it."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.around = (before, after)

    def forward(self, samples: Tensor) -> Tensor:
        return functional.pad(samples, self.around)


class RecogniserGraph(nn.Module):
    """A network with its parameters: samples (n,) become log-probabilities (frames, tokens)."""

    def __init__(self, network: Network, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.network, self.names = network, list(parameters)
        for number, name in enumerate(self.names):
            self.register_buffer(f"trained_{number}", parameters[name].detach())
        self.front, self.shortest, self.longest = _front(network)

    def forward(self, samples: Tensor) -> Tensor:
        parameters = {name: self.get_buffer(f"trained_{number}") for number, name in enumerate(self.names)}
        logits, _ = self.network.forward(parameters, self.front(samples), None, None)
        return logits[0].log_softmax(dim=-1)


def _front(network: Network) -> tuple[nn.Module, int, int | None]:
    """What makes features of samples, how many samples it needs at least, and how many it takes at most."""
    if isinstance(network, Whole):
        settings = network.front.settings
        if settings.sample_rate != SAMPLE_RATE:
            raise UserError(
                f"task.features.sample_rate={settings.sample_rate}: audio is brought to that rate by a library, which "
                f"a graph cannot hold; expected a model that hears {SAMPLE_RATE} samples a second"
            )
        frames = network.settings.stride  # to one frame of the output
        return LogMelGraph(settings), settings.window_samples + (frames - 1) * settings.step_samples, None
    if not isinstance(network, Pretrained):
        raise TypeError(f"{type(network).__name__} is no network of this package")
    encoder, chosen = network.front.encoder, network.settings
    before, after = (round(seconds * SAMPLE_RATE) for seconds in (chosen.before, chosen.after))
    most = None if math.isinf(encoder.longest) else int(encoder.longest * SAMPLE_RATE) - before - after
    front = nn.Sequential(Silence(before, after), States(encoder, chosen.depth))
    return front, max(1, encoder.shortest - before - after), most

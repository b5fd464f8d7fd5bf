"""The workloads' numbers, from numpy alone: other systems' environments read this file by its path."""

from __future__ import annotations

import numpy as np

USERS, EXAMPLES, WIDTH, HIDDEN, CLASSES = 1000, 20, 784, 128, 10


def small_clients(
    users: int = USERS, examples: int = EXAMPLES, width: int = WIDTH, classes: int = CLASSES
) -> tuple[np.ndarray, np.ndarray]:
    """Workload A: features (users, examples, width) float32 and labels (users, examples) int64."""
    draw = np.random.default_rng(0)
    features = draw.standard_normal((users, examples, width), dtype=np.float32)
    return features, draw.integers(classes, size=(users, examples))


def speech_clients(
    users: int = 100, utterances: int = 4, frames: int = 300, labels: int = 20, tokens: int = 29
) -> tuple[np.ndarray, np.ndarray]:
    """Workload B: features (users, utterances, frames, 80) float32 and labels (users, utterances, labels), no blank."""
    draw = np.random.default_rng(0)
    features = draw.standard_normal((users, utterances, frames, 80), dtype=np.float32)
    return features, draw.integers(1, tokens, size=(users, utterances, labels))

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


def kept_states(
    users: int = 390, utterances: int = 3, frames: int = 80, width: int = 384, labels: int = 5, tokens: int = 29
) -> tuple[np.ndarray, np.ndarray]:
    """Workload D: states (users, utterances, frames, width) float32, each of mean 0 and length 1, and labels, no blank.

    A quarter of its 1,560 users, whose states the others repeat: every candidate holds all of it in memory.
    """
    draw = np.random.default_rng(0)
    states = draw.standard_normal((users, utterances, frames, width), dtype=np.float32)
    states -= states.mean(axis=-1, keepdims=True)
    states /= np.linalg.norm(states, axis=-1, keepdims=True)
    return states, draw.integers(1, tokens, size=(users, utterances, labels))


def query_vectors(users: int = 4459, width: int = 384, documents: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Workload E: one vector of length 1 for each user (users, 1, width), and the document that it asks for."""
    draw = np.random.default_rng(0)
    vectors = draw.standard_normal((users, 1, width), dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors, draw.integers(documents, size=(users, 1))

"""How much noise the prefix sums of a run carry: banded factorisations, independent noise and binary trees.

All of them are compared at the same guarantee, z = 1 for the whole run, with contributions of norm 1 and users who take
turns (`confide.privacy.factorisation`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from confide.privacy.factorisation import Array, optimised_coefficients, prefix_variance, root_coefficients, sensitivity


def participations(rounds: int, separation: int) -> int:
    """k, the most rounds out of `rounds` that one user can be in."""
    return -(-rounds // separation)


def banded_variance(coefficients: Array, rounds: int, separation: int) -> Array:
    """(rounds,) for this mechanism: squared norms of the rows of B, times the squared sensitivity."""
    return sensitivity(coefficients, rounds, separation) ** 2 * prefix_variance(coefficients, rounds)


def independent_variance(rounds: int, separation: int) -> Array:
    """(rounds,) for independent noise: k Gaussian releases of multiplier sqrt(k) are one of multiplier 1, exactly."""
    return participations(rounds, separation) * np.arange(1.0, rounds + 1)


def tree_variance(rounds: int, separation: int) -> Array:
    """(rounds,) for binary trees: one for the whole run or one for each pass, whichever has the smaller total.

    Nodes are estimated from below (Honaker 2015; "efficient tree" in Kairouz et al. 2021): a node of height h has
    variance 1 / (2 - 2^-h). Nodes that are not complete within the run are not released. A user's contributions to one
    node add up, which is what a whole-run tree pays for.
    """
    options = [_trees(rounds, separation, length) for length in {rounds, min(rounds, separation)}]
    return min(options, key=lambda variance: float(variance.sum()))


def _trees(rounds: int, separation: int, length: int) -> Array:
    """Trees of `length` leaves, one after the other."""
    turn = np.arange(rounds) % separation == np.arange(min(rounds, separation))[:, None]  # (groups, rounds)
    before = np.pad(np.cumsum(turn, axis=1), ((0, 0), (1, 0)))  # participations before each round
    squared = np.zeros(len(turn))
    variance, base = np.zeros(rounds), 0.0
    for start in range(0, rounds, length):
        leaves = min(length, rounds - start)
        for height in range(leaves.bit_length()):
            edges = start + np.arange(0, leaves + 1, 2**height)  # complete nodes lie between neighbouring edges
            squared += np.square(np.diff(before[:, edges], axis=1)).sum(axis=1)
            covers = np.arange(1, leaves + 1) >> height & 1  # prefixes in whose sum a node of this height occurs
            variance[start : start + leaves] += covers / (2 - 2.0**-height)
        variance[start : start + leaves] += base
        base = float(variance[start + leaves - 1])
    return float(squared.max()) * variance


def compare(rounds: int, separation: int, bands: Sequence[int]) -> dict[str, Array]:
    """Name of a mechanism -> (rounds,) variance of its prefix sums, all with the same guarantee."""
    table = {
        "independent noise": independent_variance(rounds, separation),
        "binary tree": tree_variance(rounds, separation),
    }
    for count in bands:
        table[f"square root, {count} bands"] = banded_variance(root_coefficients(count), rounds, separation)
        best = optimised_coefficients(count, rounds)
        table[f"optimised, {count} bands"] = banded_variance(best, rounds, separation)
    return table

"""Renyi divergence of the Poisson-sampled Gaussian at the orders that dp-accounting gives up.

For little noise and orders near 1 dp-accounting's series (Mironov, Talwar and Zhang 2019, section 3.3) converges too
slowly; it leaves such an order out, and epsilon comes out up to 1.8 times too large (PFL-ASR's row z = 0.3072). Here
the same quantity is bounded from above by closed forms.

With the rate q and x ~ N(0, z^2) the divergence of order a is log A / (a - 1), where A = E[r(u)^a],
r(u) = 1 - q + q exp(u) and u = (2x - 1) / (2 z^2) (their section 3, which also shows that this direction of
add-or-remove is the worse one). log r is convex in u, so on every cell of a grid it lies below its chord; a Gaussian
integral of the exponential of a line is known. Left of the grid r is below its first value, right of it log r rises by
at most the rise of u. Every step is an upper bound; the grid's width only decides how tight it is.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

ORDERS = 1 + np.arange(1, 40) / 10
"""From 1.1, as the moments accountant that PFL-ASR used, to 4.9; above, dp-accounting's own series converges."""
_CELL = 0.02
_REACH = 40.0  # so many units of u from its bend, log r is a line to 17 digits


def epsilon(steps: Iterable[tuple[float, float, int]], delta: float) -> float:
    """Epsilon of releases given as (rate, noise multiplier, how many), from the low orders alone."""
    from dp_accounting.rdp import compute_epsilon

    total = sum((count * divergence(rate, z) for rate, z, count in steps), np.zeros_like(ORDERS))
    return float(compute_epsilon(ORDERS, total, delta)[0])


def divergence(rate: float, z: float) -> np.ndarray:
    """Upper bounds of the Renyi divergence of one release, one for each of ORDERS."""
    if rate == 1:
        return ORDERS / (2 * z**2)
    orders = ORDERS[:, None]  # (orders, 1)
    bend = np.log1p(-rate) - np.log(rate)
    u = bend + np.arange(-_REACH, _REACH + _CELL, _CELL)  # (edges,)
    x = z**2 * u + 0.5
    level = np.logaddexp(np.log1p(-rate), np.log(rate) + u)  # log r
    # A chord of slope m in u tilts the Gaussian: its mean moves from 0 to a m.
    mean = orders * np.diff(level) / _CELL  # (orders, cells)
    cells = orders * level[:-1] + mean * (mean / 2 - x[:-1]) / z**2
    cells += _log_mass((x[:-1] - mean) / z, (x[1:] - mean) / z)
    left = orders * level[0] + _log_below(x[0] / z)
    right = orders * level[-1] + orders * (orders / 2 - x[-1]) / z**2 + _log_below((orders - x[-1]) / z)
    parts = np.concatenate([left, cells, right], axis=1)
    top = parts.max(axis=1)
    log_a = top + np.log(np.exp(parts - top[:, None]).sum(axis=1))
    # Rounding must not turn a bound into an estimate.
    slack = 1e-12 * (1 + ORDERS**2 / z**2)
    return np.asarray((log_a + slack) / (ORDERS - 1))


def _log_below(x: np.ndarray) -> np.ndarray:
    from scipy.special import log_ndtr  # type: ignore[import-untyped]

    return np.asarray(log_ndtr(x))


def _log_mass(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Log of a standard normal's mass between two points, by the tail in which it is small."""
    flip = low > 0
    low, high = np.where(flip, -high, low), np.where(flip, -low, high)
    below, above = _log_below(low), _log_below(high)
    with np.errstate(divide="ignore"):
        return np.asarray(above + np.log(-np.expm1(np.minimum(below - above, -1e-300))))

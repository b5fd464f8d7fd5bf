"""The closed bound of the Renyi divergence is never below the truth, and close to it where it is needed."""

from __future__ import annotations

import numpy as np
import pytest
from opacus.accountants.analysis.rdp import compute_rdp

from confide.privacy import renyi


@pytest.mark.parametrize(
    ("rate", "z", "slack"),
    [(0.0295, 0.01, 1e-9), (0.0295, 0.3072, 1e-4), (0.0295, 0.512, 2e-3), (0.166, 0.768, 2e-3), (0.5, 1.0, 1e-3)],
)
def test_bound_is_above_opacus_and_close(rate: float, z: float, slack: float) -> None:
    exact = np.array([float(compute_rdp(q=rate, noise_multiplier=z, steps=1, orders=a)) for a in renyi.ORDERS])
    bound = renyi.divergence(rate, z)
    assert (bound >= exact * (1 - 1e-12)).all()
    assert (bound <= exact * (1 + slack)).all()


@pytest.mark.parametrize("z", [0.05, 0.7, 20.0])
def test_bound_holds_against_plain_integration(z: float) -> None:
    from scipy.integrate import quad  # type: ignore[import-untyped]

    rate, order = 0.1, renyi.ORDERS[9]
    assert order == 2.0

    def integrand(x: float) -> float:
        # Tilted by exp(order u) so that nothing overflows; taken back below.
        u = (2 * x - 1) / (2 * z**2)
        log = order * np.logaddexp(np.log1p(-rate), np.log(rate) + u) - x**2 / (2 * z**2)
        return float(np.exp(log - order * (order - 1) / (2 * z**2)))

    found = quad(integrand, -15 * z, order + 15 * z, points=[0, order], limit=400)[0] / (z * np.sqrt(2 * np.pi))
    exact = (np.log(found) + order * (order - 1) / (2 * z**2)) / (order - 1)
    assert renyi.divergence(rate, z)[9] >= exact * (1 - 1e-6)


def test_full_participation_is_the_plain_gaussian() -> None:
    assert renyi.divergence(1.0, 2.0) == pytest.approx(renyi.ORDERS / 8)

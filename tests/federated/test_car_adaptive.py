"""CAR's adaptive rule: its equations, its warm-up, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from confide.errors import UserError
from confide.federated import car_adaptive
from confide.federated.bounding import Bounder
from confide.federated.car_adaptive import CarAdaptive, Clients

NORMS = st.lists(st.floats(1e-6, 1e6), min_size=3, max_size=3).map(lambda v: torch.tensor(v, dtype=torch.float64))
PLAIN = CarAdaptive(decay=0)
EVERYONE = torch.arange(3)


def _factors(bounds: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    """As the loop takes them, for the users 0, 1, ..."""
    rule = Bounder("clip", 1.0, torch.ones(1).double(), per_user=True).at(bounds)
    return rule.of(torch.arange(len(norms))).factors(norms[:, None])[:, 0]


def test_the_defaults_are_the_papers_experiment() -> None:
    assert CarAdaptive().model_dump() == {
        "kind": "car", "noise_multiplier": 0.1, "update_rate": 0.05, "quantile": 0.9, "decay": 0.9, "warm_up": 0,
    }  # fmt: skip


def test_the_multiplier_for_two_clients_is_worked_out_by_hand() -> None:
    # sigma_b = 0.1; z_D^-2 = 100 - 25.
    assert car_adaptive.multiplier(PLAIN, 2) == pytest.approx(1 / math.sqrt(75))


@settings(deadline=None)
@given(z=st.floats(1e-3, 10), clients=st.integers(1, 500))
def test_the_multiplier_splits_the_noise_between_update_and_count(z: float, clients: int) -> None:
    if z < clients / 10:
        left = car_adaptive.multiplier(CarAdaptive(noise_multiplier=z), clients)
        assert left >= z
        assert left**-2 + (clients / 10) ** -2 == pytest.approx(z**-2)
    else:
        with pytest.raises(UserError, match=r"below 2 sigma_b"):
            car_adaptive.multiplier(CarAdaptive(noise_multiplier=z), clients)


def test_the_papers_noise_is_refused_for_a_single_client() -> None:
    with pytest.raises(UserError, match=r"noise_multiplier=0.1 with 1 client: .* = 1/10 = 0.1; lower it or use more"):
        car_adaptive.multiplier(CarAdaptive(), 1)


@settings(deadline=None)
@given(norms=NORMS, bound=st.floats(1e-3, 1e3))
def test_bound_and_noise_follow_the_equations(norms: torch.Tensor, bound: float) -> None:
    clients = car_adaptive.start(bound, 3)
    z = car_adaptive.multiplier(PLAIN, 3)
    variance = 2 * z**2 * 0.95**2 * bound**2 + 2 * z**2 * 0.05**2 * 0.9**2 * norms**2
    scales = car_adaptive.noise_scales(PLAIN, clients, EVERYONE, norms, 0)
    torch.testing.assert_close(scales, variance.sqrt())
    after = car_adaptive.next_clients(PLAIN, clients, EVERYONE, norms, 0)
    torch.testing.assert_close(after.bounds, 0.95 * bound + 0.05 * 0.9 * norms)
    # Equation 40 is an upper bound of z_D^2 C^2 with the next bound in it.
    assert (scales >= z * after.bounds * (1 - 1e-12)).all()


@settings(deadline=None)
@given(norms=NORMS, bound=st.floats(1e-3, 1e3))
def test_what_is_sent_is_within_the_clients_own_bound(norms: torch.Tensor, bound: float) -> None:
    bounds = bound * torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    factors = _factors(bounds, norms)
    assert (factors * norms <= bounds).all()
    assert (factors[norms <= bounds] > 0.99).all()


def test_a_zero_update_stays_zero_and_finite() -> None:
    zero = torch.zeros(1, dtype=torch.float64)
    assert torch.isfinite(_factors(torch.ones(1).double(), zero)).all()


def test_a_bound_is_its_clients_own_and_stays_where_a_client_is_absent() -> None:
    clients = car_adaptive.start(1.0, 3)
    after = car_adaptive.next_clients(PLAIN, clients, torch.tensor([2, 0]), torch.tensor([10.0, 4.0]).double(), 0)
    assert after.bounds.tolist() == pytest.approx([0.95 + 0.045 * 4, 1.0, 0.95 + 0.045 * 10])
    assert clients.bounds.tolist() == [1.0, 1.0, 1.0]


def test_bounds_tend_to_the_quantile_times_a_steady_norm() -> None:
    clients = car_adaptive.start(1.0, 3)
    for step in range(300):
        clients = car_adaptive.next_clients(CarAdaptive(), clients, EVERYONE, torch.full((3,), 7.0).double(), step)
    assert clients.bounds.tolist() == pytest.approx([0.9 * 7.0] * 3, rel=1e-4)


def test_decay_smooths_the_norms_from_the_first_one_on() -> None:
    first = car_adaptive.average_norms(CarAdaptive(), torch.tensor([0.0]), torch.tensor([5.0]))
    assert first.tolist() == [5.0]
    assert car_adaptive.average_norms(CarAdaptive(), first, torch.tensor([15.0])).tolist() == pytest.approx([6.0])


def test_warm_up_neither_bounds_nor_noises_nor_moves() -> None:
    rule, norms = CarAdaptive(warm_up=3), torch.full((3,), 100.0).double()
    clients = car_adaptive.start(1.0, 3)
    for step in range(3):
        free = _factors(car_adaptive.bounds_at(rule, clients, step), norms)
        assert free.tolist() == pytest.approx([1, 1, 1], abs=2e-6)
        assert car_adaptive.noise_scales(rule, clients, EVERYONE, norms, step).tolist() == [0, 0, 0]
        clients = car_adaptive.next_clients(rule, clients, EVERYONE, norms, step)
    assert clients.bounds.tolist() == [1, 1, 1]
    assert _factors(car_adaptive.bounds_at(rule, clients, 3), norms).max() < 0.011
    assert car_adaptive.noise_scales(rule, clients, EVERYONE, norms, 3).min() > 0


def test_a_norm_that_is_not_finite_is_not_remembered() -> None:
    clients = Clients(torch.ones(3).double(), torch.full((3,), 2.0).double())
    norms = torch.tensor([math.nan, math.inf, 2.0]).double()
    after = car_adaptive.next_clients(PLAIN, clients, EVERYONE, norms, 0)
    assert after.bounds.tolist() == pytest.approx([1, 1, 0.95 + 0.045 * 2])
    assert after.norms.tolist() == [2, 2, 2]

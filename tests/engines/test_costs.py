"""Schedules: who trains what, and when. Longest first, within the room that there is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from confide.engines.costs import LongestFirst, deal, expected_costs
from confide.federated.local import LocalTraining

COSTS = st.lists(st.floats(0, 100, allow_subnormal=False), min_size=1, max_size=40).map(np.array)


class Held:
    """Three users with 2, 6 and 4 examples, which last 30, 6 and 8 seconds in all."""

    examples = np.array([2, 6, 4])

    def __init__(self, lasting: bool) -> None:
        self.lasting = lasting

    def seconds(self, user: int) -> np.ndarray | None:
        return np.full(self.examples[user], (15.0, 1.0, 2.0)[user]) if self.lasting else None


@pytest.mark.parametrize(
    ("lasting", "settings", "expected"),
    [
        (False, {"steps": 1}, [2, 6, 4]),
        (False, {"epochs": 2, "batch_size": 2}, [2, 6, 4]),
        (False, {"steps": 5, "batch_size": 3}, [2, 3, 3]),
        (True, {"epochs": 1}, [30, 6, 8]),
        (True, {"steps": 5, "batch_seconds": 7.0}, [7, 6, 7]),
        (True, {"steps": 5, "batch_size": 3}, [30, 3, 6]),
    ],
)
def test_a_user_costs_the_data_that_local_training_looks_at(
    lasting: bool, settings: dict[str, float], expected: list[float]
) -> None:
    costs = expected_costs(Held(lasting), LocalTraining(learning_rate=0.1, **settings))  # type: ignore[arg-type]
    assert costs([np.array([0]), np.array([1]), np.array([2])]) == pytest.approx(expected)
    assert costs([np.array([0, 2])]) == pytest.approx([expected[0] + expected[2]])


def simulated(costs: np.ndarray, workers: int, slots: int) -> tuple[list[int], float, int]:
    """The order in which parts begin, when the last one ends, and how many sums were held at most."""
    spare = len(costs) if len(costs) <= slots else slots - workers
    order, begun, most = LongestFirst(costs, spare), list[int](), 0
    held, ends, added, now = set[int](), dict[int, float](), 0, 0.0
    while added < len(costs):
        while len(ends) < workers and len(held) < slots and (part := order.take(held)) is not None:
            begun.append(part)
            held.add(part)
            ends[part] = now + float(costs[part])
        most = max(most, len(held))
        assert ends, "nobody works and nothing can be added: this would wait for ever"
        soonest = min(ends, key=lambda part: ends[part])
        now = ends.pop(soonest)
        while added in held and added not in ends:
            held.remove(added)
            added += 1
    return begun, now, most


@given(COSTS, st.integers(1, 6), st.integers(0, 12))
def test_every_part_is_trained_once_and_sums_never_need_more_slots_than_there_are(
    costs: np.ndarray, workers: int, more: int
) -> None:
    begun, _, most = simulated(costs, workers, workers + more)
    assert sorted(begun) == list(range(len(costs)))
    assert most <= workers + more


@given(COSTS, st.integers(1, 6))
def test_with_a_slot_for_every_part_the_longest_come_first_and_the_time_keeps_grahams_bound(
    costs: np.ndarray, workers: int
) -> None:
    begun, took, _ = simulated(costs, workers, max(workers, len(costs)))
    assert begun == sorted(range(len(costs)), key=lambda part: (-costs[part], part))
    least = max(costs.max(), costs.sum() / workers)
    assert took <= least + costs.max() * (1 - 1 / workers) + 1e-9


def test_without_a_spare_slot_parts_are_trained_in_order() -> None:
    begun, _, _ = simulated(np.arange(10.0), workers=2, slots=2)
    assert begun == list(range(10))


def test_with_few_spare_slots_the_longest_still_come_first() -> None:
    costs = np.ones(20)
    costs[[7, 15, 19]] = [5, 9, 7]
    begun, took, most = simulated(costs, workers=2, slots=5)
    assert begun[:4] == [15, 19, 7, 0]
    assert most <= 5
    assert took == costs.sum() / 2


def test_on_a_skewed_cohort_longest_first_takes_less_time_than_the_order_of_the_cohort() -> None:
    """Sizes of users as a log-normal of spread 1, 32 in a cohort, two workers."""
    draw = np.random.default_rng(0)
    ratios = []
    for _ in range(200):
        costs = draw.lognormal(0, 1, 32)
        ratios.append(simulated(costs, 2, 32)[1] / simulated(costs, 2, 2)[1])
    assert max(ratios) < 1.001
    assert np.mean(ratios) < 0.85


@given(COSTS, st.lists(st.floats(0.1, 10), min_size=1, max_size=5).map(np.array), st.integers(0, 3))
def test_parts_are_dealt_within_the_capacity_of_every_rank(costs: np.ndarray, speeds: np.ndarray, more: int) -> None:
    capacity = -(-len(costs) // len(speeds)) + more
    owners = deal(costs, speeds, capacity)
    assert owners.min() >= 0
    assert np.bincount(owners, minlength=len(speeds)).max() <= capacity
    assert len(np.bincount(owners, minlength=len(speeds))) == len(speeds)


def test_a_rank_that_is_twice_as_fast_is_dealt_twice_as_much() -> None:
    owners = deal(np.ones(30), np.array([2.0, 1.0]), 30)
    assert np.bincount(owners).tolist() == [20, 10]


def test_more_parts_than_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="5 parts do not fit 2 ranks of 2"):
        deal(np.ones(5), np.ones(2), 2)

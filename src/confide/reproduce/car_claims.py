"""What CAR's tables claim, as numbers with a threshold."""

from __future__ import annotations

import math
from statistics import mean, stdev
from typing import Any

from confide.reproduce.car_tables import BOTH, ENCODERS, HEAD, METHODS, POOLINGS, SIZES
from confide.reproduce.grid import claim

GOAL = 95.0
"""The test accuracy, in per cent, to which `start` counts steps."""


def paired(what: str, better: list[float], worse: list[float]) -> dict[str, Any]:
    """That one way is clearly ahead of another on the same folds: the mean difference, and twice its standard error."""
    points = [one - other for one, other in zip(better, worse, strict=True)]
    clear = 2 * stdev(points) / math.sqrt(len(points)) if len(points) > 1 else 1.0
    return claim(what, round(mean(points), 2), round(clear, 2), mean(points) > clear)


def folds(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """That adapter and head are ahead of each other way, and all that train of search, by tests paired over folds."""
    by = {row["method"]: [float(score) for score in row["each"].split()] for row in rows}
    search, *others, both = METHODS
    found = [paired(f"{both} is ahead of {method}, paired over folds", by[both], by[method]) for method in others]
    return found + [paired(f"{method} is ahead of {search}, paired over folds", by[method], by[search])
                    for method in (*others, both)]  # fmt: skip


def claims_of(what: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if (what == "figure2" or what.startswith("folds")) and len(rows) < len(METHODS):
        return []  # they compare all ways
    if what.startswith("folds"):
        return folds(rows)
    if what == "start":
        identity, random = ([float(steps) for steps in row["steps"].split()] for row in rows)
        return [paired(f"steps to {GOAL:g} % that a random adapter needs more than the identity", random, identity)]
    score = {tuple(row[name] for name in ("method", "scenario") if name in row): row["accuracy"] for row in rows}
    if what == "figure2":
        plain, soft, head, both = (score[method,] for method in METHODS)
        return [
            claim("untrained search is 5 points below the least of the trained", plain, min(soft, head, both) - 5,
                  plain <= min(soft, head, both) - 5),
            claim("head", head, 97.0, head >= 97),
            claim("adapter + search", soft, 95.0, soft >= 95),
            claim("adapter + head", both, 98.5, both >= 98.5),
            claim("adapter + head is the best of the four", both, max(soft, head), both > max(plain, soft, head)),
        ]  # fmt: skip
    if what == "table1":
        found = []
        for method in (name for name in (HEAD, BOTH) if (name, "central") in score):
            central = score[method, "central"]
            for scenario, points in (("FL", 0.5), ("FL + DP, fixed", 1.0)):
                lost = central - score[method, scenario]
                found.append(claim(f"{method}: points that {scenario} loses", lost, points, lost <= points))
        return found
    if what == "table2":
        return _together_claims(rows)
    if what == "table3":
        return _news_claims(rows)
    if what in ENCODERS:
        return _encoder_claims(rows, of_all=what == "figure7")
    return []


def _news_claims(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """That the accuracy is near the paper's, clients at once are as much sooner through, and a warm-up helps."""
    what = "test accuracy on AG News"
    found = [claim(f"{what}: {row['scenario']}", row["accuracy"], 88.0, row["accuracy"] >= 88) for row in rows[:2]]
    *_, together, warm, cold = rows
    found.append(
        claim("3 clients at once are so many times as fast as one (2.38 in the paper)", together["speed_up"], 2.38,
              together["speed_up"] >= 2.38)
    )  # fmt: skip
    each = [[float(score) for score in row["each"].split()] for row in (warm, cold)]
    return [*found, paired("adaptive noise: a warm-up is ahead of none, paired over seeds", *each)]


def _encoder_claims(rows: list[dict[str, Any]], of_all: bool) -> list[dict[str, Any]]:
    """That the larger encoder and the mean are ahead, and that the first ten of many categories have far more."""
    each = {(row["encoder"], row["pooling"]): [float(score) for score in row["each"].split()] for row in rows}
    found = []
    if of_all:
        found = [
            claim(f"{row['encoder']}, {row['pooling']}: top 10 over top 1", row["top_k"] / row["accuracy"], 2.2,
                  row["top_k"] >= 2.2 * row["accuracy"])
            for row in rows
        ]  # fmt: skip
    (small, large), (average, last) = SIZES, POOLINGS
    found += [paired(f"{pooling}: {large} is ahead of {small}, paired over seeds",
                     each[large, pooling], each[small, pooling])
              for pooling in POOLINGS]  # fmt: skip
    return found + [paired(f"{encoder}: the {average} is ahead of the {last} token, paired over seeds",
                           each[encoder, average], each[encoder, last]) for encoder in SIZES]  # fmt: skip


def _together_claims(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """That several clients at once are sooner through than one, and lose at most half a point."""
    plain = {(row["method"], row["clients"]): row for row in rows if row["noise"] == "none"}
    found = []
    for (method, clients), row in plain.items():
        if clients > 1:
            sooner, lost = row["speed_up"], round(plain[method, 1]["accuracy"] - row["accuracy"], 2)
            found.append(claim(f"{method}: {clients} clients at once are faster than one", sooner, 1.0, sooner > 1))
            found.append(claim(f"{method}: points that {clients} clients lose", lost, 0.5, lost <= 0.5))
    return found

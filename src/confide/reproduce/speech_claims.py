"""What PFL-ASR's tables claim, as numbers with a threshold: whether ours agree on which setting is better.

"Level" and "ahead" are by mean word error rate over the runs of a cell. A difference counts if it is above twice its
standard error, which takes the deviations of both cells; one run has none, and then anything above 1 point counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import mean
from typing import Any

from confide.reproduce.grid import claim
from confide.reproduce.speech_tables import LORA_NOISE

Row = dict[str, Any]
Claims = list[dict[str, Any]]
ALONE = 1.0
"""Points that a difference of single runs has to exceed."""


def ahead(what: str, better: Row, worse: Row) -> dict[str, Any]:
    """That one cell has clearly fewer errors than the other: by how many points, and how many are clear."""
    points = worse["wer"] - better["wer"]
    return claim(what, round(points, 2), round(spread(better, worse), 2), points > spread(better, worse))


def level(what: str, one: Row, other: Row) -> dict[str, Any]:
    """That two cells differ by less than is clear, or by less than a point."""
    points, clear = abs(one["wer"] - other["wer"]), max(ALONE, spread(one, other))
    return claim(what, round(points, 2), round(clear, 2), points <= clear)


def not_ahead(what: str, one: Row, other: Row) -> dict[str, Any]:
    """That one cell does not have clearly fewer errors than the other: by how many points, and how many are clear."""
    gained, clear = other["wer"] - one["wer"], spread(one, other)
    return claim(what, round(gained, 2), round(clear, 2), gained <= clear)


def spread(one: Row, other: Row, deviation: str = "deviation") -> float:
    """Twice the standard error of the difference of two cells."""
    if "" in (one[deviation], other[deviation]):
        return ALONE
    return 2 * math.sqrt(sum(float(row[deviation]) ** 2 / int(row["runs"]) for row in (one, other)))


def _table1(rows: list[Row]) -> Claims:
    cell = {(round(row["sigma"] * 1e6), row["clipping"]): row for row in rows}
    found = [level("without noise, global and per-layer clipping are level", cell[0, "global"], cell[0, "dim"])]
    for sigma in (3, 10):
        for rule in ("uniform", "dim"):
            what = f"per-layer clipping ({rule}) is ahead of global clipping at sigma {sigma}e-6"
            found.append(ahead(what, cell[sigma, rule], cell[sigma, "global"]))
        found.append(ahead(f"dim is ahead of uniform at sigma {sigma}e-6", cell[sigma, "dim"], cell[sigma, "uniform"]))
    lost = cell[3, "dim"]["wer"] - cell[0, "dim"]["wer"]
    found.append(
        claim("points lost to noise of sigma 3e-6 with dim (1.5 in the paper)", round(lost, 2), 3.0, lost <= 3)
    )
    gained = cell[0, "global"]["start"] - cell[10, "dim"]["wer"]
    found.append(
        claim("points gained over the seed at sigma 10e-6 with dim (37 in the paper)", round(gained, 2), 20.0,
              gained >= 20)
    )  # fmt: skip
    for rule in ("uniform", "dim"):
        what = f"{rule} at sigma 100e-6 is level with global clipping at sigma 3e-6"
        found.append(level(what, cell[100, rule], cell[3, "global"]))
    norms = [float(row["norms"]) for row in rows]
    what = "norms of LayerNorms' updates over the attention's: the most over the least of all rules and noises"
    found.append(claim(what, round(max(norms) / min(norms), 2), 2.0, max(norms) <= 2 * min(norms)))
    return found


def _imbalance(rows: list[Row]) -> Claims:
    cell = {(row["c"], row["noise"], row["clipping"]): row for row in rows}
    ratio, words = cell[5, 0.0, "global"]["norms"], "updates of LayerNorms over those of the attention"
    found = [
        claim(f"c = 5: {words} (about 10 in the paper)", ratio, 10.0, ratio >= 10),
        level("c = 1: global and dim are level at noise 1e-3", cell[1, 1e-3, "global"], cell[1, 1e-3, "dim"]),
    ]
    for c in (3, 5):
        what = f"c = {c}: global and dim are level without noise"
        found.append(level(what, cell[c, 0.0, "global"], cell[c, 0.0, "dim"]))
        for s in (3e-4, 1e-3):
            for rule in ("uniform", "dim"):
                what = f"c = {c}: {rule} is ahead of global at noise {s:g}"
                found.append(ahead(what, cell[c, s, rule], cell[c, s, "global"]))
    gaps = [cell[c, 1e-3, "global"]["wer"] - cell[c, 1e-3, "dim"]["wer"] for c in (1, 3, 5)]
    grows = round(gaps[2] - gaps[0], 2)
    found.append(claim("the gap between global and dim at noise 1e-3 grows from c = 1 to c = 5", grows, 0.0, grows > 0))
    for s in (3e-4, 1e-3):
        best = min((cell[5, s, rule] for rule in ("uniform", "dim")), key=lambda row: float(row["wer"]))
        what = f"c = 5 balanced: global clipping is not behind the best per-layer clipping of c = 5 at noise {s:g}"
        lost, clear = cell["balanced", s, "global"]["wer"] - best["wer"], spread(cell["balanced", s, "global"], best)
        found.append(claim(what, round(lost, 2), round(clear, 2), lost <= clear))
    return found


def _table4(rows: list[Row]) -> Claims:
    cell = {(row["seed"], row["cohort"]): row for row in rows}
    return [
        ahead(f"cohorts of 32 are ahead of cohorts of 4, seed: {seed}", cell[seed, 32], cell[seed, 4])
        for seed in ("none", "seed")
    ] + [ahead("a seed is ahead of no seed at cohort 16", cell["seed", 16], cell["none", 16])]


def _table15(rows: list[Row]) -> Claims:
    cell = {row["seed"]: row for row in rows}
    return [
        ahead("a seed stopped at 5 % is ahead of no seed", cell["seed-5%"], cell["none"]),
        ahead("the whole seed is ahead of one stopped at 20 %", cell["seed"], cell["seed-20%"]),
    ]


def _groups(rows: list[Row]) -> Claims:
    cell = {(row["noise on"], row["clipping"]): row for row in rows}
    found = []
    for rule in ("global", "dim"):
        worst = max(("wqkv", "wf", "norms"), key=lambda name: float(cell[name, rule]["wer"]))
        what = f"{rule}: noise on the MLPs alone costs more than noise on {worst} alone, the worst other group"
        found.append(ahead(what, cell[worst, rule], cell["mlp", rule]))
        what = f"{rule}: noise on all but the MLPs costs less than noise on all"
        found.append(ahead(what, cell["all but mlp", rule], cell["all", rule]))
        what = f"{rule}: half of the noise on the MLPs is ahead of all of it"
        found.append(ahead(what, cell["mlp at half", rule], cell["all", rule]))
    return found


def _bounds(rows: list[Row]) -> Claims:
    cell = {(row["C"], row["clipping"]): row for row in rows}
    return [
        level(f"{rule}: C = {bound} and C = 0.01 are level without noise", cell[bound, rule], cell["0.01", rule])
        for bound, rule in cell
        if bound != "0.01"
    ]


def _clients(rows: list[Row]) -> Claims:
    cell = {(row["users"], row["mu"]): row for row in rows}
    plain = cell["speakers", 0.0]
    return [
        ahead("utterances dealt at random are ahead of speakers", cell["iid", 0.0], plain),
        ahead("FedProx with mu = 0.1 is ahead of none", cell["speakers", 0.1], plain),
    ]


def _optimisers(rows: list[Row]) -> Claims:
    cell = {(row["noise"], row["clipping"], row["optimiser"]): row for row in rows}
    return [
        ahead(f"{rule}: LAMB is ahead of Adam at noise {s:g}", cell[s, rule, "lamb"], cell[s, rule, "adam"])
        for s, rule in dict.fromkeys(key[:2] for key in cell)
    ]


def _product(rows: list[Row]) -> Claims:
    whole, noise, proportion = rows
    return [
        level("half of C and twice sigma (the same C sigma) are level with C = 0.01", noise, whole),
        level("half of C and the same sigma (noise in proportion) are level with C = 0.01", proportion, whole),
    ]


def _local(rows: list[Row]) -> Claims:
    epochs, steps, free = rows
    return [
        ahead("ten local epochs are ahead of ten local steps", epochs, steps),
        not_ahead("ten local steps are not ahead of ten local epochs", steps, epochs),
        not_ahead("normalised updates are not ahead of updates as they are", epochs, free),
    ]


def _central(rows: list[Row]) -> Claims:
    seed, fresh = (float(row["norms"]) for row in rows)
    words = "norms of LayerNorms' gradients over those of the attention in central training"
    return [
        claim(f"{words}: LayerNorms dominate from the seed", seed, 1.0, seed > 1),
        claim(f"{words}: LayerNorms do not dominate from scratch", fresh, 1.0, fresh < 1),
    ]


def _precision(rows: list[Row]) -> Claims:
    return [level("bfloat16 and float32 are level", rows[1], rows[0])]


def _table6(rows: list[Row]) -> Claims:
    cell = {(row["seed"], row["cohort"], row["users"]): row for row in rows}
    return [
        ahead(f"utterances dealt at random are ahead of speakers: seed {seed}, cohort {size}", cell[seed, size, "iid"],
              cell[seed, size, "speakers"])
        for seed, size, users in cell if users == "iid"
    ]  # fmt: skip


def _table7(rows: list[Row]) -> Claims:
    cell = {(row["norm"], row["warmup"]): row for row in rows}
    front, behind, warm = cell["pre", 0], cell["post", 0], cell["post", 15]
    return [
        ahead("without a warm-up, LayerNorms in front are ahead of those behind", front, behind),
        level("LayerNorms behind with a warm-up are level with those in front without", front, warm),
    ]


def _table13(rows: list[Row]) -> Claims:
    cell = {row["mu"]: row for row in rows}
    return [ahead(f"FedProx with mu = {mu:g} is ahead of none", cell[mu], cell[0.0]) for mu in cell if mu]


def _pretrained(rows: list[Row]) -> Claims:
    cell = {(row["noise"], row["clipping"]): row for row in rows}
    return [
        ahead(f"low-rank updates of Whisper's encoder: {rule} is ahead of global under noise", cell[LORA_NOISE, rule],
              cell[LORA_NOISE, "global"])
        for rule in ("uniform", "dim")
    ]  # fmt: skip


def _whisper(rows: list[Row]) -> Claims:
    _, plain, *others = rows
    return [
        ahead(f"all of Whisper's encoder: {row['clipping']} is ahead of global under noise", row, plain)
        for row in others
    ]


def _natural(rows: list[Row]) -> Claims:
    cell = {(row["seed"], row["noise"], row["clipping"]): row for row in rows}
    return [
        ahead(f"{seed}: {rule} is ahead of global at noise {s:g}", cell[seed, s, rule], cell[seed, s, "global"])
        for seed, s, rule in cell
        if rule != "global"
    ]


def _local_clip(rows: list[Row]) -> Claims:
    clipped, free = rows
    return [ahead("clipped local gradients are ahead of gradients as they are", clipped, free)]


def _local_optimisers(rows: list[Row]) -> Claims:
    plain, *others = rows
    return [not_ahead(f"local steps by SGD are not ahead of those by {row['local']}", plain, row) for row in others]


def _transfer(rows: list[Row]) -> Claims:
    """By how much the test loss grows, in the mean over cells, where a rate is that of another cell."""
    lost = {}
    for kind in ("lamb", "adam", "lars"):
        own = {(row["blocks"], row["cohort"], row["rate"]): row for row in rows if row["optimiser"] == kind}
        places = {key[:2] for key in own} - {(3, 16)}
        lost[kind] = mean(own[*at, "transferred"]["test_loss"] - own[*at, "best"]["test_loss"] for at in places)
    found = [
        claim(f"LAMB's test loss grows less by transfer of its rate than that of {kind}", round(lost["lamb"], 3),
              round(lost[kind], 3), lost["lamb"] < lost[kind])
        for kind in ("adam", "lars")
    ]  # fmt: skip
    cell = {(row["optimiser"], row["blocks"], row["cohort"], row["rate"]): row for row in rows}
    for layers, cohort in ((3, 4), (3, 16), (12, 4), (12, 16)):
        for kind in ("adam", "lars"):
            what = f"LAMB at one rate has a lower test loss than {kind} at its best: {layers} blocks, cohort {cohort}"
            one, other = cell["lamb", layers, cohort, "transferred"], cell[kind, layers, cohort, "best"]
            less, clear = other["test_loss"] - one["test_loss"], spread(one, other, "test_loss_deviation")
            found.append(claim(what, round(less, 2), round(clear, 2), less > clear))
    return found


def _weighted(rows: list[Row]) -> Claims:
    cell = {row["beta"]: row for row in rows}
    words = "times the share of the bound for the MLPs is not ahead of the split by dimension"
    return [not_ahead(f"{beta:g} {words}", cell[beta], cell[1.0]) for beta in cell if beta != 1]


def _figure13(rows: list[Row]) -> Claims:
    """What the paper says of these norms in words: deltas of 0.7 (Figure 7), which C = 1e-2 always shortens."""
    least = {name: round(min(row[name] for row in rows), 3) for name in ("gradient", "update")}
    loud = {row["clipping"]: row for row in rows if row["sigma"] == max(each["sigma"] for each in rows)}
    return [
        claim("local gradients are longer than their clip of 1, least mean of a cell", least["gradient"], 1.0,
              least["gradient"] > 1),
        claim("updates are longer than C = 0.01 before clipping, least mean of a cell", least["update"], 0.01,
              least["update"] > 0.01),
    ] + [
        claim(f"{rule}: at sigma 100e-6 noise is longer than the aggregate, so with it that is so many times as long",
              round(row["noisy"] / row["aggregate"], 2), 1.41, row["noisy"] > 1.41 * row["aggregate"])
        for rule, row in loud.items()
    ]  # fmt: skip


def _table8(rows: list[Row]) -> Claims:
    cell = {(row["seed"], row["optimiser"]): row for row in rows}
    found = []
    for kind in ("adam", "lars", "sgd"):
        found.append(
            ahead(f"LAMB is ahead of {kind} from a weak seed", cell["seed-20%", "lamb"], cell["seed-20%", kind])
        )
    for kind in ("adam", "lars"):
        found.append(level(f"LAMB and {kind} are level from the whole seed", cell["seed", "lamb"], cell["seed", kind]))
    return found


def _table21(rows: list[Row]) -> Claims:
    cell = {(row["model"], row["clipping"], row["sigma"] > 0): row for row in rows}
    found = [
        ahead(f"{size}: uniform is ahead of global at sigma 10e-6", cell[size, "uniform", True],
              cell[size, "global", True])
        for size in ("narrow", "shallow", "baseline", "wide", "deep")
    ]  # fmt: skip
    return [*found, ahead("without noise, wide is ahead of narrow", cell["wide", "global", False],
                          cell["narrow", "global", False])]  # fmt: skip


_CLAIMS: dict[str, Callable[[list[Row]], Claims]] = {
    "table1": _table1, "imbalance": _imbalance, "table4": _table4, "table15": _table15, "table8": _table8,
    "table21": _table21, "groups": _groups, "bounds": _bounds, "clients": _clients, "transfer": _transfer,
    "table6": _table6, "table7": _table7, "table13": _table13, "pretrained": _pretrained,
    "weighted": _weighted, "figure13": _figure13, "optimisers": _optimisers, "product": _product, "local": _local,
    "central": _central, "precision": _precision, "natural": _natural, "local-clip": _local_clip,
    "local-optimisers": _local_optimisers, "whisper": _whisper,
}  # fmt: skip


def claims_of(what: str, rows: list[Row]) -> Claims:
    """The claims of a table, for its rows."""
    return _CLAIMS[what](rows) if what in _CLAIMS else []

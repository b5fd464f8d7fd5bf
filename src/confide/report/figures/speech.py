"""Figures of PFL-ASR's experiments at our scale."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, stdev
from typing import Any

from matplotlib.ticker import NullFormatter

from confide.report.figures.sheets import sheet

COLOURS = {"global": "#57534e", "uniform": "#c2410c", "dim": "#1d4ed8"}
NAMES = {
    "global": "global clipping", "uniform": "per layer, uniform", "dim": "per layer, dim",
}  # fmt: skip
_KINDS = ("conv", "wqkv", "wf", "w1", "w2", "ln1", "ln2", "norm", "head")


def draw_clipping(path: Path, runs: dict[tuple[float, str], list[dict[str, Any]]]) -> Path:
    """Word error rate against noise for each kind of clipping, and the signal-to-noise ratios that explain it.

    `runs` has the measurements of every seed of a cell (noise, clipping).
    """
    noises = sorted({noise for noise, _ in runs if noise > 0})
    rules = [rule for rule in COLOURS if any(name == rule for _, name in runs)]
    worst = noises[-1]
    with sheet(path, 1, 2, (11, 4.2)) as (_, axes):
        left, right = axes[0]
        quiet = [run["wer"] for (noise, _), own in runs.items() if noise == 0 for run in own]
        for rule in rules:
            known = [noise for noise in noises if (noise, rule) in runs]
            points = [[run["wer"] for run in runs[noise, rule]] for noise in known]
            middles, spread = [mean(p) for p in points], [stdev(p) if len(p) > 1 else 0.0 for p in points]
            left.errorbar(
                known, middles, yerr=spread, color=COLOURS[rule], marker="o", ms=4, lw=1.5, capsize=3, label=NAMES[rule]
            )
        if quiet:
            left.axhline(mean(quiet), color="black", ls=":", lw=1, label="no noise")
        start = [run["start"] for own in runs.values() for run in own]
        left.axhline(mean(start), color="black", ls="--", lw=1, label="seed model")
        left.set(
            xscale="log",
            xlabel="the paper's sigma with the same signal over noise",
            ylabel="word error rate, %",
            ylim=(0, None),
        )
        left.set_xticks(noises, [f"{noise:g}" for noise in noises])
        left.minorticks_off()
        left.set_title("mean and deviation over seeds")
        left.legend()
        width = 0.8 / len(rules)
        for place, rule in enumerate(rules):
            own = runs.get((worst, rule), [])
            if own:
                values = [mean(run["snr"].get(kind, float("nan")) for run in own) for kind in _KINDS]
                xs = [i + (place - (len(rules) - 1) / 2) * width for i in range(len(_KINDS))]
                right.bar(xs, values, width, color=COLOURS[rule], label=NAMES[rule])
        right.set_xticks(range(len(_KINDS)), _KINDS)
        right.set(yscale="log", title=f"signal over noise by kind of tensor, noise {worst:g}")
        right.axhline(1, color="black", lw=0.8)
    return path


def draw_course(path: Path, cells: list[tuple[dict[str, Any], list[list[dict[str, float]]]]]) -> Path:
    """Norms over central steps (Figures 13 and 14): a row of axes for each rule, a curve for each noise, mean of runs.

    `cells` has the row of each cell and, for every run of it, the norms of each step.
    """
    panels = {
        "gradient": "local gradient", "update": "update", "bounded": "update, clipped", "aggregate": "aggregate",
        "noisy": "aggregate with noise",
    }  # fmt: skip
    rules = list(dict.fromkeys(row["clipping"] for row, _ in cells))
    noises = sorted({row["sigma"] for row, _ in cells})
    with sheet(path, len(rules), len(panels), (14, 2.9 * len(rules))) as (_, axes):
        for row, runs in cells:
            colour = f"C{noises.index(row['sigma'])}"
            for axis, (name, title) in zip(axes[rules.index(row["clipping"])], panels.items(), strict=True):
                steps = [step["step"] for step in runs[0] if name in step]
                norms = [mean(own) for own in zip(*([s[name] for s in run if name in s] for run in runs), strict=True)]
                axis.plot(steps, norms, color=colour, lw=1.4, marker="o" if name == "noisy" else None, ms=3,
                          label=f"sigma {row['sigma']:g}")  # fmt: skip
                axis.set(yscale="log", title=title)
        for column, name in enumerate(panels):  # one scale for all rules, wide enough for a curve that does not move
            found = [step[name] for _, runs in cells for run in runs for step in run if step.get(name, 0) > 0]
            for axis in axes[:, column]:
                axis.set_ylim(min(found) / 4, max(found) * 4)
                axis.yaxis.set_minor_formatter(NullFormatter())
        for own, rule in zip(axes, rules, strict=True):
            own[0].set_ylabel(f"{NAMES[rule]}: norm")
            own[-1].legend(fontsize=7)
        for axis in axes[-1]:
            axis.set_xlabel("central step")
    return path


def draw_imbalance(path: Path, rows: list[dict[str, Any]]) -> Path:
    """How far per-layer clipping is ahead of global clipping, against how much longer the LayerNorms' updates are.

    `rows` are those of the table, with means over runs.
    """
    cell = {(row["c"], row["noise"], row["clipping"]): row for row in rows}
    starts = sorted({row["c"] for row in rows if isinstance(row["c"], int)})
    noises = sorted({row["noise"] for row in rows})
    with sheet(path, 1, 2, (11, 4.2)) as (_, axes):
        left, right = axes[0]
        norms = [cell[c, 0.0, "global"]["norms"] for c in starts]
        for noise, style in zip(noises, (":", "--", "-"), strict=False):
            for rule in ("uniform", "dim"):
                gaps = [cell[c, noise, "global"]["wer"] - cell[c, noise, rule]["wer"] for c in starts]
                label = f"{NAMES[rule]}, noise {noise:g}"
                left.plot(norms, gaps, style, color=COLOURS[rule], marker="o", ms=4, lw=1.5, label=label)
        left.axhline(0, color="black", lw=0.8)
        left.set(
            xscale="log", xlabel="norm of updates, LayerNorms over attention",
            ylabel="points by which per-layer is ahead of global",
        )  # fmt: skip
        left.set_xticks(norms, [f"{norm:.2g}" for norm in norms])
        left.minorticks_off()
        left.legend(fontsize=7)
        places = [*starts, "balanced"]
        width = 0.8 / len(COLOURS)
        for number, rule in enumerate(COLOURS):
            own = [cell[c, noises[-1], rule] for c in places]
            xs = [i + (number - 1) * width for i in range(len(places))]
            spread = [float(row["deviation"] or 0) for row in own]
            right.bar(xs, [row["wer"] for row in own], width, yerr=spread, color=COLOURS[rule], label=NAMES[rule])
        right.set_xticks(range(len(places)), [f"c = {c}" if c != "balanced" else "c = 5, balanced" for c in places])
        right.set(ylabel="word error rate, %", title=f"noise {noises[-1]:g}")
        right.legend(fontsize=7)
    return path

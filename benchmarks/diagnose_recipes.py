"""Does following `confide diagnose` help on recipes? Train, diagnose, follow the first advice, train again, compare.

Each recipe is trained to its end and diagnosed. The advice that comes first and has settings is followed, and the run
is made again with each of some seeds that no rehearsal has seen. What is compared is the metric on the test set, which
no rehearsal looks at. "Clearly worse" is worse by more than two standard errors of the difference over seeds.

python benchmarks/diagnose_recipes.py --seeds 3 --data ../shared/data [--json diagnose-recipes.json]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from confide.recipe import Recipe, changed_by, load
from confide.reproduce.grid import cached_task
from confide.runs import folder
from confide.runs.beginning import score_model
from confide.runs.simulation import simulate
from confide.theory.diagnose import diagnose_run
from support.written import write_record

HIGHER = {"accuracy"}
MESSAGES = "task.data.file={data}/sms_spam/SMSSpamCollection"
RECIPES: dict[str, tuple[str, list[str]]] = {
    "digits, epsilon 5": ("convex/digits", []),
    "digits, epsilon 1": ("convex/digits", ["privacy.target_epsilon=1"]),
    "digits, clipped": ("convex/digits", ["bounding={rule: clip, bound: 10}", "privacy.target_epsilon=2"]),
    "quadratics": ("convex/quadratics", ["run.steps=100", "evaluation.every=100"]),
    "help desk, no noise": ("retrieval/embedded", []),
    "help desk, epsilon 8": (
        "retrieval/embedded",
        ["users.weights=uniform", "sampling={kind: poisson, cohort: 10}", "bounding={rule: clip, bound: 1}",
         "privacy={mechanism: gaussian, target_epsilon: 8, delta: 1.0e-2}"],
    ),
    "messages, epsilon 2": ("retrieval/sms-private", [MESSAGES, "run.steps=80"]),
    "phones, epsilon 4": ("retrieval/sms-private-quantile", [MESSAGES]),
    "words, epsilon 8": ("speech/words/private", ["task.start=null", "run.steps=20"]),
}  # fmt: skip


def finals(recipe: Recipe, seeds: range) -> list[float]:
    found = []
    for seed in seeds:
        wanted = changed_by(recipe, [f"run.seed={seed}"])
        loop, state = simulate(wanted, cached_task(recipe.task, recipe.run.seed))
        metrics, _ = score_model(loop.task, loop.layout.views(loop.final.model(state)))
        found.append(metrics[loop.task.metric])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data", default="../shared/data", help="the folder with sms_spam")
    parser.add_argument("--only", nargs="*", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--json", type=Path, help="where the record is written, after every recipe")
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(100, 100 + wanted.seeds)
    rows: list[dict[str, Any]] = []
    for name in wanted.only:
        source, settings = RECIPES[name]
        recipe = load(source, [each.replace("{data}", wanted.data) for each in settings])
        with tempfile.TemporaryDirectory() as place:
            metric = folder.train(recipe, Path(place) / "run", quiet=True)["metric"]
            advice = [each for each in diagnose_run(Path(place) / "run").advice if each.settings]
        row: dict[str, Any] = {"recipe": name, "metric": metric, "advice": None}
        if advice:
            before, after = finals(recipe, seeds), finals(changed_by(recipe, advice[0].settings), seeds)
            sign = 1 if metric in HIGHER else -1
            gap = sign * (mean(after) - mean(before))
            error = ((stdev(before) ** 2 + stdev(after) ** 2) / wanted.seeds) ** 0.5 if wanted.seeds > 1 else 0.0
            row |= {"advice": advice[0].what, "settings": advice[0].settings, "before": mean(before),
                    "after": mean(after), "error": error, "better": gap > 0,
                    "clearly worse": gap < -2 * error}  # fmt: skip
        rows.append(row)
        print(json.dumps(row), flush=True)
        if wanted.json is not None:
            write_record(wanted.json, rows)
    told = [row for row in rows if row["advice"] is not None]
    better, worse = (sum(row[name] for row in told) for name in ("better", "clearly worse"))
    print(f"{len(told)} of {len(rows)} got advice to follow: better {better}, clearly worse {worse}")


if __name__ == "__main__":
    main()

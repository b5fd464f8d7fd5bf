"""Does `confide init` write recipes that train? For each data set: init, train, and the gain over the start.

    .venv/bin/python benchmarks/first_recipes.py --out results/first [--only an4 fsdd] [--json first-recipes.json]

Runs the commands as a user would, one process each, and prints what was found, epsilon, the metric before the first
step and at the end, and processor seconds (features that are kept from earlier count as nothing). first.json keeps
that, so that --only makes single rows again; --json writes all of them as a record.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

from confide.files import data_folder
from support.written import write_record

SETS = ("speech_commands", "an4", "audiomnist", "fsdd", "LibriSpeech", "sms_spam", "ag_news", "arxiv")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for recipes, runs and first.json")
    parser.add_argument("--only", nargs="+", default=SETS, help="these data sets")
    parser.add_argument("--json", type=Path, help="where the record is written")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    record = asked.out / "first.json"
    rows: dict[str, Any] = json.loads(record.read_text()) if record.exists() else {}
    for name in asked.only:
        rows[name] = one(name, asked.out)
        record.write_text(json.dumps(rows, indent=2) + "\n")
        print(name, rows[name], flush=True)
    if asked.json is not None:
        write_record(asked.json, [{"data": name, **row} for name, row in rows.items()])
    worse = [name for name, row in rows.items() if not row["gain"] or row["gain"] <= 0]
    sys.exit(f"no better than they began: {', '.join(worse)}" if worse else 0)


def one(name: str, out: Path) -> dict[str, Any]:
    """Two commands: a recipe, and its run."""
    before = _seconds()
    recipe = out / f"{name}.yaml"
    recipe.unlink(missing_ok=True)
    found = _confide("init", str(data_folder() / name), "--out", str(recipe), "--json")
    summary = _confide("train", str(recipe), "--out", str(out / name), "--json")
    metric, start = summary["metric"], summary["start"]
    return {
        "found": found["found"].replace(f"{data_folder()}/", ""),
        "people": found["people"], "epsilon": summary["epsilon"], "delta": summary["delta"],
        "metric": metric, "began": start["metrics"][metric], "ended": summary["metrics"][metric],
        "gain": start["gain"], "said": start["said"], "processor_seconds": round(_seconds() - before, 1),
    }  # fmt: skip


def _confide(*words: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-m", "confide", *words], stdout=subprocess.PIPE, text=True, check=True)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def _seconds() -> float:
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


if __name__ == "__main__":
    main()

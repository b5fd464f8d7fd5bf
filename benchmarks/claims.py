"""Write docs/claims.md: every claim of the three papers, what we find, and the numbers.

    python benchmarks/claims.py > docs/claims.md

`docs/results/claims.yaml` lists the claims with a verdict each. `docs/results/*.json` are the documents that
`confide reproduce ... --json` printed, with the command that made them. A verdict has to agree with its evidence: one
that says "shown" names claims of these documents that hold, all of them, and "not shown" names at least one that does
not. So a new measurement that changes the answer makes this fail until the verdict is changed too.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
VERDICTS = {
    "shown": "Shown", "conditions": "Shown under conditions", "not shown": "Not shown", "not tried": "Not tried",
}  # fmt: skip
HEAD = """# What the papers claim, and what shows here

Every claim of the three papers that can be tried on a small machine, with a verdict: **shown**, **shown under
conditions** (which are named), **not shown** (and why, as far as we know), or **not tried**. The page is made by
`python benchmarks/claims.py` from the records in `docs/results`, which have what the commands printed, and a test keeps
it that way. A difference counts as clear if it is above twice its standard error over the runs. A verdict with numbers
names its record; one without them stands on a test or on another of these documents. Nothing here says that a paper is
wrong: the models are hundreds of times smaller, and so are the populations.
"""


def load_records(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """The recorded documents by name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def evidence_of(entry: dict[str, Any], records: dict[str, dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """The recorded claims that an entry names, each with its record."""
    found = []
    for name, claims in entry.get("evidence", {}).items():
        known = {one["claim"]: one for one in records[name]["claims"]}
        for text in claims:
            if text not in known:
                raise SystemExit(f"{entry['claim']!r} names {text!r}, which {name}.json does not have")
            found.append((name, known[text]))
    return found


def check(entry: dict[str, Any], found: list[tuple[str, dict[str, Any]]]) -> None:
    """Refuse a verdict that its evidence does not bear out."""
    holds = [one["holds"] for _, one in found]
    verdict, text = entry["verdict"], entry["claim"]
    if verdict not in VERDICTS:
        raise SystemExit(f"{text!r}: verdict {verdict!r}; expected one of {', '.join(VERDICTS)}")
    if verdict == "shown" and not all(holds):
        raise SystemExit(f"{text!r} is said to be shown, but a claim that it names does not hold")
    if verdict == "not shown" and holds and all(holds):
        raise SystemExit(f"{text!r} is said not to be shown, but all claims that it names hold")
    if verdict in ("shown", "conditions") and not (found or entry.get("why")):
        raise SystemExit(f"{text!r} has no evidence")


def page(entries: list[dict[str, Any]], records: dict[str, dict[str, Any]]) -> str:
    """The whole page."""
    parts = [HEAD, _summary(entries)]
    for paper in dict.fromkeys(entry["paper"] for entry in entries):
        parts.append(f"## {paper}\n")
        parts += [_entry(entry, records) for entry in entries if entry["paper"] == paper]
    parts.append("## Records\n\n| record | command |\n|---|---|")
    parts += [f"| `docs/results/{name}.json` | `{record['command']}` |" for name, record in records.items()]
    return "\n".join(parts) + "\n"


def _summary(entries: list[dict[str, Any]]) -> str:
    papers = list(dict.fromkeys(entry["paper"] for entry in entries))
    lines = ["| | " + " | ".join(word.lower() for word in VERDICTS.values()) + " |", "|---|---|---|---|---|"]
    for paper in papers:
        counts = [sum(e["paper"] == paper and e["verdict"] == kind for e in entries) for kind in VERDICTS]
        lines.append(f"| {paper} | " + " | ".join(map(str, counts)) + " |")
    return "\n".join([*lines, ""])


def _entry(entry: dict[str, Any], records: dict[str, dict[str, Any]]) -> str:
    found = evidence_of(entry, records)
    check(entry, found)
    lines = [f"**{entry['claim']}** ({entry['where']}) {VERDICTS[entry['verdict']]}."]
    if entry.get("why"):
        lines[0] += f" {' '.join(entry['why'].split())}"
    if found:
        lines += ["", "| measured | value | threshold | holds | record |", "|---|---|---|---|---|"]
        for name, one in found:
            said = "yes" if one["holds"] else "no"
            lines.append(f"| {one['claim']} | {one['value']:.4g} | {one['threshold']:.4g} | {said} | {name} |")
    return "\n".join([*lines, ""])


def main() -> str:
    entries = yaml.safe_load((RESULTS / "claims.yaml").read_text())
    return page(entries, load_records())


if __name__ == "__main__":
    sys.stdout.write(main())

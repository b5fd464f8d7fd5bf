"""The page of claims is what the command makes of the records, and a verdict against its evidence is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import claims

ROOT = Path(__file__).resolve().parents[1]
RECORDS: dict[str, dict[str, Any]] = {
    "run": {
        "command": "confide reproduce x/y",
        "claims": [
            {"claim": "up", "value": 2.0, "threshold": 1.0, "holds": True},
            {"claim": "down", "value": 0.0, "threshold": 1.0, "holds": False},
        ],
    }
}


def entry(verdict: str, *names: str) -> dict[str, Any]:
    return {"paper": "P", "where": "Table 1", "claim": "It rises.", "verdict": verdict, "evidence": {"run": [*names]}}


def test_the_page_is_what_the_command_makes_of_the_records() -> None:
    assert (ROOT / "docs" / "claims.md").read_text() == claims.main()


def test_every_record_has_its_command_and_claims_with_numbers() -> None:
    for name, record in claims.load_records().items():
        assert record["command"].startswith("confide reproduce "), name
        for one in record["claims"]:
            assert isinstance(one["holds"], bool)
            assert isinstance(one["value"], int | float)
            assert isinstance(one["threshold"], int | float)


@pytest.mark.parametrize(
    "wrong",
    [
        entry("shown", "up", "down"),
        entry("not shown", "up"),
        entry("proved", "up"),
        entry("shown"),
        entry("shown", "x"),
    ],
)
def test_a_verdict_that_its_evidence_does_not_bear_out_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SystemExit):
        claims.page([wrong], RECORDS)


def test_a_page_has_the_numbers_and_the_command() -> None:
    text = claims.page([entry("shown", "up"), entry("not shown", "down"), entry("conditions", "up", "down")], RECORDS)
    assert "| up | 2 | 1 | yes | run |" in text
    assert "`confide reproduce x/y`" in text
    assert "| P | 1 | 1 | 1 | 0 |" in text

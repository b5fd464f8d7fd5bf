"""Claims about PFL-ASR's tables at our scale: every cell is a sound recipe, results are kept, and rows say what ran."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest

from confide import recipe
from confide.errors import UserError
from confide.reproduce import pfl_asr

Command = Callable[..., tuple[int, str, str]]
VOICES = "{kind: synthetic, speakers: 4, utterances: 3, sentences: digits, digits: [1, 2]"
SMALL = f"""\
task:
  kind: speech
  corpus: {VOICES}, population: POPULATION}}
  test: {VOICES}, population: test}}
  POOL
  model: {{preset: tiny, layers: 1, width: 32, mlp: 32}}
  augment: null
sampling: {{kind: KIND, cohort: 2}}
local: {{steps: 1, learning_rate: 0.1, batch_seconds: 4}}
bounding: {{rule: clip, bound: 0.01}}
central: {{kind: lamb, learning_rate: 0.01}}
run: {{steps: 2}}
"""


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A base whose seed and federated runs take a second."""
    base = tmp_path / "base"
    base.mkdir()
    (base / "seed").write_text(SMALL.replace("POPULATION", "seed").replace("POOL", "pool: 2").replace("KIND", "fixed"))
    (base / "federated").write_text(
        SMALL.replace("POPULATION", "federated").replace("POOL", "").replace("KIND", "poisson")
    )
    monkeypatch.setitem(pfl_asr.BASES, "synthetic", str(base))
    return tmp_path


@pytest.mark.parametrize("base", pfl_asr.BASES.values())
@pytest.mark.parametrize("name", pfl_asr.TABLES)
def test_every_cell_of_every_table_is_a_sound_recipe_of_its_own(name: str, base: str) -> None:
    digests = []
    for cell in pfl_asr.TABLES[name]():
        for tried in cell.best_of:
            start = "task.start=null" if cell.start == pfl_asr.FRESH else f"task.start={cell.start}"
            found = recipe.load(f"{base}/federated", [start, *pfl_asr.resolve(cell.changes), *tried])
            digests.append(found.digest)
    assert len(set(digests)) == len(digests)
    assert any(cell.paper for cell in pfl_asr.TABLES[name]())


def test_the_noise_of_a_cell_is_the_papers_sigma_on_the_average() -> None:
    found = recipe.load("speech/embedded/federated", [*pfl_asr.noisy(1e-3)])
    assert (found.privacy.noise_scale, found.privacy.placement) == (1e-3, "average")


@pytest.mark.usefixtures("warm_processes")
@pytest.mark.usefixtures("no_figures")
def test_a_table_trains_its_seed_once_and_keeps_its_cells(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [
        pfl_asr.Cell({"noise": s, "clipping": "dim"}, (pfl_asr.CLIPPING["dim"], *pfl_asr.noisy(s)), paper="1.0")
        for s in (0.0, 0.1)
    ]
    tried = (("central.learning_rate=0.01",), ("central.learning_rate=0.02",))
    cells.append(pfl_asr.Cell({"noise": 0.0, "clipping": "fresh"}, (), pfl_asr.FRESH, "", tried))
    monkeypatch.setitem(pfl_asr.TABLES, "table1", lambda: cells)
    out = small / "results" / "table1"
    first = pfl_asr.reproduce("table1", out, "synthetic", 2, 1, quiet=True)
    assert [row["epsilon"] == "none" for row in first.rows] == [True, False, True]
    assert "wqkv" in first.rows[1]["snr"]
    assert first.rows[2]["chosen"] in {t[0] for t in tried}
    assert (small / "results" / "synthetic-seeds" / "seed" / "model.safetensors").exists()
    lines = (out.parent / "synthetic-cells" / "cells.jsonl").read_text()
    assert len(lines.splitlines()) == 2 * 2 + 2 + 1, "two rates are tried in one run, and the better one is run again"
    again = pfl_asr.reproduce("table1", out, "synthetic", 2, 1, quiet=True)
    assert (out.parent / "synthetic-cells" / "cells.jsonl").read_text() == lines
    assert again.rows == first.rows
    with (out / "rows.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 3
    assert "paper" in first.text


def test_unknown_tables_and_corpora_are_refused(command: Command, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="table1, table4"):
        pfl_asr.reproduce("table2", tmp_path, "synthetic", 1, 1)
    with pytest.raises(UserError, match="audiomnist"):
        pfl_asr.reproduce("table1", tmp_path, "digits", 1, 1)
    assert command("reproduce", "pfl-asr/table2", "--out", tmp_path / "x")[0] == 2

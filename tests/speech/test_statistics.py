"""Numbers over speakers, and the figure drawn from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from confide.report.figures.corpus import draw_corpora
from confide.speech.corpus import Corpus, Skipped, Utterance
from confide.speech.statistics import TABLE_2, statistics, summarise


def corpus(minutes: dict[str, list[float]]) -> Corpus:
    speakers = {
        name: [Utterance(f"{name}-{i}", name, (Path("x.wav"),), 60 * m, "two words") for i, m in enumerate(own)]
        for name, own in minutes.items()
    }
    skipped = [Skipped("a", "empty text"), Skipped("b", "longer than 30 s: 31.0 s"), Skipped("c", "empty text")]
    return Corpus("made", "en", speakers, skipped)


def test_a_corpus_is_counted_per_speaker() -> None:
    counts = statistics(corpus({"ann": [1.0, 2.0], "bob": [5.0], "eve": [0.5, 0.5, 3.0]}))
    assert (counts.speakers, counts.utterances, counts.words) == (3, 6, 12)
    assert counts.hours == pytest.approx(12 / 60)
    assert counts.minutes_per_speaker == pytest.approx([3, 5, 4])
    assert (counts.minutes.mean, counts.minutes.median) == pytest.approx((4, 4))
    assert counts.minutes.deviation == pytest.approx(np.sqrt(2 / 3))
    assert (counts.samples.minimum, counts.samples.maximum) == (1, 3)
    assert counts.words_per_speaker == [4, 2, 6]
    assert counts.skipped == {"empty text": 2, "longer than 30 s": 1}
    document = counts.to_json()
    assert document["minutes_per_speaker"]["maximum"] == pytest.approx(5)
    assert document["utterances_per_speaker"]["mean"] == 2


@given(st.lists(st.floats(0.01, 1e4), min_size=1, max_size=50))
def test_summaries_agree_with_numpy(values: list[float]) -> None:
    summary = summarise(values)
    assert summary.mean == pytest.approx(np.mean(values))
    assert summary.deviation == pytest.approx(np.std(values), abs=1e-9, rel=1e-6)
    assert summary.median == pytest.approx(np.median(values))
    assert (summary.minimum, summary.maximum) == (min(values), max(values))


def test_table_2_adds_up() -> None:
    for whole, parts in {
        "LS-860": ("LS-360", "LS-500"),
        "LS-960": ("LS-100", "LS-860"),
        "CV-en-train": ("CV-en-train-10", "CV-en-train-90"),
        "CV-fr-train": ("CV-fr-train-10", "CV-fr-train-90"),
        "CV-de-train": ("CV-de-train-10", "CV-de-train-90"),
    }.items():
        assert TABLE_2[whole].speakers == sum(TABLE_2[part].speakers for part in parts)
        assert TABLE_2[whole].hours == pytest.approx(sum(TABLE_2[part].hours for part in parts), abs=0.11)


@pytest.mark.parametrize(
    "minutes",
    [
        {"one": [3.0]},
        {"ann": [2.0, 2.0], "bob": [2.0, 2.0]},
        {f"s{n}": [0.02 * 1.2**n] * (1 + n * n) for n in range(40)},
    ],
    ids=["one speaker", "all alike", "unlike"],
)
def test_a_figure_is_drawn_for_any_spread_of_speakers(tmp_path: Path, minutes: dict[str, list[float]]) -> None:
    import matplotlib.image

    counts = statistics(corpus(minutes))
    path = draw_corpora(tmp_path / "folder" / "figure.png", [counts, counts])
    picture = matplotlib.image.imread(path)
    assert picture.shape[0] > 500
    assert picture.shape[1] > 1_000
    # Not a blank sheet: the bars' blue is in it.
    blue = (picture[..., 2] > 0.8) & (picture[..., 0] < 0.4)
    assert blue.sum() > 1_000


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("values", [[1, 1, 2, 3, 900], [5, 5], [7], [9, 14, 12, 13], list(range(1, 200))])
def test_no_speaker_falls_outside_the_bins(values: list[float], whole: bool) -> None:
    from confide.report.figures.corpus import _edges

    wide = max(values) / min(values) > 30
    counts, _ = np.histogram(values, _edges(values, wide, whole))
    assert counts.sum() == len(values)

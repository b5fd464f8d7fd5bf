"""Word and character error rates of a corpus, with an interval (PFL-ASR section 4, "Evaluation").

Errors and reference words are summed over the corpus before they are divided: a long utterance counts for more than a
short one. An empty reference has no words, and whatever was heard instead counts as insertions.

The interval is a percentile bootstrap over speakers: utterances of one speaker resemble each other, so drawing
utterances would make the interval too narrow. With a single speaker its utterances are drawn.

Differs from the paper: its released code weights each utterance's rate; this is the usual corpus rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from confide.errors import UserError


@dataclass(frozen=True)
class Rate:
    """An error rate, as a share (1.0 is 100 %, and more is possible), with its interval."""

    value: float
    low: float
    high: float
    errors: int
    total: int  # words, or characters, of the references


@dataclass(frozen=True)
class Scores:
    """What an evaluation says; `of_speaker` leaves out speakers whose references have no word."""

    wer: Rate
    cer: Rate
    of_speaker: dict[str, float]  # word error rates
    utterances: int
    empty_references: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def score(
    references: Sequence[str],
    hypotheses: Sequence[str],
    speakers: Sequence[str],
    draw: np.random.Generator,
    resamples: int = 1000,
    level: float = 0.95,
) -> Scores:
    """Both rates of a corpus, one entry per utterance; texts have to be normalised in the same way."""
    if not len(references) == len(hypotheses) == len(speakers):
        given = f"{len(references)} references, {len(hypotheses)} hypotheses and {len(speakers)} speakers"
        raise UserError(f"{given} were given; there has to be one of each per utterance")
    if resamples < 1 or not 0 < level < 1:
        raise UserError(f"resamples={resamples}, level={level}: give at least one resample and a level between 0 and 1")
    in_words = error_counts(references, hypotheses, characters=False)  # (utterances, 2)
    in_characters = error_counts(references, hypotheses, characters=True)
    if in_words[:, 1].sum() == 0:
        raise UserError(f"none of {len(references)} references has a word; an error rate needs a reference text")
    names, owner = np.unique(np.asarray(speakers, dtype=np.str_), return_inverse=True)
    groups = owner if len(names) > 1 else np.arange(len(references))
    picks = _picks(int(groups.max()) + 1, resamples, draw)
    own = _sums(in_words, owner)
    return Scores(
        _rate(in_words, groups, picks, level),
        _rate(in_characters, groups, picks, level),
        {str(name): float(errors / total) for name, (errors, total) in zip(names, own, strict=True) if total},
        len(references),
        int((in_words[:, 1] == 0).sum()),
    )


def error_counts(references: Sequence[str], hypotheses: Sequence[str], characters: bool) -> np.ndarray:
    """Errors (substitutions, insertions, deletions) and size of the reference, per utterance."""  # (utterances, 2)
    import jiwer

    if not references:
        return np.zeros((0, 2), dtype=np.int64)
    process = jiwer.process_characters if characters else jiwer.process_words
    output = process(list(references), list(hypotheses))
    counts = np.zeros((len(references), 2), dtype=np.int64)
    for row, chunks, reference in zip(counts, output.alignments, output.references, strict=True):
        wrong = (c for c in chunks if c.type != "equal")
        row[0] = sum(max(c.ref_end_idx - c.ref_start_idx, c.hyp_end_idx - c.hyp_start_idx) for c in wrong)
        row[1] = len(reference)
    return counts


def _picks(groups: int, resamples: int, draw: np.random.Generator) -> np.ndarray:
    """How often each resample takes each group."""  # (resamples, groups)
    return draw.multinomial(groups, np.full(groups, 1 / groups), size=resamples)


def _sums(counts: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Errors and sizes of each group."""  # (groups, 2)
    return np.stack([np.bincount(groups, weights=column) for column in counts.T], axis=1)


def _rate(counts: np.ndarray, groups: np.ndarray, picks: np.ndarray, level: float) -> Rate:
    errors, total = (int(n) for n in counts.sum(axis=0))
    drawn = picks @ _sums(counts, groups)  # (resamples, 2)
    drawn = drawn[drawn[:, 1] > 0]  # a resample of empty references alone has no rate
    rates = drawn[:, 0] / drawn[:, 1] if len(drawn) else np.array([errors / total])
    low, high = np.quantile(rates, [(1 - level) / 2, (1 + level) / 2])
    return Rate(errors / total, float(low), float(high), errors, total)

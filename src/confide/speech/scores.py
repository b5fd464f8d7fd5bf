"""Word and character error rates of a corpus, with an interval (PFL-ASR section 4, "Evaluation").

Errors and reference words are summed over the corpus before they are divided: a long utterance counts for more than a
short one. Words that are recognised where the reference is empty count as insertions.

The interval is that of `confide.federated.intervals`, over speakers: utterances of one speaker resemble each other, so
drawing utterances would make the interval too narrow. With a single speaker its utterances are drawn.

Differs from the paper: its released code weights each utterance's rate; this is the usual corpus rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from confide.errors import UserError
from confide.federated.intervals import LEVEL, RESAMPLES, interval
from confide.federated.items import Items, number_names

WORST = 20
"""So many utterances a run keeps with their texts."""


@dataclass(frozen=True)
class Rate:
    """An error rate, as a share (1.0 is 100 %, and more is possible), with its interval."""

    value: float
    low: float
    high: float
    errors: int
    total: int  # words, or characters, of the references


@dataclass(frozen=True)
class SpeakerScore:
    """How well one speaker is understood; rates are shares."""

    name: str
    wer: float
    cer: float
    utterances: int
    words: int


@dataclass(frozen=True)
class Scores:
    """Both rates of a corpus, and of each speaker whose references have a word, in falling order of their WER."""

    wer: Rate
    cer: Rate
    speakers: tuple[SpeakerScore, ...]
    utterances: int
    empty_references: int


@dataclass(frozen=True)
class Transcribed:
    """References, hypotheses and speakers, one of each per utterance; one token set normalises all texts."""

    references: list[str]
    hypotheses: list[str]
    speakers: list[str]

    def __post_init__(self) -> None:
        if not len(self.references) == len(self.hypotheses) == len(self.speakers):
            given = f"{len(self.references)} references, {len(self.hypotheses)} hypotheses and {len(self.speakers)}"
            raise UserError(f"{given} speakers were given; there has to be one of each per utterance")
        if not any(reference.split() for reference in self.references):
            raise UserError(
                f"none of {len(self.references)} references has a word; an error rate needs a reference text"
            )

    def items(self, characters: bool = False, test: str = "") -> Items:
        """The errors in each utterance, in words or characters; `test` names the test set."""
        errors = error_counts(self.references, self.hypotheses, characters).astype(np.float64)  # (utterances, 2)
        names, places = number_names(self.speakers)
        metric = "cer" if characters else "wer"
        worst = () if characters else self._worst(errors)
        return Items(metric, "lower", 100.0, "speaker", True, names, places, errors[:, 0], errors[:, 1], test, worst)

    def _worst(self, errors: np.ndarray) -> tuple[tuple[str, str, str, float], ...]:
        """The utterances with the most errors for their words, and of equal ones those with more errors."""
        rates = 100 * errors[:, 0] / np.maximum(errors[:, 1], 1)
        order = [int(i) for i in np.lexsort((-errors[:, 0], -rates)) if errors[i, 0] > 0][:WORST]
        return tuple((self.speakers[i], self.references[i], self.hypotheses[i], float(rates[i])) for i in order)

    def score(self, level: float = LEVEL, resamples: int = RESAMPLES) -> Scores:
        """Both rates, as shares, with intervals at this level from so many bootstrap samples."""
        words, characters = (replace(self.items(kind), scale=1.0) for kind in (False, True))
        wer, cer = (
            Rate(each.value, *interval(each, level, resamples), int(each.counts.sum()), int(each.sizes.sum()))
            for each in (words, characters)
        )
        in_characters = {name: rate for name, rate, _, _ in characters.table()}
        speakers = tuple(
            SpeakerScore(name, rate, in_characters[name], utterances, int(size))
            for name, rate, utterances, size in words.table()
        )
        return Scores(wer, cer, speakers, len(self.references), int((words.sizes == 0).sum()))


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

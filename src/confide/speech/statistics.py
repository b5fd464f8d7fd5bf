"""How much each speaker says: the numbers of PFL-ASR's Table 2, and what its Figure 1 draws.

Differs from the paper: the median, the utterances and the words per speaker are added. Deviations divide by the
number of speakers, not by one less.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median, pstdev
from typing import Any

from confide.speech.corpus import Corpus, count_by_reason
from confide.speech.tokens import Tokens, damage, has_letters


@dataclass(frozen=True)
class Summary:
    """One number per speaker, summed up."""

    mean: float
    deviation: float
    minimum: float
    median: float
    maximum: float


@dataclass(frozen=True)
class Statistics:
    """A row of Table 2 and more; the lists hold one value per speaker, in the order of their names."""

    name: str
    language: str
    speakers: int
    utterances: int
    words: int
    hours: float
    minutes_per_speaker: list[float]
    utterances_per_speaker: list[int]
    words_per_speaker: list[int]
    skipped: dict[str, int]
    damaged: dict[str, int] | None
    """Utterances whose text normalising damages, by what it does; none where there is no token set to tell."""

    @property
    def minutes(self) -> Summary:
        return summarise(self.minutes_per_speaker)

    @property
    def samples(self) -> Summary:
        return summarise(self.utterances_per_speaker)

    @property
    def spoken(self) -> Summary:
        return summarise(self.words_per_speaker)

    def to_json(self) -> dict[str, Any]:
        found = {"corpus" if key == "name" else key: value for key, value in asdict(self).items()}
        return {key: asdict(summarise(found[key])) if key.endswith("_per_speaker") else found[key] for key in found}


@dataclass(frozen=True)
class Published:
    """A row of Table 2 as printed: hours, speakers, and minutes per speaker."""

    hours: float
    speakers: int
    mean: float
    deviation: float
    minimum: float
    maximum: float


TABLE_2 = {
    "LS-100": Published(100.6, 251, 24.1, 2.7, 5.5, 25.2),
    "LS-360": Published(363.6, 921, 23.7, 3.2, 1.9, 25.3),
    "LS-500": Published(496.9, 1_166, 25.6, 5.9, 3.0, 30.3),
    "LS-860": Published(860.5, 2_087, 24.7, 5.1, 1.9, 30.3),
    "LS-960": Published(961.1, 2_338, 24.7, 4.9, 1.9, 30.3),
    "CV-en-train": Published(1593.7, 34_753, 2.8, 32.7, 0.02, 5049.6),
    "CV-en-train-10": Published(149.5, 3_475, 2.6, 17.3, 0.03, 755.1),
    "CV-en-train-90": Published(1444.2, 31_278, 2.8, 34.0, 0.02, 5049.6),
    "CV-en-train-05": Published(79.5, 1_737, 2.7, 15.8, 0.03, 508.3),
    "CV-en-train-95": Published(1514.2, 33_016, 2.7, 33.4, 0.02, 5049.6),
    "CV-fr-train": Published(727.9, 6_856, 6.4, 57.2, 0.04, 3081.2),
    "CV-fr-train-10": Published(47.6, 685, 4.2, 13.6, 0.07, 235.1),
    "CV-fr-train-90": Published(680.3, 6_171, 6.6, 60.2, 0.04, 3081.2),
    "CV-de-train": Published(852.8, 7_127, 7.2, 89.2, 0.03, 6249.9),
    "CV-de-train-10": Published(52.2, 712, 4.4, 11.4, 0.04, 120.8),
    "CV-de-train-90": Published(800.6, 6_415, 7.5, 94.0, 0.03, 6249.9),
}


def summarise(values: Sequence[float]) -> Summary:
    """Sum up at least one value."""
    return Summary(fmean(values), pstdev(values), float(min(values)), float(median(values)), float(max(values)))


def statistics(corpus: Corpus) -> Statistics:
    """Count a corpus that has at least one speaker, as every corpus that `read_corpus` gives has."""
    seconds = [sum(u.seconds for u in own) for own in corpus.speakers.values()]
    utterances = [len(own) for own in corpus.speakers.values()]
    words = [sum(len(u.text.split()) for u in own) for own in corpus.speakers.values()]
    return Statistics(
        name=corpus.name, language=corpus.language, speakers=len(corpus.speakers), utterances=sum(utterances),
        words=sum(words), hours=sum(seconds) / 3600, minutes_per_speaker=[s / 60 for s in seconds],
        utterances_per_speaker=utterances, words_per_speaker=words, skipped=count_by_reason(corpus.skipped),
        damaged=_damaged(corpus),
    )  # fmt: skip


def _damaged(corpus: Corpus) -> dict[str, int] | None:
    """Count utterances by what normalising their texts would remove or fold."""
    if not has_letters(corpus.language):
        return None
    tokens = Tokens(corpus.language)
    found = Counter(kind for utterance in corpus.utterances() for kind in damage(tokens, utterance.text))
    return dict(found.most_common())

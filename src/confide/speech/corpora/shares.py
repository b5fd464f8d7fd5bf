"""Random choices that are the same on every machine: shares of the speakers, and users without speakers (the control).

PFL-ASR, section 4 and Table 2: CV-en-train-10 is all the data of a randomly chosen 10 % of the speakers, and
CV-en-train-90 the rest. PFL-ASR, Figure 4 and Tables 5 and 6: in the IID control each utterance gets a user drawn
uniformly from the users there are.

All draws are hashes of names. They do not depend on the order of a listing, on Python's hash seed, or on a version of
numpy, which does not promise to keep its shuffles.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace

from confide.errors import UserError
from confide.speech.corpus import Corpus, Utterance

# Independent of a run's seed: whatever the seeds of their runs, a seed model and the users it meets later are cut from
# one order, so they never share a speaker.
_ORDER_KEY = b"confide/speakers"


def hash_to_integer(seed: int, *words: str) -> int:
    """64 bits that look random and depend on the seed and the words alone."""
    text = "\0".join((str(seed), *words))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def choose_share(speakers: Iterable[str], percent: int) -> set[str]:
    """Choose so many percent of the speakers: below 50 the first of a fixed order, above 50 all but the complement.

    So 10 and 90 are disjoint and complete, as are 5 and 95. The smaller share is rounded down, as in Table 2.
    """
    order = sorted(set(speakers), key=_place)
    cut = len(order) * min(percent, 100 - percent) // 100
    chosen = order[:cut] if percent < 50 else order[cut:]
    if not chosen:
        raise UserError(
            f"share={percent}: {percent} % of {len(order)} speakers is not one speaker; raise share, or use a corpus "
            "with more speakers"
        )
    return set(chosen)


def assign_at_random(corpus: Corpus, seed: int) -> Corpus:
    """Give each utterance to a user drawn uniformly from the names of the corpus's speakers.

    A user who gets no utterance is left out.
    """
    names = list(corpus.speakers)
    users: dict[str, list[Utterance]] = {name: [] for name in names}
    for utterance in corpus.utterances():
        user = names[hash_to_integer(seed, "iid", utterance.id) % len(names)]
        users[user].append(replace(utterance, speaker=user))
    kept = {name: sorted(own, key=lambda u: u.id) for name, own in users.items() if own}
    return replace(corpus, name=f"{corpus.name}-IID", speakers=kept)


def _place(speaker: str) -> tuple[bytes, str]:
    return hashlib.blake2b(speaker.encode(), key=_ORDER_KEY, digest_size=16).digest(), speaker

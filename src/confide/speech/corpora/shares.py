"""Who is drawn: shares of the speakers, and the control without speakers, the same on every machine.

PFL-ASR, section 4 and Table 2: CV-en-train-10 is all the data of a randomly chosen 10 % of the speakers, and
CV-en-train-90 the rest. PFL-ASR, Figure 4 and Tables 5 and 6: in the IID control each utterance gets a user drawn
uniformly from the users there are.

All draws are hashes of names. They do not depend on the order of a listing, on Python's hash seed, or on a version of
numpy, whose shuffles carry no such promise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace

from confide.errors import UserError
from confide.speech.corpus import Corpus, Utterance

# Without the seed of a run: a seed model and the users it meets later are cut from one order, whatever their runs'
# seeds, so they never share a speaker.
_ORDER_KEY = b"confide/speakers"


def drawn(seed: int, *words: str) -> int:
    """64 random bits that belong to these words."""
    text = "\0".join((str(seed), *words))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def share(speakers: Iterable[str], percent: int) -> set[str]:
    """A share of the speakers: below 50 the first of a fixed order, above 50 the rest after its complement.

    So 10 and 90 are disjoint and complete, as are 5 and 95. The smaller share is rounded down, as in Table 2.
    """
    order = sorted(set(speakers), key=_place)
    smaller = min(percent, 100 - percent)
    cut = len(order) * smaller // 100
    chosen = order[:cut] if percent < 50 else order[cut:]
    if not chosen:
        raise UserError(
            f"share={percent}: {percent} % of {len(order)} speakers is not one speaker; raise share, or use a corpus "
            "with more speakers"
        )
    return set(chosen)


def iid(corpus: Corpus, seed: int) -> Corpus:
    """The same utterances, each given to a user drawn uniformly from the names of the corpus's speakers.

    A user to whom nothing falls is not in the result: there would be nothing to train on.
    """
    names = list(corpus.speakers)
    users: dict[str, list[Utterance]] = {name: [] for name in names}
    for utterance in corpus.utterances():
        user = names[drawn(seed, "iid", utterance.id) % len(names)]
        users[user].append(replace(utterance, speaker=user))
    kept = {name: sorted(own, key=lambda u: u.id) for name, own in users.items() if own}
    return replace(corpus, name=f"{corpus.name}-IID", speakers=kept)


def _place(speaker: str) -> tuple[bytes, str]:
    return hashlib.blake2b(speaker.encode(), key=_ORDER_KEY, digest_size=16).digest(), speaker

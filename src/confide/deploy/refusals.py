"""Why a client does not answer: in full to its owner, as one of a few codes to the server.

What goes wrong on a client may name its files or quote its data, so no word of it travels. A code is one of `MEANINGS`,
and the server prints the sentence that it has for it here: it takes no text from clients either.
"""

from __future__ import annotations

import sys

from confide.errors import UserError
from confide.privacy.trust.own_noise import Spent

TRUST, NOISE, ROUND, LIFETIME = "trust", "noise", "epsilon-round", "epsilon-lifetime"
POPULATION, REHEARSAL, RECIPE, VERSION, OTHER_RECIPE = "population", "rehearsal", "recipe", "version", "other-recipe"
MODEL, QUESTION, JOIN_FIRST, SPENT, DATA, FAILED = "model", "question", "join-first", "spent", "data", "failed"
ENCODER, PEERS, ROSTER, WAITING = "encoder", "peers", "roster", "waiting"
MEANINGS = {
    TRUST: "its policy wants another privacy.trust",
    NOISE: "its policy wants more noise",
    ROUND: "an answer would cost more epsilon than its policy allows for a round",
    LIFETIME: "its lifetime budget does not allow another answer",
    POPULATION: "its policy does not believe the number of users",
    REHEARSAL: "the noise is seeded, or there is none, and its policy allows that for rehearsals alone",
    RECIPE: "it cannot make a run of the recipe that it was told",
    VERSION: "it has another version of confide",
    OTHER_RECIPE: "it has another recipe",
    MODEL: "it has another model",
    ENCODER: "its policy names another frozen encoder than the server has",
    QUESTION: "it was asked something that does not belong to this run or round",
    PEERS: "what it was told of this round does not fit its roster, its neighbours or what it was told before",
    ROSTER: "its policy names no roster of its peers' keys, which distributed trust needs",
    JOIN_FIRST: "it was started anew and has to be asked to join first",
    SPENT: "it has given all the answers that its guarantee was made for",
    DATA: "it cannot use its data; its owner sees why",
    WAITING: "it is a relay, and too few of its own clients are there",
    FAILED: "something went wrong there; its owner sees what",
}


class RefusedByClient(UserError):
    """A client does not do what a server asks. The text is for the client's owner, the code for the server."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


def to_owner(text: str) -> None:
    """Say something to whoever runs this process."""
    print(text, file=sys.stderr, flush=True)


def code_of(error: BaseException) -> str:
    """All that a server hears of an error."""
    if isinstance(error, Spent):
        return LIFETIME if error.lifetime else SPENT
    return error.code if isinstance(error, RefusedByClient) else FAILED


def meaning(code: object) -> str:
    """What the server says about a code that a client sent; a text that is no code is not repeated."""
    return MEANINGS.get(code, "for a reason that is not known here") if isinstance(code, str) else MEANINGS[FAILED]

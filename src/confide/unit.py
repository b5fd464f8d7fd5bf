"""What one user is: the unit that a guarantee protects, and whether it is a person.

Differential privacy protects whatever the accounting calls a user. Where data were dealt to made-up users at random, a
person's data lie with many of them, and nothing is promised to that person. So every task says what its users are, the
ledger's first line keeps it, and every statement of a guarantee names it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from confide.settings import Section

UnitName = Annotated[str, Field(min_length=2, max_length=80, pattern=r"^[^\x00-\x1f\x7f<>]+$")]


class Unit(Section):
    """What one user is.

    Examples:
        >>> from confide.recipe import load
        >>> load("convex/digits").unit
        Unit(name='simulated client with rows of a public data set', person=False, origin='made-up')
    """

    name: UnitName = Field(description="what one user is, in the singular: speaker, device, owner of documents")
    person: bool = Field(description="whether one user is one person")
    origin: Literal["found", "declared", "dealt", "made-up", "unsaid"] = Field(
        description="found: the data say whose they are; declared: the recipe says what a user is; dealt: people's "
        "data were dealt to users at random; made-up: nobody's data, or a public data set's; unsaid: the ledger is "
        "from before it named its unit"
    )

    @property
    def said(self) -> str:
        """Whether it is a person, in a sentence."""
        if self.person:
            said = "It is a person"
            return f"{said}, as the recipe declares." if self.origin == "declared" else f"{said}."
        return _NOT_A_PERSON[self.origin]


_NOTHING = "nothing here is promised to people"
_NOT_A_PERSON = {
    "found": f"It is not a person, or nobody has said that it is: {_NOTHING}.",
    "declared": f"The recipe does not say that it is a person: {_NOTHING}.",
    "dealt": f"It is not a person: data were dealt to users at random, so that one person's may lie with many. So "
    f"{_NOTHING}.",
    "made-up": f"It is not a person, but made up for an experiment: {_NOTHING}.",
    "unsaid": f"This ledger does not say what a user is: {_NOTHING}.",
}
MADE_UP = Unit(name="made-up client", person=False, origin="made-up")
UNSAID = Unit(name="user", person=False, origin="unsaid")
DEVICE = Unit(name="device: all data that a client holds for one user", person=False, origin="found")
"""Of a deployment, whose server cannot see whose data its clients hold."""

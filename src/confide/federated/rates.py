"""Rates of their own for some tensors of a model, chosen by name: `local.rates` and `central.rates`.

Parts of different kinds want steps of different sizes: a head that begins at zero and low-rank updates of a trained
encoder, for example. A user's update scales with the local rate, and with it what bounding sees of it. An adaptive
central optimiser does not notice the size of updates, so there the central rate decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated

from pydantic import Field

from confide.errors import UserError

Rates = dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]]
"""Factors of the rate by patterns of names; the first that fits counts."""


def factors(rates: Mapping[str, float], names: Sequence[str], section: str) -> list[float]:
    """What the rate of each tensor is multiplied by."""
    for pattern in rates:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UserError(
                f"{section}.rates: no tensor is called {pattern!r}; expected a pattern of names such as {names[0]}"
            )
    fitting = ([factor for pattern, factor in rates.items() if fnmatchcase(name, pattern)] for name in names)
    return [found[0] if found else 1.0 for found in fitting]

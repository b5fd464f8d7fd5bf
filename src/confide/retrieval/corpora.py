"""The kinds of data that a recipe can ask for, each in a file of its own, told apart by `kind`.

To add one: a class of settings with a method `read`, in a file beside this one, and its name in the union.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from confide.retrieval.embedded import EmbeddedSettings
from confide.retrieval.published import AgNewsSettings, ArxivSettings, SmsSpamSettings
from confide.retrieval.table import TableSettings

DataSettings = Annotated[
    EmbeddedSettings | SmsSpamSettings | AgNewsSettings | ArxivSettings | TableSettings, Field(discriminator="kind")
]

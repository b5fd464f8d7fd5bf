"""The kinds of data that a recipe can ask for, told apart by `kind`; `read_data` reads any of them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from confide.retrieval.data import RetrievalCorpus
from confide.retrieval.embedded import EmbeddedSettings, embedded
from confide.retrieval.published import AgNewsSettings, ArxivSettings, SmsSpamSettings, ag_news, arxiv, sms_spam
from confide.retrieval.table import TableSettings, table

DataSettings = Annotated[
    EmbeddedSettings | SmsSpamSettings | AgNewsSettings | ArxivSettings | TableSettings,
    Field(discriminator="kind"),
]


def read_data(settings: DataSettings, seed: int) -> RetrievalCorpus:
    """Documents, training queries and test queries; `seed` decides the split and nothing else."""
    if isinstance(settings, EmbeddedSettings):
        return embedded(settings, seed)
    if isinstance(settings, SmsSpamSettings):
        return sms_spam(settings, seed)
    if isinstance(settings, AgNewsSettings):
        return ag_news(settings, seed)
    if isinstance(settings, ArxivSettings):
        return arxiv(settings, seed)
    return table(settings, seed)

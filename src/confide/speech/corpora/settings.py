"""What all kinds of corpus have in common in a recipe, and where the named ones are looked for."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from confide.errors import UserError
from confide.files import DATA_ENV, data_folder
from confide.settings import Section


class SpeakerSettings(Section):
    """Which speakers, which utterances, and who counts as a user."""

    share: int | None = Field(
        None,
        ge=1,
        le=99,
        description="percent of the speakers: N and 100 - N are disjoint and together complete, on every machine",
    )
    users: Literal["speakers", "iid"] = Field(
        "speakers", description="a user is a speaker, or (the control) each utterance gets a user drawn uniformly"
    )
    seed: int = Field(0, ge=0, lt=2**63, description="of the draws for users=iid and for joining digits")
    max_seconds: float = Field(30.0, gt=0, allow_inf_nan=False, description="longer utterances are skipped")

    @field_validator("share")
    @classmethod
    def _not_its_own_complement(cls, share: int | None) -> int | None:
        if share == 50:
            raise PydanticCustomError(
                "share", "Input should be other than 50, whose complement would be itself; use 49 and 51"
            )
        return share


def find_folder(given: Path | None, name: str, title: str, source: str) -> Path:
    """The folder of a corpus: the one given, or `name` under the data folder. `source` says where to get it."""
    folder = given.expanduser() if given is not None else data_folder() / name
    if not folder.is_dir():
        raise UserError(
            f"{title} was looked for in {folder}, but that is no folder; get it from {source} and pass its folder "
            f"(folder: in a recipe, --folder on the command line), or name the folder that holds {name} in the "
            f"environment variable {DATA_ENV}"
        )
    return folder

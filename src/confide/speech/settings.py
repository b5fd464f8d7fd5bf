"""The recipe's section of the speech task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from confide.federated.task import Task, TaskSection
from confide.settings import LocalPath, Unit
from confide.speech.augment import SpecAugment
from confide.speech.corpora import CorpusSettings
from confide.speech.corpora.population import PopulationSettings
from confide.speech.corpora.settings import SpeakerSettings
from confide.speech.features import FeatureSettings
from confide.speech.model import ModelSettings
from confide.speech.tokens import Letters, Tokens


class SpeechSettings(TaskSection):
    """Speech recognition over speakers."""

    kind: Literal["speech"] = "speech"
    corpus: CorpusSettings = Field(description="whose speakers are the users")
    test: CorpusSettings = Field(description="what the central model is evaluated on; other speakers")
    pool: Annotated[int, Field(ge=1)] | None = Field(
        None, description="deal all utterances into so many users, in place of the speakers: central training"
    )
    model: ModelSettings = Field(ModelSettings(), description="a preset, and what differs from it")
    start: LocalPath | None = Field(
        None,
        description="run folder or safetensors file to begin from; parts of an encoder that it lacks begin as the "
        "encoder has them; none: fresh weights",
    )
    features: FeatureSettings = FeatureSettings()
    augment: SpecAugment | None = Field(SpecAugment(), description="SpecAugment in training; null for none")
    # Both are left out of a dump at their default, so that recipes from before they were there keep their digest.
    letters: Letters | None = Field(
        None, exclude_if=lambda value: value is None,
        description="the letters of the token set, each once, for a language beyond en, fr and de",
    )  # fmt: skip
    numbers: Literal["drop", "spell"] = Field(
        "drop", exclude_if=lambda value: value == "drop",
        description="what becomes of digits in a text: nothing, or words in the corpus's language (num2words)",
    )  # fmt: skip
    cache: LocalPath | None = Field(None, description="where features are kept; none: the user's cache folder")

    @property
    def size(self) -> int:
        return self.model.size + self.features.mels * self.features.fft

    @property
    def unit(self) -> Unit:
        made_up = {"synthetic": "synthetic voice", "population": "simulated speaker"}
        if self.corpus.kind in made_up:
            return Unit(name=made_up[self.corpus.kind], person=False, origin="made-up")
        if self.pool is not None:
            return Unit(name="share of pooled utterances", person=False, origin="dealt")
        if self.corpus.users == "iid":
            return Unit(name="random share of the utterances", person=False, origin="dealt")
        named = "speaker, by the corpus's client_id" if self.corpus.kind == "common_voice" else "speaker"
        return Unit(name=named, person=True, origin="found")

    def held_out(self, percent: int) -> dict[str, Any] | None:
        if isinstance(self.corpus, PopulationSettings) and isinstance(self.test, PopulationSettings):
            return {"test.part": "validation"}
        if not isinstance(self.corpus, SpeakerSettings) or self.corpus.share is not None:
            return None
        return {"test": {**self.corpus.model_dump(mode="json"), "share": percent}, "corpus.share": 100 - percent}

    @model_validator(mode="before")
    @classmethod
    def _augment_features_only(cls, given: Any) -> Any:
        """SpecAugment is on unless a recipe says otherwise, but not for states of an encoder, which are no features."""
        model = given.get("model") if isinstance(given, Mapping) else None
        encoder = model.get("encoder") if isinstance(model, Mapping) else getattr(model, "encoder", None)
        return {"augment": None, **given} if encoder is not None else given

    @model_validator(mode="after")
    def _fits_together(self) -> SpeechSettings:
        if self.model.encoder is not None and self.augment is not None:
            raise ValueError("augment: masks log-mel features, and model.encoder has its own; drop augment")
        if self.model.encoder is not None and self.features != FeatureSettings():
            raise ValueError("features: model.encoder brings its own; drop features")
        return self

    def tokens(self, language: str) -> Tokens:
        """The token set of a model for corpora in this language."""
        return Tokens(language, self.letters or "", self.numbers == "spell")

    def make(self, seed: int) -> Task:
        from confide.speech.task import Speech

        return Speech(self, seed)

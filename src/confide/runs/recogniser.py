"""The recogniser that a finished speech run left, to score it or to transcribe recordings.

All that is needed is the folder of the run: its recipe says which tokens, features and model, its file of tensors holds
the weights. Neither the corpus that the model was trained on nor its test corpus has to be here, unless it is the one
to be scored on: the language, and with it the token set, follows from the corpus's settings alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from confide.errors import UserError, require
from confide.federated.start import held_encoder
from confide.runs import folder
from confide.runs.parameters import check_encoder, load_parameters
from confide.runs.shared_recipe import PLACEHOLDER
from confide.speech.beam import BeamSearch, BeamSettings
from confide.speech.corpora import CorpusSettings
from confide.speech.network import network_of
from confide.speech.recogniser import Recogniser
from confide.speech.settings import SpeechSettings
from confide.speech.tokens import Tokens


def language_of(settings: CorpusSettings) -> str:
    """The language of a corpus that need not be here. The kinds without such a setting are English."""
    language: str = settings.model_dump(include={"language"}).get("language", "en")
    return language


def tokens_of(task: SpeechSettings) -> Tokens:
    """The token set of a run's model."""
    return task.tokens(language_of(task.corpus))


def load_recogniser(run: Path, language_model: Path | None = None, encoder: str | None = None) -> Recogniser:
    """The recogniser that a finished run left; it decodes greedily without a language model.

    `encoder` is where the frozen encoder is that the run was trained on, if not where its recipe says.
    """
    task = folder.held_recipe(run).task
    if not isinstance(task, SpeechSettings):
        raise UserError(f"{run} holds a run of {task.kind}, which hears nothing; give one whose task is speech")
    require("speech", "speech recognition")
    task = _with_encoder(run, task, encoder)
    tokens = tokens_of(task)
    network = network_of(task, tokens)
    check_encoder(run, network.encoder)
    parameters = load_parameters(run, network.shapes())
    search = None
    if language_model is not None:
        with silent_libraries():
            search = BeamSearch(BeamSettings(language_model=language_model), tokens.names)
    return Recogniser(tokens, network, parameters, search)


def _with_encoder(run: Path, task: SpeechSettings, source: str | None) -> SpeechSettings:
    """The task with its encoder where it is on this machine."""
    frozen = task.model.encoder
    if frozen is None:
        if source is not None:
            raise UserError(f"--encoder {source}: the model of {run} was trained whole and has no encoder; drop it")
        return task
    if source is None and frozen.source == PLACEHOLDER:
        held = held_encoder(run / folder.MODEL) or "not known"
        raise UserError(
            f"{run} was published without the place of its frozen encoder, which was a folder of its owner; expected "
            f"--encoder with a preset, a transformers folder or owner/name, whose digest is {held[:16]}"
        )
    named = frozen if source is None else frozen.model_copy(update={"source": source})
    return task.model_copy(update={"model": task.model.model_copy(update={"encoder": named})})


@contextmanager
def silent_libraries() -> Iterator[None]:
    """The MP3 and n-gram libraries write notes to standard error, past Python; what matters of them is an exception."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)

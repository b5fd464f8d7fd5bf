"""A recipe for data of one's own, with what was found, what was chosen and why.

Speech gets a CTC head on a frozen encoder, text a classifier head on a frozen language model: small enough for a few
thousand people to hide. Who is tested on is held out by person, by a hash of names that is the same on every machine.
The rate of speech with noise was chosen on training people of Speech Commands who were held out. The other rates are
those of the shipped recipes of the same kind, and were not chosen again.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from confide.encoders.presets import PRESETS
from confide.encoders.weights import find, is_url
from confide.errors import UserError
from confide.propose.affordable import ENOUGH, Afforded, afford, people_needed
from confide.propose.look import Found, Section
from confide.propose.voices import MOST_WORDS, Sayings, run_of, share_said, spelled, write_start
from confide.propose.writing import Draft, quoted
from confide.retrieval.splits import ColumnSplit, EvenSplit
from confide.runs.corpus_choice import check_corpus, read_with_bar
from confide.settings import validate
from confide.speech.corpus import Corpus
from confide.speech.tokens import Tokens, damage

Owners = Literal["people", "others"]
EPSILON = 8.0
TEXT_ENCODER = "minilm"
_BATCH_SECONDS = 60.0
_MOSTLY = 0.5  # of the utterances


@dataclass(frozen=True)
class Proposal:
    """The text of a recipe, and what there is to say about it."""

    text: str
    found: str
    """What was found, in a line."""
    said: tuple[str, ...]
    """What was chosen, a line each."""
    warnings: tuple[str, ...]
    encoder: str
    people: int
    epsilon: float | None
    start: str | None = None
    """The text of another recipe, whose run this one begins with."""


def speech_encoder(language: str) -> str:
    """The smallest preset that hears this language."""
    return "whisper-tiny.en" if language == "en" else "whisper-base"


def width_of(encoder: str) -> int:
    """How wide the states of a preset are; of an encoder that nobody knows here, a usual width."""
    found = re.search(r"(\d+) wide", PRESETS[encoder].about) if encoder in PRESETS else None
    if found is not None:
        return int(found[1])
    try:
        config = json.loads((Path(encoder).expanduser() / "config.json").read_text(encoding="utf-8"))
        return int(config.get("d_model") or config["hidden_size"])
    except (OSError, ValueError, KeyError, AttributeError):
        return 512


def check_encoder(source: str, kind: Literal["speech", "text"]) -> None:
    """Refuse a name that is no encoder of this kind; a preset that is yet to be fetched is one."""
    chosen = PRESETS.get(source)
    if chosen is not None and chosen.kind == kind and not chosen.installed:
        return
    if not (kind == "text" and is_url(source)):
        find(source, kind)


def propose(
    found: Found, name: str, epsilon: float | None, encoder: str | None = None, start: Path | None = None,
    letters: str = "", words: Sayings | None = None, owners: Owners | None = None,
) -> Proposal:  # fmt: skip
    """Choose, and write down why. `epsilon` is none where nobody asked for one: then what can be afforded is chosen.

    `words` are what simulated people say first; `owners` says whether each owner of texts is one person.
    """
    if owners is not None and found.owner is None:
        raise UserError(
            f"--owners {owners}: {found.layout} has no column that says whose a text is; name it with --owner-column, "
            "or leave --owners out"
        )
    if encoder is not None:
        check_encoder(encoder, found.task)
    if start is not None and not start.exists():
        raise UserError(
            f"--start {start}: there is nothing; expected the folder of a finished run, or a file model.safetensors"
        )
    if words is not None and (start is not None or found.task != "speech"):
        raise UserError("--words: expected recordings, and no --start beside it; leave one of them out")
    if found.task == "speech":
        return _propose_speech(found, name, epsilon, encoder, start, letters, words)
    return _propose_text(found, name, epsilon, encoder, start, owners)


def _propose_speech(
    found: Found, name: str, epsilon: float | None, encoder: str | None, start: Path | None, letters: str,
    words: Sayings | None,
) -> Proposal:  # fmt: skip
    train, test, corpus, tested, notes = _part_speakers(found)
    encoder = encoder or speech_encoder(corpus.language)
    tokens = Tokens(corpus.language, letters)
    numbers = tokens.size * (width_of(encoder) + 1)
    people = len(corpus.speakers)
    plan, warnings = _plan(people, numbers, epsilon, "people")
    seconds = [sum(u.seconds for u in own) for own in corpus.speakers.values()]
    longest = max(u.seconds for u in corpus.utterances())
    batch = _batch(seconds, longest)
    draft = Draft()
    draft.lines.append(f"description: {quoted(f'{name}: a head on a frozen encoder, for {people:,} people')}")
    draft.comment(
        f"Written by `confide init` for {found.layout}: {people:,} people to train on, {len(corpus.utterances()):,} "
        f"utterances, {sum(seconds) / 3600:.2f} h; {_counted(len(tested.speakers), 'other person', 'other people')} to "
        f"test on, "
        f"{len(tested.utterances()):,} utterances.",
        *notes,
    )
    model = {"encoder": {"source": encoder, "train": ["head"], "edges": False}}
    fields: list[tuple[str, Any, str]] = [
        ("kind", "speech", ""),
        ("corpus", train, ""),
        (
            "test",
            test,
            "People whom nobody trains on; which ones depends on their names alone." if "share" in test else "",
        ),
        ("model", model, f"The encoder stays as it is; {numbers:,} numbers are trained on its states."),
    ]
    fields += (
        [("letters", letters, "The token set, beside the word boundary, hyphen and apostrophe.")] if letters else []
    )
    harmed = Counter(kind for utterance in corpus.utterances() for kind in damage(tokens, utterance.text))
    begun: str | None = None
    if start is not None:
        fields.append(("start", str(start), "The model to begin with."))
    elif words is not None:
        written = Tokens(corpus.language, letters, bool(harmed["digits removed"]))
        words = spelled(words, corpus, written)
        begun = write_start(name, words, corpus.language, model)
        fields.append(("start", str(run_of(name)), f"Simulated people say the words first: {name}-start.yaml."))
        share = share_said(words, corpus, written)
        if share < _MOSTLY:
            warnings.append(f"--words: only {share:.0%} of the utterances consist of these {len(words.words)} words")
    if harmed["digits removed"]:
        fields.append(("numbers", "spell", f"Digits in {harmed.pop('digits removed'):,} utterances become words."))
    warnings += [f"normalising changes texts: {many:,} utterances with {kind}" for kind, many in harmed.items()]
    draft.block("task", fields)
    _write_sampling(draft, plan, min(people, 16), "people")
    if batch:
        draft.comment(f"A step of a person is over at most {batch['batch_seconds']:g} s of speech, not all of it.")
    draft.section("local", steps=1, learning_rate=1.0, **batch)
    steps = 240 if plan is None else plan.steps
    if plan is None:
        draft.section("bounding", rule="none")
        draft.section("central", kind="adam", learning_rate=1.0, schedule={"kind": "linear", "steps": steps})
    else:
        draft.comment("Every person moves the model by the same length; the noise is a multiple of it.")
        draft.section("bounding", rule="normalise", bound=1.0)
        _write_privacy(draft, plan)
        schedule = {"kind": "linear", "steps": steps}
        draft.section("central", kind="sgd", learning_rate=4.0, momentum=0.9, schedule=schedule)
    _write_end(draft, steps)
    made = _proposal(draft, name, found, plan, tuple(warnings), encoder, people, len(tested.speakers), numbers)
    said = made.said
    if plan is not None and start is None and words is None:
        texts = {tokens.normalise(utterance.text) for utterance in corpus.utterances()}
        if len(texts) <= MOST_WORDS:
            said += (f"people say {len(texts)} different things; if these are no secret, --words begins with voices",)
    return replace(made, said=said, start=begun)


def _propose_text(
    found: Found, name: str, epsilon: float | None, encoder: str | None, start: Path | None, owners: Owners | None
) -> Proposal:
    from pydantic import TypeAdapter

    from confide.retrieval.corpora import DataSettings

    encoder = encoder or TEXT_ENCODER
    settings, problems = validate(TypeAdapter(DataSettings), found.train, "task.data")
    if problems:
        raise UserError("\n".join(problems))
    corpus, section, notes = settings.read(0), found.train, list[str]()
    owned = "client_column" in section
    both = set(corpus.train.groups or ()) & set(corpus.test.groups or ())
    if both:  # only where a split of its own is the test
        section = {key: value for key, value in section.items() if key != "test"} | {"test_by": "clients"}
        notes.append(
            f"{len(both):,} owners are in the data for training and in those for test; so the test data are not used, "
            "and a share of the owners is held out."
        )
        corpus = validate(TypeAdapter(DataSettings), section, "task.data")[0].read(0)
    people = len(set(corpus.train.groups or ())) if owned else len(corpus.train)
    unit = "owners" if owned else "rows"
    numbers = len(corpus.documents) * (width_of(encoder) + 1)
    plan, warnings = _plan(people, numbers, epsilon, unit, everyone=True)
    draft = Draft()
    draft.lines.append(f"description: {quoted(f'{name}: a classifier head on a frozen language model')}")
    rows = f"{len(corpus.train):,} texts to train on and {len(corpus.test):,} to test on"
    draft.comment(
        f"Written by `confide init` for {found.layout}: {rows}, {len(corpus.documents):,} labels."
        + ("" if owned else " Nobody said whose a text is, so every text is a user of its own; a person who wrote "
           "several is protected less. With a column that names owners: --owner-column."),
        *notes,
    )  # fmt: skip
    clients = ColumnSplit() if owned else EvenSplit(clients=people)
    data_why = "Test texts are those of owners whom nobody trains on." if owned else ""
    if not owned and "test" not in section and section["kind"] != "ag_news":  # which has a test of its own
        section = {**section, "deal": 0}
        data_why = "The same texts are for the test whatever run.seed is."
    fields: list[tuple[str, Any, str]] = [
        ("kind", "retrieval", ""),
        ("encoder", {"source": encoder, "pooling": "mean"}, "Stays as it is; its vectors are computed once and kept."),
        ("data", section, data_why),
        ("clients", clients.model_dump(), ""),
        ("method", "head", f"{numbers:,} numbers are trained."),
        ("head", {"scale": "unit"}, ""),
        ("k", max(1, min(5, len(corpus.documents) // 2)), ""),
    ]
    fields += [("start", str(start), "The model to begin with.")] if start is not None else []
    draft.block("task", fields)
    declared = {} if owners is None else {"person": owners == "people"}
    if owned and owners is None:
        draft.comment("Nobody said whether each owner is one person. If so, add person: true; the guarantee says it.")
    draft.section("users", unit="owner of texts" if owned else "text", **declared)
    _write_sampling(draft, plan, min(people, 1000), unit)
    draft.section("local", epochs=1, learning_rate=1)
    steps = 100 if plan is None else plan.steps
    if plan is None:
        draft.section("bounding", rule="none")
        draft.section("central", kind="sgd", learning_rate=10.0, momentum=0.5)
    else:
        draft.section("bounding", rule="clip", bound=0.1)
        _write_privacy(draft, plan)
        draft.section("central", kind="sgd", learning_rate=100.0, momentum=0.5)
    _write_end(draft, steps)
    held = len(set(corpus.test.groups or ())) if owned else len(corpus.test)
    if owned and owners is None and plan is not None:
        warnings.append(
            f"nobody said whether each {found.owner} is one person, so the guarantee will be for owners and promise "
            "nothing to people; if each is one, say --owners people"
        )
    return _proposal(draft, name, found, plan, tuple(warnings), encoder, people, held, numbers, unit)


def _part_speakers(found: Found) -> tuple[Section, Section, Corpus, Corpus, list[str]]:
    """Sections and corpora for training and test, with no person in both, and what there is to say about it."""
    everyone = read_with_bar(check_corpus(found.train["kind"], _without_kind(found.train)))
    notes: list[str] = []
    if found.test is not None:
        tested = read_with_bar(check_corpus(found.test["kind"], _without_kind(found.test)))
        both = set(everyone.speakers) & set(tested.speakers)
        if not both:
            return found.train, found.test, everyone, tested, notes
        notes.append(
            f"{len(both):,} speakers are in the data for training and in those for test; so the test data are not "
            "used, and a share of the speakers is held out."
        )
    people = len(everyone.speakers)
    if people < 2:
        raise UserError(
            f"{found.layout} has {people} speaker; expected two or more: the model is tested on people whom nobody "
            "trains on. Check that the layout says who speaks"
        )
    share = 10 if people >= 100 else min(49, max(20, math.ceil(100 / people)))
    train, test = {**found.train, "share": 100 - share}, {**found.train, "share": share}
    corpora = [read_with_bar(check_corpus(part["kind"], _without_kind(part))) for part in (train, test)]
    return train, test, corpora[0], corpora[1], notes


def _without_kind(section: Section) -> Section:
    return {key: value for key, value in section.items() if key != "kind"}


def _plan(
    people: int, numbers: int, asked: float | None, unit: str, everyone: bool = False
) -> tuple[Afforded | None, list[str]]:
    """The private plan, or none where so few people cannot hide; who asked for an epsilon is refused there."""
    epsilon = EPSILON if asked is None else asked
    if asked == math.inf:
        return None, ["no privacy was asked for: the model may give its users away"]
    try:
        plan: Afforded | None = afford(people, numbers, epsilon, everyone)
    except UserError:
        plan = None
    if plan is not None and plan.enough:
        return plan, []
    needed = people_needed(people, numbers, epsilon, everyone)
    amount = "More than ten million" if needed is None else f"About {needed:,}"
    strength = (
        ""
        if plan is None
        else (
            f": with a noise multiplier of {plan.noise_multiplier:.3g} on cohorts of {plan.cohort:,} the signal is "
            f"{plan.strength:.2g} of the {ENOUGH:g} that it takes (`{plan.command}`)"
        )
    )
    problem = (
        f"{people:,} {unit} are too few to train {numbers:,} numbers at epsilon {epsilon:g}{strength}. {amount} would "
        "be enough"
    )
    if asked is not None:
        raise UserError(
            f"--epsilon {asked:g}: {problem}. Leave --epsilon out for a recipe without privacy, or give a higher one"
        )
    return None, [f"{problem}. The recipe has no noise: the model may give its users away, and must not be published"]


def _batch(seconds: Sequence[float], longest: float) -> dict[str, float]:
    """Seconds of speech in a step, where some people have more than one minute."""
    if max(seconds) <= _BATCH_SECONDS:
        return {}
    return {"batch_seconds": float(max(_BATCH_SECONDS, math.ceil(2 * longest)))}


def _write_sampling(draft: Draft, plan: Afforded | None, otherwise: int, unit: str) -> None:
    if plan is not None and plan.cohort == plan.population:
        draft.comment(f"All {unit} take part in every step.")
    draft.section("sampling", kind="poisson", cohort=otherwise if plan is None else plan.cohort)


def _write_privacy(draft: Draft, plan: Afforded) -> None:
    draft.comment(
        f"Noise multiplier {plan.noise_multiplier:.4g}, by the planner; delta is below one in the {plan.population:,}:",
        f"  {plan.command}",
    )
    draft.section("privacy", mechanism="gaussian", target_epsilon=plan.epsilon, delta=plan.delta)


def _write_end(draft: Draft, steps: int) -> None:
    draft.section("final", kind="mean", count=max(1, steps // 10))
    draft.section("evaluation", every=max(1, steps // 4))
    draft.section("run", steps=steps, checkpoint_every=max(1, steps // 4))


def _counted(many: int, one: str, more: str) -> str:
    return f"{many:,} {one if many == 1 else more}"


def _proposal(
    draft: Draft, name: str, found: Found, plan: Afforded | None, warnings: tuple[str, ...], encoder: str, people: int,
    held_out: int, numbers: int, unit: str = "people",
) -> Proposal:  # fmt: skip
    draft.check(name)
    privacy = (
        "no noise, and no guarantee"
        if plan is None
        else (
            f"epsilon {plan.epsilon:g} at delta {plan.delta:g}: noise multiplier {plan.noise_multiplier:.3g}, cohorts "
            f"of {plan.cohort:,} of {plan.population:,}, {plan.steps} steps"
        )
    )
    said = (
        f"{people:,} {unit} to train on, {_counted(held_out, 'other', 'others')} to test on",
        f"a head of {numbers:,} numbers on the frozen encoder {encoder}",
        privacy,
    )
    epsilon = None if plan is None else plan.epsilon
    return Proposal(draft.text, found.layout, said, (*found.notes, *warnings), encoder, people, epsilon)

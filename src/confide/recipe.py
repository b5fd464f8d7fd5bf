"""The document that describes a run: typed sections, checked before anything is done, all problems together.

`load` reads YAML, applies `--set section.key=value`, checks each section on its own (`confide.settings` explains what
is wrong) and then what the sections say of each other, and raises one error that lists everything it found.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, Field, TypeAdapter

from confide.convex.logistic import LogisticSettings
from confide.convex.quadratics import QuadraticSettings
from confide.errors import UserError
from confide.federated.bounding import Bounding
from confide.federated.custom import PythonTaskSettings
from confide.federated.final import Final
from confide.federated.local import LocalTraining
from confide.federated.optimisers import Optimiser
from confide.federated.task import TaskSection
from confide.privacy.mechanisms import PYTHON, Asked, Privacy, mechanism_of, refusals
from confide.privacy.sampling import Sampling
from confide.retrieval.head import HeadSettings
from confide.retrieval.settings import RetrievalSettings
from confide.settings import Section, Unit, UnitName, nearest, read_override, read_yaml, to_yaml, validate
from confide.speech.settings import SpeechSettings
from confide.workloads.heads import QueriesSettings, StatesSettings
from confide.workloads.tasks import MlpSettings, SpeechClientSettings, VectorSettings

TaskSettings = Annotated[
    LogisticSettings | QuadraticSettings | SpeechSettings | RetrievalSettings | PythonTaskSettings
    | MlpSettings | SpeechClientSettings | VectorSettings | StatesSettings | QueriesSettings,
    Field(discriminator="kind"),
]  # fmt: skip


class Users(Section):
    """Who counts how much."""

    weights: Literal["uniform", "examples"] | tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...] = Field(
        "uniform", description="uniform: 1/K each; examples: by the number of examples; or a list, scaled to sum 1"
    )
    # Left out of a dump where they are not used, so that recipes from before they were there keep their digest.
    public: bool = Field(
        False, exclude_if=lambda value: not value,
        description="whether everybody may know how many examples each user has; a guarantee with weights: examples "
        "takes that as given",
    )  # fmt: skip

    unit: UnitName | None = Field(
        None, exclude_if=lambda value: value is None,
        description="what one user is, where the task cannot tell or its users are not people: device, patient, share "
        "of pooled utterances; a guarantee is stated for this unit",
    )  # fmt: skip
    person: bool | None = Field(
        None, exclude_if=lambda value: value is None,
        description="whether one user is one person; where data were dealt at random it cannot be",
    )  # fmt: skip

    @property
    def declared_public(self) -> bool:
        """Whether the weights follow from the users' data, and the recipe says that these may be known."""
        return self.weights == "examples" and self.public

    def named(self, unit: Unit) -> Unit:
        """What one user is, where the task says `unit`. Data that were dealt at random are nobody's own."""
        if self.unit is None and self.person is None:
            return unit
        mixed = unit.origin in ("dealt", "made-up")
        person = unit.person if self.person is None else self.person
        return Unit(
            name=self.unit or unit.name, person=person and not mixed, origin=unit.origin if mixed else "declared"
        )


class Evaluation(Section):
    """When the central model is evaluated."""

    every: int = Field(10, ge=1, description="evaluate after every so many central steps, and after the last")
    last: int = Field(1, ge=1, description="also after each of the last so many steps; their mean is reported")
    start: bool = Field(
        True, exclude_if=lambda value: value,
        description="also before the first step, so that the run can say whether it ended better than it began; costs "
        "one evaluation",
    )  # fmt: skip


class Run(Section):
    """Length, seed and care."""

    steps: int = Field(gt=0, description="T, central steps")
    seed: int = Field(0, ge=0, lt=2**63, description="0 is a seed like any other")
    checkpoint_every: int = Field(10, ge=1, description="central steps between checkpoints")


class Recipe(Section):
    """One run.

    A recipe has a section for each part of a run. `load` makes one from YAML and `parse` from a mapping; both report
    all problems together. A recipe does not change after it was checked. `digest` names the run: two recipes with the
    same digest give the same model.

    Examples:
        >>> from confide.recipe import load
        >>> recipe = load("convex/digits")
        >>> recipe.task.kind, recipe.run.steps, len(recipe.digest)
        ('convex/logistic', 100, 16)
    """

    description: str = Field("", description="one line for `confide recipe list`")
    chosen: str = Field("", description="on whose data settings were chosen, which the page of a run says")
    task: TaskSettings
    users: Users = Users()
    sampling: Sampling
    local: LocalTraining
    bounding: Bounding = Bounding()
    privacy: Privacy = Privacy()
    central: Optimiser
    final: Final = Final()
    evaluation: Evaluation = Evaluation()
    run: Run

    def to_yaml(self) -> str:
        return to_yaml(self.model_dump(mode="json"))

    def asked(self) -> Asked:
        """What the recipe asks of its mechanism."""
        return _asked(self.task, self.users, self.sampling, self.privacy, self.bounding)

    @property
    def unit(self) -> Unit:
        """What one user is: what a guarantee protects."""
        return self.users.named(self.task.unit)

    def is_evaluated(self, step: int) -> bool:
        """Whether the central model is evaluated after this step, counted from 1."""
        return step % self.evaluation.every == 0 or step > self.run.steps - self.evaluation.last

    @property
    def digest(self) -> str:
        """Names the run: two recipes with the same digest give the same model."""
        said = self.model_dump(mode="json", exclude={"chosen"})  # came later, and changes nothing about a run
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def load(name: str, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe and check it, before anything is done with it.

    Args:
        name: the name of a shipped recipe (`confide recipe list`), or the path of a YAML file.
        overrides: changes, each `section.key=value`, as `--set` takes them.

    Returns:
        The recipe, with every default filled in.

    Raises:
        UserError: one message that lists everything that is wrong.

    Examples:
        >>> from confide.recipe import load
        >>> load("convex/digits", ["run.steps=5", "privacy.target_epsilon=2"]).run.steps
        5
    """
    document = _read(name)
    for override in overrides:
        _apply(document, override)
    return parse(document, name)


def changed_by(recipe: Recipe, overrides: Iterable[str]) -> Recipe:
    """The recipe with changes as `--set` takes them."""
    document = recipe.model_dump(mode="json")
    for override in overrides:
        _apply(document, override)
    return parse(document)


def parse(document: Mapping[str, Any], name: str = "recipe", made: bool = False, elsewhere: bool = False) -> Recipe:
    """Make a recipe from a mapping.

    `made` says that its run has begun: then it is read also if this version would refuse to begin it. `elsewhere` says
    that the task holds one of many users: then nothing is checked that depends on how many there are.
    """
    sections, problems = _sections(document)
    for needs, check in () if made else _CHECKS:
        counts_users = "task" in needs and ("sampling" in needs or "users" in needs)
        if all(need in sections for need in needs) and not (elsewhere and counts_users):
            problems += check(*(sections[need] for need in needs))
    if problems:
        count = "one problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise UserError(f"{name}: {count}\n" + "\n".join(f"  - {p}" for p in problems))
    return Recipe(**sections)


def shipped() -> dict[str, Traversable]:
    """Names and places of the recipes inside the package."""
    found: dict[str, Traversable] = {}

    def collect(folder: Traversable, prefix: str) -> None:
        for item in sorted(folder.iterdir(), key=lambda i: i.name):
            if item.is_dir():
                collect(item, f"{prefix}{item.name}/")
            elif item.name.endswith(".yaml"):
                found[prefix + item.name.removesuffix(".yaml")] = item

    collect(resources.files("confide") / "recipes", "")
    return found


@cache
def schema() -> dict[str, Any]:
    """The JSON Schema of a recipe. The first paragraph of a section's docstring describes it there."""
    found = Recipe.model_json_schema()
    for part in (found, *found["$defs"].values()):
        if "description" in part:
            part["description"] = part["description"].partition("\n\n")[0]
    return found


def _read(name: str) -> dict[str, Any]:
    known = shipped()
    try:
        text = known[name].read_text() if name in known else Path(name).read_text()
    except FileNotFoundError:
        beside = Path(name).parent
        files = [str(path) for path in beside.glob("*.y*ml")] if beside.is_dir() else []
        hint = nearest(name, [*known, *files])
        raise UserError(
            f"no recipe {name!r}: neither a file nor a shipped recipe{hint}; see `confide recipe list`"
        ) from None
    except IsADirectoryError:
        raise UserError(
            f"recipe {name!r} is a folder; expected a YAML file, or the name of a shipped recipe "
            "(`confide recipe list`). To go on with a run in a folder: `confide resume`"
        ) from None
    except (NotADirectoryError, UnicodeDecodeError, PermissionError) as error:
        raise UserError(f"recipe {name!r} cannot be read: {error}; expected a YAML file") from None
    try:
        document = read_yaml(text)
    except yaml.YAMLError as error:
        raise UserError(f"recipe {name!r} is not valid YAML: {error}") from None
    if not isinstance(document, dict):
        raise UserError(f"recipe {name!r} must be a mapping of sections; see `confide recipe show convex/digits`")
    return document


def _apply(document: dict[str, Any], override: str) -> None:
    keys, value = read_override(override, "section.key=value, such as run.steps=100")
    place = document
    for key in keys[:-1]:
        inner = place.setdefault(key, {})
        if not isinstance(inner, dict):
            raise UserError(f"--set {override!r}: {key} is a value, not a section")
        place = inner
    place[keys[-1]] = value


def _keys(section: Any) -> set[str]:
    """The keys that a section can have, whichever of its kinds it is."""
    if isinstance(section, type) and issubclass(section, BaseModel):
        return set(section.model_fields)
    return {key for part in get_args(section) for key in _keys(part)}


def _sections(document: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    sections: dict[str, Any] = {}
    problems: list[str] = []
    fields = Recipe.model_fields
    for key in document:
        if key not in fields:
            homes = [f"{name}.{key}" for name, info in fields.items() if key in _keys(info.annotation)]
            hint = f"; did you mean {' or '.join(homes)}?" if homes else nearest(str(key), fields)
            problems.append(f"{key}: there is no such section{hint}")
    for key, info in fields.items():
        if key not in document:
            if info.is_required():
                problems.append(f"{key}: this section is required")
            else:
                sections[key] = info.get_default(call_default_factory=True)
            continue
        value, wrong = validate(_adapter(key), document[key], key)
        if wrong:
            problems += wrong
        else:
            sections[key] = value
    return sections, problems


@cache
def _adapter(section: str) -> TypeAdapter[Any]:
    info = Recipe.model_fields[section]
    return TypeAdapter(Annotated[info.annotation, info])  # type: ignore[arg-type]


def _check_local(local: LocalTraining) -> list[str]:
    problems = []
    if (local.steps is None) == (local.epochs is None):
        problems.append("local: give exactly one of steps and epochs")
    if local.batch_size is not None and local.batch_seconds is not None:
        problems.append("local: give batch_size or batch_seconds, not both")
    return problems


def _check_seconds(task: Any, local: LocalTraining) -> list[str]:
    if local.batch_seconds is not None and task.kind != "speech":
        return [f"local.batch_seconds: examples of {task.kind} have no length in time; use batch_size"]
    return []


def _check_cohort(task: TaskSection, sampling: Sampling) -> list[str]:
    users = task.population
    if users is not None and sampling.cohort > users:
        key = "task.clients.clients" if isinstance(task, RetrievalSettings) else "task.users"
        return [
            f"sampling.cohort={sampling.cohort} is larger than the population of {users} users; lower it or raise {key}"
        ]
    return []


def _asked(task: TaskSection, users: Users, sampling: Sampling, privacy: Privacy, bounding: Bounding) -> Asked:
    uniform, private = users.weights == "uniform", users.weights == "examples" and not users.public
    return Asked(privacy, sampling, bounding.rule != "none", bounding.follows, task.population, uniform, private)


def _check_lengths(final: Final, evaluation: Evaluation, run: Run) -> list[str]:
    problems = []
    if final.kind == "mean" and final.count > run.steps:
        problems.append(f"final.count={final.count}: expected at most run.steps={run.steps}")
    if final.kind != "mean" and final.count != 1:
        problems.append(f"final.count={final.count}: only used with final.kind: mean")
    if evaluation.last > run.steps:
        problems.append(f"evaluation.last={evaluation.last}: expected at most run.steps={run.steps}")
    return problems


def _check_weights(task: TaskSection, users: Users) -> list[str]:
    population = task.population
    if isinstance(users.weights, tuple) and population is not None and len(users.weights) != population:
        return [f"users.weights: {len(users.weights)} weights for {population} users; give one each"]
    return []


def _check_unit(task: TaskSection, users: Users, privacy: Privacy, bounding: Bounding) -> list[str]:
    unit = task.unit
    if users.person and unit.origin in ("dealt", "made-up"):
        return [f"users.person=true: a user of this task is a {unit.name}, and no person; leave it out"]
    if unit.origin != "dealt" or users.unit is not None or not _promises(privacy, bounding):
        return []
    return [
        f"users.unit: required with a guarantee here. Data are dealt to users at random, so a user is no person but a "
        f"{unit.name}; give people their own data back, or say for what the guarantee is, as in "
        f"--set 'users.unit={unit.name}'"
    ]


def _promises(privacy: Privacy, bounding: Bounding) -> bool:
    """Whether a run would state a guarantee; what cannot be read is refused elsewhere."""
    if privacy.mechanism == PYTHON:
        return True
    return mechanism_of(privacy, bounding.follows).guaranteed


def _check_retrieval(task: Any, local: LocalTraining) -> list[str]:
    if not isinstance(task, RetrievalSettings):
        return []
    problems = []
    if task.experts is not None and not task.has_head:
        problems.append(f"task.experts: only used with method head or adapter_head, not {task.method}")
    if task.experts is not None and task.head != HeadSettings():
        problems.append("task.head: has no meaning beside task.experts; leave one of them out")
    if task.negatives is not None and task.method != "adapter_search":
        problems.append(f"task.negatives: only used with method adapter_search, not {task.method}")
    if task.start is not None and "documents" in (task.head.start, task.experts and task.experts.start):
        problems.append("task.start: has the head's tensors already; leave it out, or start: documents")
    if task.trains_adapter and local.batch_size is None:
        problems.append(
            f"local.batch_size: required with task.method={task.method}, whose steps run the encoder; for example 16"
        )
    return problems


_CHECKS: list[tuple[tuple[str, ...], Callable[..., list[str]]]] = [
    (("local",), _check_local),
    (("task", "local"), _check_seconds),
    (("bounding",), Bounding.problems),
    (("task", "sampling"), _check_cohort),
    (("task", "users", "sampling", "privacy", "bounding"), lambda *sections: refusals(_asked(*sections))),
    (("final", "evaluation", "run"), _check_lengths),
    (("task", "users"), _check_weights),
    (("task", "local"), _check_retrieval),
    (("task", "users", "privacy", "bounding"), _check_unit),
]

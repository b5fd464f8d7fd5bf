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
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, TypeAdapter

from confide.convex.logistic import LogisticSettings
from confide.convex.quadratics import QuadraticSettings
from confide.errors import UserError
from confide.federated.bounding import Adaptive, Bounding
from confide.federated.car_adaptive import CarAdaptive
from confide.federated.custom import PythonTaskSettings
from confide.federated.local import LocalTraining
from confide.federated.optimisers import Optimiser
from confide.privacy.plan import Privacy
from confide.privacy.sampling import Sampling
from confide.retrieval.head import HeadSettings
from confide.retrieval.settings import RetrievalSettings
from confide.settings import Section, nearest, read_override, to_yaml, validate
from confide.settings import read_yaml as read_yaml
from confide.speech.settings import SpeechSettings
from confide.workloads.tasks import MlpSettings, SpeechClientSettings, VectorSettings

TaskSettings = Annotated[
    LogisticSettings | QuadraticSettings | SpeechSettings | RetrievalSettings | PythonTaskSettings
    | MlpSettings | SpeechClientSettings | VectorSettings,
    Field(discriminator="kind"),
]  # fmt: skip


class Users(Section):
    """Who counts how much."""

    weights: Literal["uniform", "examples"] | tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...] = Field(
        "uniform",
        description="uniform: 1/K each; examples: by the number of examples; or a list, scaled to sum 1",
    )


class Final(Section):
    """Which model a run leaves behind."""

    kind: Literal["last", "mean", "random"] = Field(
        "last", description="last iterate, mean of the last `count`, or a uniformly random iterate (NORM)"
    )
    count: int = Field(1, ge=1, description="for mean: over how many last iterates")


class Evaluation(Section):
    """When the central model is evaluated."""

    every: int = Field(10, ge=1, description="evaluate after every so many central steps, and after the last")
    last: int = Field(1, ge=1, description="also after each of the last so many steps; their mean is reported")


class Run(Section):
    """Length, seed and care."""

    steps: int = Field(gt=0, description="T, central steps")
    seed: int = Field(0, ge=0, lt=2**63, description="0 is a seed like any other")
    checkpoint_every: int = Field(10, ge=1, description="central steps between checkpoints")


class Recipe(Section):
    """One run."""

    description: str = Field("", description="one line for `confide recipe list`")
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

    @property
    def digest(self) -> str:
        """Names the run: two recipes with the same digest give the same model."""
        return hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()[:16]


def load(name: str, overrides: Iterable[str] = ()) -> Recipe:
    """A recipe by the name of a shipped one or by path, with `section.key=value` overrides."""
    document = _read(name)
    for override in overrides:
        _apply(document, override)
    return parse(document, name)


def parse(document: Mapping[str, Any], name: str = "recipe") -> Recipe:
    sections, problems = _sections(document)
    for needs, check in _CHECKS:
        if all(need in sections for need in needs):
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
    return Recipe.model_json_schema()


def _read(name: str) -> dict[str, Any]:
    known = shipped()
    try:
        text = known[name].read_text() if name in known else Path(name).read_text()
    except FileNotFoundError:
        hint = nearest(name, known)
        raise UserError(
            f"no recipe {name!r}: neither a file nor a shipped recipe{hint}; see `confide recipe list`"
        ) from None
    except (IsADirectoryError, NotADirectoryError, UnicodeDecodeError, PermissionError) as error:
        raise UserError(f"recipe {name!r} cannot be read: {error}") from None
    try:
        document = read_yaml(text)
    except yaml.YAMLError as error:
        raise UserError(f"recipe {name!r} is not valid YAML: {error}") from None
    if not isinstance(document, dict):
        raise UserError(f"recipe {name!r} must be a mapping of sections; see `confide recipe show convex/digits`")
    return document


def _apply(document: dict[str, Any], override: str) -> None:
    keys, value = read_override(override, "section.key=value")
    place = document
    for key in keys[:-1]:
        inner = place.setdefault(key, {})
        if not isinstance(inner, dict):
            raise UserError(f"--set {override!r}: {key} is a value, not a section")
        place = inner
    place[keys[-1]] = value


def _sections(document: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    sections: dict[str, Any] = {}
    problems: list[str] = []
    fields = Recipe.model_fields
    for key in document:
        if key not in fields:
            problems.append(f"{key}: there is no such section{nearest(str(key), fields)}")
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


def _check_noise(privacy: Privacy, bounding: Bounding) -> list[str]:
    given = [n for n in ("target_epsilon", "noise_multiplier", "noise_scale") if getattr(privacy, n) is not None]
    if isinstance(bounding.adaptive, CarAdaptive):
        given += ["delta"] if privacy.delta is not None else []
        given += ["source"] if privacy.source == "system" else []
        given += ["trust"] if privacy.trust == "local" else []
        given = ["mechanism"] if privacy.mechanism != "none" else given
        return [
            f"privacy.{n}: bounding.adaptive.kind=car brings its own noise (its noise_multiplier) and has "
            "no formal guarantee; leave the privacy section out, or use a rule with a guarantee (adaptive.kind: "
            "quantile, or a fixed bound with privacy.trust: local)"
            for n in given
        ]
    if privacy.mechanism == "none":
        given += ["trust"] if privacy.trust == "local" else []
        return [f"privacy.{n}: has no meaning with privacy.mechanism=none; use mechanism: gaussian" for n in given]
    problems = []
    partial = privacy.mechanism == "partial"
    if len(given) != 1:
        names = " and ".join(given) or "none of them"
        options = "noise_multiplier" if partial else "target_epsilon, noise_multiplier"
        problems.append(f"privacy: give exactly one of {options} and noise_scale (given: {names})")
    if privacy.delta is None and not partial:
        problems.append("privacy.delta: required with noise, between 0 and 1, for example 1e-5")
    if bounding.rule == "none":
        problems.append(
            "bounding.rule=none: noise protects nobody unless every update is bounded; choose clip or normalise"
        )
    return problems


def _check_bound(bounding: Bounding) -> list[str]:
    problems = []
    if bounding.rule != "none" and bounding.bound is None:
        problems.append(f"bounding.bound: required with rule {bounding.rule}, a number above 0")
    if (bounding.rule == "python") != (bounding.function is not None):
        problems.append("bounding.function: required by rule python, module:function, and only used by it")
    if isinstance(bounding.adaptive, CarAdaptive):
        if bounding.rule != "clip":
            problems.append(f"bounding.adaptive.kind=car: a client has one bound; use rule: clip, not {bounding.rule}")
    elif bounding.adaptive is not None and bounding.rule not in ("clip", "per_layer_clip"):
        problems.append(f"bounding.adaptive: only clip and per_layer_clip can follow a quantile, not {bounding.rule}")
    if bounding.split == "learned" and (bounding.rule != "per_layer_clip" or bounding.adaptive is None):
        problems.append(
            "bounding.split=learned: needs rule: per_layer_clip and adaptive, which says how the quantiles are "
            "estimated, for example adaptive: {quantile: 0.8}"
        )
    if bounding.layer_weights and not (bounding.per_layer and bounding.split == "weighted"):
        problems.append("bounding.layer_weights: only used by the per-layer rules with split: weighted")
    return problems


def _check_cohort(task: Any, sampling: Sampling) -> list[str]:
    users: int | None = getattr(task, "users", None)
    if users is not None and sampling.cohort > users:
        key = "task.clients.clients" if task.kind == "retrieval" else "task.users"
        return [
            f"sampling.cohort={sampling.cohort} is larger than the population of {users} users; lower it or raise {key}"
        ]
    return []


def _check_sampler(task: Any, sampling: Sampling, privacy: Privacy) -> list[str]:
    full = sampling.cohort == getattr(task, "users", None)
    problems = []
    if (
        privacy.mechanism == "gaussian"
        and privacy.accountant == "pld"
        and privacy.trust != "local"
        and sampling.kind == "fixed"
        and not full
    ):
        problems.append(
            "privacy.accountant=pld: has no proof for cohorts of fixed size; "
            "use accountant: rdp, or sampling.kind: poisson"
        )
    if privacy.mechanism == "gaussian" and privacy.trust != "local" and sampling.kind == "cyclic":
        problems.append(
            "sampling.kind=cyclic: independent noise gains nothing from a schedule; "
            "use privacy.mechanism: banded (bands: 1 is independent noise), or sampling.kind: poisson"
        )
    return problems


def _check_banded(sampling: Sampling, privacy: Privacy, bounding: Bounding) -> list[str]:
    if privacy.mechanism != "banded":
        return ["privacy.bands: only used with privacy.mechanism: banded"] if privacy.bands is not None else []
    problems = []
    if sampling.kind != "cyclic":
        problems.append(
            f"sampling.kind={sampling.kind}: privacy.mechanism=banded needs a user's turns to be far apart; "
            "use sampling.kind: cyclic"
        )
    for name, bad in (("trust", "local"), ("source", "system"), ("placement", "client")):
        if getattr(privacy, name) == bad:
            problems.append(f"privacy.{name}={bad}: cannot be combined with privacy.mechanism: banded")
    if privacy.noise_scale is not None:
        problems.append("privacy.noise_scale: not defined for banded noise; give noise_multiplier or target_epsilon")
    if bounding.adaptive is not None:
        problems.append("bounding.adaptive: banded noise is made for one bound; leave it out")
    return problems


def _check_partial(sampling: Sampling, privacy: Privacy, bounding: Bounding) -> list[str]:
    if privacy.mechanism != "partial":
        given = [name for name in ("tensors", "all_but", "elsewhere") if getattr(privacy, name)]
        return [f"privacy.{name}: only used with privacy.mechanism: partial" for name in given]
    problems = []
    if not privacy.tensors:
        problems.append("privacy.tensors: required with mechanism partial, patterns of names, for example ['*.mlp.*']")
    for name in ("target_epsilon", "delta"):
        if getattr(privacy, name) is not None:
            problems.append(
                f"privacy.{name}: noise on a part of the tensors gives no guarantee (privacy.mechanism: partial); "
                "leave it out, and give noise_multiplier or noise_scale"
            )
    for name, bad in (("trust", "local"), ("source", "system")):
        if getattr(privacy, name) == bad:
            problems.append(f"privacy.{name}={bad}: cannot be combined with privacy.mechanism: partial, an analysis")
    if sampling.kind == "cyclic":
        problems.append(
            "sampling.kind=cyclic: cannot be combined with privacy.mechanism: partial; use poisson or fixed"
        )
    if bounding.adaptive is not None:
        problems.append("bounding.adaptive: cannot be combined with privacy.mechanism: partial; leave it out")
    return problems


def _check_local_trust(privacy: Privacy, bounding: Bounding) -> list[str]:
    if privacy.trust != "central" and isinstance(bounding.adaptive, Adaptive):
        return [
            "bounding.adaptive: its counts are noised by the server; it cannot be used with privacy.trust: "
            f"{privacy.trust}"
        ]
    if privacy.trust == "distributed" and isinstance(bounding.adaptive, CarAdaptive):
        return ["bounding.adaptive.kind=car: every client noises its own message; it goes with privacy.trust: local"]
    if privacy.trust == "distributed" and privacy.mechanism != "gaussian":
        return [f"privacy.trust=distributed: shares of the noise are for mechanism gaussian, not {privacy.mechanism}"]
    return []


def _check_lengths(final: Final, evaluation: Evaluation, run: Run) -> list[str]:
    problems = []
    if final.kind == "mean" and final.count > run.steps:
        problems.append(f"final.count={final.count}: expected at most run.steps={run.steps}")
    if final.kind != "mean" and final.count != 1:
        problems.append(f"final.count={final.count}: only used with final.kind: mean")
    if evaluation.last > run.steps:
        problems.append(f"evaluation.last={evaluation.last}: expected at most run.steps={run.steps}")
    return problems


def _check_weights(task: Any, users: Users) -> list[str]:
    population = getattr(task, "users", None)
    if isinstance(users.weights, tuple) and population is not None and len(users.weights) != population:
        return [f"users.weights: {len(users.weights)} weights for {population} users; give one each"]
    return []


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
    (("bounding",), _check_bound),
    (("privacy", "bounding"), _check_noise),
    (("task", "sampling"), _check_cohort),
    (("task", "sampling", "privacy"), _check_sampler),
    (("sampling", "privacy", "bounding"), _check_banded),
    (("sampling", "privacy", "bounding"), _check_partial),
    (("privacy", "bounding"), _check_local_trust),
    (("final", "evaluation", "run"), _check_lengths),
    (("task", "users"), _check_weights),
    (("task", "local"), _check_retrieval),
]

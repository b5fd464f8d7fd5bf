"""What a server may say to a client at all: the shape of training, and what privacy it asks for.

A client trusts no server. `MAY_SAY` is the whole list of recipe fields that a server's word counts for; everything that
is not on it (data, encoder, files, code) comes from the client's policy or from its own copy of the recipe, and a field
that somebody adds to recipes is not told until it is listed here. The fields of `privacy` are what the server asks for:
the client's policy judges them (`confide.deploy.policy`). Server and client compare a digest of exactly these fields.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from confide.errors import UserError
from confide.recipe import Recipe, parse

_SCHEDULE = ("kind", "warmup", "rate", "start", "transition", "staircase", "factor", "steps")
_RULE = ("kind", "momentum", "betas", "bias_correction", "coefficient", "epsilon", "initial_accumulator",
         "weight_decay")  # fmt: skip
_TOLD: dict[str, tuple[str, ...]] = {
    "users": ("weights", "public"),
    "sampling": ("kind", "cohort", "most"),
    "local": ("steps", "epochs", "batch_size", "batch_seconds", "learning_rate", "gradient_clip", "proximal",
              "divide_by_learning_rate", "rates"),
    "local.schedule": _SCHEDULE,
    "local.optimiser": _RULE,
    "bounding": ("rule", "bound", "split", "layer_weights"),
    "bounding.adaptive": ("kind", "quantile", "learning_rate", "count_noise", "decay", "noise_multiplier",
                          "update_rate", "warm_up"),
    "privacy": ("mechanism", "trust", "target_epsilon", "noise_multiplier", "noise_scale", "placement", "delta",
                "accountant", "source", "bands", "tensors", "all_but", "elsewhere"),
    "central": (*_RULE, "learning_rate", "rates"),
    "central.schedule": _SCHEDULE,
    "final": ("kind", "count"),
    "evaluation": ("every", "last"),
    "run": ("steps", "seed", "checkpoint_every"),
    # The shape of the model, by task. Tasks whose data are made from numbers, for rehearsals, are all shape.
    "task": ("kind", "method", "negatives", "k",
             "users", "dimension", "rank", "distance", "l2", "shards_per_user",
             "distinct", "examples", "width", "hidden", "classes", "utterances", "frames", "labels", "layers",
             "parameters", "tensors"),
    "task.model": ("preset", "layers", "width", "mlp", "heads", "dropout", "layer_drop", "norm", "kernel", "stride",
                   "cape_shift", "tokens", "mels", "dtype", "checkpoint_activations"),
    "task.model.encoder": ("train", "first", "rank", "hidden", "before", "after", "edges"),
    "task.features": ("sample_rate", "window", "step", "fft", "mels", "lowest", "highest", "scale", "pre_emphasis",
                      "floor", "normalise", "epsilon"),
    "task.augment": ("frequency_masks", "frequency_width", "time_masks", "time_width", "time_ratio"),
    "task.encoder": ("pooling", "max_tokens", "max_windows"),
    "task.head": ("kind", "pre_classifier", "activation", "dropout", "scale", "start"),
    "task.experts": ("kind", "active", "clusters", "scale", "start"),
    "task.search": ("kind", "normalise", "temperature"),
}  # fmt: skip
MAY_SAY = frozenset(f"{section}.{name}" for section, names in _TOLD.items() for name in names)
_LONGEST = 1 << 20
"""Characters of a recipe that a client reads."""


def shape(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Keep of a recipe's document, or of the section that `prefix` names, what a server may say."""
    kept: dict[str, Any] = {}
    for key, value in document.items():
        name = f"{prefix}{key}"
        if name in MAY_SAY:
            kept[key] = value
        elif name in _TOLD:
            # A section may also be left out by `null`, as `task.augment: null` says.
            kept[key] = shape(value, f"{name}.") if isinstance(value, Mapping) else None
    return kept


def shape_digest(recipe: Recipe) -> str:
    """Name what server and clients have in common; where data and caches lie is each one's own affair."""
    document = shape(recipe.model_dump(mode="json"))
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]


def read_told(text: object) -> dict[str, Any]:
    """Read the server's recipe, and keep of it what a server may say."""
    if not isinstance(text, str) or len(text) > _LONGEST:
        raise UserError("the server has told no recipe")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"the server's recipe cannot be read: {error}") from None
    if not isinstance(document, dict):
        raise UserError("the server's recipe cannot be read: it is no mapping of sections")
    told = shape(document)
    if not all(text.isprintable() for text in _texts(told)):  # the owner reads some of them again, in what is wrong
        raise UserError("the server's recipe cannot be read: there are control characters in it")
    return told


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in (*value, *value.values()):
            yield from _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)


def with_own(told: Mapping[str, Any], own: Mapping[str, Any]) -> Recipe:
    """Make the recipe that a client trains by: the server's shape, and the client's own task fields."""
    task = told.get("task")
    document = {**told, "task": _joined(task if isinstance(task, dict) else {}, own)}
    try:
        return parse(document, "the server's recipe, with this client's data", elsewhere=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"the server's recipe cannot be read: {error}") from None


def _joined(told: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Own fields go before told ones; inside of an encoder too, of which a server may say what is trained on it."""
    joined = {**told, **own}
    for name in ("model", "encoder"):
        if isinstance(told.get(name), dict) and name in own:
            joined[name] = _joined(told[name], own[name])
    return joined

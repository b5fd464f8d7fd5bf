"""The model card of a published run: README.md in the form of the Hugging Face hub, YAML first and then text.

What the program knows it writes; what only the owner knows (`Words`) stands there in the owner's words, or as not said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from confide.federated.items import in_words
from confide.privacy import wording
from confide.privacy.accountant import shown
from confide.privacy.guarantee import Statement
from confide.recipe import Recipe
from confide.retrieval.listing import FILE, Listed
from confide.retrieval.settings import RetrievalSettings
from confide.runs.notes import described
from confide.runs.shared_recipe import PLACEHOLDER
from confide.settings import to_yaml
from confide.speech.settings import SpeechSettings

NOT_SAID = "The owner has not said."
_KINDS = {
    "speech": "automatic-speech-recognition",
    "retrieval": "sentence-similarity",
    "convex/logistic": "tabular-classification",
}
"""The hub's words for tasks."""
_METRICS = {"speech": "wer", "retrieval": "accuracy", "convex/logistic": "accuracy"}
"""And for what they are judged by."""


@dataclass(frozen=True)
class Words:
    """What only the owner of a model can say; it is published as it is."""

    name: str = ""
    data: str = ""
    use: str = ""
    license: str = ""


def write(
    recipe: Recipe,
    tensors: Mapping[str, Tensor],
    stated: Statement,
    words: Words,
    figures: Sequence[Mapping[str, float]],
    spread: float,
    tests: Mapping[str, float],
    encoder: str | None = None,
    documents: Listed | None = None,
) -> str:
    """The whole card.

    `figures` are those with noise, whose deviation is `spread` in units of their bounds; `tests` are the metrics on
    test data, where they are published; `encoder` is the digest of the frozen encoder that it was trained on;
    `documents` says what of a retriever's documents is published.
    """
    name = " ".join(words.name.split()) or f"{recipe.task.kind}, {recipe.digest}"
    parts = [
        f"---\n{to_yaml(_front(recipe, words, name, tests))}---\n\n# {name}",
        _model(recipe, tensors),
        _encoder(recipe, encoder),
        f"## Data\n\n{words.data or NOT_SAID}",
        f"## Intended use\n\n{words.use or NOT_SAID}",
        _how(recipe, documents),
        _documents(recipe, documents),
        _guarantee(stated),
        _figures(recipe, figures, spread),
        _tests(tests),
        _files(bool(figures), documents),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front(recipe: Recipe, words: Words, name: str, tests: Mapping[str, float]) -> dict[str, Any]:
    kind = _KINDS.get(recipe.task.kind)
    front: dict[str, Any] = {"library_name": "confide", "tags": ["federated-learning", "differential-privacy"]}
    front |= {"license": words.license} if words.license else {}
    front |= {"pipeline_tag": kind} if kind else {}
    front |= {"metrics": [_METRICS[recipe.task.kind]]} if recipe.task.kind in _METRICS else {}
    language, base = described(recipe).get("language"), _base(recipe)
    front |= {"language": [language]} if language else {}
    front |= {"base_model": base} if base else {}
    if tests:
        result = {
            "task": {"type": kind or "other"},
            "dataset": {"type": "private", "name": "test data of the owner"},
            "metrics": [{"type": metric, "value": value} for metric, value in tests.items()],
        }
        front["model-index"] = [{"name": name, "results": [result]}]
    return front


def _model(recipe: Recipe, tensors: Mapping[str, Tensor]) -> str:
    size = sum(tensor.numel() for tensor in tensors.values())
    return (
        f"A model for the task `{recipe.task.kind}`, {size:,} parameters in {len(tensors)} tensors, trained by "
        f"federated learning with user-level differential privacy (Confide): {recipe.run.steps} central steps, cohorts "
        f"of about {recipe.sampling.cohort} users. `recipe.yaml` has the settings."
    )


def _source(recipe: Recipe) -> str:
    """Where the recipe has its frozen encoder from."""
    task = recipe.task
    if isinstance(task, SpeechSettings):
        return PLACEHOLDER if task.model.encoder is None else task.model.encoder.source
    return task.encoder.source if isinstance(task, RetrievalSettings) else PLACEHOLDER


def _base(recipe: Recipe) -> str | None:
    """The hub's name of the frozen encoder, where it has one."""
    from confide.encoders.presets import PRESETS

    source = _source(recipe)
    if source in PRESETS:
        return PRESETS[source].model
    return source if source.count("/") == 1 else None


def _encoder(recipe: Recipe, digest: str | None) -> str:
    """Which frozen encoder the tensors belong to, and how to get it."""
    if digest is None:
        return ""
    from confide.encoders.presets import PRESETS

    source = _source(recipe)
    named = "which was a folder of the owner's" if source == PLACEHOLDER else f"`{source}`"
    how = f"{PRESETS[source].command} fetches it. " if source in PRESETS else ""
    return (
        f"It is of no use alone: it was trained on a frozen encoder, {named}, whose digest begins with {digest[:16]}. "
        f"{how}Another encoder is refused."
    )


def _how(recipe: Recipe, documents: Listed | None) -> str:
    """How to use it, with this folder as PUBLIC."""
    if recipe.task.kind not in _KINDS:
        return ""
    given = "" if documents is not None else " --documents FILE"
    lines = {
        "speech": "confide transcribe PUBLIC recording.wav    # text; --json has times and confidences of words\n"
        "confide serve PUBLIC                       # over HTTP\n",
        "retrieval": f'confide retrieve PUBLIC "some words"{given}\n'
        f"confide serve PUBLIC{given}                       # over HTTP\n",
    }.get(recipe.task.kind, "")
    return f"## How to use it\n\n```bash\n{lines}confide export PUBLIC --out model.onnx     # for other programs\n```"


def _documents(recipe: Recipe, documents: Listed | None) -> str:
    """What a retriever scores, and whether anybody here can know it."""
    if recipe.task.kind != "retrieval":
        return ""
    said = {
        None: "The model scores documents by number. Their names were not published: FILE above is `documents.jsonl`, "
        "which only the owner can give. `confide export` needs no names.",
        "names": "`documents.jsonl` has the names of the documents in the order of the model, and not their texts. The "
        "owner decided to publish them; no guarantee covers them.",
        "texts": "`documents.jsonl` has the documents, names and texts, in the order of the model. The owner decided "
        "to publish them; no guarantee covers them.",
    }
    return f"## Documents\n\n{said[documents]}"


def _guarantee(stated: Statement) -> str:
    lines = [
        f"## Privacy\n\n**{wording.promise(stated)}**",
        "| | |\n|---|---|",
        f"| epsilon | {shown(stated.epsilon)} |",
        f"| that is | {stated.protection} |",
        f"| delta | {stated.delta:g} |",
        f"| protected unit | {stated.unit.name} |",
        f"| neighbouring data sets | {stated.adjacency} |",
        f"| accounted by | {stated.accountant.upper()}, {stated.releases} releases |",
        f"| trust | {stated.trust} |",
    ]
    table = "\n".join(lines[1:])
    public = "\n".join(f"* {line}" for line in stated.public)
    uncovered = "\n".join(f"* {line}" for line in stated.not_covered)
    return (
        f"{lines[0]}\n\n{table}\n\n`guarantee.txt` says against whom this holds, and how the number arises.\n\n"
        f"### Taken as public\n\n{public}\n\n### Not covered\n\n{uncovered}"
    )


def _figures(recipe: Recipe, figures: Sequence[Mapping[str, float]], spread: float) -> str:
    asked = recipe.privacy.metrics
    if asked is None or not figures:
        return ""
    last = figures[-1]
    rows = [f"| {n} | {last[n]:.4g} | {bound * spread:.2g} | {bound:g} |" for n, bound in asked.bounds.items()]
    return (
        "## Figures from the users' own data, with noise\n\nEach is a mean over the users of a step, was released with "
        "noise under the guarantee above, and can lie outside of what is possible. A user counts as at most the bound. "
        "`released.jsonl` has every step; this is the last one, before whose update the model was measured.\n\n"
        "| figure | mean, with noise | deviation of the noise | bound |\n|---|---|---|---|\n" + "\n".join(rows)
    )


def _tests(tests: Mapping[str, float]) -> str:
    if not tests:
        return ""
    rows = "\n".join(f"| {in_words(name)} | {value:.6g} |" for name, value in tests.items())
    return (
        "## Metrics on test data, without noise\n\nBy publishing these the owner says that nobody whose data trained "
        "the model is in the test data. They are computed from the test data without noise: the guarantee "
        f"does not cover the people of the test data.\n\n| metric | value |\n|---|---|\n{rows}"
    )


def _files(figures: bool, documents: Listed | None) -> str:
    rows = {
        "model.safetensors": "the model",
        "guarantee.txt, guarantee.json": "the whole statement",
        "ledger.jsonl": "the releases: `confide ledger` recomputes epsilon from them. A copy, chained anew, without "
        "the keyed digests of the data that the owner's ledger begins with",
        "recipe.yaml": "how it was trained, without the owner's paths",
    }
    rows |= {"released.jsonl": "the figures with noise"} if figures else {}
    rows |= {} if documents is None else {FILE: f"the documents' {documents}, in the order of the model"}
    table = "\n".join(f"| {name} | {what} |" for name, what in rows.items())
    return f"## Files\n\n| file | what it is |\n|---|---|\n{table}"

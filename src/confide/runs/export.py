"""The model of a finished run as an ONNX file, with everything between input and answer inside (`confide export`).

| task            | input                                       | output                                             |
|-----------------|---------------------------------------------|----------------------------------------------------|
| speech          | samples (n,), 16 kHz, mono, -1 to 1         | log_probabilities (frames, tokens)                 |
| retrieval       | ids, mask (windows, tokens) int64, one text | log_probabilities (documents,), or vector (width,) |
| convex/logistic | features (examples, wide)                   | log_probabilities (examples, classes)              |

Lengths are free. A file is written only after onnxruntime has answered as this program does, on inputs of several
lengths, other than the one that the graph was traced with. Its metadata are the notes of the model
(`confide.runs.notes`), so that it says for itself what it writes and what it promises.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from confide.convex.logistic import LogisticSettings
from confide.errors import UserError, require
from confide.federated.start import held_encoder
from confide.randomness import generator
from confide.retrieval import head, listing
from confide.retrieval.graph import RetrieverGraph, answer
from confide.retrieval.retriever import ADAPTER, Retriever
from confide.retrieval.settings import RetrievalSettings
from confide.runs import folder
from confide.runs.notes import as_texts, notes_of
from confide.runs.parameters import check_encoder, load_parameters, read_tensors
from confide.runs.recogniser import load_recogniser, silent_libraries
from confide.runs.stated import stated
from confide.speech.corpus import SAMPLE_RATE
from confide.speech.settings import SpeechSettings

TOLERANCE = 2e-3  # of a log-probability, or of a number of a vector
_LARGEST = 1.8e9  # bytes that one protobuf message may have, with room for the graph
Inputs = dict[str, np.ndarray]


@dataclass(frozen=True)
class Graph:
    """A model that can be written: the module, how its inputs vary, and what this program itself answers."""

    module: nn.Module
    example: dict[str, Tensor]
    free: dict[str, dict[int, Any]]  # dimensions of the inputs that are free
    output: str
    trials: Sequence[Inputs]
    reference: Callable[[Inputs], Tensor]
    notes: dict[str, Any] = field(default_factory=dict)


def export(run: Path, out: Path, encoder: str | None = None, recordings: Sequence[Path] = ()) -> dict[str, Any]:
    """Write the model of a finished run, or of a published folder, as ONNX, and check it.

    Args:
        run: the folder.
        out: the file to write; it must be new.
        encoder: where the frozen encoder is, if not where the recipe says.
        recordings: for speech, audio files whose transcripts have to be the same.

    Returns:
        What was written: file, bytes, inputs, output, how far onnxruntime's answers were off, and the notes.

    Examples:
        >>> from pathlib import Path
        >>> from confide.recipe import load
        >>> from confide.runs.export import export
        >>> from confide.runs.folder import train
        >>> _ = train(load("convex/digits", ["run.steps=5"]), Path("runs/to-export"), quiet=True)
        >>> made = export(Path("runs/to-export"), Path("digits.onnx"))
        >>> made["output"], made["notes"]["task"], made["difference"] < 1e-4
        ('log_probabilities', 'convex/logistic', True)
    """
    recipe = folder.held_recipe(run)
    folder.check_unedited(run, recipe)
    if out.exists():
        raise UserError(f"{out} is there already and was not touched; choose another --out file")
    require("export", "writing ONNX")
    task = recipe.task
    if recordings and not isinstance(task, SpeechSettings):
        raise UserError(f"--check names recordings, and {run} is of task {task.kind}, which hears nothing; drop it")
    match task:
        case SpeechSettings():
            graph = _speech(run, encoder)
        case RetrievalSettings():
            graph = _retrieval(run, task, recipe.run.seed, encoder)
        case LogisticSettings():
            graph = _logistic(run, encoder)
        case _:
            raise UserError(
                f"{run} holds a run of {task.kind}, whose model answers nothing by itself; expected a run of speech, "
                "retrieval or convex/logistic"
            )
    notes = notes_of(recipe, stated(run, curve=False), held_encoder(run / folder.MODEL))
    notes = {**notes, **as_texts(graph.notes)}
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as beside:
        made = Path(beside) / out.name
        _write(graph, notes, made)
        session = open_onnx(made)
        off = _check(graph, session)
        same = _same_transcripts(run, encoder, session, recordings) if recordings else 0
        size = sum(part.stat().st_size for part in Path(beside).iterdir())
        for part in sorted(Path(beside).iterdir()):  # a large model has its numbers in a file of their own
            part.replace(out.parent / part.name)
    inputs = {name: list(value.shape) for name, value in graph.example.items()}
    for name, free in graph.free.items():
        for place, dim in free.items():
            inputs[name][place] = dim.__name__
    lengths = [next(iter(trial.values())).shape for trial in graph.trials]
    return {
        "file": str(out), "bytes": size, "inputs": inputs, "output": graph.output, "difference": off,
        "checked": [list(shape) for shape in lengths], "same_transcripts": same, "notes": notes,
    }  # fmt: skip


def _speech(run: Path, source: str | None) -> Graph:
    from confide.speech.graph import RecogniserGraph

    recogniser = load_recogniser(run, None, source)
    network = recogniser.network
    module = RecogniserGraph(network, recogniser.parameters).eval()
    draw, trials = generator(0, "export"), []
    for seconds in (0.9, 1.7, 2.9):
        swell = np.abs(np.sin(np.linspace(0, 7, round(seconds * SAMPLE_RATE))))  # loud and quiet parts
        trials.append({"samples": (0.2 * swell * draw.normal(size=len(swell))).astype(np.float32)})

    def reference(given: Inputs) -> Tensor:
        (features,) = network.front.make([given["samples"]])
        return recogniser.logits([features])[0][0].log_softmax(dim=-1)

    limits = {"least_samples": module.shortest, "most_samples": module.longest}
    timing = {"frame_seconds": network.frame_seconds, "silence_before": network.silence}
    dim = torch.export.Dim("n", min=module.shortest, max=module.longest)
    example = {"samples": torch.from_numpy(trials[0]["samples"][:-1600])}
    free = {"samples": {0: dim}}
    return Graph(module, example, free, "log_probabilities", trials, reference, {**limits, **timing})


def _retrieval(run: Path, task: RetrievalSettings, seed: int, source: str | None) -> Graph:
    require("retrieval", "retrieval")
    from confide.encoders.remote import RemoteEncoder, open_encoder  # they need the extra
    from confide.runs.library import documents_of, with_encoder

    task = with_encoder(run, task, source)
    encoder = open_encoder(task.encoder)
    if isinstance(encoder, RemoteEncoder):
        raise UserError(
            f"the encoder of {run} is served at {task.encoder.source}, and its blocks are not on this machine; "
            "expected --encoder with a preset, a transformers folder or owner/name"
        )
    check_encoder(run, encoder.identity)
    clusters, found = None, read_tensors(run)
    if task.has_head and task.experts is not None:  # which documents an expert has follows from the documents
        retriever = Retriever(task, encoder, documents_of(run, task, seed)[0], seed, quiet=True)
        clusters, shapes = retriever.clusters, retriever.parameter_shapes()
    else:
        side, rows = encoder.embedding_width, found.get("head.bias", torch.empty(0)).numel()
        shapes = {ADAPTER: (side, side)} if task.trains_adapter else {}
        shapes |= head.parameter_shapes(task.head, encoder.width, rows) if task.has_head else {}
    parameters = load_parameters(run, shapes)
    module = RetrieverGraph(task, encoder, parameters, clusters).eval()
    words = ["where", "is", "the", "switch", "of", "the", "light", "in", "the", "kitchen"]
    texts = [" ".join(words[i % len(words)] for i in range(count)) for count in (3, 11, 2 * encoder.room)]
    batches = [encoder.tokens([text]) for text in texts]

    def reference(given: Inputs) -> Tensor:
        (batch,) = (each for each in batches if each.ids.shape == given["ids"].shape)
        with torch.no_grad():
            return answer(task, parameters, encoder.hidden(batch, parameters.get(ADAPTER)), clusters)

    example = {"ids": batches[1].ids[:, :7].repeat(2, 1), "mask": batches[1].mask[:, :7].repeat(2, 1)}
    windows, tokens = torch.export.Dim("windows"), torch.export.Dim("tokens", max=encoder.max_tokens)
    free = {name: {0: windows, 1: tokens} for name in example}
    trials = [{"ids": each.ids.numpy(), "mask": each.mask.numpy()} for each in batches]
    frame = {"tokens_before": encoder.before, "tokens_after": encoder.after}
    sizes = {"max_tokens": encoder.max_tokens, "max_windows": task.encoder.max_windows}
    listed = run / listing.FILE  # names leave only where the owner has published them
    names = {"documents": [one.id for one in listing.read_listing(listed, task)]} if listed.is_file() else {}
    return Graph(module, example, free, module.output, trials, reference, {**frame, **sizes, **names})


class _Linear(nn.Module):
    """Logistic regression."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    def forward(self, features: Tensor) -> Tensor:
        return nn.functional.linear(features, self.get_buffer("weight"), self.get_buffer("bias")).log_softmax(dim=1)


def _logistic(run: Path, source: str | None) -> Graph:
    if source is not None:
        raise UserError(f"--encoder {source}: the model of {run} has no encoder; drop it")
    found = read_tensors(run)
    weight, bias = found["weight"], found["bias"]
    draw = generator(0, "export")
    trials = [{"features": draw.random((count, weight.shape[1]), dtype=np.float32)} for count in (1, 5)]

    def reference(given: Inputs) -> Tensor:
        return (torch.from_numpy(given["features"]) @ weight.T + bias).log_softmax(dim=1)

    example = {"features": torch.zeros(3, weight.shape[1])}
    free = {"features": {0: torch.export.Dim("examples")}}
    return Graph(_Linear(weight, bias), example, free, "log_probabilities", trials, reference)


def _write(graph: Graph, notes: Mapping[str, str], path: Path) -> None:
    with _quietly(), torch.no_grad(), torch.backends.mkldnn.flags(enabled=False):
        try:
            program: Any = torch.onnx.export(
                graph.module, kwargs=graph.example, dynamo=True, dynamic_shapes=graph.free, verbose=False,
                input_names=list(graph.example), output_names=[graph.output],
            )  # fmt: skip
        except torch.onnx.OnnxExporterError as error:
            said = str(error.__cause__ or error).strip().splitlines()[0]
            raise UserError(
                f"the model cannot be written as ONNX ({said[:200]}); nothing was written. Encoders with the parts of "
                "Whisper, Moonshine, wav2vec 2.0, BERT or Llama are known to work"
            ) from error
        program.model.metadata_props.update(notes)
        program.model.producer_name = "confide"
        large = sum(t.nbytes for t in (*graph.module.parameters(), *graph.module.buffers())) > _LARGEST
        program.save(path, external_data=large)


@contextmanager
def _quietly() -> Iterator[None]:
    """The exporter tells of its work and of libraries that are not there; what matters of it is an exception."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    before = [each.level for each in loggers]
    try:
        for each in loggers:
            each.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for each, level in zip(loggers, before, strict=True):
            each.setLevel(level)


def open_onnx(path: Path) -> Any:
    """A session of onnxruntime on one thread, on this machine's processor."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _check(graph: Graph, session: Any) -> float:
    """Hold onnxruntime's answers against the program's own; how far they are apart at most."""
    worst = 0.0
    for given in graph.trials:
        (found,), wanted = session.run([graph.output], given), graph.reference(given).numpy()
        apart = float(np.abs(found - wanted).max()) if found.shape == wanted.shape else np.inf
        worst = max(worst, apart)
        if not apart <= TOLERANCE:
            shapes = f"{found.shape} for {wanted.shape}"
            raise UserError(
                f"onnxruntime's answers are up to {apart:.2g} off ({shapes}; expected at most {TOLERANCE:g}), so "
                "nothing was written. Try other versions of onnx, onnxscript and onnxruntime"
            )
    return worst


def _same_transcripts(run: Path, source: str | None, session: Any, recordings: Sequence[Path]) -> int:
    """Transcribe recordings both ways and refuse a difference; how many were the same."""
    from confide.speech.corpus import Undecodable, read_file

    recogniser = load_recogniser(run, None, source)
    for path in recordings:
        try:
            with silent_libraries():
                samples = read_file(path)
        except Undecodable as error:
            raise UserError(f"--check {path}: {error}; expected a recording that can be read") from None
        here = recogniser.transcribe(samples).text
        there = recogniser.transcribe(samples, lambda s: session.run(["log_probabilities"], {"samples": s})[0]).text
        if here != there:
            raise UserError(f"--check {path}: {there!r} by onnxruntime and {here!r} here; nothing was written")
    return len(recordings)

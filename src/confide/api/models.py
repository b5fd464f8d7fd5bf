"""What finished runs are for: their promise, their figures, and their models in use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from confide.api.runs import Run, Sets, folder_of, words_of
from confide.errors import UserError

if TYPE_CHECKING:
    import numpy as np

    from confide.privacy.guarantee import Statement
    from confide.runs.comparison import Comparison
    from confide.runs.library import RetrievedDocument
    from confide.speech.transcribe import Transcript


def evaluate(
    run: str | Path | Run,
    corpus: str | None = None,
    sets: Sets = (),
    language_model: str | Path | None = None,
    encoder: str | None = None,
) -> dict[str, Any]:
    """Evaluate a run's model again, as `confide evaluate RUN` does.

    Args:
        run: a run, or its folder.
        corpus: for speech, another corpus to test on, by its kind.
        sets: for speech, changes to that corpus: `{"share": 10}` or `["share=10"]`.
        language_model: for speech, the ARPA file of an n-gram model for beam search.
        encoder: for speech, where the run's frozen encoder is, if not where its recipe says.

    Returns:
        What `--json` prints: the metrics, with the interval of the one that sums the task up.

    Examples:
        >>> import confide
        >>> run = confide.train("convex/digits", "runs/evaluate", {"run.steps": 5})
        >>> confide.evaluate(run)["metrics"]["accuracy"] == run.metrics["accuracy"]
        True
    """
    from confide.runs import evaluation

    arpa = None if language_model is None else Path(language_model)
    return evaluation.evaluate(folder_of(run), corpus, words_of(sets), arpa, True, encoder).to_json()


def compare(*folders: str | Path | Run) -> Comparison:
    """Compare finished runs, as `confide compare RUN RUN ...` does.

    Args:
        folders: two or more runs, or their folders.

    Returns:
        A comparison. Its `to_json()` is what `--json` prints: each run's metric with its interval, and for each pair
        on the same test set the difference, its interval and whether it is real.

    Examples:
        >>> import confide
        >>> runs = [confide.train("convex/digits", f"runs/{s}", {"run.steps": 5, "run.seed": s}) for s in (0, 1)]
        >>> len(confide.compare(*runs).to_json()["pairs"])
        1
    """
    from confide.runs import comparison

    return comparison.compare([folder_of(each) for each in folders])


def guarantee(run: str | Path | Run) -> Statement:
    """What a run promises, to whom and against whom, as `confide guarantee RUN` states it from the ledger alone.

    Args:
        run: a run, its folder, or a published folder.

    Returns:
        The statement: `epsilon`, `delta`, `unit`, `adversaries`, `not_covered`; `model_dump(mode="json")` is `--json`.

    Raises:
        UserError: a line of the ledger was edited, or the folder says something else than its ledger.

    Examples:
        >>> import confide
        >>> run = confide.train("convex/digits", "runs/promise", {"run.steps": 5, "privacy.target_epsilon": 2})
        >>> found = confide.guarantee(run)
        >>> found.epsilon <= 2, found.delta, found.protection
        (True, 1e-05, 'moderate protection')
    """
    from confide.runs.stated import differences, stated

    found = stated(folder_of(run))
    if wrong := differences(folder_of(run), found):
        raise UserError(f"{'; '.join(wrong)}: this folder was edited: believe the ledger, or nothing")
    return found


def release(run: str | Path | Run, out: str | Path, workers: int = 1, quiet: bool = True) -> Run:
    """Train a research run again with noise of the operating system, as `confide release RUN --out OUT` does.

    Args:
        run: a finished run with seeded noise, or its folder.
        out: the folder for the new run.
        workers: how many processes train clients.
        quiet: whether to leave out the progress bar.

    Returns:
        The new run, which may be published.

    Raises:
        UserError: a point of the checklist (`confide release RUN --check`) speaks against it.

    Examples:
        >>> import confide
        >>> run = confide.train("convex/digits", "runs/seeded", {"run.steps": 5})
        >>> confide.release(run, "runs/for-others").summary["for_release"]
        True
    """
    from confide.report.page import write_report
    from confide.runs import release as releasing

    releasing.release(folder_of(run), Path(out), workers, quiet, write_report)
    return Run(Path(out))


def publish(
    run: str | Path | Run,
    out: str | Path,
    *,
    name: str = "",
    data: str = "",
    use: str = "",
    license: str = "",
    with_test_metrics: bool = False,
    documents: Literal["names", "texts"] | None = None,
) -> dict[str, Any]:
    """Write what the guarantee of a finished run covers into a new folder, as `confide publish RUN OUT` does.

    Args:
        run: a run, or its folder. Its noise has to be the operating system's.
        out: the folder to write, new or empty. It may leave; the run's folder must not.
        name: for the model card, what the model is called.
        data: for the card, what the data are, in the owner's words.
        use: for the card, what the model is meant for.
        license: for the card, under which licence.
        with_test_metrics: whether to publish the metrics on the test data, which have no noise.
        documents: of a retrieval model, whether to publish its documents' names, or names and texts; None: neither.

    Returns:
        What `--json` prints: folder, files, and the guarantee.

    Raises:
        UserError: there is nothing that may leave; the message says why.

    Examples:
        >>> import confide
        >>> run = confide.train("convex/digits", "runs/public", {"run.steps": 5, "privacy.source": "system"})
        >>> written = confide.publish(run, "public", data="Digits, written by 287 people.")
        >>> "model.safetensors" in written["files"], written["epsilon"] == run.epsilon
        (True, True)
    """
    from confide.runs import publish as publishing
    from confide.runs.card import Words

    words = Words(name, data, use, license)
    return publishing.publish(folder_of(run), Path(out), words, with_test_metrics, documents)


def export(
    run: str | Path | Run, out: str | Path, encoder: str | None = None, recordings: Sequence[str | Path] = ()
) -> dict[str, Any]:
    """Write the model of a run as one ONNX file, as `confide export RUN --out FILE` does.

    Args:
        run: a finished run, its folder, or a published folder.
        out: the file to write; it must be new.
        encoder: where the run's frozen encoder is, if not where its recipe says.
        recordings: for speech, audio files whose transcripts have to be the same.

    Returns:
        What `--json` prints: file, bytes, inputs, output, how far onnxruntime's answers were off, and the notes.

    Examples:
        >>> import confide
        >>> run = confide.train("convex/digits", "runs/for-programs", {"run.steps": 5})
        >>> confide.export(run, "for-programs.onnx")["inputs"]
        {'features': ['examples', 64]}
    """
    from confide.runs.export import export as write

    return write(folder_of(run), Path(out), encoder, [Path(each) for each in recordings])


def transcribe(
    run: str | Path | Run,
    recording: str | Path | np.ndarray,
    language_model: str | Path | None = None,
    encoder: str | None = None,
) -> Transcript:
    """Write down what a recording says, as `confide transcribe RUN FILE` does. The model stays open for the next one.

    Args:
        run: a finished speech run, its folder, or a published folder.
        recording: an audio file of any rate and length, or samples (n,) at 16 kHz, mono, from -1 to 1.
        language_model: the ARPA file of an n-gram model for beam search.
        encoder: where the run's frozen encoder is, if not where its recipe says.

    Returns:
        A transcript: `text`, `segments` with the times and confidences of their words, and `to_json()`.

    Examples:
        >>> import confide, numpy
        >>> few = "{kind: synthetic, population: seed, speakers: 2, utterances: 2, sentences: digits}"
        >>> sets = {"run.steps": 1, "task.corpus": few, "task.test": few, "evaluation.every": 1}
        >>> run = confide.train("speech/embedded/seed", "runs/heard", sets)
        >>> said = confide.transcribe(run, numpy.zeros(16_000, dtype="float32"))
        >>> said.text, said.seconds
        ('', 1.0)
    """
    from confide.runs import answering

    arpa = None if language_model is None else Path(language_model)
    given = Path(recording) if isinstance(recording, str) else recording
    return answering.transcribe(folder_of(run), given, arpa, encoder)


def retrieve(
    run: str | Path | Run, query: str, k: int = 5, documents: str | Path | None = None, encoder: str | None = None
) -> list[RetrievedDocument]:
    """Find documents for a query, as `confide retrieve RUN QUERY` does. The model stays open for the next one.

    Args:
        run: a finished retrieval run, its folder, or a published folder.
        query: what is looked for.
        k: how many documents.
        documents: for a model that was published without them, the file `documents.jsonl` of its owner.
        encoder: where the run's frozen encoder is, if not where its recipe says.

    Returns:
        The documents, best first, each with its `rank`, `score` and `document` (`id` and `text`).

    Examples:
        >>> import confide
        >>> few = "{kind: embedded, documents: 4, queries_per_document: 4, households: 2}"
        >>> sets = {"run.steps": 1, "task.data": few, "sampling.cohort": 2}
        >>> run = confide.train("retrieval/embedded", "runs/desk", sets)
        >>> [each.rank for each in confide.retrieve(run, "my fridge is too loud", k=2)]
        [1, 2]
    """
    from confide.runs import answering

    listed = None if documents is None else Path(documents)
    return answering.retrieve(folder_of(run), query, k, listed, encoder)

"""`confide evaluate`: what the model of a finished run is worth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from confide.commands.options import Arpa, EncoderPlace, FinishedRun, Json
from confide.commands.printing import counts, ends, percent, print_json, print_table

if TYPE_CHECKING:
    from confide.retrieval.metrics import ClassScore
    from confide.runs.evaluation import RetrievalEvaluation, SpeechEvaluation

Kind = Annotated[
    str | None,
    typer.Option(
        "--corpus", metavar="KIND", help="A kind from `confide corpus list`; default: the recipe's task.test."
    ),
]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of the corpus, as often as you like.")
]


def evaluate(
    run: FinishedRun,
    corpus: Kind = None,
    settings: Sets = None,
    language_model: Arpa = None,
    encoder: EncoderPlace = None,
    as_json: Json = False,
) -> None:
    """Score the model of a finished run: for speech, word and character error rates with 95 % intervals.

    Without --corpus it is the recipe's own test corpus, which --set can change: another subset, or its folder on
    this machine. The corpus that the model was trained on is not needed.

    For retrieval: top-1, top-K, mean reciprocal rank and nDCG@10 on the test queries, also per document. Plain
    inner-product search needs no run: `confide evaluate retrieval/sms-head --set task.method=search`

    Example: `confide evaluate runs/a --corpus librispeech --set subset=test-other`
    """
    from confide.runs import evaluation

    found = evaluation.evaluate(run, corpus, settings or [], language_model, as_json, encoder)
    if as_json:
        print_json(found.to_json(), escape=False)
    elif isinstance(found, evaluation.SpeechEvaluation):
        _show_speech(found)
    elif isinstance(found, evaluation.RetrievalEvaluation):
        _show_retrieval(found)
    else:
        print(f"{found.task}, model of {found.run}")
        for name, value in found.metrics.items():
            print(f"  {name}: {value:.4g}")


def _show_speech(found: SpeechEvaluation) -> None:
    """Print error rates, and the speakers who are understood worst and best."""
    scores = found.scores
    rows = []
    for unit, rate in (("word", scores.wer), ("character", scores.cer)):
        interval, many = f"{percent(rate.low, 1)} to {percent(rate.high, 1)}", f"{rate.total:,} {unit}s"
        rows.append((f"{unit} error rate", percent(rate.value, 2), interval, f"{rate.errors:,}", many))
    title = f"{found.run} on {found.corpus}, {found.decoder}"
    print_table(("", "%", "95 % interval", "errors", "of"), rows, title=title, width=80)
    speakers = [
        (each.name, percent(each.wer, 1), percent(each.cer, 1), f"{each.utterances:,}", f"{each.words:,}")
        for each in scores.speakers
    ]
    print_table(("speaker", "word errors, %", "character errors, %", "utterances", "words"), ends(speakers), width=80)
    skipped, reasons = sum(found.skipped_by_reason.values()), counts(found.skipped_by_reason)
    print(
        f"{len(scores.speakers):,} speakers, {scores.utterances:,} utterances, {scores.wer.total:,} words; "
        f"{skipped:,} utterances skipped{f' ({reasons}); --json names them' if reasons else ''}"
    )


def _show_retrieval(found: RetrievalEvaluation) -> None:
    """Print how well a retriever finds documents, and the classes that it finds least and most often."""
    scores = found.scores
    rows = [("top 1", percent(scores.top_1, 2), f"{percent(scores.low, 2)} to {percent(scores.high, 2)}")]
    if scores.k > 1:
        rows.append((f"top {scores.k}", percent(scores.top_k, 2), ""))
    rows += [("mean reciprocal rank", percent(scores.mrr, 2), ""), ("nDCG@10", percent(scores.ndcg_10, 2), "")]
    rows.append(("top 1, mean over classes", percent(scores.macro_top_1, 2), ""))
    title = f"{found.run} on {found.corpus}, {found.method}"
    print_table(("", "%", f"{100 * scores.level:g} % interval"), rows, title=title, width=80)
    ordered = sorted(scores.per_class, key=lambda own: (own.top_1, own.top_k, own.name))
    columns = ("document or class", "top 1 %", f"top {scores.k} %", "queries")
    print_table(columns, ends([_row(own) for own in ordered]), width=80)
    left = counts(found.left_out)
    print(
        f"{scores.queries:,} test queries, {found.documents:,} documents, loss {found.loss:.4g}"
        + (f"; left out: {left}" if left else "")
    )


def _row(own: ClassScore) -> tuple[str, ...]:
    name = own.name if len(own.name) <= 60 else f"{own.name[:57]}..."
    return name, percent(own.top_1, 1), percent(own.top_k, 1), f"{own.queries:,}"

"""The command line: every command is one call into the package. Heavy imports happen only where they are used."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from confide import __version__
from confide.commands import (
    bench as bench_commands,
)
from confide.commands import (
    corpus as corpus_commands,
)
from confide.commands import (
    deploy as deploy_commands,
)
from confide.commands import (
    diagnose as diagnose_commands,
)
from confide.commands import (
    encoder as encoder_commands,
)
from confide.commands import (
    plan as plan_commands,
)
from confide.commands import (
    report as report_commands,
)
from confide.commands import (
    retrieval as retrieval_commands,
)
from confide.commands import (
    speech as speech_commands,
)
from confide.commands import (
    ui as ui_commands,
)
from confide.commands.completion import recipe_names
from confide.engines.ranks import LostRank, Place, dismiss, place
from confide.errors import Stopped, UserError, explained

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="""Private federated learning with a stated, checked guarantee for every user.

\b
Start here:
  confide demo                                   private speech recognition, from nothing (a few minutes)
  confide recipe list                            what can be run
  confide train convex/digits --out runs/digits  run it (about 10 s)
  confide ledger runs/digits                     what privacy it spent
  confide diagnose runs/digits                   what holds it back, and what to change
  confide ui runs                                plan, look at runs and try models in a browser
  confide audit convex/digits                    try to disprove the guarantee
  confide reproduce norm/table1                  a paper's table beside ours
""",
)
app.command()(bench_commands.bench)
app.add_typer(plan_commands.app, name="plan")
app.add_typer(corpus_commands.app, name="corpus")
app.add_typer(encoder_commands.app, name="encoder")
app.add_typer(deploy_commands.app, name="deploy")
recipes = typer.Typer(no_args_is_help=True, help="Look at recipes: the documents that describe runs.")
app.add_typer(recipes, name="recipe")

Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on standard output, and nothing else there.")
]
Folder = Annotated[Path, typer.Argument(help="The folder of a run.")]
Workers = Annotated[int, typer.Option(min=1, help="Processes that train users. The result does not depend on it.")]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one value of the recipe; may be repeated."),
]


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version
        from platform import python_version

        parts = ", ".join(f"{name} {version(name)}" for name in ("dp-accounting", "torch"))
        print(f"confide {__version__} ({parts}, Python {python_version()})")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="The version, and that of the privacy accountant."
        ),
    ] = False,
) -> None:
    """What holds for every command."""


@app.command()
def train(
    recipe: Annotated[
        str,
        typer.Argument(
            help="Name of a shipped recipe (`confide recipe list`) or path of a YAML file.",
            autocompletion=recipe_names,
        ),
    ],
    out: Annotated[Path, typer.Option(help="A new folder for everything that the run leaves.")],
    set_: Sets = None,
    workers: Workers = 1,
    as_json: Json = False,
) -> None:
    """Train a model as a recipe says.

    The folder gets the recipe, a checkpoint, the privacy ledger, metrics, TensorBoard events, and at the end the
    model, a summary, figures and a page. Ctrl-C stops after saving; `confide resume` goes on.

    Over several nodes: `torchrun --nnodes 2 --nproc-per-node 8 ... -m confide train RECIPE --out RUN`, with the same
    result. Rank 0 writes the folder. With `--max-restarts 3` the run goes on by itself when a rank is lost; one that
    does not answer for CONFIDE_RANK_TIMEOUT seconds (1800) is given up.

    Example: `confide train convex/digits --out runs/a --set privacy.target_epsilon=2 --set run.seed=1`
    """
    from confide.recipe import load
    from confide.report.page import write_report
    from confide.runs import folder

    here = _rank(workers)
    _show_summary(folder.train(load(recipe, set_ or []), out, workers, as_json, here, page=write_report), out, as_json)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the four runs go.")] = Path("runs/demo"),
    workers: Workers = 2,
    as_json: Json = False,
) -> None:
    """Private federated speech recognition in a few minutes, on synthetic voices; needs no data.

    A seed model, then the same users without privacy, with global and with per-layer clipping, each tested on unseen
    speakers, and what the noise would be worth with more users. A stopped demo goes on where it was.
    """
    from dataclasses import asdict

    from confide.reproduce import demo as showing

    rows = showing.demo(out, workers, quiet=as_json)
    if as_json:
        _print_json([{**asdict(row), "report": str(row.report)} for row in rows])
        return
    print(f"\n{showing.table(rows)}\n\npages: " + ", ".join(str(row.report) for row in rows))


@app.command()
def resume(run: Folder, workers: Workers = 1, as_json: Json = False) -> None:
    """Go on with a run that was stopped or killed. It ends exactly as if it had not been.

    The number of workers, or of ranks (`torchrun ... -m confide resume RUN`), need not be that of the start.
    """
    from confide.report.page import write_report
    from confide.runs import folder

    _show_summary(folder.resume(run, workers, as_json, _rank(workers), page=write_report), run, as_json)


@app.command()
def ledger(run: Folder, as_json: Json = False) -> None:
    """Recompute the privacy spent from a run's ledger alone, and check every line of it."""
    from confide.privacy.accountant import shown
    from confide.privacy.mechanisms.base import NOT_COVERED
    from confide.privacy.trust.server_view import against_server
    from confide.runs import folder

    found = folder.check_ledger(run)
    if as_json:
        _print_json(found)
        return
    if found["delta"] is None:
        print(f"{found['releases']} releases: no privacy guarantee")
        return
    print(
        f"every line is in order: {found['releases']} releases over {found['steps']} central steps\n"
        f"epsilon {shown(found['epsilon'])} at delta {found['delta']:g} ({found['accountant'].upper()}, "
        f"{found['adjacency']})"
    )
    if "epsilon_server" in found:
        print(f"that is against whoever sees the models alone; {against_server(found)}")
    if found["begins_elsewhere"]:
        print(f"it does not cover {NOT_COVERED}")
    if not found["for_release"]:
        print("the noise was seeded: repeatable, for research; not for a release to others")


@app.command()
def audit(
    recipe: Annotated[
        str,
        typer.Argument(
            help="Name of a shipped recipe or path of a YAML file, with a guarantee.", autocompletion=recipe_names
        ),
    ],
    set_: Sets = None,
    canaries: Annotated[
        int, typer.Option(min=10, help="Users that are planted. More can prove a larger epsilon.")
    ] = 1000,
    as_json: Json = False,
) -> None:
    """Try to disprove a recipe's guarantee: plant canary users, train once, and bound epsilon from below.

    The method is one-run auditing (Steinke, Nasr, Jagielski 2023). A lower bound above the claimed epsilon proves a
    defect, at 95 % confidence, and the command fails. A lower bound below it proves nothing: the guarantee rests on the
    accounting, and the audit is a smoke alarm for it.

    Example: `confide audit convex/digits --set privacy.target_epsilon=3`
    """
    from confide.progress import Reporter
    from confide.recipe import load
    from confide.runs import audit as auditing

    wanted = load(recipe, set_ or [])
    with Reporter(f"audit of {recipe}", wanted.run.steps, 0, as_json) as reporter:
        found = auditing.audit(wanted, canaries, lambda step: reporter.advance(""))
    if as_json:
        _print_json(found.to_json())
    else:
        best = found.findings[0]
        print(
            f"claimed: epsilon at most {found.claimed:.3f} at delta {found.delta:g}\n"
            f"audited: epsilon at least {found.lower_bound:.3f} at {found.confidence:.0%} confidence, from one run "
            f"with {found.canaries} canaries ({best.right} of {best.guesses} guesses right)\n"
            f"with every guess right, {found.best_possible:.2f} would have been shown"
            + ("" if found.best_possible > found.claimed else ": too few canaries to disprove the claim")
        )
    if not found.passed:
        print("THE AUDIT FAILED: this run gave away more than it claims. Do not release it", file=sys.stderr)
        raise typer.Exit(1)


@app.command()
def reproduce(
    what: Annotated[
        str,
        typer.Argument(
            help="norm/quadratics, norm/table1, or pfl-asr/ with table1 (noise, clipping), table4 (cohort, seed), "
            "table6 (IID), table8 (optimisers), table13 (FedProx), table15 (seed quality), table21 (sizes), "
            "figure5 (norms); or car/ with figure2 (four combinations), table1 (FL, DP), table2 (clients), table3 (AG "
            "News), figure7 (arXiv)."
        ),
    ],
    dataset: Annotated[
        str | None,
        typer.Option(help="norm/table1: digits, fashion-mnist or cifar10; pfl-asr: synthetic or audiomnist."),
    ] = None,
    encoder: Annotated[str, typer.Option(help="car: the frozen encoder; `confide encoder list`.")] = "minilm",
    limit: Annotated[
        int | None, typer.Option(min=2, help="car: so many examples only (figure7: papers of each category).")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many runs each figure is the mean of.")] = 3,
    epsilons: Annotated[str, typer.Option(help="For norm/table1: which epsilons, for example 5 or 5,1.5.")] = "5,1.5",
    out: Annotated[Path | None, typer.Option(help="Where results are kept; default results/WHAT.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Cells of the grid at a time, one thread each.")] = 2,
    as_json: Json = False,
) -> None:
    """Run a paper's experiment and show its numbers beside ours.

    Every finished cell is kept, so a stopped grid goes on where it was. Rows are written as CSV, with figures.
    """
    from confide.reproduce import car, norm, pfl_asr

    folder = out or Path("results") / what.replace("/", "-")
    paper, _, table = what.partition("/")
    if paper == "pfl-asr":
        corpus = dataset or "synthetic"
        result = pfl_asr.reproduce(table, out or Path(f"{folder}-{corpus}"), corpus, seeds, workers, quiet=as_json)
    elif paper == "car":
        named = f"{folder}-{encoder}{'' if limit is None else f'-{limit}'}"
        result = car.reproduce(table, out or Path(named), encoder, limit, seeds, workers, quiet=as_json)
    elif what == "norm/quadratics":
        result = norm.quadratics(folder, seeds, workers, quiet=as_json)
    elif what == "norm/table1":
        levels = _levels(epsilons)
        result = norm.table1(
            folder if out else Path(f"{folder}-{dataset or 'digits'}"),
            dataset or "digits",
            seeds,
            levels,
            workers,
            quiet=as_json,
        )
    else:
        raise UserError(
            f"cannot reproduce {what!r}; expected norm/quadratics, norm/table1, pfl-asr/TABLE or car/TABLE; see --help"
        )
    if as_json:
        _print_json({"rows": result.rows, "claims": result.claims})
        return
    print(result.text)


@recipes.command("list")
def recipe_list(as_json: Json = False) -> None:
    """The recipes that come with the package."""
    import yaml

    from confide.recipe import shipped

    found = {name: yaml.safe_load(place.read_text()).get("description", "") for name, place in shipped().items()}
    if as_json:
        _print_json([{"name": n, "description": d} for n, d in found.items()])
        return
    width = max(map(len, found))
    for name, description in found.items():
        print(f"{name:<{width}}  {description.partition('. ')[0]}")


@recipes.command("show")
def recipe_show(
    name: Annotated[str, typer.Argument(help="A shipped recipe or a file.", autocompletion=recipe_names)],
    set_: Sets = None,
) -> None:
    """A recipe with every default written out, checked."""
    from confide.recipe import load

    print(load(name, set_ or []).to_yaml(), end="")


@recipes.command("schema")
def recipe_schema() -> None:
    """The JSON Schema of a recipe, for editors and for reading."""
    from confide.recipe import schema

    _print_json(schema())


report_commands.mount(app)
diagnose_commands.mount(app)
speech_commands.mount(app)
retrieval_commands.mount(app)
ui_commands.mount(app)


def _levels(text: str) -> list[float]:
    try:
        levels = [float(part) for part in text.split(",")]
    except ValueError:
        levels = []
    if not levels or not all(0 < level < float("inf") for level in levels):
        raise UserError(f"--epsilons {text!r}: expected numbers above 0 separated by commas, for example 5,1.5")
    return levels


def _print_json(document: Any) -> None:
    print(json.dumps(document, indent=2, allow_nan=False))


def _show_summary(summary: dict[str, Any], out: Path, as_json: bool) -> None:
    if as_json:
        _print_json(summary)
        return
    from rich.console import Console
    from rich.table import Table

    from confide.privacy.accountant import shown
    from confide.privacy.mechanisms.base import NOT_COVERED
    from confide.privacy.trust.server_view import against_server

    table = Table(show_header=False, title=f"{summary['task']}, seed {summary['seed']}")
    for name, value in summary["metrics"].items():
        table.add_row(name, _number(value))
    for name, value in summary["metrics_mean_of_last"].items():
        table.add_row(f"{name}, mean of the last steps", _number(value))
    if summary["epsilon"] is None:
        table.add_row("privacy", summary.get("guarantee", "none: no guarantee"))
    else:
        table.add_row("epsilon", f"{shown(summary['epsilon'])} at delta {summary['delta']:g}")
        if "epsilon_server" in summary:
            table.add_row("against the server", against_server(summary))
        if summary.get("begins_elsewhere"):
            table.add_row("not covered", NOT_COVERED)
        table.add_row("accounted by", f"{summary['accountant'].upper()}, {summary['sampler']}, {summary['adjacency']}")
        table.add_row("noise", f"multiplier {_number(summary['noise_multiplier'])}, {summary['noise_source']}")
    for reason, count in summary.get("skipped", {}).items():
        table.add_row(f"left out: {reason}", str(count))
    table.add_row("central steps", f"{summary['steps']} in {summary['seconds']:.1f} s")
    Console().print(table)
    if summary["mechanism"] == "car adaptive":
        print(f"{summary['guarantee']}; no epsilon is stated")
    print(f"model, ledger and page: {out}/model.safetensors, {out}/ledger.jsonl, {out}/report.html")


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


_STOPPED = "stopped at once; go on from the last checkpoint with `confide resume`"


def main() -> None:
    """Run the command line: 2 for the user's mistakes, 130 for a stop, a traceback only for defects."""
    try:
        with _first_of_ranks():
            code = app(standalone_mode=False)
    except UserError as error:
        _fail(str(error), 2)
    except Stopped as stop:
        _fail(str(stop), 130)
    except LostRank as lost:
        _fail(str(lost), 1)
    except OSError as error:
        if error.errno not in (
            errno.ENOSPC,
            errno.EDQUOT,
            errno.EACCES,
            errno.EROFS,
            errno.ENOTDIR,
            errno.EISDIR,
        ):
            raise
        place = f" while writing {error.filename}" if error.filename else ""
        _fail(
            f"{error.strerror}{place}; what was saved before is kept. Make room or mend this, then `confide resume`",
            2,
        )
    except (KeyboardInterrupt, typer.Abort):
        _fail(_STOPPED, 130)
    except ModuleNotFoundError as error:
        said = explained(error)
        if said is None:
            raise
        _fail(said, 2)
    except Exception as error:
        if isinstance(error, typer.Exit):
            sys.exit(error.exit_code)
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # click's own usage errors
            error.show()  # type: ignore[attr-defined]
            sys.exit(error.exit_code)
        raise
    if code == 130:  # what typer makes of Ctrl-C
        _fail(_STOPPED, 130)
    sys.exit(code if isinstance(code, int) else 0)


def _rank(workers: int) -> Place | None:
    here = place()
    if here is not None and workers > 1:
        raise UserError(
            f"--workers {workers} together with torchrun: every rank is one process; choose how many there are with "
            "--nproc-per-node and leave --workers out"
        )
    return here


@contextmanager
def _first_of_ranks() -> Iterator[None]:
    """What is inside is done by rank 0 alone. The others train for it where they can, and end with it."""
    here, shared = place(), sys.argv[1:2] in (["train"], ["resume"])
    if here is not None and here.rank > 0:
        if not shared:
            sys.exit(0)
        from confide.build import make_trainer_from
        from confide.engines.distributed import follow

        sys.exit(follow(here, make_trainer_from))
    try:
        yield
    finally:
        if here is not None and here.ranks > 1 and shared:
            dismiss(here)


def _fail(message: str, code: int) -> None:
    print(message, file=sys.stderr)
    sys.exit(code)

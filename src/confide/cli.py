"""The command line: joins the commands, and turns mistakes, stops and lost ranks into exit codes."""

from __future__ import annotations

import errno
import sys
from typing import Annotated, NoReturn

import typer

from confide import __version__
from confide.commands import (
    audit,
    bench,
    budget,
    cache,
    corpus,
    deploy,
    diagnose,
    encoder,
    evaluate,
    export,
    guarantee,
    init,
    ledger,
    plan,
    publish,
    recipe,
    release,
    report,
    reproduce,
    retrieval,
    serve,
    sweep,
    train,
    transcribe,
    ui,
)
from confide.commands.options import OpensRecipes
from confide.engines.ranks import LostRank
from confide.errors import Stopped, UserError, explained

_STOPPED, _GO_ON = "stopped at once", "; go on from the last checkpoint with `confide resume`"
_MENDABLE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.EISDIR)

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="""Private federated learning with a stated, checked guarantee for every user.

\b
Start here:
  confide demo                                   private speech recognition
  confide init recordings                        a recipe for data of your own
  confide recipe list                            what can be run
  confide train convex/digits --out runs/digits  run it (about 10 s)
  confide guarantee runs/digits                  what it promises, and to whom
  confide diagnose runs/digits                   what holds it back
  confide sweep convex/digits                    try settings, several seeds
  confide ui runs                                runs and models in a browser
  confide audit convex/digits                    try to disprove the guarantee
  confide reproduce norm/table1                  a paper's table beside ours
""",
)
_OPEN_NONE = (
    init.init,
    bench.bench,
    train.demo,
    guarantee.guarantee,
    ledger.ledger,
    budget.budget,
    reproduce.reproduce,
)
# In the order of `confide --help`: what people do first comes first.
for command in (
    train.demo, init.init, train.train, train.resume, report.watch, report.report, ui.ui, guarantee.guarantee,
    diagnose.diagnose, sweep.sweep, report.compare, evaluate.evaluate, transcribe.transcribe, retrieval.retrieve,
    retrieval.answer, release.release, publish.publish, export.export, serve.serve, ledger.ledger, budget.budget,
    audit.audit, reproduce.reproduce, bench.bench,
):  # fmt: skip
    app.command(cls=None if command in _OPEN_NONE else OpensRecipes)(command)
for name, group in {
    "plan": plan,
    "corpus": corpus,
    "encoder": encoder,
    "cache": cache,
    "deploy": deploy,
    "recipe": recipe,
}.items():
    app.add_typer(group.app, name=name)


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


def main() -> None:
    """Run the command line: 2 for the user's mistakes, 130 for a stop, a traceback only for defects."""
    try:
        with train.rank_0_alone(sys.argv[1:2]):
            code = app(standalone_mode=False)
    except UserError as error:
        _fail(str(error), 2)
    except Stopped as stop:
        _fail(str(stop), 130)
    except LostRank as lost:
        _fail(str(lost), 1)
    except OSError as error:
        if error.errno not in _MENDABLE:
            raise
        where = f" while writing {error.filename}" if error.filename else ""
        what = f"{error.strerror}{where}; what was saved before is kept"
        _fail(f"{what}. Make room or mend this, then `confide resume`", 2)
    except (KeyboardInterrupt, typer.Abort):
        _fail(_stopped(), 130)
    except ModuleNotFoundError as error:
        said = explained(error)
        if said is None:
            raise
        _fail(said, 2)
    except typer.Exit as end:
        sys.exit(end.exit_code)
    except Exception as error:
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # click's own usage errors
            error.show()  # type: ignore[attr-defined]
            sys.exit(error.exit_code)
        raise
    if code == 130:  # what typer makes of Ctrl-C
        _fail(_stopped(), 130)
    sys.exit(code if isinstance(code, int) else 0)


def _stopped() -> str:
    """What is true after Ctrl-C: only training leaves something to go on from."""
    return _STOPPED + (_GO_ON if sys.argv[1:2] in (["train"], ["resume"]) else "")


def _fail(message: str, code: int) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(code)

"""`confide plan`: what a guarantee takes, asked in every direction."""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import StrEnum
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from confide.commands.options import Json, OpensRecipes, Sets, parse_numbers, recipe_argument
from confide.commands.printing import print_json, print_table
from confide.errors import UserError

if TYPE_CHECKING:
    from confide.privacy.planner import Answer
    from confide.report.figures.plan import Scaled

app = typer.Typer(
    no_args_is_help=True,
    help="""What a guarantee takes: epsilon, noise, cohort, population or rounds. Give all but one, get that one.

\b
  confide plan epsilon --noise-multiplier 0.6144 --cohort 204800 --population 69506000 --rounds 2034 --delta 1e-9
  confide plan noise --target-epsilon 2 --cohort 1000 --population 1000000 --rounds 500 --delta 1e-7
  confide plan extrapolate    (PFL-ASR's Table 1)
  confide plan mechanism --cohort 1000 --population 100000 --rounds 2000 --delta 1e-6    (which noise to take)
  confide plan frontier convex/digits    (trains: error against epsilon)
""",
)


class By(StrEnum):
    pld = "pld"
    rdp = "rdp"


Z = Annotated[
    float | None,
    typer.Option("--noise-multiplier", help="z: noise on the sum, in units of a user's largest contribution."),
]
S = Annotated[
    float | None,
    typer.Option("--noise-per-user", help="s: PFL-ASR's sigma_DP, noise on the average of the cohort; z = s x cohort."),
]
Cohort = Annotated[int, typer.Option(help="Expected number of users in a round.")]
Population = Annotated[int, typer.Option(help="All users who may be drawn.")]
Rounds = Annotated[int, typer.Option(help="Central steps.")]
Delta = Annotated[float, typer.Option(help="The guarantee's delta; choose at most 1 / population.")]
Target = Annotated[float, typer.Option("--target-epsilon", help="The largest epsilon allowed.")]
Accountant = Annotated[By, typer.Option(help="The accountant that searches; epsilon is always stated by both.")]


_QUANTITIES: dict[str, Any] = {
    "target": Target, "cohort": Cohort, "population": Population, "rounds": Rounds, "delta": Delta,
    "noise_multiplier": Z, "noise_per_user": S,
}  # fmt: skip


def _add_question(asked: str, about: str, *unknown: str) -> None:
    """Add the command that finds one quantity; it has an option for every quantity that is not `unknown`."""

    def answer(accountant: By, as_json: bool, **given: Any) -> None:
        from confide.privacy import planner

        if "noise_multiplier" in given:
            given["noise"] = planner.Noise(given.pop("noise_multiplier"), given.pop("noise_per_user"))
        find: Callable[..., Answer] = vars(planner)[asked]
        _show(find(**given, accountant=accountant.value), as_json)

    options = {name: kind for name, kind in _QUANTITIES.items() if name not in unknown}
    options |= {"accountant": Accountant, "as_json": Json}
    defaults = {"noise_multiplier": None, "noise_per_user": None, "accountant": By.pld, "as_json": False}
    answer.__signature__ = Signature([  # type: ignore[attr-defined]
        Parameter(name, Parameter.KEYWORD_ONLY, default=defaults.get(name, Parameter.empty), annotation=kind)
        for name, kind in options.items()
    ])  # fmt: skip
    app.command(asked, help=about)(answer)


_NOISE = ("noise_multiplier", "noise_per_user")
_FOR_COHORT = "The largest cohort within a target at a fixed noise multiplier; the smallest at a fixed noise per user."
_add_question("epsilon", "The epsilon that a number of rounds spends.", "target")
_add_question("noise", "The smallest noise multiplier within a target.", *_NOISE)
_add_question("cohort", _FOR_COHORT, "cohort")
_add_question("population", "The smallest population within a target.", "population")
_add_question("rounds", "The largest number of rounds within a target.", "rounds")


@app.command()
def extrapolate(
    target: Target = 10.0,
    cohort: Annotated[int | None, typer.Option(help="Of the small run; none: show PFL-ASR's Table 1.")] = None,
    population: Annotated[int | None, typer.Option(help="Of the small run.")] = None,
    rounds: Rounds = 2000,
    delta: Delta = 1e-9,
    noise_multiplier: Z = None,
    noise_per_user: S = None,
    cohort_factors: Annotated[str, typer.Option(help="Multiply cohort and population by each.")] = "1,10,100",
    population_factors: Annotated[str, typer.Option(help="Multiply the population further by each.")] = "1,10",
    accountant: Accountant = By.pld,
    as_json: Json = False,
) -> None:
    """Scale a small run to a larger cohort and population at the same noise on the average.

    Without options it prints PFL-ASR's Table 1: the paper's epsilon beside ours, and the smallest population that
    reaches the target for each cohort. With --cohort, --population and a noise it does so for your own run.
    """
    from rich.console import Console
    from rich.progress import track

    from confide.privacy.planner import Noise, Point
    from confide.report.figures import plan as figures

    rows: list[tuple[Point, float | None, str]] = list(figures.published_points(delta))
    if (cohort, population, noise_multiplier, noise_per_user) != (None, None, None, None):
        if cohort is None or population is None:
            raise UserError("a run of your own needs --cohort, --population and --noise-multiplier or --noise-per-user")
        small = Point(Noise(noise_multiplier, noise_per_user).at(cohort), cohort, population, rounds, delta)
        factors = [
            parse_numbers(option, text, float, bool, "numbers separated by commas, for example 1,10,100")
            for option, text in (("cohort-factors", cohort_factors), ("population-factors", population_factors))
        ]
        rows = [(point, None, "") for point in figures.scaled_points(small, *factors)]
        if lost := len(factors[0]) * len(factors[1]) - len(rows):
            print(
                f"note: {lost} populations are left out, because delta {delta:g} is above 1 / population there and "
                "would hide a user by itself; a lower --delta allows them",
                file=sys.stderr,
            )
    shown = track(rows, "accounting", console=Console(stderr=True), transient=True, disable=as_json)
    found = figures.extrapolate(shown, target, accountant.value)
    if as_json:
        print_json({"target_epsilon": target, "rows": [row.to_json() for row in found]})
    else:
        _show_rows(found, target, accountant.value)


@app.command()
def curve(
    cohort: Cohort,
    population: Population,
    rounds: Rounds,
    delta: Delta,
    noise_multiplier: Z = None,
    noise_per_user: S = None,
    out: Annotated[Path | None, typer.Option(help="A PNG file for the four curves.")] = None,
    points: Annotated[int, typer.Option(min=3, max=99, help="Points on each curve.")] = 9,
    as_json: Json = False,
) -> None:
    """Epsilon against rounds, noise, cohort and population around a point, by both accountants."""
    from confide.privacy.planner import Noise, Point
    from confide.report.figures.plan import curves, draw_curves

    if out is None and not as_json:
        raise UserError("nothing to show: give --out FILE.png, --json, or both")
    fixed = Noise(noise_multiplier, noise_per_user)
    centre = Point(fixed.at(cohort), cohort, population, rounds, delta)
    drawn = curves(fixed, centre, points)
    if out is not None:
        draw_curves(out, drawn, centre, "s" if noise_multiplier is None else "z")
        print(out, file=sys.stderr if as_json else sys.stdout)
    if as_json:
        event = centre.event
        print_json({"curves": drawn, "delta": delta, "adjacency": event.adjacency, "sampler": event.sampler})


@app.command(cls=OpensRecipes)
def mechanism(
    cohort: Cohort,
    population: Population,
    rounds: Rounds,
    delta: Delta,
    epsilons: Annotated[str, typer.Option(help="Compare at each.")] = "1,2,4,8,16",
    most_bands: Annotated[int, typer.Option(min=1, max=1024, help="Each band costs a vector like the model.")] = 64,
    accountant: Accountant = By.pld,
    out: Annotated[Path | None, typer.Option(help="A PNG file for the comparison.")] = None,
    as_json: Json = False,
) -> None:
    """Which noise is the least at the same epsilon: independent or correlated, with sampling or without.

    The noise is that of prefix sums of the average update, in units of the bound C, because that is how far it carries
    the model. Each row has the number of bands that is best there.
    """
    from rich.console import Console
    from rich.progress import track

    from confide.privacy import advice

    wanted = parse_numbers("epsilons", epsilons, float, bool, "numbers separated by commas, for example 1,4,16")
    found = advice.compare(cohort, population, rounds, delta, wanted, most_bands, accountant.value)
    bar = track(found, "calibrating", len(wanted), console=Console(stderr=True), transient=True, disable=as_json)
    rows = list(bar)
    if out is not None:
        from confide.report.figures.plan import draw_advice

        draw_advice(out, rows, f"S = {cohort:,}, K = {population:,}, T = {rounds:,}, delta {delta:g}: equal epsilon")
        print(out, file=sys.stderr if as_json else sys.stdout)
    advised = advice.sentence(rows)
    if as_json:
        print_json({"delta": delta, "rows": [row.to_json() for row in rows], "advice": advised})
        return
    cells = [
        (f"{row.epsilon:g}", advice.NAMES[one.kind], f"{one.bands}", f"{one.noise_multiplier:.4g}", f"{one.rms:.3g}",
         f"{one.last:.3g}", "take" if one is row.best else "")
        for row in rows for one in row.choices
    ]  # fmt: skip
    names = ["epsilon", "mechanism", "bands", "z", "rms noise", "at the end", ""]
    title = f"noise of prefix sums, in units of C: S = {cohort:,}, K = {population:,}, T = {rounds:,}, delta {delta:g}"
    print_table(names, cells, title=title, left=2, width=112)
    print(advised)


@app.command(cls=OpensRecipes)
def frontier(
    recipes: Annotated[list[str], recipe_argument("Private recipes to compare, by name or as YAML files.")],
    epsilons: Annotated[str, typer.Option(help="Which epsilons to train at, beside no noise.")] = "8,4,2,1",
    seeds: Annotated[int, typer.Option(min=1, help="Runs at each epsilon, whose mean is shown.")] = 1,
    out: Annotated[Path, typer.Option(help="Where finished runs, rows and the page are kept.")] = Path(
        "results/frontier"
    ),
    set_: Sets = None,
    workers: Annotated[int, typer.Option(min=1, help="Runs at a time, one thread each.")] = 2,
    as_json: Json = False,
) -> None:
    """What does privacy cost me, with my people? Error against epsilon, trained for real.

    Every recipe is trained without noise and at each epsilon. Between these points, and for populations that are
    larger, the planner finds the noise, and the error is read off the measured runs. The page has the figure. A stopped
    command goes on where it was.

    Example: `confide plan frontier convex/digits --epsilons 8,2 --out results/digits`
    """
    from confide.reproduce.frontier import measure_frontier, sentences

    expected = "numbers above 0 separated by commas, for example 8,2"
    levels = parse_numbers(
        "epsilons", epsilons, float, lambda found: all(0 < e < float("inf") for e in found), expected
    )
    found = measure_frontier(recipes, set_ or [], levels, seeds, out, workers, quiet=as_json)
    if as_json:
        print_json(found.to_json())
        return
    print("\n".join([found.text(), "", *sentences(found), "", f"page: {out / 'frontier.html'}"]))


def _show(answer: Answer, as_json: bool) -> None:
    for sentence in answer.warnings:
        print(f"warning: {sentence}", file=sys.stderr)
    if as_json:
        print_json(answer.to_json())
        return
    from confide.privacy.accountant import COLOURS, protection, shown, strength, too_large

    point = answer.point
    spent = (answer.epsilon[answer.accountant], point.delta, point.population)
    word = strength(*spent)
    s = point.noise_multiplier / point.cohort
    lines = {
        "epsilon": f"{shown(answer.epsilon['pld'])} by PLD, {shown(answer.epsilon['rdp'])} by RDP",
        "that is": f"[{COLOURS[word]}]{protection(*spent)}[/]",
        "delta": f"[red]{point.delta:g}, above 1 / population[/]" if too_large(*spent[1:]) else f"{point.delta:g}",
        "noise": f"multiplier z = {point.noise_multiplier:.6g} (s = {s:.4g} per user)",
        "cohort": f"{point.cohort:,}",
        "population": f"{point.population:,} (rate {point.rate:.4g})",
        "rounds": f"{point.rounds:,}",
        "accounted by": f"PLD and RDP, {point.event.sampler} sampling, {point.event.adjacency}",
    }
    if answer.target_epsilon is not None:
        lines["searched with"] = f"{answer.accountant.upper()}, target epsilon {answer.target_epsilon:g}"
    rows = [(f"[bold]{name}[/bold]" if name == answer.asked else name, value) for name, value in lines.items()]
    print_table((), rows, title=f"confide plan {answer.asked}")


def _show_rows(rows: list[Scaled], target: float, accountant: str) -> None:
    from confide.privacy.accountant import COLOURS, shown, strength

    published = any(row.published is not None for row in rows)
    names = [
        "z",
        "s (1e-6)",
        "cohort S",
        "population K",
        "rounds",
        *(["published"] if published else []),
        "RDP",
        "PLD",
        "protection",
    ]
    cells = []
    for row in rows:
        point, both = row.answer.point, row.answer.epsilon
        word = strength(both[row.answer.accountant], point.delta, point.population)
        given = [f"{row.published:.3g}" + ("*" if row.note else "")] if row.published is not None else []
        cells.append((
            f"{point.noise_multiplier:.4g}", f"{point.noise_multiplier / point.cohort * 1e6:.4g}", f"{point.cohort:,}",
            f"{point.population:,}", f"{point.rounds:,}", *given, shown(both["rdp"]), shown(both["pld"]),
            f"[{COLOURS[word]}]{word}[/]", "none" if row.least_population is None else f"{row.least_population:,}",
        ))  # fmt: skip
    title = f"epsilon at delta {rows[0].answer.point.delta:g}: Poisson sampling, add-or-remove one user"
    print_table([*names, f"K for {target:g} ({accountant.upper()})"], cells, title=title, left=0, width=128)
    for note in {row.note for row in rows if row.note}:
        print(f"* {note}")

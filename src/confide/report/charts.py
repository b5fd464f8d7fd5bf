"""Charts as inline SVG, for pages that need no network, no library and no script to be read.

A chart is drawn once, in coordinates of a phone's width, and scaled by the browser. Colours are variables of the page's
style sheet, so that one drawing serves light, dark and paper. The numbers behind the lines are in the page as well, for
the script that shows the value under a pointer; without the script everything but that is there.

Own code in place of plotly or Vega: their scripts alone are 1 to 4 MB, more than a report may weigh.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

WIDTH, HEIGHT = 420, 250
LEFT, RIGHT, TOP, BOTTOM = 50, 12, 10, 34
POINTS = 300
COLOURS = 8
Numbers = Sequence[float | None]


@dataclass(frozen=True)
class Line:
    """A curve, dots, or a band with a curve in it. Values that are none, or not finite, are gaps."""

    label: str
    xs: Sequence[float]
    ys: Numbers
    colour: int = 0
    dashed: bool = False
    dots: bool = False
    low: Numbers | None = None
    high: Numbers | None = None


@dataclass(frozen=True)
class Axis:
    """From a value to a place and back to round numbers."""

    low: float
    high: float
    log: bool
    start: float
    end: float

    def at(self, value: float) -> float:
        low, high, x = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (self.end - self.start) * (x - low) / (high - low)

    def ticks(self) -> list[float]:
        return _log_ticks(self.low, self.high) if self.log else _even_ticks(self.low, self.high)


@dataclass(frozen=True)
class Chart:
    """What is drawn, with the sentence that says what it shows."""

    title: str
    said: str
    lines: Sequence[Line]
    x: str = "central step"
    log: bool = False
    log_x: bool = False
    from_zero: bool = False
    level: float | None = None
    """A horizontal line to compare with."""
    marks: Sequence[float] = field(default=())
    """Vertical lines."""

    def svg(self) -> str:
        """The figure, or nothing where there is no value to draw."""
        lines = [_thin_line(line, self.log, self.log_x) for line in self.lines]
        lines = [line for line in lines if any(y is not None for y in line.ys)]
        if not lines:
            return ""
        across, up = self._axes(lines)
        whole = all(float(x).is_integer() for line in lines for x in line.xs)
        parts = [_frame(across, up, self.x, whole)]
        if self.level is not None and up.low <= self.level <= up.high:
            y = f"{up.at(self.level):.1f}"
            parts.append(f"<line class=level x1={LEFT} x2={WIDTH - RIGHT} y1={y} y2={y} />")
        for mark in self.marks:
            if across.low <= mark <= across.high:
                x = f"{across.at(mark):.1f}"
                parts.append(f"<line class=level y1={TOP} y2={HEIGHT - BOTTOM} x1={x} x2={x} />")
        for number, line in enumerate(lines):
            parts.append(
                f'<g class="series c{line.colour % COLOURS}" data-series={number}>{_draw(line, across, up)}</g>'
            )
        said, title = html.escape(self.said), html.escape(self.title)
        return (
            f'<figure class=chart><h3>{title}</h3>{_legend(lines)}<svg viewBox="0 0 {WIDTH} {HEIGHT}" role=img '
            f'tabindex=0 aria-label="{title}. {said}">{"".join(parts)}</svg>'
            f"<figcaption>{said}</figcaption>{_data(lines, across, up, self.x)}</figure>"
        )

    def _axes(self, lines: Sequence[Line]) -> tuple[Axis, Axis]:
        xs = [x for line in lines for x, y in zip(line.xs, line.ys, strict=True) if y is not None]
        ys = [v for line in lines for many in (line.ys, line.low or (), line.high or ()) for v in many if v is not None]
        low, high = min(ys), max(ys)
        if self.from_zero and not self.log:
            low = min(low, 0.0)
        x_low, x_high = _spread_ends(min(xs), max(xs), self.log_x, 0.0)
        y_low, y_high = _spread_ends(low, high, self.log, 0.04)
        if self.from_zero and not self.log and low >= 0:
            y_low = 0.0
        return Axis(x_low, x_high, self.log_x, LEFT, WIDTH - RIGHT), Axis(y_low, y_high, self.log, HEIGHT - BOTTOM, TOP)


def thin(xs: Sequence[float], ys: Sequence[float], points: int = POINTS) -> list[int]:
    """Which points to keep: of each stretch the lowest and the highest, so that no spike is lost, and both ends."""
    if len(xs) <= points:
        return list(range(len(xs)))
    edges = np.linspace(0, len(xs), max((points - 2) // 2, 1) + 1).astype(int)
    values = np.asarray(ys, dtype=np.float64)
    kept = {0, len(xs) - 1}
    for start, end in pairwise(edges):
        kept |= {int(start + values[start:end].argmin()), int(start + values[start:end].argmax())}
    return sorted(kept)


def number(value: float) -> str:
    """A tick's or a table's number, short."""
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e4:
        return f"{value:.4g}"
    if 1e4 <= abs(value) < 1e15 and float(f"{value:.3g}") == value:
        for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
            if abs(value) >= size:
                return f"{value / size:.4g}{letter}"
    mantissa, power = f"{value:.2e}".split("e")
    mantissa = mantissa.rstrip("0").rstrip(".")
    return f"{mantissa}e{int(power)}"


def _thin_line(line: Line, log: bool, log_x: bool) -> Line:
    """Only values that can be drawn, and not more of them than a screen can show."""

    def fits(x: float, y: float | None) -> bool:
        return y is not None and math.isfinite(y) and math.isfinite(x) and (y > 0 or not log) and (x > 0 or not log_x)

    usable = [i for i, (x, y) in enumerate(zip(line.xs, line.ys, strict=True)) if fits(x, y)]
    kept = [usable[i] for i in thin([line.xs[i] for i in usable], [float(line.ys[i] or 0) for i in usable])]
    low, high = (
        None if band is None else [_band(band[i], line.ys[i], log) for i in kept] for band in (line.low, line.high)
    )
    return replace(line, xs=[line.xs[i] for i in kept], ys=[line.ys[i] for i in kept], low=low, high=high)


def _band(value: float | None, middle: float | None, log: bool) -> float | None:
    """A band's edge that has no place on the axis is drawn at its curve."""
    good = value is not None and math.isfinite(value) and (value > 0 or not log)
    return value if good else middle


def _spread_ends(low: float, high: float, log: bool, room: float) -> tuple[float, float]:
    """Ends of an axis that are not the same."""
    if log:
        if high / low < 1.001:
            return low / 1.5, high * 1.5
        factor = (high / low) ** room
        return low / factor, high * factor
    if high - low < 1e-9 * max(abs(high), abs(low), 1e-300):
        spread = abs(high) * 0.1 or 0.5
        return low - spread, high + spread
    return low - room * (high - low), high + room * (high - low)


def _even_ticks(low: float, high: float, about: int = 6) -> list[float]:
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [
        round(i * step, 12 - math.floor(math.log10(step))) for i in range(first, math.floor(high / step + 1e-9) + 1)
    ]


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    span = math.log10(high / low)
    steps = (1, 2, 5) if span < 2.5 else (1,)
    every = max(1, math.ceil(span / 6)) if len(steps) == 1 else 1
    found = [s * 10.0**d for d in decades if d % every == 0 for s in steps if low <= s * 10.0**d <= high]
    return found if len(found) > 1 else _even_ticks(low, high, 3)


def _frame(across: Axis, up: Axis, name: str, whole: bool) -> str:
    parts = []
    for tick in up.ticks():
        y = f"{up.at(tick):.1f}"
        parts.append(f"<line class=grid x1={LEFT} x2={WIDTH - RIGHT} y1={y} y2={y} />")
        parts.append(f"<text class=tick x={LEFT - 6} y={y} dy=.32em text-anchor=end>{number(tick)}</text>")
    for tick in across.ticks():
        if whole and not float(tick).is_integer():
            continue
        x = f"{across.at(tick):.1f}"
        parts.append(f"<text class=tick x={x} y={HEIGHT - BOTTOM + 15} text-anchor=middle>{number(tick)}</text>")
    parts.append(f"<line class=axis x1={LEFT} x2={WIDTH - RIGHT} y1={HEIGHT - BOTTOM} y2={HEIGHT - BOTTOM} />")
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f"<text class=name x={middle:g} y={HEIGHT - 3} text-anchor=middle>{html.escape(name)}</text>")
    return "".join(parts)


def _draw(line: Line, across: Axis, up: Axis) -> str:
    def place(ys: Numbers) -> list[tuple[float, float]]:
        return [(across.at(x), up.at(float(y))) for x, y in zip(line.xs, ys, strict=True) if y is not None]

    places, parts = place(line.ys), []
    if line.low is not None and line.high is not None:
        parts.append(f'<path class=band d="{_path([*place(line.high), *reversed(place(line.low))])}Z"/>')
    if len(places) > 1 and not line.dots:
        parts.append(f'<path class="curve{" dashed" if line.dashed else ""}" d="{_path(places)}"/>')
    if line.dots or len(places) <= 24:
        parts += [f"<circle r={3 if line.dots else 2.2} cx={x:.1f} cy={y:.1f} />" for x, y in places]
    return "".join(parts)


def _path(places: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)


def _legend(lines: Sequence[Line]) -> str:
    if len(lines) < 2:
        return ""
    keys = "".join(
        f'<button type=button class="key c{line.colour % COLOURS}{" dashed" if line.dashed else ""}" aria-pressed=true '
        f"data-series={i}>{html.escape(line.label)}</button>"
        for i, line in enumerate(lines)
    )
    return f"<div class=legend>{keys}</div>"


def _data(lines: Sequence[Line], across: Axis, up: Axis, x: str) -> str:
    document = {
        "x": x,
        "across": [across.low, across.high, int(across.log), across.start, across.end],
        "up": [up.low, up.high, int(up.log), up.start, up.end],
        "lines": [
            {"label": line.label, "colour": line.colour % COLOURS, "x": [_digits(v) for v in line.xs],
             "y": [_digits(v) for v in line.ys]}
            for line in lines
        ],
    }  # fmt: skip
    return f"<script type=application/json>{as_script(document)}</script>"


def as_script(document: object) -> str:
    """JSON that can stand inside a script element, whatever is in its strings."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _digits(value: float | None) -> float | None:
    if value is None:
        return None
    short = float(f"{value:.5g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short

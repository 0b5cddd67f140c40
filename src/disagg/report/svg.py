"""Plots as SVG text. Colours are classes that the page's style sheet fills, so one plot is right in light and dark."""

import html
import itertools
import math
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from disagg.report.axes import Axis, Scale, short

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 14, 44
LEGEND_ROW = 20
NUM_COLOURS = 6
MAX_POINTS = 600  # of a line; more cannot be seen
ROW_HEIGHT = 18
LETTER_WIDTH = 6.6

T = TypeVar("T")


class Series(msgspec.Struct, frozen=True):
    """One line. intervals: (low, high) of y for each point, or none. colour: index; None: the next one."""

    name: str
    points: tuple[tuple[float, float], ...]
    intervals: tuple[tuple[float, float], ...] = ()
    is_stepped: bool = False
    has_dots: bool = False
    has_line: bool = True
    colour: int | None = None


class Mark(msgspec.Struct, frozen=True):
    """A dashed line at a value, such as a target."""

    value: float
    label: str
    is_upright: bool = True  # at a value of x


class Span(msgspec.Struct, frozen=True):
    """Part of a waterfall's row. colour: index of the kind."""

    start: float
    stop: float
    colour: int


class Row(msgspec.Struct, frozen=True):
    """One row of a waterfall. ticks: moments within, such as tokens."""

    label: str
    spans: tuple[Span, ...]
    ticks: tuple[float, ...] = ()


def cdf(name: str, values: Sequence[float], colour: int | None = None) -> Series:
    """Share of values at or below x."""
    ordered = sorted(values)
    points = tuple((value, (rank + 1) / len(ordered)) for rank, value in enumerate(ordered))
    return Series(name, points, is_stepped=True, colour=colour)


def line_plot(title: str, series: Sequence[Series], x: Axis, y: Axis, marks: Sequence[Mark] = ()) -> str:
    """Lines, dots and intervals over two axes; a legend where there is more than one series."""
    has_legend = len(series) > 1
    top = TOP + (LEGEND_ROW * _num_legend_rows([each.name for each in series]) if has_legend else 0)
    height = HEIGHT + top - TOP
    xs = [px for each in series for px, _ in each.points] + [mark.value for mark in marks if mark.is_upright]
    ys = [py for each in series for _, py in each.points] + [
        v for each in series for pair in each.intervals for v in pair
    ]
    ys += [mark.value for mark in marks if not mark.is_upright]
    across = Scale(x, xs, LEFT, WIDTH - RIGHT)
    up = Scale(y, ys, height - BOTTOM, top)
    parts = [*_frame(across, up, top, height)]
    for index, each in enumerate(series):
        parts += _line(each, across, up, (each.colour if each.colour is not None else index) % NUM_COLOURS)
    parts += [part for mark in marks for part in _mark(mark, across, up, top, height)]
    if has_legend:
        parts += _legend(
            [(each.name, index if each.colour is None else each.colour) for index, each in enumerate(series)]
        )
    return _svg(title, height, parts)


def waterfall(title: str, rows: Sequence[Row], kinds: Sequence[str], x: Axis) -> str:
    """Rows of spans over one axis; kinds name the colours."""
    top = TOP + LEGEND_ROW * _num_legend_rows(kinds)
    height = top + ROW_HEIGHT * max(1, len(rows)) + BOTTOM
    ends = [value for row in rows for span in row.spans for value in (span.start, span.stop)]
    left = LEFT + max((LETTER_WIDTH * (len(row.label) - 7) for row in rows), default=0)
    scale = Scale(x, [0.0, *ends, *(tick for row in rows for tick in row.ticks)], max(LEFT, left), WIDTH - RIGHT)
    parts = _bottom(scale, top, height)
    for number, row in enumerate(rows):
        at = top + number * ROW_HEIGHT
        middle = at + ROW_HEIGHT / 2
        edge = scale.place(scale.low)
        parts.append(_text("tick", edge - 6, middle + 4, row.label, anchor="end"))
        for span in row.spans:
            start, stop = scale.place(span.start), scale.place(span.stop)
            box = f'x="{start:.1f}" y="{at + 3}" width="{max(0.5, stop - start):.1f}" height="{ROW_HEIGHT - 6}"'
            parts.append(f'<rect class="f{span.colour % NUM_COLOURS}" {box}/>')
        if row.ticks:
            moves = "".join(f"M{scale.place(tick):.1f} {at + 4}v{ROW_HEIGHT - 8}" for tick in _thin(row.ticks))
            parts.append(f'<path class="moment" d="{moves}"/>')
    parts += _legend(list(zip(kinds, range(len(kinds)), strict=True)))
    return _svg(title, height, parts)


def _line(series: Series, across: Scale, up: Scale, colour: int) -> list[str]:
    kept = [index for index, (x, y) in enumerate(series.points) if math.isfinite(x) and math.isfinite(y)]
    places = [(across.place(series.points[i][0]), up.place(series.points[i][1])) for i in _thin(kept)]
    parts: list[str] = []
    if series.has_line and places:
        steps = [f"M{places[0][0]:.1f} {places[0][1]:.1f}"]
        if series.is_stepped:
            steps = [f"M{places[0][0]:.1f} {up.place(up.low):.1f}V{places[0][1]:.1f}"]
            steps += [f"H{x:.1f}V{y:.1f}" for x, y in places[1:]]
            steps.append(f"H{across.place(across.high):.1f}")
        else:
            steps += [f"L{x:.1f} {y:.1f}" for x, y in places[1:]]
        parts.append(f'<path class="line l{colour}" d="{"".join(steps)}"/>')
    for (x, _), (low, high) in zip(series.points, series.intervals, strict=False):
        at, bottom, top = across.place(x), up.place(low), up.place(high)
        whisker = f"M{at:.1f} {bottom:.1f}V{top:.1f}M{at - 4:.1f} {bottom:.1f}h8M{at - 4:.1f} {top:.1f}h8"
        parts.append(f'<path class="whisker l{colour}" d="{whisker}"/>')
    if series.has_dots:
        parts += [f'<circle class="f{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in places]
    return parts


def _frame(across: Scale, up: Scale, top: float, height: float) -> list[str]:
    parts = _bottom(across, top, height)
    for tick in up.ticks():
        y = up.place(tick)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(_text("tick", LEFT - 6, y + 4, short(tick), anchor="end"))
    middle = (top + height - BOTTOM) / 2
    turned = f'transform="rotate(-90 14 {middle:.1f})" text-anchor="middle"'
    parts.append(f'<text class="axis" x="14" y="{middle:.1f}" {turned}>{_esc(up.axis.title)}</text>')
    return parts


def _bottom(across: Scale, top: float, height: float) -> list[str]:
    parts: list[str] = []
    floor = height - BOTTOM
    for tick in across.ticks():
        x = across.place(tick)
        parts.append(f'<path class="grid" d="M{x:.1f} {top}V{floor}"/>')
        parts.append(_text("tick", x, floor + 16, short(tick), anchor="middle"))
    middle = (across.place(across.low) + across.place(across.high)) / 2
    parts.append(_text("axis", middle, height - 8, across.axis.title, anchor="middle"))
    return parts


def _mark(mark: Mark, across: Scale, up: Scale, top: float, height: float) -> list[str]:
    text = _esc(mark.label)
    if mark.is_upright:
        x = across.place(mark.value)
        is_far = x > WIDTH - RIGHT - LETTER_WIDTH * len(mark.label) - 8
        side = f'x="{x - 5:.1f}" text-anchor="end"' if is_far else f'x="{x + 5:.1f}"'
        line = f'<path class="mark" d="M{x:.1f} {top}V{height - BOTTOM}"/>'
        return [line, f'<text class="note" {side} y="{height - BOTTOM - 8}">{text}</text>']
    y = up.place(mark.value)
    below = y < top + 16
    line = f'<path class="mark" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
    return [line, f'<text class="note" x="{LEFT + 6}" y="{y + 14 if below else y - 5:.1f}">{text}</text>']


def _legend_places(names: Sequence[str]) -> list[tuple[float, int]]:
    """(x, row) of each entry."""
    x, row = float(LEFT), 0
    found: list[tuple[float, int]] = []
    for name in names:
        width = 24 + LETTER_WIDTH * len(name) + 14
        if x > LEFT and x + width > WIDTH:
            x, row = float(LEFT), row + 1
        found.append((x, row))
        x += width
    return found


def _num_legend_rows(names: Sequence[str]) -> int:
    return max((row for _, row in _legend_places(names)), default=-1) + 1


def _legend(entries: Sequence[tuple[str, int]]) -> list[str]:
    parts: list[str] = []
    for (name, colour), (x, row) in zip(entries, _legend_places([name for name, _ in entries]), strict=True):
        y = 4 + row * LEGEND_ROW
        parts.append(f'<rect class="f{colour % NUM_COLOURS}" x="{x:.1f}" y="{y}" width="12" height="12" rx="2"/>')
        parts.append(_text("legend", x + 18, y + 10, name))
    return parts


def _thin(values: Sequence[T]) -> list[T]:
    """At most MAX_POINTS of them, evenly taken, the last among them."""
    if len(values) <= MAX_POINTS:
        return list(values)
    step = (len(values) - 1) / (MAX_POINTS - 1)
    return [values[round(number * step)] for number in range(MAX_POINTS)]


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{_esc(title)}">'
    return "".join(itertools.chain((head, f"<title>{_esc(title)}</title>"), parts, ("</svg>",)))


def _text(kind: str, x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_esc(text)}</text>'


def _esc(text: str) -> str:
    return html.escape(text, quote=True)

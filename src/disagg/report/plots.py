"""Plots as SVG text."""

import itertools
import math
from collections.abc import Sequence

import msgspec

from disagg.report.axes import Axis, Scale, short, ticks
from disagg.report.drawing import (
    LEFT,
    LETTER,
    NUM_COLOURS,
    WIDTH,
    box,
    legend,
    legend_height,
    line,
    svg,
    text,
)

__all__ = ["HEIGHT", "WIDTH", "Bar", "Mark", "Row", "Series", "Span", "bar_plot", "line_plot", "share_below", "ticks"]

HEIGHT = 300.0
RIGHT, TOP, BOTTOM = 22.0, 48.0, 46.0
BAR_TOP, BAR_HEIGHT, BAR_LEFT, BAR_RIGHT = 34.0, 22.0, 170.0, 64.0
ROW_HEIGHT = 18.0
LEAST_APART = 3.0  # moments of a row
MOST_POINTS = 240  # of a line: more cannot be seen


class Series(msgspec.Struct, frozen=True):
    """One line of (x, y); points that are not finite are left out. intervals: (low, high) of y at each point."""

    name: str
    points: tuple[tuple[float, float], ...]
    intervals: tuple[tuple[float, float], ...] = ()
    is_stepped: bool = False  # y holds until the next x
    has_dots: bool = False


class Mark(msgspec.Struct, frozen=True):
    """A dashed line across the plot where x, or y, is this."""

    name: str
    value: float
    is_upright: bool = True


class Bar(msgspec.Struct, frozen=True):
    """value: 0 or more, as the axis has it; text stands beside it; colour: a number of the page's."""

    name: str
    value: float
    text: str
    colour: int = 0


class Span(msgspec.Struct, frozen=True):
    """Part of a waterfall's row. kind: number of the name that says what it is, and of its colour."""

    start: float
    stop: float
    kind: int


class Row(msgspec.Struct, frozen=True):
    """One row of a waterfall. moments: within it, such as tokens."""

    name: str
    spans: tuple[Span, ...]
    moments: tuple[float, ...] = ()


def share_below(values: Sequence[float], num_points: int = MOST_POINTS) -> tuple[tuple[float, float], ...]:
    """(value, share of the values at or below it), rising; the finite ones of any numbers."""
    ordered = sorted(value for value in values if math.isfinite(value))
    if not ordered:
        return ()
    last = len(ordered) - 1
    places = sorted({round(index * last / max(1, num_points - 1)) for index in range(num_points)})
    return tuple((ordered[place], (place + 1) / len(ordered)) for place in places)


def line_plot(title: str, x: Axis | str, y: Axis | str, series: Sequence[Series], marks: Sequence[Mark] = ()) -> str:
    """An axis given by its name begins at 0 or at what is lowest, if that is negative. A plot of nothing says so."""
    x, y = (Axis(axis) if isinstance(axis, str) else axis for axis in (x, y))
    lines = [[point for point in each.points if all(map(math.isfinite, point))] for each in series]
    xs = [px for points in lines for px, _ in points] + [mark.value for mark in marks if mark.is_upright]
    ys = [py for points in lines for _, py in points] + [
        end for each in series for pair in each.intervals for end in pair
    ]
    if not ys:
        return svg(HEIGHT, title, [text(WIDTH / 2, HEIGHT / 2, "nothing to show", "middle")])
    names = [each.name for each in series] if len(series) > 1 else []
    top = TOP + legend_height(names)
    floor = HEIGHT - TOP + top - BOTTOM
    across = Scale(x, xs, LEFT, WIDTH - RIGHT)
    up = Scale(y, [*ys, *(mark.value for mark in marks if not mark.is_upright)], floor, top)
    parts = [line(LEFT, up.place(tick), WIDTH - RIGHT, up.place(tick), "grid") for tick in up.ticks]
    parts += [text(LEFT - 6, up.place(tick) + 4, short(tick), "end") for tick in up.ticks]
    parts += _below(across, floor)
    turned = f'transform="rotate(-90 14 {(top + floor) / 2:g})"'
    parts += [text(14, (top + floor) / 2, y.name, "middle", turned)]
    for mark in marks:
        parts += _mark(mark, across, up, top, floor)
    for number, (each, points) in enumerate(zip(series, lines, strict=True)):
        kept = [point for point in points if across.fits(point[0]) and up.fits(point[1])]
        parts += _series(each, kept, across, up, number % NUM_COLOURS)
    return svg(floor + BOTTOM, title, [*parts, *legend(names)])


def bar_plot(title: str, bars: Sequence[Bar], most: float | None = None) -> str:
    """One bar below the other, from 0 to `most` or the largest."""
    height = BAR_TOP + max(1, len(bars)) * BAR_HEIGHT + 12
    if not bars:
        return svg(height, title, [text(WIDTH / 2, BAR_TOP + 16, "nothing to show", "middle")])
    top = most or max(bar.value for bar in bars) or 1.0
    parts = []
    for number, bar in enumerate(bars):
        y = BAR_TOP + number * BAR_HEIGHT
        width = max(0.0, min(1.0, bar.value / top)) * (WIDTH - BAR_LEFT - BAR_RIGHT)
        parts.append(box(BAR_LEFT, y + 3, width, BAR_HEIGHT - 6, bar.colour))
        parts.append(text(BAR_LEFT - 8, y + 15, bar.name, "end"))
        parts.append(text(BAR_LEFT + width + 6, y + 15, bar.text, "start"))
    return svg(height, title, parts)


def waterfall(title: str, x: Axis | str, rows: Sequence[Row], kinds: Sequence[str]) -> str:
    """Rows of spans over one axis; kinds name the colours."""
    x = Axis(x) if isinstance(x, str) else x
    top = TOP + legend_height(kinds)
    floor = top + ROW_HEIGHT * max(1, len(rows))
    if not rows:
        return svg(floor + BOTTOM, title, [text(WIDTH / 2, top + 12, "nothing to show", "middle")])
    left = max(LEFT, *(LETTER * len(row.name) + 14 for row in rows))
    ends = [end for row in rows for span in row.spans for end in (span.start, span.stop)]
    scale = Scale(x, [*ends, *(moment for row in rows for moment in row.moments)], left, WIDTH - RIGHT)
    parts = [line(scale.place(tick), top, scale.place(tick), floor, "grid") for tick in scale.ticks]
    parts += _below(scale, floor)
    for number, row in enumerate(rows):
        y = top + number * ROW_HEIGHT
        parts.append(text(left - 8, y + 13, row.name, "end"))
        for span in row.spans:
            start, stop = scale.place(span.start), scale.place(span.stop)
            parts.append(box(start, y + 3, max(0.5, stop - start), ROW_HEIGHT - 6, span.kind))
        places = _apart([scale.place(moment) for moment in row.moments])
        moments = "".join(f"M{place:.1f} {y + 4:g}v{ROW_HEIGHT - 8:g}" for place in places)
        parts.append(f'<path class="moment" d="{moments}"/>' if moments else "")
    return svg(floor + BOTTOM, title, [*parts, *legend(kinds, has_boxes=True)])


def _apart(places: Sequence[float]) -> list[float]:
    """Rising places, without those too near the one before: lines side by side would hide what they stand on."""
    kept: list[float] = []
    for place in places:
        if not kept or place - kept[-1] >= LEAST_APART:
            kept.append(place)
    return kept


def _below(scale: Scale, floor: float) -> list[str]:
    """Numbers and name of the axis across."""
    parts = [text(scale.place(tick), floor + 16, short(tick), "middle") for tick in scale.ticks]
    return [*parts, text((scale.place(scale.low) + scale.place(scale.high)) / 2, floor + 38, scale.axis.name, "middle")]


def _mark(mark: Mark, across: Scale, up: Scale, top: float, floor: float) -> list[str]:
    if not mark.is_upright:
        y = up.place(mark.value)
        return [line(LEFT, y, WIDTH - RIGHT, y, "mark"), text(LEFT + 4, y + 14, mark.name, "start")]
    x = across.place(mark.value)
    shift, anchor = (-4, "end") if x > WIDTH * 0.75 else (4, "start")
    return [line(x, top, x, floor, "mark"), text(x + shift, floor - 6, mark.name, anchor)]


def _series(series: Series, points: Sequence[tuple[float, float]], across: Scale, up: Scale, colour: int) -> list[str]:
    places = [(across.place(x), up.place(y)) for x, y in points]
    drawn = places
    if series.is_stepped and places:
        drawn = [(places[0][0], up.place(up.low)), places[0]]
        for (_, y_before), (x, y) in itertools.pairwise(places):
            drawn += [(x, y_before), (x, y)]
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in drawn)
    parts = [f'<polyline class="line s{colour}" points="{joined}"/>']
    for (x, _), (low, high) in zip(series.points, series.intervals, strict=False):
        at, bottom, top = across.place(x), up.place(low), up.place(high)
        parts.append(line(at, bottom, at, top, f"line thin s{colour}"))
        parts += [line(at - 4, end, at + 4, end, f"line thin s{colour}") for end in (bottom, top)]
    if series.has_dots:
        parts += [f'<circle class="bar s{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in places]
    return parts

"""Plots as SVG text. Colours are classes of the page, so that one drawing serves light and dark."""

import html
import math
from collections.abc import Sequence

import msgspec

WIDTH, HEIGHT = 560.0, 300.0
LEFT, RIGHT, TOP, BOTTOM = 62.0, 22.0, 48.0, 46.0
BAR_TOP, BAR_HEIGHT, BAR_LEFT, BAR_RIGHT = 34.0, 22.0, 170.0, 64.0
LETTER = 7.0  # about, of a legend's letters
NUM_COLOURS = 6  # .s0 to .s5 of the page
NARROWEST = 1e-9  # of an axis, beside what stands on it
MOST_POINTS = 240  # of a line: more cannot be seen


class Series(msgspec.Struct, frozen=True):
    """One line of (x, y); points that are not finite are left out."""

    name: str
    points: tuple[tuple[float, float], ...]


class Mark(msgspec.Struct, frozen=True):
    """A dashed line across the plot where x is this."""

    name: str
    x: float


class Bar(msgspec.Struct, frozen=True):
    """value: 0 or more, as the axis has it; text stands beside it; colour: a number of the page's."""

    name: str
    value: float
    text: str
    colour: int = 0


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from at or below `low` to at or above `high`, about `count` steps."""
    scale = max(1.0, abs(low), abs(high))
    if not high - low > NARROWEST * scale:
        high = low + scale
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def share_below(values: Sequence[float], num_points: int = MOST_POINTS) -> tuple[tuple[float, float], ...]:
    """(value, share of the values at or below it), rising; the finite ones of any numbers."""
    ordered = sorted(value for value in values if math.isfinite(value))
    if not ordered:
        return ()
    last = len(ordered) - 1
    places = sorted({round(index * last / max(1, num_points - 1)) for index in range(num_points)})
    return tuple((ordered[place], (place + 1) / len(ordered)) for place in places)


def line_plot(title: str, x_name: str, y_name: str, series: Sequence[Series], marks: Sequence[Mark] = ()) -> str:
    """Axes begin at 0 or at what is lowest, if that is negative. A plot of nothing says so."""
    lines = [[point for point in each.points if all(map(math.isfinite, point))] for each in series]
    xs = [x for line in lines for x, _ in line] + [mark.x for mark in marks]
    ys = [y for line in lines for _, y in line]
    if not ys:
        return _svg(HEIGHT, title, [_text(WIDTH / 2, HEIGHT / 2, "nothing to show", "middle")])
    x_ticks, y_ticks = ticks(min(0.0, *xs), max(xs)), ticks(min(0.0, *ys), max(ys))

    def place_x(x: float) -> float:
        return LEFT + (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0]) * (WIDTH - LEFT - RIGHT)

    def place_y(y: float) -> float:
        return HEIGHT - BOTTOM - (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]) * (HEIGHT - TOP - BOTTOM)

    parts = [_line(LEFT, place_y(y), WIDTH - RIGHT, place_y(y), "grid") for y in y_ticks]
    parts += [_text(LEFT - 6, place_y(y) + 4, f"{y:g}", "end") for y in y_ticks]
    parts += [_text(place_x(x), HEIGHT - BOTTOM + 16, f"{x:g}", "middle") for x in x_ticks]
    parts += [_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x_name, "middle")]
    turned = f'transform="rotate(-90 14 {HEIGHT / 2:g})"'
    parts += [_text(14, HEIGHT / 2, y_name, "middle", turned)]
    for mark in marks:
        parts.append(_line(place_x(mark.x), TOP, place_x(mark.x), HEIGHT - BOTTOM, "mark"))
        is_right = place_x(mark.x) > WIDTH * 0.75
        shift, anchor = (-4, "end") if is_right else (4, "start")
        parts.append(_text(place_x(mark.x) + shift, HEIGHT - BOTTOM - 6, mark.name, anchor))
    for number, line in enumerate(lines):
        places = " ".join(f"{place_x(x):.1f},{place_y(y):.1f}" for x, y in line)
        parts.append(f'<polyline class="line s{number % NUM_COLOURS}" points="{places}"/>')
    if len(series) > 1:
        parts += _legend([each.name for each in series])
    return _svg(HEIGHT, title, parts)


def bar_plot(title: str, bars: Sequence[Bar], most: float | None = None) -> str:
    """One bar below the other, from 0 to `most` or the largest."""
    height = BAR_TOP + max(1, len(bars)) * BAR_HEIGHT + 12
    if not bars:
        return _svg(height, title, [_text(WIDTH / 2, BAR_TOP + 16, "nothing to show", "middle")])
    top = most or max(bar.value for bar in bars) or 1.0
    parts = []
    for number, bar in enumerate(bars):
        y = BAR_TOP + number * BAR_HEIGHT
        width = max(0.0, min(1.0, bar.value / top)) * (WIDTH - BAR_LEFT - BAR_RIGHT)
        place = f'x="{BAR_LEFT:g}" y="{y + 3:g}" width="{width:.1f}" height="{BAR_HEIGHT - 6:g}"'
        parts.append(f'<rect class="bar s{bar.colour % NUM_COLOURS}" {place}/>')
        parts.append(_text(BAR_LEFT - 8, y + 15, bar.name, "end"))
        parts.append(_text(BAR_LEFT + width + 6, y + 15, bar.text, "start"))
    return _svg(height, title, parts)


def _legend(names: Sequence[str]) -> list[str]:
    """Between title and plot, where no line runs."""
    parts, x = [], LEFT
    for number, name in enumerate(names):
        parts += [_line(x, 32, x + 18, 32, f"line s{number % NUM_COLOURS}"), _text(x + 23, 36, name, "start")]
        x += 40 + LETTER * len(name)
    return parts


def _svg(height: float, title: str, parts: Sequence[str]) -> str:
    label = html.escape(title, quote=True)
    head = f'<svg viewBox="0 0 {WIDTH:g} {height:g}" role="img" aria-label="{label}">'
    return "\n".join((head, _text(8, 18, title, "start", 'class="title"'), *parts, "</svg>"))


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, words: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{html.escape(words)}</text>'

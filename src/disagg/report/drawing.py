"""Pieces of SVG. Colours are classes of the page: sN for the N-th, so that one drawing serves light and dark."""

import html
from collections.abc import Sequence

WIDTH = 560.0
LEFT = 62.0
LETTER = 7.0  # about, of a legend's letters
NUM_COLOURS = 6  # .s0 to .s5 of the page
LEGEND_TOP, LEGEND_ROW = 32.0, 18.0


def svg(height: float, title: str, parts: Sequence[str]) -> str:
    label = html.escape(title, quote=True)
    head = f'<svg viewBox="0 0 {WIDTH:g} {height:g}" role="img" aria-label="{label}">'
    return "\n".join((head, text(8, 18, title, "start", 'class="title"'), *parts, "</svg>"))


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def text(x: float, y: float, words: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{html.escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, colour: int) -> str:
    place = f'x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{height:g}"'
    return f'<rect class="bar s{colour % NUM_COLOURS}" {place}/>'


def legend_places(names: Sequence[str]) -> list[tuple[float, int]]:
    """(x, row) of each name, between title and plot, where no line runs."""
    found, x, row = [], LEFT, 0
    for name in names:
        width = 40 + LETTER * len(name)
        if x > LEFT and x + width > WIDTH:
            x, row = LEFT, row + 1
        found.append((x, row))
        x += width
    return found


def legend_height(names: Sequence[str]) -> float:
    """Below the first row, which every plot has room for."""
    return LEGEND_ROW * max((row for _, row in legend_places(names)), default=0)


def legend(names: Sequence[str], *, has_boxes: bool = False) -> list[str]:
    parts = []
    for number, (name, (x, row)) in enumerate(zip(names, legend_places(names), strict=True)):
        y = LEGEND_TOP + row * LEGEND_ROW
        colour = number % NUM_COLOURS
        parts.append(box(x, y - 5, 18, 10, colour) if has_boxes else line(x, y, x + 18, y, f"line s{colour}"))
        parts.append(text(x + 23, y + 4, name, "start"))
    return parts

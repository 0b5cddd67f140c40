"""One HTML file that needs nothing else: headings, paragraphs, tables, plots."""

import html
from collections.abc import Sequence
from pathlib import Path

import msgspec

_STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")


class Plot(msgspec.Struct, frozen=True):
    """An SVG of disagg.report.svg under a heading, with words below."""

    heading: str
    svg: str
    caption: str = ""


class Table(msgspec.Struct, frozen=True):
    """Cells are text; the first column is to the left, numbers to the right."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """In this order: heading, paragraphs, table, plots."""

    heading: str
    paragraphs: tuple[str, ...] = ()
    table: Table | None = None
    plots: tuple[Plot, ...] = ()


def page(title: str, subtitle: str, verdicts: Sequence[str], sections: Sequence[Section]) -> str:
    """Light or dark as the reader's system is. All text is escaped. verdicts: sentences that stand first."""
    body = [f"<h1>{_esc(title)}</h1>", f'<p class="soft">{_esc(subtitle)}</p>']
    body += [f'<p class="verdict">{_esc(verdict)}</p>' for verdict in verdicts]
    for section in sections:
        body.append(f"<h2>{_esc(section.heading)}</h2>")
        body += [f"<p>{_esc(text)}</p>" for text in section.paragraphs]
        if section.table is not None:
            body.append(_table(section.table))
        if section.plots:
            body.append(f'<div class="plots">{"".join(map(_plot, section.plots))}</div>')
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_esc(title)}</title><style>\n{_STYLE}</style>"
    )
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(body) + "\n</body></html>\n"


def _plot(plot: Plot) -> str:
    caption = f"<figcaption>{_esc(plot.caption)}</figcaption>" if plot.caption else ""
    return f"<figure><h3>{_esc(plot.heading)}</h3>{plot.svg}{caption}</figure>"


def _table(table: Table) -> str:
    heads = "".join(f"<th>{_esc(head)}</th>" for head in table.heads)
    rows = "".join("<tr>" + "".join(f"<td>{_esc(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'


def _esc(text: str) -> str:
    return html.escape(text, quote=True)

"""One HTML file with everything in it: no script, no font, no address."""

import html
from collections.abc import Sequence

import msgspec

_STYLE = """
:root { --back: #ffffff; --ink: #1d2433; --soft: #5b6577; --rule: #dfe3ea; --warn: #c0392b;
  --c0: #2563eb; --c1: #d97706; --c2: #059669; --c3: #9333ea; --c4: #dc2626; --c5: #0891b2; color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --back: #12161f; --ink: #e6e9ef; --soft: #9aa5b8; --rule: #2b3342;
  --warn: #ff8a7a; --c0: #6ea8ff; --c1: #f5b14c; --c2: #4fd1a1; --c3: #c792ff; --c4: #ff8585; --c5: #5cd3ea; } }
body { margin: 2rem auto; max-width: 76rem; padding: 0 1rem; background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.1rem; margin-top: 2rem; } p { color: var(--soft); }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr));
  gap: 1.2rem; margin-top: 1.2rem; }
svg { width: 100%; height: auto; border: 1px solid var(--rule); border-radius: 6px; }
svg text { fill: var(--soft); font-size: 12px; }
svg text.title { fill: var(--ink); font-size: 13px; font-weight: 600; }
.grid { stroke: var(--rule); } .mark { stroke: var(--warn); stroke-dasharray: 4 4; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.line.s0 { stroke: var(--c0); } .line.s1 { stroke: var(--c1); } .line.s2 { stroke: var(--c2); }
.line.s3 { stroke: var(--c3); } .line.s4 { stroke: var(--c4); } .line.s5 { stroke: var(--c5); }
.bar.s0 { fill: var(--c0); } .bar.s1 { fill: var(--c1); } .bar.s2 { fill: var(--c2); }
.line.thin { stroke-width: 1.2; } .moment { stroke: var(--back); stroke-width: 1; fill: none; }
.verdict { color: var(--ink); border-left: 4px solid var(--c0); padding: .5rem 1rem; font-size: 1.05rem; }
figure { margin: 0; max-width: 46rem; } figcaption { color: var(--soft); font-size: .85rem; }
.bar.s3 { fill: var(--c3); } .bar.s4 { fill: var(--c4); } .bar.s5 { fill: var(--c5); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--rule); }
th { color: var(--soft); font-weight: 500; } .wide { overflow-x: auto; }
"""


class Table(msgspec.Struct, frozen=True):
    """Texts; each row as long as the heads."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Section(msgspec.Struct, frozen=True):
    """Words, then tables, then plots (SVG text), under a heading."""

    title: str
    text: str = ""
    tables: tuple[Table, ...] = ()
    plots: tuple[str, ...] = ()


def page(title: str, subtitle: str, sections: Sequence[Section], verdicts: Sequence[str] = ()) -> str:
    """The whole file. verdicts: sentences that stand above all else."""
    first = [f'<p class="verdict">{html.escape(each)}</p>' for each in verdicts]
    body = "\n".join([*first, *(_section(each) for each in sections)])
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{html.escape(title)}</h1>\n<p>{html.escape(subtitle)}</p>\n{body}\n</body>\n</html>\n"
    )


def captioned(svg: str, caption: str) -> str:
    """A plot with words below it."""
    return f"{svg}<figcaption>{html.escape(caption)}</figcaption>"


def _section(section: Section) -> str:
    parts = [f"<h2>{html.escape(section.title)}</h2>"]
    if section.text:
        parts.append(f"<p>{html.escape(section.text)}</p>")
    parts += [_table(table) for table in section.tables]
    if section.plots:
        parts.append(
            '<div class="plots">\n' + "\n".join(f"<figure>{each}</figure>" for each in section.plots) + "\n</div>"
        )
    return "\n".join(parts)


def _table(table: Table) -> str:
    heads = "".join(f"<th>{html.escape(head)}</th>" for head in table.heads)
    rows = "\n".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    return f'<div class="wide"><table>\n<tr>{heads}</tr>\n{rows}\n</table></div>'

"""Write what is generated into the documentation: the state diagrams, the table of metrics."""

from pathlib import Path

from disagg.protocol.tables import DIAGRAMS, TABLES
from disagg.telemetry import page
from disagg.telemetry.metrics import ROUTER_METRICS

DOCS = Path(__file__).parents[1] / "docs"


def main() -> None:
    by_name = {table.name: table for table in TABLES}
    for file, names in DIAGRAMS.items():
        put(file, {name: f"```mermaid\n{by_name[name].diagram()}\n```\n" for name in names})
    parts = {name: page.markdown(metrics) for name, metrics in page.PARTS.items()}
    put("metrics.md", {**parts, "buckets": page.bucket_lines(ROUTER_METRICS)})


def put(file: str, parts: dict[str, str]) -> None:
    """Each text between the mark of its name and the next end."""
    text = (DOCS / file).read_text()
    for name, content in parts.items():
        head, rest = text.split(f"<!-- table: {name} -->\n", 1)
        _, tail = rest.split("<!-- end -->", 1)
        text = f"{head}<!-- table: {name} -->\n{content}<!-- end -->{tail}"
    (DOCS / file).write_text(text)


if __name__ == "__main__":
    main()

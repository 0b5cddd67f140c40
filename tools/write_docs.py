"""Write what is generated into the documentation: the state diagrams of docs/architecture.md."""

from pathlib import Path

from disagg.protocol.tables import TABLES

ARCHITECTURE = Path(__file__).parents[1] / "docs" / "architecture.md"


def main() -> None:
    text = ARCHITECTURE.read_text()
    for table in TABLES:
        head, rest = text.split(f"<!-- table: {table.name} -->\n", 1)
        _, tail = rest.split("<!-- end -->", 1)
        text = f"{head}<!-- table: {table.name} -->\n```mermaid\n{table.diagram()}\n```\n<!-- end -->{tail}"
    ARCHITECTURE.write_text(text)


if __name__ == "__main__":
    main()

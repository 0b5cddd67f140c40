"""Write what is generated into the documentation: the state diagrams."""

from pathlib import Path

from disagg.protocol.tables import DIAGRAMS, TABLES

DOCS = Path(__file__).parents[1] / "docs"


def main() -> None:
    by_name = {table.name: table for table in TABLES}
    for file, names in DIAGRAMS.items():
        text = (DOCS / file).read_text()
        for name in names:
            head, rest = text.split(f"<!-- table: {name} -->\n", 1)
            _, tail = rest.split("<!-- end -->", 1)
            text = f"{head}<!-- table: {name} -->\n```mermaid\n{by_name[name].diagram()}\n```\n<!-- end -->{tail}"
        (DOCS / file).write_text(text)


if __name__ == "__main__":
    main()

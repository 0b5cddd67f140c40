"""Write what is generated into the documentation: the state diagrams of docs/architecture.md."""

import re
from pathlib import Path

from disagg.protocol.tables import TABLES

ARCHITECTURE = Path(__file__).parents[1] / "docs" / "architecture.md"


def main() -> None:
    text = ARCHITECTURE.read_text()
    for table in TABLES:
        block = f"<!-- table: {table.name} -->\n```mermaid\n{table.diagram()}\n```\n<!-- end -->"
        text = re.sub(rf"<!-- table: {re.escape(table.name)} -->\n.*?<!-- end -->", lambda _: block, text, flags=re.DOTALL)  # noqa: B023
    ARCHITECTURE.write_text(text)


if __name__ == "__main__":
    main()

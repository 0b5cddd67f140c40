"""The documentation says what the code says."""

import re
import tomllib
from pathlib import Path

import pytest

from disagg.protocol.tables import DIAGRAMS, TABLES
from disagg.telemetry.metrics import ALL_METRICS, ROUTER_METRICS
from disagg.telemetry.page import PARTS, bucket_lines, markdown

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "disagg"
ARCHITECTURE = ROOT / "docs" / "architecture.md"


def section(page: str, name: str) -> str:
    match = re.search(
        rf"<!-- table: {re.escape(name)} -->\n(.*?)<!-- end -->", (ROOT / "docs" / page).read_text(), re.DOTALL
    )
    assert match is not None, f"docs/{page} has no table {name}"
    return match.group(1)


@pytest.mark.parametrize(("page", "name"), [(page, name) for page, names in DIAGRAMS.items() for name in names])
def test_diagrams_are_generated(page: str, name: str) -> None:
    """`make docs` rewrites them."""
    (table,) = [each for each in TABLES if each.name == name]
    assert section(page, name) == f"```mermaid\n{table.diagram()}\n```\n"


def test_the_page_of_metrics_is_the_table() -> None:
    """`make docs` rewrites it."""
    for name, metrics in PARTS.items():
        assert section("metrics.md", name) == markdown(metrics)
    assert section("metrics.md", "buckets") == bucket_lines(ROUTER_METRICS)


def test_metrics_that_pages_name_exist() -> None:
    names = {metric.name for metric in ALL_METRICS}
    for path in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]:
        for name in re.findall(r"\bdisagg_[a-z0-9_]+", path.read_text()):
            assert names & {name, re.sub("_(bucket|sum|count)$", "", name)}, f"{path.name} names {name}"


def test_rooms_are_those_on_disk_lowest_first_and_the_pure_ones_are_marked() -> None:
    rows = re.findall(r"^\| (· )?`(\w+)` \|", ARCHITECTURE.read_text(), re.MULTILINE)
    rooms = [room for _, room in rows]
    assert sorted(rooms) == sorted(path.parent.name for path in SOURCES.glob("*/__init__.py"))
    linted = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    contracts = {contract["id"]: contract for contract in linted}
    layers = [line.split(" | ") for line in reversed(contracts["rooms"]["layers"])]
    height = {room: number for number, layer in enumerate(layers) for room in layer}
    assert [height[room] for room in rooms] == sorted(height.values())
    pure = [f"disagg.{room}" for mark, room in rows if mark]
    assert sorted(pure) == sorted(contracts["pure"]["source_modules"])


def test_readme_tree_is_the_one_on_disk() -> None:
    """Every package stands once in the README's tree with its purpose, and nothing else does."""
    rows = re.findall(r"^\s+(\w+)/\s{2,}\S", (ROOT / "README.md").read_text(), re.MULTILINE)
    named = set(rows)
    assert len(rows) == len(named)
    on_disk = {path.parent.name for path in SOURCES.glob("*/__init__.py")}
    assert on_disk <= named, f"missing in README: {on_disk - named}"
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
    inner = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()}
    assert named <= on_disk | folders | inner, f"only in README: {named - on_disk - folders - inner}"


def test_files_that_pages_name_exist() -> None:
    """Paths are the project's, or a room's."""
    for page in [*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")]:
        for name in re.findall(r"`((?:[\w-]+/)+[\w*.-]+\.[a-z]+)`", page.read_text()):
            assert any([*ROOT.glob(name), *SOURCES.glob(name)]), f"{page.name} names {name}"

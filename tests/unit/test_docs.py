"""The documentation says what the code says."""

import re
from pathlib import Path

import pytest

from disagg.protocol.tables import DIAGRAMS, TABLES
from disagg.telemetry.metrics import ALL_METRICS, ROUTER_METRICS
from disagg.telemetry.page import PARTS, bucket_lines, markdown

ROOT = Path(__file__).parents[2]
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


def test_rooms_are_those_on_disk() -> None:
    rooms = set(re.findall(r"^\| (?:· )?`(\w+)` \|", ARCHITECTURE.read_text(), re.MULTILINE))
    on_disk = {path.parent.name for path in (ROOT / "src" / "disagg").glob("*/__init__.py")}
    assert rooms == on_disk


def test_readme_tree_is_the_one_on_disk() -> None:
    """Every package stands in the README's tree with its purpose, and nothing else does."""
    readme = (ROOT / "README.md").read_text()
    named = set(re.findall(r"^\s+(\w+)/\s{2,}\S", readme, re.MULTILINE))
    on_disk = {path.parent.name for path in (ROOT / "src" / "disagg").glob("*/__init__.py")}
    assert on_disk <= named, f"missing in README: {on_disk - named}"
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
    inner = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()}
    assert named <= on_disk | folders | inner, f"only in README: {named - on_disk - folders - inner}"

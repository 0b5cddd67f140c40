"""Rules of the house that no linter knows."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src" / "disagg").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
BANNED = re.compile(r"(Manager|Handler|Helper|Utils?|Impl|Mixin)$|^Base[A-Z]|common|misc", re.IGNORECASE)
CLASS = re.compile(r"^\s*class (\w+)", re.MULTILINE)
MAX_LINES = 400


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_files_are_short_and_say_what_they_are() -> None:
    texts = {relative(path): path.read_text() for path in (*SOURCES, *TESTS)}
    lengths = {name: len(text.splitlines()) for name, text in texts.items()}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}
    assert [name for name, text in texts.items() if not text.startswith('"""')] == [], "no module docstring"


def test_names_say_something() -> None:
    assert [relative(path) for path in SOURCES if BANNED.search(path.stem)] == []
    classes = [(relative(path), name) for path in SOURCES for name in CLASS.findall(path.read_text())]
    assert classes
    assert [each for each in classes if BANNED.search(each[1])] == []


def test_every_pinned_dependency_is_allowed_and_every_direct_one_is_pinned() -> None:
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = dict(
        line.lower().split("==") for line in (ROOT / "requirements.lock").read_text().splitlines() if "==" in line
    )
    pins = {name.replace("_", "-"): version for name, version in pins.items()}
    for text in (*project["dependencies"], *project["optional-dependencies"]["dev"]):
        requirement = Requirement(text)
        name = requirement.name.lower().replace("_", "-")
        assert requirement.specifier.contains(pins[name]), f"{text} does not allow the pinned {pins[name]}"


def test_the_package_is_typed() -> None:
    assert (ROOT / "src" / "disagg" / "py.typed").exists()


def test_the_check_on_a_server_is_what_a_person_runs() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert "set -euo pipefail" in script
    assert script.index("make test") < script.index("make parity")
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111

"""Fields become flags: with their defaults and help, one for both of two structs, and back into structs."""

from typing import Annotated, Any

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from disagg.cli.unfold import same_named, unfolded

Shared = Annotated[int, typer.Option(help="Of both ends.")]


class Front(msgspec.Struct, frozen=True, kw_only=True):
    target: Annotated[str, typer.Argument(metavar="WHERE")]
    beat: Shared = 3
    names: Annotated[list[str] | None, typer.Option("--name", help="Again for more.")] = None


class Back(msgspec.Struct, frozen=True, kw_only=True):
    beat: Shared = 3
    depth: float = 0.5


class Deeper(Back, frozen=True, kw_only=True):
    is_loud: Annotated[bool, typer.Option("--loud", help="Say more.")] = False


class Config(msgspec.Struct, frozen=True):
    beat: int
    is_loud: bool


@pytest.fixture
def run() -> Any:
    told: list[tuple[object, ...]] = []

    @unfolded
    def command(back: Deeper, front: Front, times: Annotated[int, typer.Option(help="How often.")] = 1) -> None:
        """Say what was asked."""
        told.append((back, front, times))

    app = typer.Typer()
    app.command()(command)

    def run(*words: str) -> tuple[int, str, list[tuple[object, ...]]]:
        told.clear()
        result = CliRunner().invoke(app, words, env={"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"})
        return result.exit_code, result.output, list(told)

    return run


def test_flags_come_back_as_structs(run: Any) -> None:
    assert run("here") == (0, "", [(Deeper(), Front(target="here"), 1)])
    asked = ("here", "--beat", "7", "--name", "a", "--name", "b", "--depth", "2", "--loud", "--times", "4")
    expected = (Deeper(beat=7, depth=2.0, is_loud=True), Front(target="here", beat=7, names=["a", "b"]), 4)
    assert run(*asked) == (0, "", [expected])


def test_help_and_errors_are_typers_own(run: Any) -> None:
    code, output, _ = run("--help")
    assert code == 0
    for words in (
        "WHERE",
        "--beat",
        "Of both ends.",
        "[default: 3]",
        "--name",
        "--depth",
        "--loud",
        "Say what was asked",
    ):
        assert words in output
    assert output.count("--beat") == 1
    assert output.index("--times") < output.index("--beat")  # a command's own come first
    for wrong in ((), ("here", "--beat", "x"), ("here", "--noise")):
        code, _, told = run(*wrong)
        assert (code, told) == (2, [])


def test_only_fields_of_the_same_name_are_taken_over() -> None:
    assert same_named(Deeper(beat=9), Config) == {"beat": 9, "is_loud": False}

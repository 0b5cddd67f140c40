"""What a running load says of itself: on a terminal and elsewhere."""

import io
import sys
from types import SimpleNamespace

import pytest
from tests.unit.bench.rigs import record

from disagg.bench.record import Lapse
from disagg.cli import bench_progress
from disagg.cli.bench_progress import PLAIN_INTERVAL_S, Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(bench_progress, "time", SimpleNamespace(perf_counter=lambda: made.now_s))
    return made


def test_the_line_says_how_many_are_over_what_failed_and_how_it_goes(clock: Clock) -> None:
    progress = Progress("chat", 10)
    assert progress.line(100.0) == "chat: 0/10 over in 0 s"
    for ttft_s in (0.1, 0.2, 0.3):
        progress.tell(record(0, ttft_s=ttft_s))
    progress.tell(record(1, lapse=Lapse.TIMEOUT))
    assert progress.line(107.0) == "chat: 4/10 over in 7 s, 1 failed, recent TTFT p50 200 ms"
    assert Progress("chat", 0).line(100.0) == "chat: 0 over in 0 s"


def test_elsewhere_than_on_a_terminal_a_line_comes_now_and_then(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress("x", 3) as progress:
        for _ in range(3):
            clock.now_s += 0.4 * PLAIN_INTERVAL_S
            progress.tell(record(0))
    assert capsys.readouterr().err == "disagg: x: 3/3 over in 12 s, recent TTFT p50 500 ms\n"


def test_on_a_terminal_one_line_is_drawn_again_and_is_gone_in_the_end(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress("a load with a long name", 1000) as progress:
        assert "a load with a long name: 0/1000" in terminal.getvalue()
        for _ in range(2):
            clock.now_s += 0.2  # drawn at most four times a second
            progress.tell(record(0))
        drawn = terminal.getvalue()
        assert "1/1000" not in drawn
        assert "2/1000" in drawn
        assert "\n" not in drawn  # a line that is too long is cut, not broken
    assert terminal.getvalue().endswith("\x1b[2K")

"""Lines that say how each worker does."""

import io

from rich.console import Console

from disagg.cli.display import LiveDisplay, PlainDisplay, worker_lines
from disagg.cluster.supervisor import ProcessExited, ProcessPhase, ProcessSnapshot
from disagg.cluster.view import WorkerStateView, WorkerView
from disagg.policy.restart import RestartDecision

STATE = WorkerStateView(
    num_free_blocks=90, num_cached_blocks=3, num_held_blocks=7, num_running=2, num_waiting=1, num_handoffs=4
)
RUNNING = ProcessSnapshot("decode-0", ProcessPhase.RUNNING, 1, 3, None)
EXIT = ProcessExited("mixed-0", 7, -9, "", RestartDecision(None, "8 crashes within 300 s: left dead"))
DEAD = ProcessSnapshot("mixed-0", ProcessPhase.GIVEN_UP, None, 8, EXIT)


def test_one_line_per_worker_and_those_of_others_last() -> None:
    views = [WorkerView("decode-0", "decode", "m", STATE), WorkerView("a-guest", "mixed", "m", WorkerStateView())]
    lines = worker_lines(["mixed-0", "decode-0"], views, [RUNNING, DEAD])
    assert list(lines.values()) == [
        "mixed-0   given up: 8 crashes within 300 s: left dead",
        "decode-0  decode   running 2  waiting 1  hand-offs 4  KV 7/100 blocks  cached 3  restarts 2",
        "a-guest   mixed    running 0  waiting 0  hand-offs 0  KV 0/0 blocks  cached 0",
    ]


def test_a_worker_that_the_router_does_not_see_is_said_so() -> None:
    assert worker_lines(["decode-0"], [], [RUNNING])["decode-0"] == "decode-0  not connected  restarts 2"


def test_plain_lines_are_printed_when_they_change_and_not_too_often() -> None:
    out, err = io.StringIO(), io.StringIO()
    display = PlainDisplay(out, err, min_interval_s=5.0)
    for now_s, line in ((0.0, "a 1"), (1.0, "a 1"), (2.0, "a 2"), (6.0, "a 3"), (20.0, "a 3")):
        display.show({"a": line}, now_s)
    display.note("note")
    display.child_line("a", "words")
    display.close()
    assert out.getvalue() == "a 1\na 3\nnote\n"
    assert err.getvalue() == "[a] words\n"


def test_live_lines_leave_brackets_alone() -> None:
    out = io.StringIO()
    display = LiveDisplay(Console(file=out, force_terminal=True, width=80))
    display.show({"a": "a [red]1"}, 0.0)
    display.child_line("a", "[bold]words")
    display.note("long " * 50 + "end")
    display.close()
    assert "[bold]words" in out.getvalue()
    assert "long " * 50 + "end" in out.getvalue()  # a command is pasted as one line
    assert "a [red]1" in out.getvalue()

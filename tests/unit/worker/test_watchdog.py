"""A process whose work has stopped moving ends itself; one that was only stopped, or waits for work, does not."""

import subprocess
import sys
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from disagg.worker import watchdog as watchdog_module
from disagg.worker.watchdog import STUCK_EXIT_CODE, Watchdog

TIMEOUT_S = 10.0
TURN_S = 0.5  # as often as it looks
DEADLINE_S = 40.0


class Stage:
    """A watchdog without thread or time of its own: it looks once after each turn that the test makes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.reasons: list[str] = []
        self._turns: deque[Callable[[], None]] = deque()
        fakes = SimpleNamespace(Event=lambda: self, Thread=lambda **what: SimpleNamespace(start=lambda: None))
        monkeypatch.setattr(watchdog_module, "threading", fakes)
        monkeypatch.setattr(watchdog_module, "time", self)
        self.watchdog = Watchdog(TIMEOUT_S, self.reasons.append)

    def monotonic(self) -> float:
        return self.now_s

    def wait(self, timeout_s: float) -> bool:
        """Stands for the event that ends the thread: set when there are no more turns."""
        assert timeout_s == TURN_S
        if not self._turns:
            return True
        self._turns.popleft()()
        return False

    def run(self, *turns: Callable[[], None]) -> None:
        self._turns = deque(turns)
        self.watchdog._watch()

    def beat(self) -> None:
        """The event loop turns."""
        self.watchdog.stamp_loop()
        self.now_s += TURN_S

    def idle(self) -> None:
        self.now_s += TURN_S

    def sleep(self) -> None:
        """The whole process is suspended, or its machine is."""
        self.now_s += 3600.0


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(monkeypatch)


def test_a_loop_that_turns_and_has_nothing_to_do_is_fine(stage: Stage) -> None:
    stage.run(*[stage.beat] * 100)
    assert stage.reasons == []


def test_a_step_that_finishes_layers_may_take_as_long_as_it_likes(stage: Stage) -> None:
    for _ in range(10):
        stage.watchdog.stamp_step()
        stage.run(*[stage.beat] * 20)
    assert stage.reasons == []


def test_a_step_in_which_no_layer_finishes_is_stuck(stage: Stage) -> None:
    stage.watchdog.stamp_step()
    stage.run(*[stage.beat] * 20)
    assert stage.reasons == []  # at the limit, not over it
    stage.run(*[stage.beat] * 10)
    assert stage.reasons == ["no layer has finished for 10.5 s, the limit is 10 s"]  # told once


def test_a_step_that_has_ended_is_not_waited_for(stage: Stage) -> None:
    stage.watchdog.stamp_step()
    stage.watchdog.end_step()
    stage.run(*[stage.beat] * 50)
    assert stage.reasons == []


def test_a_loop_that_does_not_turn_is_stuck(stage: Stage) -> None:
    stage.run(*[stage.beat] * 3, *[stage.idle] * 19)
    assert stage.reasons == []
    stage.run(stage.idle)
    assert stage.reasons == ["the event loop has not turned for 10.5 s, the limit is 10 s"]


@pytest.mark.parametrize("has_step", [True, False])
def test_a_process_that_was_stopped_as_a_whole_is_forgiven(stage: Stage, has_step: bool) -> None:
    if has_step:
        stage.watchdog.stamp_step()
    stage.run(*[stage.idle] * 10, stage.sleep, *[stage.idle] * 20)
    assert stage.reasons == []  # it has had its full time again
    stage.run(stage.idle)
    assert len(stage.reasons) == 1


def test_a_slow_machine_is_not_a_stopped_process(stage: Stage) -> None:
    """A look that comes late, but not by much, forgives nothing."""

    def slow() -> None:
        stage.now_s += 4 * TURN_S

    stage.run(*[slow] * 5)
    assert stage.reasons == []
    stage.run(slow)
    assert len(stage.reasons) == 1


def test_closing_ends_the_thread_in_real_time_too() -> None:
    watchdog = Watchdog(60.0, lambda reason: None)
    watchdog.close()
    assert not watchdog._thread.is_alive()


def test_the_end_is_hard_and_says_why() -> None:
    """A thread that never ends would keep an ordinary exit waiting for ever."""
    code = (
        "import threading; from disagg.worker.watchdog import Watchdog;"
        "threading.Thread(target=threading.Event().wait).start(); Watchdog(0.5); threading.Event().wait()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert ended.returncode == STUCK_EXIT_CODE
    assert ended.stderr.startswith("disagg: the event loop has not turned for ")
    assert ended.stderr.endswith("the limit is 0.5 s; ending this process\n")

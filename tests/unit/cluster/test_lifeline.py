"""A child notices its parent's end; a process started by hand is left alone."""

import os
import queue
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from disagg.channel.lifeline import LIFELINE_FD, LIFELINE_PARENT, ParentEnd, watch_parent
from disagg.testing.processes import wait_until

pytestmark = pytest.mark.timeout(400)  # the waits within say more than the end of all tests would
TIMEOUT_S = 60.0


def test_without_a_supervisor_nothing_is_armed() -> None:
    assert watch_parent({}) is None


@pytest.mark.parametrize("fd_text", ["999999", "not a number", "-1", "0"])
def test_a_variable_that_names_no_pipe_is_ignored(fd_text: str, tmp_path: Path) -> None:
    environ = {LIFELINE_FD: fd_text, LIFELINE_PARENT: "1"}
    if fd_text == "0" and os.path.exists("/proc/self/fd/0") and "pipe" in os.readlink("/proc/self/fd/0"):
        pytest.skip("stdin is a pipe here")
    assert watch_parent(environ) is None
    assert environ == {}


def test_the_end_of_the_pipe_is_sigterm_and_then_sigkill() -> None:
    parent = ParentEnd()
    parent.check_invariants()
    signals: queue.Queue[int] = queue.Queue()
    environ = {LIFELINE_FD: str(os.dup(parent.fd))}
    lifeline = watch_parent(environ, grace_s=0.01, send_signal=signals.put)
    assert lifeline is not None
    lifeline.check_invariants()
    assert environ == {}
    assert signals.empty()
    parent.close()
    assert signals.get(timeout=TIMEOUT_S) == signal.SIGTERM
    assert signals.get(timeout=TIMEOUT_S) == signal.SIGKILL
    lifeline.close()
    lifeline.check_invariants()


def test_a_process_that_ends_within_its_grace_is_not_killed() -> None:
    parent = ParentEnd()
    signals: queue.Queue[int] = queue.Queue()
    lifeline = watch_parent({LIFELINE_FD: str(os.dup(parent.fd))}, grace_s=60.0, send_signal=signals.put)
    assert lifeline is not None
    parent.close()
    assert signals.get(timeout=TIMEOUT_S) == signal.SIGTERM
    lifeline.close()
    assert signals.empty()


def test_closing_without_an_end_sends_nothing() -> None:
    parent = ParentEnd()
    signals: queue.Queue[int] = queue.Queue()
    with watch_parent({LIFELINE_FD: str(os.dup(parent.fd))}, send_signal=signals.put) as lifeline:  # type: ignore[union-attr]
        lifeline.check_invariants()
    parent.close()
    assert signals.empty()


CHILD = """
import signal, sys, threading
signal.signal(signal.SIGTERM, signal.SIG_IGN)
from disagg.channel.lifeline import watch_parent
assert watch_parent(grace_s=0.05) is not None
print("armed", flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize("from_main", [True, False], ids=["kernel and pipe", "pipe alone"])
def test_a_child_that_ignores_sigterm_ends_with_its_parent(from_main: bool) -> None:
    parent = ParentEnd()
    environment = os.environ | parent.environment() | ({} if from_main else {LIFELINE_PARENT: ""})
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD], env=environment, pass_fds=(parent.fd,), stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "armed\n"
        parent.close()
        assert child.wait(TIMEOUT_S) == -signal.SIGKILL
    finally:
        child.kill()
        child.wait(TIMEOUT_S)
        assert child.stdout is not None
        child.stdout.close()


MIDDLE = """
import os, subprocess, sys
from disagg.channel.lifeline import ParentEnd
parent = ParentEnd()
env = os.environ | parent.environment()
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=env, pass_fds=(parent.fd,))
print(child.pid, flush=True)
child.wait()
"""


def test_sigkill_of_the_parent_ends_the_child() -> None:
    middle = subprocess.Popen([sys.executable, "-c", MIDDLE, CHILD], stdout=subprocess.PIPE, text=True)
    assert middle.stdout is not None
    child_pid = 0
    try:
        words = [middle.stdout.readline().strip(), middle.stdout.readline().strip()]
        child_pid = int(next(word for word in words if word.isdecimal()))
        assert "armed" in words
        middle.kill()
        middle.wait(TIMEOUT_S)
        wait_until(lambda: not _is_running(child_pid), TIMEOUT_S, "the child's end")
    finally:
        middle.kill()
        middle.wait(TIMEOUT_S)
        middle.stdout.close()


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

"""The loop of `disagg serve` over fake processes: ready, crash, Ctrl-C, and nothing left behind."""

import os
import re
import signal
import sys
from functools import partial
from pathlib import Path

import pytest

from disagg.testing.processes import MarkedProcess, wait_until

pytestmark = pytest.mark.timeout(400)  # the waits within say more than the end of all tests would
TIMEOUT_S = 90.0
PROGRAM = (sys.executable, str(Path(__file__).with_name("fake_serve.py")))


def serving(mode: str = "", *, start_s: float = 60.0, stop_s: float = 10.0, num_workers: int = 2) -> MarkedProcess:
    arguments = (str(start_s), str(stop_s), str(num_workers))
    return MarkedProcess(arguments, program=PROGRAM, environment={"FAKE_DISAGG": mode})


def pid_of(process: MarkedProcess, words: str) -> int:
    return next((pid for pid, command in process.family().items() if words in command), 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_it_says_how_to_try_it_and_a_signal_ends_everything(number: int, request: pytest.FixtureRequest) -> None:
    # These tests may run under nohup, whose children are right to ignore SIGHUP.
    request.addfinalizer(partial(signal.signal, number, signal.signal(number, signal.SIG_DFL)))
    with serving() as serve:
        url = re.findall(r"http://[\d.:]+", serve.wait_line("m is ready at", TIMEOUT_S))[0]
        assert f"curl {url}/v1/chat/completions" in serve.wait_line("curl", TIMEOUT_S)
        serve.wait_line("python -c .*chat.completions.create", TIMEOUT_S)
        serve.wait_line(r"^mixed-1 +mixed +running 0", TIMEOUT_S)
        serve.wait_line(r"^\[mixed-0\] mixed-0 says hello", TIMEOUT_S)  # its router may hear it first
        assert len(serve.family()) == 4
        serve.send_signal(number)
        assert serve.wait(TIMEOUT_S) == 0
        serve.check_nothing_left()


def test_a_second_ctrl_c_kills() -> None:
    with serving("deaf", stop_s=600.0) as serve:
        serve.wait_line("is ready at", TIMEOUT_S)
        serve.send_signal(signal.SIGINT)
        serve.wait_line("stopping", TIMEOUT_S)
        serve.send_signal(signal.SIGINT)
        assert serve.wait(TIMEOUT_S) == 130
        serve.check_nothing_left()


def test_sigkill_leaves_nothing() -> None:
    with serving("deaf") as serve:
        serve.wait_line("is ready at", TIMEOUT_S)
        serve.send_signal(signal.SIGKILL)
        serve.wait(TIMEOUT_S)
        serve.check_nothing_left()


@pytest.mark.parametrize(
    ("mode", "code", "line"),
    [
        ("router-bad", 2, "disagg: router: port 8000 is already in use"),
        ("worker-bad", 2, "disagg: mixed-0: '/m' is not a model"),
        ("worker-crash", 1, "disagg: mixed-0: RuntimeError: out of luck"),
    ],
)
def test_a_failed_start_ends_with_the_childs_own_words(mode: str, code: int, line: str) -> None:
    with serving(mode, num_workers=1) as serve:
        assert serve.wait(TIMEOUT_S) == code
        assert serve.lines[-1] == line
        serve.check_nothing_left()


def test_what_is_missing_is_shown_and_a_deadline_ends_the_wait() -> None:
    with serving("never-ready", start_s=3.0, num_workers=1) as serve:
        assert serve.wait(TIMEOUT_S) == 1
        # A worker that this machine is slow to start is what is missing until then.
        assert re.search("no worker can answer|not here yet: mixed-0", serve.output)
        assert serve.lines[-1] == "disagg: waited 3 s for the workers to be ready: see the lines above"
        serve.check_nothing_left()


def test_ctrl_c_before_it_is_ready_ends_everything() -> None:
    with serving("never-ready") as serve:
        serve.wait_line("no worker can answer", TIMEOUT_S)
        serve.send_signal(signal.SIGINT)
        assert serve.wait(TIMEOUT_S) == 0
        serve.check_nothing_left()


def test_a_killed_worker_and_a_killed_router_come_back() -> None:
    with serving(num_workers=1) as serve:
        url = re.findall(r"http://[\d.:]+", serve.wait_line("is ready at", TIMEOUT_S))[0]
        for words in ("--worker-id mixed-0", "fake_disagg.py router"):
            pid = pid_of(serve, words)
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda words=words, pid=pid: pid_of(serve, words) not in (0, pid), TIMEOUT_S, f"{words} again")  # type: ignore[misc]
        serve.wait_line(r"^mixed-0 ended \(SIGKILL\).*again in 0.25 s$", TIMEOUT_S)
        serve.wait_line(r"^router ended \(SIGKILL\)", TIMEOUT_S)
        # The new router was told the old one's port.
        assert f"--port {url.rpartition(':')[2]}" in serve.family()[pid_of(serve, "fake_disagg.py router")]
        serve.send_signal(signal.SIGINT)
        assert serve.wait(TIMEOUT_S) == 0

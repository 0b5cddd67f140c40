"""The watch over process families must itself be able to fail."""

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from disagg.core.errors import InternalFault
from disagg.testing.processes import MarkedProcess, wait_until

pytestmark = pytest.mark.timeout(400)  # the waits within say more than the end of all tests would
TIMEOUT_S = 60.0
WAIT = "import threading; threading.Event().wait()"
ORPHAN = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {WAIT!r}], start_new_session=True)"
PORT = (
    "import os, socket; s = socket.create_server(('127.0.0.1', 0)); print('up', flush=True);"
    "p = os.fork();" + WAIT  # the child of the fork keeps the port
)
# Found by the number: a name with the project's own in it would alarm every test that runs beside this one.
SHARED = "open(f'/dev/shm/left-{__import__(\"os\").getpid()}', 'w')"
TEMPORARY = "import os; open(os.environ['TMPDIR'] + '/left', 'w')"


def python(code: str) -> MarkedProcess:
    return MarkedProcess(("-c", code), program=(sys.executable,))


def remove_shared(pid: int) -> None:
    """Its own only: others may run this test too."""
    Path(f"/dev/shm/left-{pid}").unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("code", "message", "clean_up"),
    [
        (ORPHAN, "the end of every process", lambda pid: None),
        (TEMPORARY, "temporary files left: .*/left", lambda pid: None),
        (SHARED, "entries left in /dev/shm: .*left-", remove_shared),
    ],
    ids=["orphan", "temporary file", "shared memory"],
)
def test_what_is_left_behind_is_found(code: str, message: str, clean_up: Callable[[int], None]) -> None:
    with python(code) as process:
        assert process.wait(TIMEOUT_S) == 0
        try:
            with pytest.raises(InternalFault, match=message):
                process.check_nothing_left(timeout_s=0.2)
        finally:
            process._kill_family()
            clean_up(process.pid)
            for path in Path(process._folder.name).iterdir():
                path.unlink()


def test_a_family_is_found_with_its_ports_and_a_clean_end_passes() -> None:
    with python(PORT) as process:
        process.wait_line("up", TIMEOUT_S)
        wait_until(lambda: len(process.family()) == 2, TIMEOUT_S, "the fork")
        process.note_family()
        assert len(process._listeners) == 1
        process.send_signal(signal.SIGKILL)
        process.wait(TIMEOUT_S)
        with pytest.raises(InternalFault, match="the end of every process"):
            process.check_nothing_left(timeout_s=0.1)
        process._kill_family()
        process.check_nothing_left()


def test_a_line_that_never_comes_ends_with_the_process() -> None:
    with python("print('something else')") as process, pytest.raises(InternalFault, match="something else"):
        process.wait_line("the line", TIMEOUT_S)

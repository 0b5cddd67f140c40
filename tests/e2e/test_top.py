"""`disagg top` on a terminal: it draws, says when the router has gone, and leaves at Ctrl-C or SIGTERM."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.cluster import announced, router

from disagg.channel.lifeline import ParentEnd
from disagg.testing.model_files import write_tiny_llama
from disagg.testing.processes import wait_until

TIMEOUT_S = 30.0
LEAVES_SCREEN = b"\x1b[?1049l"


class Terminal:
    """A command on a terminal of its own, and all that it has drawn."""

    def __init__(self, *arguments: str) -> None:
        self.drawn = b""
        self._lifeline = ParentEnd()
        self._outside, inside = pty.openpty()
        environment = {**os.environ, **self._lifeline.environment(), "TERM": "xterm", "COLUMNS": "160", "LINES": "40"}
        # What was started in the background of a shell ignores Ctrl-C, and so would what it starts.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "disagg", *arguments],
                stdin=inside,
                stdout=inside,
                stderr=inside,
                env=environment,
                pass_fds=(self._lifeline.fd,),
            )
        finally:
            signal.signal(signal.SIGINT, before)
        os.close(inside)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def wait(self, text: bytes) -> None:
        """Until it has drawn this since the last call."""
        wait_until(lambda: text in self.drawn, TIMEOUT_S, f"{text!r} to be drawn; drawn so far: {self.drawn[-2000:]!r}")
        self.drawn = b""

    def close(self) -> None:
        self.process.kill()
        self.process.wait(TIMEOUT_S)
        self._reader.join(TIMEOUT_S)
        os.close(self._outside)
        self._lifeline.close()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the other end has gone
            while data := os.read(self._outside, 1 << 16):
                self.drawn += data


@pytest.fixture
def top_of() -> Iterator[list[Terminal]]:
    made: list[Terminal] = []
    yield made
    for terminal in made:
        terminal.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_draws_says_that_the_router_has_gone_and_gives_the_screen_back(
    tmp_path: Path, top_of: list[Terminal], number: signal.Signals
) -> None:
    with router({"tiny": write_tiny_llama(tmp_path / "tiny")}) as served:
        url = f"http://{announced(served).http}"
        terminal = Terminal("top", "--url", url, "--interval-s", "0.2")
        top_of.append(terminal)
        terminal.wait(b"no worker is connected")
    terminal.wait(b"no router answers at")
    terminal.process.send_signal(number)
    assert terminal.process.wait(TIMEOUT_S) == 0
    wait_until(lambda: LEAVES_SCREEN in terminal.drawn, TIMEOUT_S, "the screen to be given back")
    assert b"Traceback" not in terminal.drawn

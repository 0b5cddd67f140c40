"""What an arena's owner knows of one writer: its connection, its process, its permits."""

import contextlib
import os
import select
import signal
import socket
import threading
from typing import NamedTuple

from disagg.core.errors import PeerLost
from disagg.core.ids import WorkerId
from disagg.transport.grants import Visit
from disagg.transport.local_stream import LocalStream, open_peer_pidfd, peer_pid
from disagg.transport.runs import RunSum
from disagg.transport.shared_memory_wire import Answer, Permit, encode


def end_process(pidfd: int) -> None:
    """SIGKILL, without any chance of hitting another process of the same number."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


class PermittedWrite(NamedTuple):
    """A write that may be under way, and the sum of its bytes so far."""

    visit: Visit
    summing: RunSum


class Writer:
    """One accepted connection, its process and its thread."""

    def __init__(self, sock: socket.socket, hello_timeout_s: float) -> None:
        """Raises PeerLost, OSError."""
        self.pid = peer_pid(sock)
        self.name = f"disagg-shm-receive-{self.pid}"
        self.stream = LocalStream(sock, hello_timeout_s)
        self.sender: WorkerId | None = None  # known after the greeting
        self.permitted: dict[int, PermittedWrite] = {}
        self.hears = True
        self.returned = threading.Event()  # nothing is written over this connection any more
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            self.pidfd = open_peer_pidfd(sock, self.pid)
        except BaseException:
            os.close(self._wake)
            raise

    def say(self, message: Permit | Answer) -> None:
        """A writer that hears no more may still have words for us: Farewell."""
        if self.hears:
            try:
                self.stream.send(encode(message))
            except PeerLost:
                self.hears = False

    def wake(self) -> None:
        """Make wait_dead() return; no more copies come from this process over this connection."""
        os.eventfd_write(self._wake, 1)

    def shut(self) -> None:
        """This end closes, or another connection of the process has come: no word of it is waited for any more."""
        self.stream.shut()
        self.wake()

    def wait_dead(self) -> None:
        """Until the process has ended, or wake()."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        poll.poll()

    def close(self) -> None:
        self.stream.close()
        os.close(self.pidfd)
        os.close(self._wake)

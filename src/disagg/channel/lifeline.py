"""How a process learns that the one that started it is gone, even by SIGKILL.

    parent   holds the write end of a pipe and passes the read end on; its number travels in DISAGG_LIFELINE_FD
    child    watch_parent() arms two alarms:
               end of file on the pipe -> SIGTERM to itself, SIGKILL grace_s later
               PR_SET_PDEATHSIG        -> SIGKILL by the kernel, for a child whose Python cannot run any more

The kernel's alarm goes off when the *thread* that started the child ends. So it is armed only when the parent started
the child from its main thread (then DISAGG_LIFELINE_PARENT names the parent). A parent that died before the alarm was
armed is no gap: the pipe is already at its end.
A process started by hand has neither variable; nothing is armed.
"""

import ctypes
import os
import select
import signal
import stat
import sys
import threading
from collections.abc import Callable, MutableMapping
from types import TracebackType
from typing import Self

LIFELINE_FD = "DISAGG_LIFELINE_FD"
LIFELINE_PARENT = "DISAGG_LIFELINE_PARENT"
PR_SET_PDEATHSIG = 1

SendSignal = Callable[[int], None]


class ParentEnd:
    """The parent's side. Children live as long as this is open in a living process."""

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe()
        self._is_open = True

    @property
    def fd(self) -> int:
        """The read end, to be passed to every child."""
        return self._read_fd

    def environment(self) -> dict[str, str]:
        """What a child's environment must contain."""
        from_main = threading.current_thread() is threading.main_thread()
        return {LIFELINE_FD: str(self._read_fd), LIFELINE_PARENT: str(os.getpid()) if from_main else ""}

    def close(self) -> None:
        """Let go: children that still live will end. Idempotent."""
        if self._is_open:
            self._is_open = False
            os.close(self._write_fd)
            os.close(self._read_fd)

    def check_invariants(self) -> None:
        """An open end has two pipe ends; children never inherit the write end."""
        if self._is_open:
            assert stat.S_ISFIFO(os.fstat(self._read_fd).st_mode)
            assert not os.get_inheritable(self._write_fd)


class Lifeline:
    """The child's side: one thread that waits for the parent's end."""

    def __init__(self, fd: int, *, grace_s: float, send_signal: SendSignal) -> None:
        self._fd = fd
        self._grace_s = grace_s
        self._send_signal = send_signal
        self._wake_read, self._wake_write = os.pipe()
        self._is_open = True
        self._thread = threading.Thread(target=self._wait, name="lifeline", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching. Idempotent; the thread has ended when this returns."""
        if not self._is_open:
            return
        self._is_open = False
        os.close(self._wake_write)
        self._thread.join()
        os.close(self._wake_read)
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def check_invariants(self) -> None:
        """While open, the thread runs or has already raised the alarm."""
        if self._is_open:
            assert stat.S_ISFIFO(os.fstat(self._fd).st_mode)
        else:
            assert not self._thread.is_alive()

    def _wait(self) -> None:
        if not self._parent_ended():
            return
        self._send_signal(signal.SIGTERM)
        if not self._closed_within(self._grace_s):
            self._send_signal(signal.SIGKILL)

    def _parent_ended(self) -> bool:
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        return self._wake_read not in {fd for fd, _ in poll.poll()}

    def _closed_within(self, timeout_s: float) -> bool:
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000.0))


def signal_self(number: int) -> None:
    """Send this process a signal."""
    os.kill(os.getpid(), number)


def watch_parent(
    environ: MutableMapping[str, str] = os.environ, *, grace_s: float = 3.0, send_signal: SendSignal = signal_self
) -> Lifeline | None:
    """Arm the alarms; None when this process was not started by a supervisor. Call it first in a process's main.

    The variables are taken out of `environ`: they are not for this process's own children.
    """
    fd_text = environ.pop(LIFELINE_FD, "")
    parent_text = environ.pop(LIFELINE_PARENT, "")
    if not fd_text.isdecimal() or not _is_pipe(int(fd_text)):
        return None
    fd = int(fd_text)
    os.set_inheritable(fd, False)
    if parent_text == str(os.getppid()):
        _set_parent_death_signal(signal.SIGKILL)
    return Lifeline(fd, grace_s=grace_s, send_signal=send_signal)


def _is_pipe(fd: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(fd).st_mode)
    except OSError:
        return False


def _set_parent_death_signal(number: int) -> None:
    """Ask the kernel. Where it cannot (not Linux, a strict sandbox) the pipe alone must do."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)

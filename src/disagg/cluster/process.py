"""One child process: started by exec, its output read line by line, ended within a deadline.

start     new process group: Ctrl-C in the terminal reaches only the supervisor, which then ends children in order
output    two reader tasks cut stdout and stderr into lines
exited    the reaper task: return code known, both pipes read to their end (or given up on)
stop      SIGTERM, deadline, SIGKILL to the whole group
"""

import asyncio
import contextlib
import enum
import functools
import os
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Mapping
from typing import IO

import msgspec

from disagg.cluster.lines import LineSplitter
from disagg.core.errors import ConfigurationError

READ_BYTES = 65536
# A grandchild may hold the pipes open after the child has died; its words are not waited for longer than this.
OUTPUT_TIMEOUT_S = 1.0
# After SIGKILL only a process inside the kernel can linger.
KILL_TIMEOUT_S = 5.0
NUM_KEPT_LINES = 20


class ProcessSpec(msgspec.Struct, frozen=True):
    """What to start. `name` stands before each of its lines."""

    name: str
    argv: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()  # added to the supervisor's own


class Stream(enum.StrEnum):
    STDOUT = "stdout"
    STDERR = "stderr"


OnLine = Callable[[str, Stream, str], None]  # (process name, where, line)


class OutputPipe:
    """Reads one pipe whenever the loop says it is readable. Nothing is waited for once close() was called."""

    def __init__(self, pipe: IO[bytes], on_lines: Callable[[list[str]], None]) -> None:
        self._pipe = pipe
        self._on_lines = on_lines
        self._splitter = LineSplitter()
        self._loop = asyncio.get_running_loop()
        self.ended = asyncio.Event()
        os.set_blocking(pipe.fileno(), False)
        self._loop.add_reader(pipe.fileno(), self._read)

    def close(self) -> None:
        """Idempotent; also what the end of the output does."""
        if not self.ended.is_set():
            self.ended.set()
            self._loop.remove_reader(self._pipe.fileno())
            self._pipe.close()
            self._on_lines(self._splitter.flush())

    def check_invariants(self) -> None:
        assert self._pipe.closed == self.ended.is_set()
        self._splitter.check_invariants()

    def _read(self) -> None:
        try:
            data = os.read(self._pipe.fileno(), READ_BYTES)
        except BlockingIOError:
            return
        if data:
            self._on_lines(self._splitter.feed(data))
        else:
            self.close()


class ChildProcess:
    """A started process. Made by start_child(). The loop learns of its end by a pidfd, and it alone reaps it."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], on_line: OnLine) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self.name = name
        self.last_lines: deque[str] = deque(maxlen=NUM_KEPT_LINES)  # of stderr
        self._process = process
        self._on_line = on_line
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._pipes = (
            OutputPipe(process.stdout, functools.partial(self._tell, Stream.STDOUT)),
            OutputPipe(process.stderr, functools.partial(self._tell, Stream.STDERR)),
        )
        self._pidfd = os.pidfd_open(process.pid)
        self._loop.add_reader(self._pidfd, self._reap)
        self._finished = asyncio.create_task(self._finish(), name=f"finish {name}")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Not reaped yet: its pid is still its own."""
        return self._process.returncode is None

    async def exited(self) -> int:
        """Wait for the end and the last words; the return code (negative: the signal). May be awaited by many."""
        return await asyncio.shield(self._finished)

    def send_signal(self, number: int, *, to_group: bool = False) -> None:
        """Nothing happens when the process is gone already."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if to_group else os.kill)(self.pid, number)

    async def stop(self, timeout_s: float) -> int:
        """SIGTERM; SIGKILL to its group after timeout_s. Returns the return code."""
        self.send_signal(signal.SIGTERM)
        # A stopped process (SIGSTOP) sees SIGTERM only when it goes on.
        self.send_signal(signal.SIGCONT)
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(self.exited(), timeout_s)
        self.send_signal(signal.SIGKILL, to_group=True)
        return await asyncio.wait_for(self.exited(), KILL_TIMEOUT_S)

    def check_invariants(self) -> None:
        """A reaped process is not alive; a finished one has no pipe left."""
        assert self._ended.is_set() == (not self.is_alive)
        for pipe in self._pipes:
            pipe.check_invariants()
            assert pipe.ended.is_set() or not self._finished.done()

    def _reap(self) -> None:
        if self._process.poll() is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._ended.set()

    async def _finish(self) -> int:
        await self._ended.wait()
        try:
            async with asyncio.timeout(OUTPUT_TIMEOUT_S):
                for pipe in self._pipes:
                    await pipe.ended.wait()
        except TimeoutError:
            pass  # a grandchild still holds it
        finally:
            for pipe in self._pipes:
                pipe.close()
        assert self._process.returncode is not None
        return self._process.returncode

    def _tell(self, which: Stream, lines: list[str]) -> None:
        for line in lines:
            if which is Stream.STDERR:
                self.last_lines.append(line)
            self._on_line(self.name, which, line)


def start_child(
    spec: ProcessSpec, *, environment: Mapping[str, str], lifeline_fd: int, on_line: OnLine
) -> ChildProcess:
    """Exec the program; needs a running loop. Raises ConfigurationError when it cannot be started at all."""
    try:
        process = subprocess.Popen(
            spec.argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env={**environment, **dict(spec.environment)},
            pass_fds=(lifeline_fd,),
            process_group=0,
        )
    except OSError as error:
        raise ConfigurationError(f"cannot start {spec.argv[0]!r} for {spec.name}: {error.strerror}") from error
    return ChildProcess(spec.name, process, on_line)

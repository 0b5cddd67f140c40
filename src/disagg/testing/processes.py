"""Real processes for tests: started, found, and proven gone.

Every process that a Serve starts, and every process these start, carries one mark in its environment. So a left-over is
found even when it was orphaned or has changed its name.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import httpx

from disagg.channel.lifeline import ParentEnd
from disagg.core.errors import InternalFault

MARK = "DISAGG_TEST_MARK"
FIRST_POLL_S, MAX_POLL_S = 0.005, 0.05
END_TIMEOUT_S = 60.0  # of a process that has been told to end: only one that hangs takes longer, on a busy machine too
OUTPUT_TIMEOUT_S = 5.0  # where others keep the output of a process open
PROC = Path("/proc")
SHARED_MEMORY = Path("/dev/shm")
_URL = re.compile(r"https?://[\w.\[\]:]+?:\d+")
_NUMBER = re.compile(r"(?<![0-9a-zA-Z])\d+(?![0-9a-zA-Z])")  # by itself: names that are drawn have digits too


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Poll until true. Raises InternalFault that names what was waited for."""
    pause_s, deadline_s = FIRST_POLL_S, time.monotonic() + timeout_s
    while True:
        is_last = time.monotonic() > deadline_s  # before the look: who had to wait for its turn looks once more
        if condition():
            return
        if is_last:
            raise InternalFault(f"waited {timeout_s:g} s for {what}: it did not happen")
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, MAX_POLL_S)  # a look at what takes seconds may cost what it waits for


def marked_processes(mark: str) -> dict[int, str]:
    """Command line by pid of every living process that carries the mark. Zombies do not count."""
    entry = f"{MARK}={mark}".encode()
    found: dict[int, str] = {}
    for folder in PROC.iterdir():
        if not folder.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = command_line(int(folder.name))
    return found


def children_of(pid: int) -> set[int]:
    """Pids of all that a process has started and not waited for, zombies among them; none when it is gone."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for thread in os.listdir(PROC / str(pid) / "task"):
            with contextlib.suppress(OSError):
                found.update(map(int, (PROC / str(pid) / "task" / thread / "children").read_text().split()))
    return found


def command_line(pid: int) -> str:
    """Arguments joined by blanks; '' when the process is gone."""
    with contextlib.suppress(OSError):
        return (PROC / str(pid) / "cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
    return ""


def listening_sockets(pids: Sequence[int]) -> dict[int, int]:
    """TCP ports (IPv4 and IPv6) on which these processes listen, by the inode of the socket.

    By inodes, for a port that is given up may be somebody else's at once.
    """
    inodes = {inode for pid in pids for inode in _socket_inodes(pid)}
    return {inode: port for inode, port in _listening_inodes() if inode in inodes}


def shared_memory_names(pids: Sequence[int]) -> set[str]:
    """Entries of /dev/shm that are named after one of these processes. Others may be those of whoever runs beside."""
    if not SHARED_MEMORY.is_dir():
        return set()
    numbers = {str(pid) for pid in pids}
    names = {path.name for path in SHARED_MEMORY.iterdir()}
    return {name for name in names if numbers & set(_NUMBER.findall(name))}


def _socket_inodes(pid: int) -> set[int]:
    inodes: set[int] = set()
    with contextlib.suppress(OSError):
        for link in (PROC / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):
                if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link)):
                    inodes.add(int(match[1]))
    return inodes


def _listening_inodes() -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (PROC / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A":  # LISTEN
                    found.append((int(fields[9]), int(fields[1].rpartition(":")[2], 16)))
    return found


class MarkedProcess:
    """`python -m disagg ...` (or another program) whose whole family is watched. Use as a context manager.

    At exit the family is killed and the test fails if anything is left: a process, a listening port, an entry in
    /dev/shm, a file in its temporary folder.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        program: Sequence[str] = (sys.executable, "-m", "disagg"),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.arguments = tuple(arguments)
        self.lines: list[str] = []  # of stdout and stderr, as they came
        self._program = tuple(program)
        self._environment = dict(environment or {})
        self._mark = uuid.uuid4().hex
        self._seen: set[int] = set()
        self._listeners: dict[int, int] = {}  # ports by inode

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="disagg-test-")
        self._lifeline = ParentEnd()  # a killed test run leaves nothing either
        environment = {**os.environ, **self._environment, **self._lifeline.environment()}
        environment |= {MARK: self._mark, "TMPDIR": self._folder.name, "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            [*self._program, *self.arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=(self._lifeline.fd,),
            process_group=0,
        )
        self._seen.add(self._process.pid)
        assert self._process.stdout is not None
        self._reader = threading.Thread(
            target=self._read, args=(self._process.stdout,), name="test-output", daemon=True
        )
        self._reader.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self.note_family()
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(END_TIMEOUT_S)
            if kind is None:
                self.check_nothing_left()
        finally:
            self._kill_family()
            self._lifeline.close()
            self._hear_out()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._folder.cleanup()
        # A failed test shows what the processes said.
        if error is not None:
            error.add_note("\n".join(["output of the processes:", *self.lines[-60:]]))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def family(self) -> dict[int, str]:
        """Command line by pid of this process and all it started, living ones."""
        return marked_processes(self._mark)

    def note_family(self) -> None:
        """Remember who lives and listens now, for the check at the end."""
        living = list(self.family())
        self._seen.update(living)
        self._listeners |= listening_sockets(living)

    def wait_line(self, pattern: str, timeout_s: float) -> str:
        """The first line of output in which the pattern is found. Raises InternalFault with the output so far."""
        found: list[str] = []

        def seen() -> bool:
            is_over = self._process.poll() is not None and not self._reader.is_alive()  # and has said all
            found[:] = [line for line in list(self.lines) if re.search(pattern, line)]
            return bool(found) or is_over

        wait_until(seen, timeout_s, f"a line with {pattern!r}; output so far: {self.output!r}")
        if not found:
            raise InternalFault(f"the process ended before a line with {pattern!r}; its output: {self.output!r}")
        return found[0]

    def wait(self, timeout_s: float) -> int:
        """The exit code. Raises InternalFault when it does not end in time."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise InternalFault(f"the process did not end within {timeout_s:g} s; its output: {self.output}") from None
        self._hear_out()
        return code

    def send_signal(self, number: int) -> None:
        self.note_family()
        self._process.send_signal(number)

    def check_nothing_left(self, timeout_s: float = 30.0) -> None:
        """Raises InternalFault when the process has ended and something of its family is still there."""
        wait_until(lambda: not self.family(), timeout_s, f"the end of every process: {self.family()}")
        # A killed process loses its environment, by which it is found, a moment before its sockets.
        ports = self._open_ports()
        wait_until(lambda: not self._open_ports(), timeout_s, f"ports {sorted(ports)} to be closed")
        if names := shared_memory_names(sorted(self._seen)):
            raise InternalFault(f"entries left in {SHARED_MEMORY}: {sorted(names)}")
        if files := sorted(str(path) for path in Path(self._folder.name).rglob("*") if path.is_file()):
            raise InternalFault(f"temporary files left: {files}")

    def _open_ports(self) -> set[int]:
        return {port for inode, port in _listening_inodes() if inode in self._listeners}

    def _kill_family(self) -> None:
        for pid in self.family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait(30.0)

    def _hear_out(self) -> None:
        """Until the last line of the ended process is here. Who of its family outlives it may keep its output open."""
        self._reader.join(OUTPUT_TIMEOUT_S)
        if self._reader.is_alive() and not self.family():
            self._reader.join(END_TIMEOUT_S)

    def _read(self, stream: IO[bytes]) -> None:
        for line in stream:
            self.lines.append(line.decode(errors="replace").rstrip())


class Serve(MarkedProcess):
    """`disagg serve` on free ports, ready when entered.

    arguments: what follows `disagg serve`, without ports: ("smollm2", "--prefill", "1", "--decode", "1").
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        ready_timeout_s: float = 240.0,
        program: Sequence[str] = (sys.executable, "-m", "disagg"),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(("serve", *arguments, "--port", "0"), program=program, environment=environment)
        self._ready_timeout_s = ready_timeout_s
        self.url = ""  # "http://127.0.0.1:port"

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            line = self.wait_line(r"is ready at http", self._ready_timeout_s)
            found = _URL.search(line)
            assert found is not None
            self.url = found[0]
            self.note_family()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def pid_of(self, name: str) -> int:
        """Pid of 'router' or of a worker, such as 'decode-0'. Raises InternalFault when it does not run."""
        wanted = " router --" if name == "router" else f" --worker-id {name} "
        # Its own children: a look at every process of the machine takes milliseconds.
        commands = {pid: command_line(pid) for pid in children_of(self.pid)}
        pids = [pid for pid, command in commands.items() if wanted in f"{command} "]
        if len(pids) != 1:
            raise InternalFault(f"{len(pids)} processes named {name!r} among {commands}")
        return pids[0]

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        """Send one process of the cluster a signal; its pid."""
        self.note_family()
        pid = self.pid_of(name)
        os.kill(pid, number)
        return pid

    def wait_restarted(self, name: str, old_pid: int, timeout_s: float = 180.0) -> int:
        """The pid of the process that took the place of old_pid."""

        def is_new() -> bool:
            with contextlib.suppress(InternalFault):
                return self.pid_of(name) != old_pid
            return False

        wait_until(is_new, timeout_s, f"{name} to be started again")
        self.note_family()
        return self.pid_of(name)

    def wait_healthy(self, timeout_s: float = 180.0) -> None:
        """Until /ready answers 200."""

        def is_healthy() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return client.get(f"{self.url}/ready").status_code == httpx.codes.OK
            return False

        # Nothing is encrypted here, and reading certificates costs more than a request.
        with httpx.Client(timeout=2.0, trust_env=False, verify=False) as client:
            wait_until(is_healthy, timeout_s, f"{self.url}/ready to answer 200")

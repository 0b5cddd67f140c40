"""Two network namespaces with one link between them.

Nothing has a name: a namespace is held by a descriptor of this process and by the processes inside. When the last of
these is gone, also by SIGKILL, the kernel takes namespaces, devices and rules away.

    rate only       a veth pair, each end behind a token bucket (tbf)
    rate and time   a TUN device at each end, a process between them (forwarder.py)
"""

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

from disagg.channel.lifeline import ParentEnd
from disagg.core.errors import ConfigurationError, InternalFault
from disagg.testing.links.shape import LinkShape

ADDRESSES = ("10.231.77.1", "10.231.77.2")
DEVICES = ("link-a", "link-b")
TOOLS = ("ip", "tc", "nsenter")
TUN = "/dev/net/tun"
BURST = "64kb"  # that the bucket lets through at once: a line's rate must hold over milliseconds
QUEUE = "50ms"  # in the bucket before packets are dropped
TOOL_TIMEOUT_S = 60.0

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000

T = TypeVar("T")


def missing(shape: LinkShape | None = None) -> str:
    """Why this process cannot make such a link; "" when it can."""
    if sys.platform != "linux":
        return f"network namespaces are Linux's; this is {sys.platform}"
    if lacking := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"{', '.join(lacking)} not found: install iproute2 and util-linux"
    if shape is not None and shape.round_trip_s and not os.path.exists(TUN):
        return f"{TUN} is not there, which a link with a delay needs"
    try:
        os.close(_new_namespace())
    except OSError as error:
        return f"no network namespace can be made: {error.strerror} (it needs root)"
    return ""


class LinkedNamespaces:
    """A context manager. Ends 0 and 1 have ADDRESSES; each has a loopback of its own."""

    def __init__(self, shape: LinkShape) -> None:
        self.shape = shape
        self._fds: list[int] = []  # of namespaces
        self._lifeline: ParentEnd | None = None
        self._forwarder: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Raises ConfigurationError where `missing()` says why."""
        if reason := missing(self.shape):
            raise ConfigurationError(f"no emulated link here: {reason}")
        try:
            self._fds = [_new_namespace(), _new_namespace()]
            if self.shape.round_trip_s:
                self._start_forwarder()
            else:
                self._join_by_veth()
            for end in (0, 1):
                self._ip(end, "link", "set", "lo", "up")
                self._ip(end, "addr", "add", f"{ADDRESSES[end]}/30", "dev", DEVICES[end])
                self._ip(end, "link", "set", DEVICES[end], "mtu", str(self.shape.mtu), "up")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def inside(self, end: int) -> tuple[str, ...]:
        """What to put before a command line, so that it runs at this end."""
        return ("nsenter", f"--net={self._path(end)}", "--")

    def run_inside(self, end: int, work: Callable[[], T]) -> T:
        """work() on a thread at this end: sockets that it makes belong there."""

        def run() -> T:
            _enter(self._fds[end])
            return work()

        return _on_thread(run)

    @contextlib.contextmanager
    def entered(self, end: int) -> Iterator[None]:
        """This thread, and what it starts meanwhile, is at this end."""
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _enter(self._fds[end])
            yield
        finally:
            _enter(home)
            os.close(home)

    def num_bytes_sent(self, end: int) -> int:
        """By this end's device so far, packet headers included."""
        return self.run_inside(end, lambda: bytes_sent(DEVICES[end]))

    def close(self) -> None:
        """Idempotent. Processes that still run inside keep their namespace, without the link."""
        if self._forwarder is not None:
            self._forwarder.send_signal(signal.SIGKILL)
            self._forwarder.wait(TOOL_TIMEOUT_S)
            assert self._forwarder.stdout is not None
            self._forwarder.stdout.close()
            self._forwarder = None
        elif self._fds:
            subprocess.run(
                [*self.inside(0), "ip", "link", "delete", DEVICES[0]],
                timeout=TOOL_TIMEOUT_S,
                check=False,
                stderr=subprocess.DEVNULL,  # it may not have been made
            )
        if self._lifeline is not None:
            self._lifeline.close()
            self._lifeline = None
        while self._fds:
            os.close(self._fds.pop())

    def check_invariants(self) -> None:
        assert len(self._fds) in (0, 2), "one end alone is no link"
        assert self._forwarder is None or self._forwarder.poll() is None, "the process between the ends has died"

    def _path(self, end: int) -> str:
        return f"/proc/{os.getpid()}/fd/{self._fds[end]}"

    def _ip(self, end: int, *words: str) -> None:
        self._tool(end, "ip", *words)

    def _tool(self, end: int, *words: str) -> None:
        done = subprocess.run(
            [*self.inside(end), *words], capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, check=False
        )
        if done.returncode:
            raise InternalFault(f"{' '.join(words)}: {done.stderr.strip()}")

    def _join_by_veth(self) -> None:
        # Made inside the first end: the machine's own namespace never sees either device.
        self._ip(0, "link", "add", DEVICES[0], "type", "veth", "peer", "name", DEVICES[1])
        self._ip(0, "link", "set", DEVICES[1], "netns", self._path(1))
        rate = f"{self.shape.rate_mbit:g}mbit"
        for end in (0, 1):
            bucket = ("tbf", "rate", rate, "burst", BURST, "latency", QUEUE)
            self._tool(end, "tc", "qdisc", "replace", "dev", DEVICES[end], "root", *bucket)

    def _start_forwarder(self) -> None:
        devices = [self.run_inside(end, partial(_open_tun, name)) for end, name in enumerate(DEVICES)]
        try:
            self._lifeline = ParentEnd()
            shape = self.shape
            numbers = [str(each) for each in (*devices, shape.rate_mbit, shape.round_trip_s, shape.mtu)]
            self._forwarder = subprocess.Popen(
                [sys.executable, "-m", "disagg.testing.links.forwarder", *numbers],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                env={**os.environ, **self._lifeline.environment()},
                pass_fds=(*devices, self._lifeline.fd),
            )
        finally:
            for fd in devices:
                os.close(fd)
        assert self._forwarder.stdout is not None
        if self._forwarder.stdout.readline() != b"up\n":
            raise InternalFault(f"the process between the ends did not start: exit code {self._forwarder.wait(1.0)}")


def bytes_sent(device: str) -> int:
    """By a device of this thread's namespace, packet headers included. Raises InternalFault when it is not there."""
    with open("/proc/thread-self/net/dev", encoding="ascii") as file:
        for line in file:
            name, _, fields = line.partition(":")
            if name.strip() == device:
                return int(fields.split()[8])
    raise InternalFault(f"no device {device} at this end of the link")


def _open_tun(name: str) -> int:
    fd = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    try:
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH14x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _new_namespace() -> int:
    """A descriptor that holds a fresh network namespace. Raises OSError."""

    def make() -> int:
        _check(ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET))
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    return _on_thread(make)


def _enter(fd: int) -> None:
    _check(ctypes.CDLL(None, use_errno=True).setns(fd, _CLONE_NEWNET))


def _check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _on_thread(work: Callable[[], T]) -> T:
    """On a fresh thread, which takes its namespace along when it ends. Raises what work() raises."""
    found: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="link-end")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]

"""A listening socket whose connections get a thread each: counted, limited, one per name, all ended by close().

One thread accepts; a connection's thread runs `serve` and ends with leave().
"""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Hashable
from typing import Any, Generic, Protocol, TypeVar

from disagg.core.errors import PeerLost
from disagg.transport.deadlines import join_all

_log = logging.getLogger(__name__)

_ACCEPT_POLL_S = 1.0  # only where nothing wakes accept()


class Accepted(Protocol):
    """One connection, as its kind keeps it."""

    name: str  # of its thread
    returned: threading.Event  # its thread will touch neither socket nor arena any more

    def shut(self) -> None:
        """Make its thread return soon."""

    def close(self) -> None:
        """Give its descriptors back."""


C = TypeVar("C", bound=Accepted)


class Acceptor(Generic[C]):
    """Owns the listener and knows every open connection."""

    def __init__(
        self,
        listener: socket.socket,
        where: str,
        *,
        name: str,
        make: Callable[[socket.socket, Any], C],
        serve: Callable[[C], None],
        max_connections: int,
        on_admitted: Callable[[C], None] = lambda made: None,
        on_full: Callable[[], None] = lambda: None,
    ) -> None:
        """`where` is for messages, `name` of the accepting thread, which start() starts.

        make(socket, its address) may raise PeerLost, OSError: then it is closed. on_admitted is called under the lock.
        """
        self._listener = listener
        self._where = where
        self._make = make
        self._serve = serve
        self._max_connections = max_connections
        self._on_admitted = on_admitted
        self._on_full = on_full
        self._lock = threading.Lock()
        self._open: set[C] = set()
        self._by_name: dict[Hashable, C] = {}
        self._threads: list[threading.Thread] = []  # of connections; ended ones are dropped at the next accept
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        listener.settimeout(_ACCEPT_POLL_S)

    def start(self) -> None:
        self._thread.start()

    def supersede(self, name: Hashable, made: C, timeout_s: float, end: Callable[[C], None]) -> bool:
        """Make this the only connection of that name. `end` is called, under the lock, of the one before.

        False when that one has not returned in time: its last bytes must not land over the new one's.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            with self._lock:
                older = self._by_name.get(name)
                if older is None:
                    self._by_name[name] = made
                    return True
                end(older)
            if not older.returned.wait(max(deadline_s - time.monotonic(), 0.0)):
                return False

    def leave(self, made: C) -> None:
        """The last act of a connection's thread."""
        with self._lock:
            self._open.discard(made)
            for name in [name for name, each in self._by_name.items() if each is made]:
                del self._by_name[name]
            made.close()
        made.returned.set()

    def if_open(self, made: C, act: Callable[[], None]) -> None:
        """Act while it cannot be closed meanwhile; not at all when it is closed already."""
        with self._lock:
            if made in self._open:
                act()

    def close(self, timeout_s: float) -> list[str]:
        """End all threads and the socket. Returns the names of threads that did not return in time."""
        with self._lock:
            self._is_closed = True
            threads = [self._thread, *self._threads]
            for made in self._open:
                made.shut()
        self._wake()
        left = join_all(threads, timeout_s)
        self._listener.close()
        return left

    def _wake(self) -> None:
        """shutdown() wakes accept() of TCP only; that of a Unix socket wakes by being called."""
        with contextlib.suppress(OSError):
            if self._listener.family == socket.AF_UNIX:
                with socket.socket(socket.AF_UNIX, self._listener.type) as caller:
                    caller.setblocking(False)  # with a full backlog nobody sleeps in accept()
                    caller.connect(self._listener.getsockname())
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)

    def check_invariants(self) -> None:
        with self._lock:
            assert len(self._open) <= self._max_connections
            for name, made in self._by_name.items():
                assert made in self._open, f"the connection of {name} is not registered"

    def _run(self) -> None:
        while not self._is_closed:
            try:
                sock, address = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if self._is_closed:
                    return
                _log.warning("accept on %s failed: %s", self._where, error)
                time.sleep(0.05)  # out of descriptors: do not spin until some are free
                continue
            if self._is_closed:
                sock.close()
                return
            self._admit(sock, address)

    def _admit(self, sock: socket.socket, address: Any) -> None:
        try:
            made = self._make(sock, address)
        except (PeerLost, OSError) as error:  # a stranger, or gone already
            _log.warning("closed a connection to %s: %s", self._where, error)
            sock.close()
            return
        with self._lock:
            is_full = len(self._open) >= self._max_connections
            if not is_full and not self._is_closed:
                self._on_admitted(made)
                self._open.add(made)
                thread = threading.Thread(target=self._serve, args=(made,), name=made.name, daemon=True)
                thread.start()
                self._threads = [*(each for each in self._threads if each.is_alive()), thread]
                return
        if is_full:
            self._on_full()
            _log.warning("closed %s: %d connections are the limit (max_connections)", made.name, self._max_connections)
        made.close()

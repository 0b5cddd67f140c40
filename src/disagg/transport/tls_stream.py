"""A Stream under TLS.

OpenSSL's connection must not be used by two threads at once, and a sender reads answers while it writes. So the socket
does not block: each call into OpenSSL holds a lock for one batch at most, and waiting happens outside of it.
"""

import contextlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from disagg.core.errors import PeerLost
from disagg.transport.segments import advance
from disagg.transport.stream import Stream

MAX_WRITE_BYTES = 256 << 10  # of one call, so that the other thread gets its turn
_POLL_S = 1.0  # only where shut() does not wake poll(); Linux wakes at once

T = TypeVar("T")


class TlsRefused(PeerLost):
    """One end does not trust the other's certificate, or does not speak TLS."""


class TlsStream(Stream):
    """Both ends show certificates of one authority."""

    def __init__(
        self, sock: socket.socket, stall_timeout_s: float, context: ssl.SSLContext, *, server_name: str | None = None
    ) -> None:
        """With a server_name this is the dialling end, which expects that name in the peer's certificate."""
        super().__init__(sock, stall_timeout_s)
        sock.setblocking(False)
        self._tls = context.wrap_socket(
            sock, server_side=server_name is None, server_hostname=server_name, do_handshake_on_connect=False
        )
        self._sock = self._tls  # the plain one has given its descriptor up
        self._turn = threading.Lock()

    def handshake(self) -> None:
        """Exchange certificates. Whoever calls bounds the time, by shut(). Raises PeerLost."""
        self._repeat(self._tls.do_handshake, "agreeing on TLS")

    def shut(self) -> None:
        with self._lock:
            self._is_shut = True
            if not self._is_closed:
                with contextlib.suppress(OSError):
                    # SSLSocket.shutdown() would drop the encryption under a thread that still reads.
                    socket.socket.shutdown(self._tls, socket.SHUT_RDWR)

    def _send_all(self, views: list[memoryview], flags: int) -> None:
        for view in views:
            for start in range(0, view.nbytes, MAX_WRITE_BYTES):
                part = view[start : start + MAX_WRITE_BYTES]
                self._repeat(lambda part=part: self._tls.send(part), "sending")  # type: ignore[misc]

    def _fill(self, views: list[memoryview], may_be_silent: Callable[[], bool] = lambda: False) -> None:
        while views:
            view = views[0]
            received = self._repeat(lambda view=view: self._tls.recv_into(view), "receiving", may_be_silent)  # type: ignore[misc]
            if received == 0:
                raise PeerLost("the peer closed the connection")
            may_be_silent = _must_not_be_silent
            views = advance(views, received)

    def _repeat(self, call: Callable[[], T], doing: str, may_be_silent: Callable[[], bool] = lambda: False) -> T:
        """Call until OpenSSL has what it needs."""
        stalls_at_s = time.monotonic() + self._stall_timeout_s
        while True:
            if self._is_shut:
                raise PeerLost("the connection was shut on this side")
            try:
                with self._turn:
                    result = call()
            except ssl.SSLWantReadError:
                wanted = select.POLLIN
            except ssl.SSLWantWriteError:
                wanted = select.POLLOUT
            except ssl.SSLError as error:
                raise TlsRefused(f"TLS failed while {doing}: {error.reason or error}") from error
            except (OSError, ValueError) as error:  # ValueError: closed
                raise PeerLost(f"the connection broke while {doing}: {error}") from error
            else:
                self.touch()
                return result
            if not self._wait(wanted) and time.monotonic() >= stalls_at_s and not may_be_silent():
                raise PeerLost(f"no byte moved for {self._stall_timeout_s} s while {doing}")

    def _wait(self, wanted: int) -> bool:
        """Whether the socket is ready, within a while."""
        waiting = select.poll()
        try:
            waiting.register(self._tls, wanted)
        except (OSError, ValueError):
            raise PeerLost("the connection was shut on this side") from None
        return bool(waiting.poll(1000 * min(_POLL_S, self._stall_timeout_s)))


def _must_not_be_silent() -> bool:
    return False

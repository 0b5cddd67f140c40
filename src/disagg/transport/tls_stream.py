"""A Stream under TLS.

OpenSSL works on memory here, and the socket below stays the plain one with its time-outs: what a call may wait for, it
waits for outside of OpenSSL. So the thread that writes and the one that reads answers share a lock for microseconds,
and many records travel in one system call.
"""

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from disagg.core.errors import PeerLost
from disagg.transport.stream import Stream

MAX_SEALED_BYTES = 256 << 10  # of plain bytes, before they are sent
RECEIVE_BYTES = 256 << 10

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
        self._arrived, self._sealed = ssl.MemoryBIO(), ssl.MemoryBIO()  # encrypted, from and to the socket
        self._tls = context.wrap_bio(
            self._arrived, self._sealed, server_side=server_name is None, server_hostname=server_name
        )
        self._turn = threading.Lock()  # of OpenSSL's connection, which is for one thread at a time
        self._scratch = memoryview(bytearray(RECEIVE_BYTES))

    def handshake(self) -> None:
        """Exchange certificates. Whoever calls bounds the time, by shut(). Raises PeerLost."""
        try:
            while not self._try(self._shake, "agreeing on TLS"):
                self._flush()
                self._receive_some(_must_not_be_silent)
            self._flush()
        except TlsRefused:
            raise
        except PeerLost as error:
            raise TlsRefused(f"no TLS was agreed on: {error}") from error

    def _shake(self) -> bool:
        self._tls.do_handshake()
        return True

    def _send_all(self, views: Sequence[memoryview], flags: int) -> None:
        num_sealed = 0
        for view in views:
            for start in range(0, view.nbytes, MAX_SEALED_BYTES):
                part = view[start : start + MAX_SEALED_BYTES]
                with self._turn:
                    self._tls.write(part)  # into memory: takes all of it at once
                num_sealed += part.nbytes
                if num_sealed >= MAX_SEALED_BYTES:
                    self._flush(flags)
                    num_sealed = 0
        self._flush(flags)

    def _fill(self, views: list[memoryview], may_be_silent: Callable[[], bool] = lambda: False) -> None:
        views = [view for view in views if view.nbytes]
        while views:
            if self._is_shut:
                raise PeerLost("the connection was shut on this side")
            left = self._try(partial(self._open_into, views), "receiving")
            if left is None:
                self._receive_some(may_be_silent)
                may_be_silent = _must_not_be_silent
            else:
                views = left

    def _open_into(self, views: list[memoryview]) -> list[memoryview]:
        """Open what has arrived, record by record. What is left of the views; raises where nothing could be opened."""
        view, at = views[0], 0
        opened = int(self._tls.read(view.nbytes, view))
        with contextlib.suppress(ssl.SSLWantReadError):  # that was all; the next call will say so again
            while opened:
                if opened == view.nbytes:
                    at += 1
                    if at == len(views):
                        break
                    view = views[at]
                else:
                    view = view[opened:]
                opened = int(self._tls.read(view.nbytes, view))
        if not opened:
            raise PeerLost("the peer closed the connection")
        return [view, *views[at + 1 :]] if at < len(views) else []

    def _try(self, call: Callable[[], T], doing: str) -> T | None:
        """None when OpenSSL needs more bytes of the peer."""
        try:
            with self._turn:
                return call()
        except ssl.SSLWantReadError:
            return None
        except ssl.SSLError as error:
            with contextlib.suppress(PeerLost):  # the peer is to hear why
                self._flush()
            raise TlsRefused(f"TLS failed while {doing}: {error.reason or error}") from error

    def _flush(self, flags: int = 0) -> None:
        with self._turn:
            sealed = self._sealed.read()
        if sealed:
            super()._send_all([memoryview(sealed)], flags)

    def _receive_some(self, may_be_silent: Callable[[], bool]) -> None:
        """Whatever the peer has sent, at least one byte."""
        while True:
            if self._is_shut:
                raise PeerLost("the connection was shut on this side")
            try:
                received = self._sock.recv_into(self._scratch)
            except BlockingIOError as error:
                if may_be_silent():
                    continue
                text = f"the peer sent no byte for {self._stall_timeout_s} s where one was due"
                raise PeerLost(text) from error
            except OSError as error:
                raise PeerLost(f"the connection broke while receiving: {error}") from error
            if received == 0:
                raise PeerLost("the peer closed the connection")
            self.touch()
            with self._turn:
                self._arrived.write(self._scratch[:received])
            return


def _must_not_be_silent() -> bool:
    return False

"""A blocking TCP connection that scatters and gathers straight from and into views of an arena."""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import xxhash

from disagg.core.errors import PeerLost
from disagg.transport.payload import BATCH_BYTES
from disagg.transport.segments import advance
from disagg.transport.wire import PREFIX_BYTES, Body, Item, Prefix, decode_prefix, encode

_MSG_MORE = getattr(socket, "MSG_MORE", 0)  # Linux: more follows at once, do not send a short packet


class Stream:
    """One connection. send_*() from one thread, receive_*() from one thread, shut() from any."""

    def __init__(self, sock: socket.socket, stall_timeout_s: float) -> None:
        self._sock = sock
        self._lock = threading.Lock()  # a descriptor must not be closed, and reused, under shut()
        self._is_closed = False
        self._is_shut = False
        self._stall_timeout_s = stall_timeout_s
        self._progress_s = time.monotonic()  # when a byte last moved, either way
        sock.settimeout(None)
        # Kernel timeouts on a blocking socket: unlike settimeout() they cost no poll() per call.
        timeval = struct.pack("@ll", int(stall_timeout_s), int(stall_timeout_s % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        silence_ms = max(int(1000 * stall_timeout_s), 1000)  # unacknowledged: the peer's machine is gone
        keep = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", silence_ms))
        for option, value in keep:
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def handshake(self) -> None:
        """Nothing to agree on without TLS."""

    def send_item(self, item: Item, body: Body) -> None:
        """Send one small item. Raises PeerLost."""
        self._send_all([memoryview(encode(item, body))], 0)

    def send_raw(self, data: bytes) -> None:
        """Bytes as they are. Raises PeerLost."""
        self._send_all([memoryview(data)] if data else [], 0)

    def finish_sending(self) -> None:
        """No byte follows; answers may still come. Raises PeerLost."""
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError as error:
            raise PeerLost(f"the connection broke while sending: {error}") from error

    def send_frame(self, head: bytes, batches: Iterable[Sequence[memoryview]]) -> None:
        """Send an encoded header and its payload; the trailer must follow by send_trailer().

        The header goes out at once: the receiver prepares while the first batch is made. No batch has more than
        MAX_VIEWS views. Raises PeerLost, and what making a batch raises.
        """
        self._send_all([memoryview(head)], 0)
        for views in batches:
            self._send_all(views, _MSG_MORE)

    def send_trailer(self, trailer: bytes) -> None:
        """End a frame. Raises PeerLost."""
        self._send_all([memoryview(trailer)], 0)

    def receive_prefix(self, item: Item, may_be_silent: Callable[[], bool] = lambda: False) -> Prefix:
        """The next item's prefix. Silence before its first byte is no stall while `may_be_silent()` says so.

        Raises PeerLost, ProtocolViolation.
        """
        data = bytearray(PREFIX_BYTES)
        self._fill([memoryview(data)], may_be_silent)
        return decode_prefix(data, item)

    def receive_bytes(self, num_bytes: int) -> bytearray:
        """Exactly so many bytes; the caller has bounded the number. Raises PeerLost."""
        data = bytearray(num_bytes)
        if num_bytes:
            self._fill([memoryview(data)])
        return data

    def receive_into(self, batches: Iterable[Sequence[memoryview]]) -> None:
        """Fill the views in order, as send_frame() sends them. Raises PeerLost, and what making a batch raises."""
        for views in batches:
            self._fill(list(views))

    def drain(self, num_bytes: int, seed: int | None = None) -> int:
        """Throw away so many bytes through a buffer of at most BATCH_BYTES.

        Returns their XXH3 under `seed` (0 with None). Raises PeerLost.
        """
        digest = None if seed is None else xxhash.xxh3_64(seed=seed)
        scratch = memoryview(bytearray(min(num_bytes, BATCH_BYTES)))
        while num_bytes > 0:
            part = scratch[:num_bytes]
            self._fill([part])
            if digest is not None:
                digest.update(part)
            num_bytes -= part.nbytes
        return digest.intdigest() if digest is not None else 0

    def idle_s(self) -> float:
        """Seconds since a byte moved."""
        return time.monotonic() - self._progress_s

    def is_stalled(self) -> bool:
        """Whether no byte has moved for stall_timeout_s."""
        return self.idle_s() >= self._stall_timeout_s

    def touch(self) -> None:
        """Count stall_timeout_s from now: work begins."""
        self._progress_s = time.monotonic()

    def shut(self) -> None:
        """Make every call on this connection, in whatever thread, fail soon. May be called often."""
        with self._lock:
            self._is_shut = True
            if not self._is_closed:
                with contextlib.suppress(OSError):  # the peer may have closed first
                    self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the descriptor back; only once no thread uses the stream."""
        with self._lock:
            self._is_shut = self._is_closed = True
            self._sock.close()

    def _send_all(self, views: Sequence[memoryview], flags: int) -> None:
        while views:
            if self._is_shut:
                raise PeerLost("the connection was shut on this side")
            try:
                sent = self._sock.sendmsg(views, (), flags)
            except BlockingIOError as error:
                raise PeerLost(f"the peer took no byte for {self._stall_timeout_s} s") from error
            except OSError as error:
                raise PeerLost(f"the connection broke while sending: {error}") from error
            self.touch()
            views = advance(views, sent)

    def _fill(self, views: list[memoryview], may_be_silent: Callable[[], bool] = lambda: False) -> None:
        num_calls = 0
        while views:
            # Bytes already in the kernel can still be read after shutdown: look before each call.
            if self._is_shut:
                raise PeerLost("the connection was shut on this side")
            try:
                received = self._sock.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
            except BlockingIOError as error:
                if num_calls == 0 and may_be_silent():
                    continue
                raise PeerLost(f"the peer sent no byte for {self._stall_timeout_s} s where one was due") from error
            except OSError as error:
                raise PeerLost(f"the connection broke while receiving: {error}") from error
            if received == 0:
                raise PeerLost("the peer closed the connection")
            num_calls += 1
            self.touch()
            views = advance(views, received)

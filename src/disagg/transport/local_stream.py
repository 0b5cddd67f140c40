"""Messages and descriptors between two processes of one machine, over a Unix socket without a name in any folder.

A message is its length (4 bytes) and a msgpack body. The kernel tells who is at the other end.
"""

import contextlib
import os
import socket
import struct
import threading

from disagg.core.errors import PeerLost, ProtocolViolation

MAX_MESSAGE_BYTES = 1 << 20  # 65,000 segments

_LENGTH = struct.Struct("!I")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_SO_PEERPIDFD = 77  # Linux 6.5: no chance that the pid is somebody else's by now


def abstract_address(name: str) -> str:
    """Where `name` listens: known to the kernel only, gone with its socket."""
    return f"\0disagg/{name}"


def peer_pid(sock: socket.socket) -> int:
    """The process at the other end. Raises PeerLost when it is another user's, or of another container."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid != os.geteuid():
        raise PeerLost(f"the process at the other end is of user {uid}, this one of {os.geteuid()}; they share nothing")
    if pid <= 0:
        raise PeerLost("the process at the other end is in another process namespace; its end could not be seen")
    return int(pid)


def open_peer_pidfd(sock: socket.socket, pid: int) -> int:
    """A descriptor that tells when the process at the other end has ended. Raises PeerLost when it has already."""
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        pass  # an older kernel
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        raise PeerLost(f"process {pid} at the other end cannot be watched: {error}") from error


class LocalStream:
    """One connection. send() from one thread, receive() from one thread, the rest from any."""

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        self._sock = sock
        self._lock = threading.Lock()  # a descriptor must not be closed, and reused, under shut()
        self._is_closed = False
        sock.settimeout(None)
        self.set_timeouts(timeout_s, timeout_s)

    def set_timeouts(self, receive_s: float, send_s: float) -> None:
        """For each system call from now on (0: none). Kernel timeouts cost no poll() per call."""
        for option, limit_s in ((socket.SO_RCVTIMEO, receive_s), (socket.SO_SNDTIMEO, send_s)):
            timeval = struct.pack("@ll", int(limit_s), int(limit_s % 1 * 1e6))
            self._sock.setsockopt(socket.SOL_SOCKET, option, timeval)

    def send(self, body: bytes, descriptor: int | None = None) -> None:
        """Send one message. Raises PeerLost; ProtocolViolation when it is over its bound."""
        if len(body) > MAX_MESSAGE_BYTES:
            raise ProtocolViolation(f"message of {len(body)} bytes is over the limit of {MAX_MESSAGE_BYTES}; split it")
        data = memoryview(_LENGTH.pack(len(body)) + body)
        try:
            if descriptor is not None:
                data = data[socket.send_fds(self._sock, [data], [descriptor]) :]
            if data:
                self._sock.sendall(data)
        except OSError as error:
            raise PeerLost(f"the connection broke while sending: {error}") from error

    def receive(self) -> bytearray | None:
        """The next message; None when none began within the timeout. Raises PeerLost, ProtocolViolation."""
        head = self._read(_LENGTH.size, may_be_silent=True)
        if head is None:
            return None
        (num_bytes,) = _LENGTH.unpack(head)
        if num_bytes > MAX_MESSAGE_BYTES:
            raise ProtocolViolation(f"message of {num_bytes} bytes is over the limit of {MAX_MESSAGE_BYTES}")
        return self._read(num_bytes)

    def receive_with_descriptor(self) -> tuple[bytearray, int | None]:
        """A message that may bring one descriptor along, which is the caller's. Raises PeerLost, ProtocolViolation."""
        try:
            head, descriptors, _, _ = socket.recv_fds(self._sock, _LENGTH.size, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise PeerLost(f"the connection broke while receiving: {error}") from error
        try:
            if len(head) != _LENGTH.size:
                raise PeerLost("the peer closed the connection")
            (num_bytes,) = _LENGTH.unpack(head)
            if num_bytes > MAX_MESSAGE_BYTES:
                raise ProtocolViolation(f"message of {num_bytes} bytes is over the limit of {MAX_MESSAGE_BYTES}")
            body = self._read(num_bytes)
            assert body is not None
            return body, descriptors[0] if descriptors else None
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise

    def stop_receiving(self) -> None:
        """Wake whoever receives here. The other end still reads what was sent, and sees no end yet."""
        self._shut(socket.SHUT_RD)

    def stop_sending(self) -> None:
        """Tell the other end that nothing more comes; what it says can still be read."""
        self._shut(socket.SHUT_WR)

    def shut(self) -> None:
        """Make every call on this connection, in whatever thread, fail soon."""
        self._shut(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the descriptor back; only once no thread uses the stream."""
        with self._lock:
            self._is_closed = True
            self._sock.close()

    def _shut(self, how: int) -> None:
        with self._lock:
            if not self._is_closed:
                with contextlib.suppress(OSError):  # the peer may have closed first
                    self._sock.shutdown(how)

    def _read(self, num_bytes: int, *, may_be_silent: bool = False) -> bytearray | None:
        data = bytearray(num_bytes)
        view = memoryview(data)
        while view:
            try:
                received = self._sock.recv_into(view)
            except BlockingIOError as error:
                if may_be_silent and len(view) == num_bytes:
                    return None
                raise PeerLost("the peer stopped in the middle of a message") from error
            except OSError as error:
                raise PeerLost(f"the connection broke while receiving: {error}") from error
            if received == 0:
                raise PeerLost("the peer closed the connection")
            view = view[received:]
        return data

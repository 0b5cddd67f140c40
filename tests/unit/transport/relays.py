"""What stands between a sender and a receiver of either kind, and can hold, damage or cut what passes."""

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable

from disagg.transport.local_stream import abstract_address
from disagg.transport.sharing import SharingDomain

PATIENCE_S = 20.0


class PairRelay:
    """Dials the receiver for each connection that is accepted, and has a thread for each direction."""

    def __init__(self, listener: socket.socket, target: str) -> None:
        """Of a subclass, after its own fields are there: connections are passed from now on."""
        self.target = target
        self.swallows_answers = False
        self._changed = threading.Condition()
        self._is_closed = False
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._threads: list[threading.Thread] = []
        self._listener = listener
        listener.listen()
        self._start(self._accept)

    def release(self) -> None:
        """Let go on what is held."""
        raise NotImplementedError

    def _dial(self) -> socket.socket:
        raise NotImplementedError

    def _upstream(self, near: socket.socket, far: socket.socket) -> None:
        """Pass what the sender says until an end is closed or broken (OSError)."""
        raise NotImplementedError

    def _downstream(self, far: socket.socket, near: socket.socket) -> None:
        """Pass what the receiver says."""
        raise NotImplementedError

    def cut(self) -> None:
        with self._changed:
            for pair in self._pairs:
                for sock in pair:
                    _shut(sock)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
        _shut(self._listener)
        self.cut()
        self.release()
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        self._listener.close()
        for pair in self._pairs:
            for sock in pair:
                sock.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = self._dial()
            except OSError:
                near.close()
                continue
            for sock in (near, far):
                if sock.family == socket.AF_INET:  # or small pieces wait for acknowledgements, which wait too
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._changed:
                self._pairs.append((near, far))
                self._start(self._pass, self._upstream, near, far)
                self._start(self._pass, self._downstream, far, near)
                if self._is_closed:
                    _shut(near)
                    _shut(far)

    def _pass(
        self, stream: Callable[[socket.socket, socket.socket], None], one: socket.socket, other: socket.socket
    ) -> None:
        with contextlib.suppress(OSError):
            stream(one, other)
        _shut(other)

    def _start(self, run: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=run, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()


class Relay(PairRelay):
    """Of tcp: bytes, whatever they mean. Offsets count those towards the receiver."""

    def __init__(self, target: str) -> None:
        self._num_passed = 0
        self._hold_at: int | None = None
        self._flip_at: int | None = None
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        listener.bind(("127.0.0.1", 0))
        host, port = listener.getsockname()
        self.address = f"{host}:{port}"
        super().__init__(listener, target)

    def flip_ahead(self, num_bytes: int) -> None:
        with self._changed:
            self._flip_at = self._num_passed + num_bytes

    def hold_ahead(self, num_bytes: int) -> None:
        with self._changed:
            self._hold_at = self._num_passed + num_bytes

    def wait_held(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._num_passed == self._hold_at, PATIENCE_S), "nothing was held"

    def release(self) -> None:
        with self._changed:
            self._hold_at = None
            self._changed.notify_all()

    def _dial(self) -> socket.socket:
        host, _, port = self.target.rpartition(":")
        return socket.create_connection((host, int(port)))

    def _upstream(self, near: socket.socket, far: socket.socket) -> None:
        while data := bytearray(near.recv(16 << 10)):
            while data:
                part = self._cut_part(data)
                if part is None:
                    return
                far.sendall(part)
                del data[: len(part)]

    def _cut_part(self, data: bytearray) -> bytes | None:
        with self._changed:
            self._changed.wait_for(lambda: self._hold_at is None or self._num_passed < self._hold_at)
            if self._is_closed:
                return None
            size = len(data) if self._hold_at is None else min(len(data), self._hold_at - self._num_passed)
            part = data[:size]
            if self._flip_at is not None and self._num_passed <= self._flip_at < self._num_passed + size:
                part[self._flip_at - self._num_passed] ^= 0x10
                self._flip_at = None
            self._num_passed += size
            self._changed.notify_all()
            return bytes(part)

    def _downstream(self, far: socket.socket, near: socket.socket) -> None:
        while data := far.recv(16 << 10):
            if not self.swallows_answers:
                near.sendall(data)


class MessageRelay(PairRelay):
    """Of shared memory: messages, and the one descriptor that the owner passes."""

    def __init__(self, domain: SharingDomain, target: str) -> None:
        self.address = f"{domain.name}/relay-{os.urandom(4).hex()}"
        self._held_tag: bytes | None = None
        self._is_holding = False
        self._awaited_tag = b""
        self._act: Callable[[], None] | None = None
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(abstract_address(self.address))
        super().__init__(listener, target)

    def do_before(self, tag: str, act: Callable[[], None]) -> None:
        """Once, before the next message of this kind goes on to the owner."""
        with self._changed:
            self._awaited_tag, self._act = tag.encode(), act

    def hold(self, tag: str) -> None:
        """Keep back the next message of this kind, and all after it, on their way to the owner."""
        with self._changed:
            self._held_tag, self._is_holding = tag.encode(), False

    def wait_held(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._is_holding, PATIENCE_S), "nothing was held"

    def release(self) -> None:
        with self._changed:
            self._held_tag, self._is_holding = None, False
            self._changed.notify_all()

    def _dial(self) -> socket.socket:
        far = socket.socket(socket.AF_UNIX)
        try:
            far.connect(abstract_address(self.target))
        except OSError:
            far.close()
            raise
        return far

    def _upstream(self, near: socket.socket, far: socket.socket) -> None:
        while (message := _read_message(near)) is not None:
            with self._changed:
                if self._act is not None and _is_of(message, self._awaited_tag):
                    act, self._act = self._act, None
                    act()
                if self._held_tag is not None and _is_of(message, self._held_tag):
                    self._is_holding = True
                    self._changed.notify_all()
                self._changed.wait_for(lambda: not self._is_holding)
                if self._is_closed:
                    return
            far.sendall(message)

    def _downstream(self, far: socket.socket, near: socket.socket) -> None:
        admission, descriptors, _, _ = socket.recv_fds(far, 64 << 10, 1)
        if admission:
            socket.send_fds(near, [admission], descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        while (message := _read_message(far)) is not None:
            if not (self.swallows_answers and b"answer" in message[:12]):
                near.sendall(message)


def _is_of(message: bytes, tag: bytes) -> bool:
    """Whether a message, with its length before it, is of this kind."""
    return tag in message[: 4 + 2 + len(tag)]


def _read_message(sock: socket.socket) -> bytes | None:
    data = b""
    wanted = 4
    while len(data) < wanted:
        part = sock.recv(wanted - len(data))
        if not part:
            return None
        data += part
        if len(data) == 4:
            wanted += struct.unpack("!I", data)[0]
    return data


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)

"""Two ends of one transport, joined by something that can corrupt, hold or cut what passes."""

import contextlib
import os
import random
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from disagg.core.endpoints import Endpoint, TransportKind
from disagg.core.ids import Incarnation, WorkerId
from disagg.kvcache.memory import Segment
from disagg.testing.memory import BytesLanding, BytesMemory, StagedLanding
from disagg.transport.api import Receiver, Sender, TransportEvent, Write
from disagg.transport.capability import frame_proof, grant_name, hello_proof
from disagg.transport.in_process import Fault, InProcessNetwork
from disagg.transport.tcp_connection import TcpSenderConfig
from disagg.transport.tcp_receiver import TcpReceiver
from disagg.transport.tcp_sender import TcpSender
from disagg.transport.wire import (
    PREFIX_BYTES,
    Ack,
    Challenge,
    FrameHeader,
    Hello,
    Item,
    Welcome,
    decode_body,
    decode_prefix,
    encode,
)

DEADLINE_S = 10.0
FENCE_S = 0.3
ARENA_BYTES = 1 << 20
PREFILL = WorkerId("prefill-0")
DECODE = WorkerId("decode-0")
SENDER_INCARNATION = Incarnation(11)
RECEIVER_INCARNATION = Incarnation(22)

T = TypeVar("T", bound=TransportEvent)


class EventLog:
    """Keeps what was posted and waits for it with a deadline."""

    def __init__(self) -> None:
        self.events: list[TransportEvent] = []
        self.on_event: Callable[[TransportEvent], None] = lambda event: None
        self._changed = threading.Condition(threading.RLock())

    def post(self, event: TransportEvent) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()
        self.on_event(event)

    def of(self, kind: type[T]) -> list[T]:
        with self._changed:
            return [event for event in self.events if isinstance(event, kind)]

    def wait(self, kind: type[T], count: int = 1) -> list[T]:
        """The first `count` events of a kind; fails after DEADLINE_S."""
        with self._changed:
            arrived = self._changed.wait_for(
                lambda: sum(isinstance(event, kind) for event in self.events) >= count, DEADLINE_S
            )
            assert arrived, f"{count} {kind.__name__} did not come; there is {self.events}"
        return self.of(kind)[:count]

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Looks again after each event; fails after DEADLINE_S."""
        with self._changed:
            assert self._changed.wait_for(is_so, DEADLINE_S), f"it did not happen; there is {self.events}"


def open_descriptors() -> set[str]:
    """Targets of this process's open sockets and pipes."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the listing's own descriptor
            continue
        if target.startswith("socket:"):
            found.add(target)
    return found


class Relay:
    """Passes bytes between a sender and a receiver. Upstream is towards the receiver; offsets count its bytes."""

    def __init__(self, address: str) -> None:
        self.target = address
        self._changed = threading.Condition()
        self._num_passed = 0
        self._hold_at: int | None = None
        self._flip_at: int | None = None
        self.swallows_answers = False
        self._is_closed = False
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        host, port = self._listener.getsockname()
        self.address = f"{host}:{port}"
        self._start(self._accept)

    def flip_ahead(self, num_bytes: int) -> None:
        with self._changed:
            self._flip_at = self._num_passed + num_bytes

    def hold_ahead(self, num_bytes: int) -> None:
        with self._changed:
            self._hold_at = self._num_passed + num_bytes

    def wait_held(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._num_passed == self._hold_at, DEADLINE_S), "nothing was held"

    def release(self) -> None:
        with self._changed:
            self._hold_at = None
            self._changed.notify_all()

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
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
        self._listener.close()
        for pair in self._pairs:
            for sock in pair:
                sock.close()

    def _start(self, run: Callable[..., None], *args: socket.socket) -> None:
        thread = threading.Thread(target=run, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                host, _, port = self.target.rpartition(":")
                far = socket.create_connection((host, int(port)))
            except OSError:
                near.close()
                continue
            with self._changed:
                self._pairs.append((near, far))
                self._start(self._upstream, near, far)
                self._start(self._downstream, far, near)
                if self._is_closed:
                    _shut(near)
                    _shut(far)

    def _upstream(self, near: socket.socket, far: socket.socket) -> None:
        try:
            while data := bytearray(near.recv(16 << 10)):
                while data:
                    part = self._cut_part(data)
                    if part is None:
                        return
                    far.sendall(part)
                    del data[: len(part)]
        except OSError:
            pass
        _shut(far)

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
        try:
            while data := far.recv(16 << 10):
                if not self.swallows_answers:
                    near.sendall(data)
        except OSError:
            pass
        _shut(near)


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


class GatedMemory(BytesMemory):
    """Its landings can be made to wait, as a slow copy would."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def landing(self, segments: Sequence[Segment]) -> BytesLanding | StagedLanding:
        self.entered.set()
        assert self.gate.wait(DEADLINE_S)
        return super().landing(segments)


class Rig(Protocol):
    """What the contract's tests need of a kind."""

    source: BytesMemory
    target: BytesMemory
    sender: Sender
    receiver: Receiver
    sent: EventLog
    landed: EventLog
    can_force_fence: bool
    num_lanes: int
    is_encrypted: bool

    def connect(self, sender: Sender, incarnation: Incarnation = RECEIVER_INCARNATION) -> None: ...
    def another_sender(self, worker_id: WorkerId, log: EventLog) -> Sender: ...
    def restart_receiver(self, incarnation: Incarnation) -> None: ...
    def corrupt_next(self) -> None: ...
    def hold_next(self) -> None: ...
    def wait_held(self) -> None: ...
    def release(self) -> None: ...
    def lose_next_answer(self) -> None: ...
    def cut(self) -> None: ...
    def check_invariants(self) -> None: ...
    def close(self) -> None: ...


def read_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        part = sock.recv(num_bytes - len(data))
        assert part, f"closed after {data!r}"
        data += part
    return data


def read_challenge(sock: socket.socket) -> bytes:
    """The nonce of this connection."""
    prefix = decode_prefix(read_exactly(sock, PREFIX_BYTES), Item.CHALLENGE)
    return decode_body(read_exactly(sock, prefix.num_bytes), prefix, Challenge).nonce


def read_welcome(sock: socket.socket) -> Welcome:
    prefix = decode_prefix(read_exactly(sock, PREFIX_BYTES), Item.WELCOME)
    return decode_body(read_exactly(sock, prefix.num_bytes), prefix, Welcome)


def read_ack(sock: socket.socket) -> Ack:
    prefix = decode_prefix(read_exactly(sock, PREFIX_BYTES), Item.ACK)
    return decode_body(read_exactly(sock, prefix.num_bytes), prefix, Ack)


RAW = WorkerId("raw")
RAW_INCARNATION = Incarnation(5)


def raw_hello(
    receiver: TcpReceiver, nonce: bytes, *, sender: WorkerId = RAW, lane: int = 0, checksums: bool = True
) -> Hello:
    """As a paired sender would say it."""
    token = receiver.endpoint_for(sender, RAW_INCARNATION).token
    proof = hello_proof(token, nonce, lane)
    return Hello(sender, RAW_INCARNATION, RECEIVER_INCARNATION, checksums, lane, proof)


def greet(sock: socket.socket, receiver: TcpReceiver, *, sender: WorkerId = RAW, lane: int = 0) -> bytes:
    """Be welcomed by hand; the nonce of the connection."""
    nonce = read_challenge(sock)
    sock.sendall(encode(Item.HELLO, raw_hello(receiver, nonce, sender=sender, lane=lane)))
    assert read_welcome(sock).refusal is None
    return nonce


def raw_header(key: bytes, nonce: bytes, number: int, destination: tuple[Segment, ...], num_bytes: int) -> FrameHeader:
    proof = frame_proof(key, nonce, number)
    return FrameHeader(grant_name(key), number, b"", destination, num_bytes, proof)


class TcpRig:
    can_force_fence = True

    def __init__(
        self,
        client_tls: ssl.SSLContext | None = None,
        server_tls: ssl.SSLContext | None = None,
        *,
        num_lanes: int = 1,
    ) -> None:
        self.num_lanes = num_lanes
        self.is_encrypted = client_tls is not None
        self.client_tls, self.server_tls = client_tls, server_tls
        self.source = BytesMemory(data=pattern(ARENA_BYTES))
        self.gated = GatedMemory(ARENA_BYTES)
        self.target: BytesMemory = self.gated
        self.sent, self.landed = EventLog(), EventLog()
        self.receiver = self._receiver(RECEIVER_INCARNATION)
        self.relay = Relay(self.receiver.endpoint.address)
        self.sender = TcpSender(
            PREFILL, SENDER_INCARNATION, self.source, self.sent.post, self._config(), tls=client_tls
        )
        self.others: list[TcpSender] = []
        self.connect(self.sender)

    def _receiver(self, incarnation: Incarnation) -> TcpReceiver:
        return TcpReceiver(
            self.target, incarnation, self.landed.post, fence_timeout_s=FENCE_S, secret=b"rig", tls=self.server_tls
        )

    def _config(self) -> TcpSenderConfig:
        return TcpSenderConfig(fence_timeout_s=FENCE_S, num_lanes=self.num_lanes)

    def connect(self, sender: Sender, incarnation: Incarnation = RECEIVER_INCARNATION) -> None:
        self._introduce(sender, PREFILL, SENDER_INCARNATION, incarnation)

    def _introduce(self, sender: Sender, worker_id: WorkerId, own: Incarnation, incarnation: Incarnation) -> None:
        token = self.receiver.endpoint_for(worker_id, own).token
        sender.connect(DECODE, Endpoint(TransportKind.TCP, self.relay.address, token), incarnation)

    def another_sender(self, worker_id: WorkerId, log: EventLog) -> Sender:
        sender = TcpSender(worker_id, Incarnation(33), self.source, log.post, self._config(), tls=self.client_tls)
        self.others.append(sender)
        self._introduce(sender, worker_id, Incarnation(33), RECEIVER_INCARNATION)
        return sender

    def restart_receiver(self, incarnation: Incarnation) -> None:
        self.receiver.close()
        self.receiver = self._receiver(incarnation)
        self.relay.target = self.receiver.endpoint.address

    def corrupt_next(self) -> None:
        self.relay.flip_ahead(2000)

    def hold_next(self) -> None:
        self.gated.entered.clear()
        self.relay.hold_ahead(2000)

    def wait_held(self) -> None:
        self.relay.wait_held()
        assert self.gated.entered.wait(DEADLINE_S)

    def release(self) -> None:
        self.relay.release()

    def lose_next_answer(self) -> None:
        self.relay.swallows_answers = True

    def cut(self) -> None:
        self.relay.cut()
        self.relay.swallows_answers = False

    def check_invariants(self) -> None:
        for sender in (self.sender, *self.others):
            sender.check_invariants()
        self.receiver.check_invariants()

    def close(self) -> None:
        for sender in (self.sender, *self.others):
            sender.close()
        self.receiver.close()
        self.relay.close()


class InProcessRig:
    can_force_fence = False  # a copy in memory can only be waited for
    num_lanes = 1
    is_encrypted = False

    def __init__(self) -> None:
        self.network = InProcessNetwork(threaded=True)
        self.source = BytesMemory(data=pattern(ARENA_BYTES))
        self.gated = GatedMemory(ARENA_BYTES)
        self.target: BytesMemory = self.gated
        self.sent, self.landed = EventLog(), EventLog()
        self.receiver = self.network.receiver("decode", RECEIVER_INCARNATION, self.target, self.landed.post)
        self.sender = self.network.sender(PREFILL, SENDER_INCARNATION, self.source, self.sent.post)
        self.connect(self.sender)

    def connect(self, sender: Sender, incarnation: Incarnation = RECEIVER_INCARNATION) -> None:
        sender.connect(DECODE, Endpoint(TransportKind.IN_PROCESS, "decode"), incarnation)

    def another_sender(self, worker_id: WorkerId, log: EventLog) -> Sender:
        sender = self.network.sender(worker_id, Incarnation(33), self.source, log.post)
        self.connect(sender)
        return sender

    def restart_receiver(self, incarnation: Incarnation) -> None:
        self.receiver.close()
        self.receiver = self.network.receiver("decode", incarnation, self.target, self.landed.post)

    def corrupt_next(self) -> None:
        self._once(Fault.CORRUPT)

    def hold_next(self) -> None:
        self.gated.entered.clear()
        self.gated.gate.clear()

    def wait_held(self) -> None:
        assert self.gated.entered.wait(DEADLINE_S)

    def release(self) -> None:
        self.gated.gate.set()

    def lose_next_answer(self) -> None:
        self._once(Fault.CUT_AFTER_LANDING)

    def cut(self) -> None:
        """The hook has cut it already."""

    def check_invariants(self) -> None:
        self.network.check_invariants()
        self.receiver.check_invariants()

    def close(self) -> None:
        self.release()
        self.sender.close()
        self.receiver.close()
        self.network.close()

    def _once(self, fault: Fault) -> None:
        faults = [fault]
        self.network.fault_hook = lambda write: faults.pop() if faults else Fault.NONE


def pattern(num_bytes: int) -> bytes:
    """Seeded random bytes."""
    return random.Random(num_bytes).randbytes(num_bytes)


def write_of(
    key: bytes, number: int, source: tuple[Segment, ...], destination: tuple[Segment, ...], tag: bytes = b""
) -> Write:
    return Write(DECODE, key, number, tag, source, destination)

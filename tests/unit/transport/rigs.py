"""Two ends of one transport, joined by something that can corrupt, hold or cut what passes."""

import os
import random
import socket
import ssl
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

import msgspec
from tests.unit.transport.relays import MessageRelay, Relay

from disagg.core.ids import Incarnation, WorkerId
from disagg.kvcache.memory import Segment
from disagg.testing.memory import BytesLanding, BytesMemory, SealedBytesMemory, StagedLanding
from disagg.transport.api import Receiver, Sender, TransportEvent, Write, WriteFinished
from disagg.transport.capability import frame_proof, grant_name, hello_proof
from disagg.transport.link_sender import LinkSender
from disagg.transport.segments import SegmentArray
from disagg.transport.shared_memory_receiver import SharedMemoryReceiver
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

DEADLINE_S = 20.0
FENCE_S = 0.3  # for who waits until it has passed
LONG_FENCE_S = 10.0  # for everybody else: this machine may hold up any thread for longer than the other
ARENA_BYTES = 1 << 20
MAX_TRIES = 20
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
        self._first_s: dict[type[object], float] = {}
        self._changed = threading.Condition(threading.RLock())

    def post(self, event: TransportEvent) -> None:
        with self._changed:
            self._first_s.setdefault(type(event), time.monotonic())
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

    def first_s(self, kind: type[T]) -> float:
        """When the first event of a kind was posted, on time.monotonic()."""
        with self._changed:
            return self._first_s[kind]

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


class GatedSource(BytesMemory):
    """What is read of it waits, as a slow copy would, until `gate` is set."""

    def __init__(self, *, data: bytes) -> None:
        super().__init__(data=data)
        self.gate, self.entered = threading.Event(), threading.Event()

    def gather(self, segments: Sequence[Segment]) -> list[memoryview]:
        self.entered.set()
        assert self.gate.wait(DEADLINE_S)
        return super().gather(segments)


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
    return FrameHeader(grant_name(key), number, b"", SegmentArray.of(destination).pack(), num_bytes, proof)


@contextmanager
def dialled(receiver: TcpReceiver) -> Iterator[socket.socket]:
    host, _, port = receiver.endpoint.address.rpartition(":")
    with socket.create_connection((host, int(port)), DEADLINE_S) as sock:
        yield sock


def is_closed_by_peer(sock: socket.socket) -> bool:
    try:
        while sock.recv(4096):
            pass
    except ConnectionError:
        pass
    return True  # a socket timeout raises TimeoutError instead


class LinkRig(ABC):
    """Both ends of a kind that has connections, and a relay between them. Subclasses set source, target and relay."""

    num_lanes = 1
    is_encrypted = False
    source: BytesMemory
    target: BytesMemory

    def __init__(self, fence_s: float) -> None:
        self.fence_s = fence_s
        self.sent, self.landed = EventLog(), EventLog()
        self.receiver = self._make_receiver(RECEIVER_INCARNATION)
        self.relay = self._make_relay(self.receiver.endpoint.address)
        self.others: list[LinkSender] = []
        self.sender = self._make_sender(PREFILL, SENDER_INCARNATION, self.sent)
        self.connect(self.sender)

    @abstractmethod
    def _make_receiver(self, incarnation: Incarnation) -> TcpReceiver | SharedMemoryReceiver: ...

    @abstractmethod
    def _make_relay(self, target: str) -> Relay | MessageRelay: ...

    @abstractmethod
    def _make_sender(self, worker_id: WorkerId, own: Incarnation, log: EventLog) -> LinkSender: ...

    def connect(self, sender: Sender, incarnation: Incarnation = RECEIVER_INCARNATION) -> None:
        self._introduce(sender, PREFILL, SENDER_INCARNATION, incarnation)

    def _introduce(self, sender: Sender, worker_id: WorkerId, own: Incarnation, incarnation: Incarnation) -> None:
        endpoint = self.receiver.endpoint_for(worker_id, own)
        sender.connect(DECODE, msgspec.structs.replace(endpoint, address=self.relay.address), incarnation)

    def another_sender(self, worker_id: WorkerId, log: EventLog) -> Sender:
        sender = self._make_sender(worker_id, Incarnation(33), log)
        self.others.append(sender)
        self._introduce(sender, worker_id, Incarnation(33), RECEIVER_INCARNATION)
        return sender

    def restart_receiver(self, incarnation: Incarnation) -> None:
        self.receiver.close()
        self.receiver = self._make_receiver(incarnation)
        self.relay.target = self.receiver.endpoint.address

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


class TcpRig(LinkRig):
    can_force_fence = True
    relay: Relay
    receiver: TcpReceiver
    sender: TcpSender

    def __init__(
        self,
        client_tls: ssl.SSLContext | None = None,
        server_tls: ssl.SSLContext | None = None,
        *,
        num_lanes: int = 1,
        is_mappable: bool = False,
        fence_s: float = LONG_FENCE_S,
    ) -> None:
        """is_mappable: both arenas are such as a worker in host memory has."""
        self.num_lanes = num_lanes
        self.is_encrypted = client_tls is not None
        self.client_tls, self.server_tls = client_tls, server_tls
        self.source = BytesMemory(data=pattern(ARENA_BYTES))
        self.gated = GatedMemory(ARENA_BYTES)
        self.target = self.gated
        if is_mappable:
            self.source, self.target = SealedBytesMemory(data=pattern(ARENA_BYTES)), SealedBytesMemory(ARENA_BYTES)
        super().__init__(fence_s)

    def _make_receiver(self, incarnation: Incarnation) -> TcpReceiver:
        return TcpReceiver(
            self.target,
            incarnation,
            self.landed.post,
            fence_timeout_s=self.fence_s,
            secret=b"rig",
            tls=self.server_tls,
        )

    def _make_relay(self, target: str) -> Relay:
        return Relay(target)

    def _make_sender(self, worker_id: WorkerId, own: Incarnation, log: EventLog) -> TcpSender:
        config = TcpSenderConfig(fence_timeout_s=self.fence_s, num_lanes=self.num_lanes)
        return TcpSender(worker_id, own, self.source, log.post, config, tls=self.client_tls)

    def corrupt_next(self) -> None:
        self.relay.flip_ahead(2000)

    def hold_next(self) -> None:
        self.gated.entered.clear()
        self.relay.hold_ahead(2000)

    def wait_held(self) -> None:
        self.relay.wait_held()
        assert self.gated.entered.wait(DEADLINE_S)


def pattern(num_bytes: int) -> bytes:
    """Seeded random bytes."""
    return random.Random(num_bytes).randbytes(num_bytes)


def write_of(
    key: bytes, number: int, source: tuple[Segment, ...], destination: tuple[Segment, ...], tag: bytes = b""
) -> Write:
    return Write(DECODE, key, number, tag, source, destination)


def write_through(sender: Sender, log: EventLog, key: bytes, run: tuple[Segment, ...]) -> None:
    """One write that lands, by an end of little patience: where this machine has used that up, it writes again."""
    for number in range(len(log.of(WriteFinished)), MAX_TRIES):
        sender.write(write_of(key, number, run, run))
        if log.wait(WriteFinished, number + 1)[number].failure is None:
            return
    raise AssertionError(f"no write of {MAX_TRIES} has landed; there is {log.events}")

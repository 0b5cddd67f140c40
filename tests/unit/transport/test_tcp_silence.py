"""Peers that say nothing, stop half way, or answer what is not due: what ends, when, and what does not."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

import pytest
from tests.unit.transport.rigs import (
    DEADLINE_S,
    DECODE,
    FENCE_S,
    PREFILL,
    RECEIVER_INCARNATION,
    SENDER_INCARNATION,
    EventLog,
    TcpRig,
    dialled,
    greet,
    is_closed_by_peer,
    raw_header,
    read_exactly,
    write_of,
    write_through,
)

from disagg.core.endpoints import Endpoint, TransportKind
from disagg.core.ids import WorkerId
from disagg.kvcache.memory import Segment
from disagg.testing.memory import BytesMemory
from disagg.transport.api import ConnectionLost, GrantFenced, WriteFinished, WriteLanded, WritesStopped
from disagg.transport.capability import NONCE_BYTES, grant_name
from disagg.transport.tcp_connection import TcpSenderConfig
from disagg.transport.tcp_receiver import TcpReceiver
from disagg.transport.tcp_sender import TcpSender
from disagg.transport.wire import (
    PREFIX_BYTES,
    Ack,
    Challenge,
    Item,
    Welcome,
    decode_prefix,
    encode,
)

KEY = b"key-0"
BIG = (Segment(0, 256 << 10),)


def test_a_stranger_who_says_nothing_is_closed_in_time() -> None:
    log = EventLog()
    receiver = TcpReceiver(BytesMemory(10), RECEIVER_INCARNATION, log.post, hello_timeout_s=0.1)
    with dialled(receiver) as sock:
        assert is_closed_by_peer(sock)
    receiver.close()


def test_revoke_shuts_the_connection_of_a_frame_that_never_ends() -> None:
    with closing(TcpRig(fence_s=FENCE_S)) as tcp:
        tcp.receiver.grant(PREFILL, KEY, BIG)
        tcp.hold_next()
        tcp.sender.write(write_of(KEY, 0, BIG, BIG))
        tcp.wait_held()
        revoked_s = time.monotonic()
        tcp.receiver.revoke(KEY)
        assert tcp.landed.wait(GrantFenced) == [GrantFenced(KEY)]  # long before the peer would count as lost
        assert tcp.landed.first_s(GrantFenced) - revoked_s >= FENCE_S
        before = tcp.target.read(BIG)
        tcp.release()
        assert tcp.sent.wait(WriteFinished)[0].failure is not None
        tcp.sent.wait(ConnectionLost)
        assert tcp.target.read(BIG) == before
        assert tcp.landed.of(WriteLanded) == []
        tcp.check_invariants()


def test_cancel_shuts_the_connection_of_a_frame_that_nobody_takes() -> None:
    with silent_peer() as peer:
        log = EventLog()
        memory = BytesMemory(32 << 20)  # more than the sockets hold
        sender = TcpSender(PREFILL, SENDER_INCARNATION, memory, log.post, TcpSenderConfig(fence_timeout_s=FENCE_S))
        sender.connect(DECODE, peer.endpoint, RECEIVER_INCARNATION)
        sender.write(write_of(KEY, 0, (Segment(0, 32 << 20),), (Segment(0, 32 << 20),)))
        sender.write(write_of(KEY, 1, BIG, BIG))
        sender.write(write_of(b"other", 0, BIG, BIG))
        assert peer.saw_frame.wait(DEADLINE_S)
        sender.check_invariants()
        cancelled_s = time.monotonic()
        sender.cancel(DECODE, KEY)
        sender.cancel(DECODE, KEY)
        assert log.wait(WriteFinished)[0].number == 1
        log.wait(WritesStopped)
        assert log.first_s(WritesStopped) - cancelled_s >= FENCE_S  # the frame had its time
        assert len(log.wait(WriteFinished, 3)) == 3
        log.wait(ConnectionLost)
        assert log.of(WritesStopped) == [WritesStopped(DECODE, KEY)]
        sender.check_invariants()
        sender.close()


def test_close_does_not_wait_for_a_peer_that_has_stopped() -> None:
    with silent_peer() as peer:
        log = EventLog()
        sender = TcpSender(PREFILL, SENDER_INCARNATION, BytesMemory(32 << 20), log.post)
        sender.connect(DECODE, peer.endpoint, RECEIVER_INCARNATION)
        sender.write(write_of(KEY, 0, (Segment(0, 32 << 20),), (Segment(0, 32 << 20),)))
        assert peer.saw_frame.wait(DEADLINE_S)
        started_s = time.monotonic()
        sender.close()
        assert time.monotonic() - started_s < 4.0  # within the time that threads have to end
        assert log.of(WriteFinished) == [WriteFinished(DECODE, KEY, 0, "the sender was closed")]


@pytest.mark.parametrize("num_bytes", [100, 32 << 20])
def test_a_peer_that_answers_nothing_is_lost_after_the_stall_timeout(num_bytes: int) -> None:
    with silent_peer() as peer:
        log = EventLog()
        config = TcpSenderConfig(stall_timeout_s=0.2)
        sender = TcpSender(PREFILL, SENDER_INCARNATION, BytesMemory(num_bytes), log.post, config)
        sender.connect(DECODE, peer.endpoint, RECEIVER_INCARNATION)
        run = (Segment(0, num_bytes),)
        sender.write(write_of(KEY, 0, run, run))
        assert log.wait(ConnectionLost)[0].peer == DECODE
        assert isinstance(log.events[0], WriteFinished)
        sender.close()


def test_an_answer_before_the_last_byte_is_not_believed() -> None:
    with silent_peer(encode(Item.ACK, Ack(grant_name(KEY), 0, None))) as peer:
        log = EventLog()
        config = TcpSenderConfig(stall_timeout_s=0.3)
        sender = TcpSender(PREFILL, SENDER_INCARNATION, BytesMemory(32 << 20), log.post, config)
        sender.connect(DECODE, peer.endpoint, RECEIVER_INCARNATION)
        run = (Segment(0, 32 << 20),)
        sender.write(write_of(KEY, 0, run, run))
        assert log.wait(WriteFinished)[0].failure is not None
        log.wait(ConnectionLost)
        sender.close()


@pytest.mark.parametrize(
    ("answers", "said"),
    [((Ack(grant_name(KEY), 7, None),), "was due"), ((Ack(grant_name(KEY), 0, None),) * 2, "none is in flight")],
    ids=["another", "one too many"],
)
def test_an_answer_that_is_not_due_ends_the_connection(answers: tuple[Ack, ...], said: str) -> None:
    with silent_peer(b"".join(encode(Item.ACK, answer) for answer in answers)) as peer:
        log = EventLog()
        sender = TcpSender(PREFILL, SENDER_INCARNATION, BytesMemory(100), log.post)
        sender.connect(DECODE, peer.endpoint, RECEIVER_INCARNATION)
        sender.write(write_of(KEY, 0, (Segment(0, 100),), (Segment(0, 100),)))
        assert said in log.wait(ConnectionLost)[0].reason
        assert len(log.of(WriteFinished)) == 1
        sender.close()


def test_an_idle_connection_outlives_the_stall_timeout() -> None:
    landed, sent = EventLog(), EventLog()
    receiver = TcpReceiver(BytesMemory(100), RECEIVER_INCARNATION, landed.post, stall_timeout_s=0.25)
    sender = TcpSender(PREFILL, SENDER_INCARNATION, BytesMemory(100), sent.post, TcpSenderConfig(stall_timeout_s=0.25))
    sender.connect(DECODE, receiver.endpoint_for(PREFILL, SENDER_INCARNATION), RECEIVER_INCARNATION)
    receiver.grant(PREFILL, KEY, (Segment(0, 100),))
    run = (Segment(0, 100),)
    write_through(sender, sent, KEY, run)
    lost = threading.Event()
    sent.on_event = lambda event: lost.set() if isinstance(event, ConnectionLost) else None
    assert not lost.wait(0.8)  # several timeouts long
    write_through(sender, sent, KEY, run)
    sender.close()
    receiver.close()


def test_a_frame_that_stops_half_way_is_given_up_by_the_receiver() -> None:
    landed = EventLog()
    receiver = TcpReceiver(BytesMemory(1000), RECEIVER_INCARNATION, landed.post, stall_timeout_s=1.0)
    receiver.grant(WorkerId("raw"), KEY, (Segment(0, 1000),))
    with dialled(receiver) as sock:
        header = raw_header(KEY, greet(sock, receiver), 0, (Segment(0, 1000),), 1000)
        sock.sendall(encode(Item.FRAME, header) + bytes(500))
        assert is_closed_by_peer(sock)
    receiver.revoke(KEY)
    assert landed.wait(GrantFenced) == [GrantFenced(KEY)]
    assert landed.of(WriteLanded) == []
    receiver.close()


class SilentPeer:
    """Welcomes one sender, then neither reads nor answers, as a stopped process does. Later ones get no welcome."""

    def __init__(self, early_answer: bytes = b"") -> None:
        self._early_answer = early_answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._taken: list[socket.socket] = []
        self.saw_frame = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        host, port = self._listener.getsockname()
        self.endpoint = Endpoint(TransportKind.TCP, f"{host}:{port}")

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for sock in self._taken:
            sock.close()
        self._thread.join(DEADLINE_S)
        self._listener.close()
        assert not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self._taken.append(sock)
            if len(self._taken) == 1:
                with suppress(OSError, AssertionError):  # it has little patience, and may have given us up by now
                    self._welcome(sock)

    def _welcome(self, sock: socket.socket) -> None:
        sock.sendall(encode(Item.CHALLENGE, Challenge(bytes(NONCE_BYTES))))
        prefix = decode_prefix(read_exactly(sock, PREFIX_BYTES), Item.HELLO)
        read_exactly(sock, prefix.num_bytes)
        sock.sendall(encode(Item.WELCOME, Welcome(None)))
        sock.recv(1, socket.MSG_PEEK)
        self.saw_frame.set()
        sock.sendall(self._early_answer)


@contextmanager
def silent_peer(early_answer: bytes = b"") -> Iterator[SilentPeer]:
    peer = SilentPeer(early_answer)
    try:
        yield peer
    finally:
        peer.close()

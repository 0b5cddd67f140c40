"""What only shared memory can do: strangers, seals, permits that are given back, a process that must not be ended."""

import fcntl
import logging
import mmap
import os
import socket
import struct
import threading
import time
from contextlib import closing

import msgspec
import pytest
from tests.unit.transport.local_rigs import BIG, KEY, RawWriter, SharedMemoryRig, raw_writer, request
from tests.unit.transport.rigs import (
    ARENA_BYTES,
    DEADLINE_S,
    DECODE,
    FENCE_S,
    PREFILL,
    RAW,
    RECEIVER_INCARNATION,
    EventLog,
    GatedSource,
    write_of,
    write_through,
)

from disagg.core.endpoints import Endpoint, TransportKind
from disagg.core.errors import InternalFault, PeerLost
from disagg.core.ids import Incarnation, WorkerId
from disagg.kvcache.memory import Segment
from disagg.testing.memory import BytesMemory, SealedBytesMemory
from disagg.testing.processes import wait_until
from disagg.transport.api import ConnectionLost, GrantFenced, WriteFinished, WriteLanded, WritesStopped
from disagg.transport.local_stream import MAX_MESSAGE_BYTES, abstract_address
from disagg.transport.shared_memory_connection import SharedMemorySenderConfig
from disagg.transport.shared_memory_receiver import MAX_TICKETS, SharedMemoryReceiver
from disagg.transport.shared_memory_sender import SharedMemorySender
from disagg.transport.shared_memory_wire import (
    PROBE_BYTES,
    Admission,
    Answer,
    Copied,
    Farewell,
    Greeting,
    Permit,
    Progress,
    Withdrawal,
    WriterMessage,
    encode,
)
from disagg.transport.sharing import SHARING_SECRET, draw_domain, take_domain

WHOLE = (Segment(0, ARENA_BYTES),)


def assert_still_serves(rig: SharedMemoryRig, number: int, key: bytes = b"served") -> None:
    if number == 0:
        rig.receiver.grant(PREFILL, key, BIG)
    rig.sender.write(write_of(key, number, BIG, BIG))
    assert rig.sent.wait(WriteFinished, number + 1)[-1].failure is None


# --- who may come in -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("greeting", "reason"),
    [
        (lambda domain: Greeting(RAW, RECEIVER_INCARNATION, b"guessed"), "secret"),
        (lambda domain: Greeting(RAW, RECEIVER_INCARNATION, b""), "secret"),
        (lambda domain: Greeting(RAW, RECEIVER_INCARNATION, draw_domain().secret), "secret"),
        (lambda domain: Greeting(RAW, Incarnation(404), domain.secret), "incarnation"),
    ],
)
def test_a_stranger_is_refused_and_given_no_memory(shared: SharedMemoryRig, greeting: object, reason: str) -> None:
    assert_still_serves(shared, 0)
    with raw_writer(shared) as writer:
        writer.say(greeting(shared.domain))  # type: ignore[operator]
        answer = writer.hear()
        assert isinstance(answer, Admission)
        assert reason in (answer.refusal or "")
        assert writer.is_closed_by_peer()
        assert writer.descriptors == []
    assert_still_serves(shared, 1)


@pytest.mark.parametrize(
    "noise",
    [
        struct.pack("!I", 2**32 - 1),
        struct.pack("!I", MAX_MESSAGE_BYTES + 1),
        struct.pack("!I", 5) + b"noise",
        struct.pack("!I", 9) + encode(Farewell())[:9].ljust(9, b"\0"),
    ],
    ids=["4 GiB", "long", "noise", "cut"],
)
@pytest.mark.parametrize("is_greeted", [False, True])
def test_noise_closes_its_connection_only(shared: SharedMemoryRig, noise: bytes, *, is_greeted: bool) -> None:
    assert_still_serves(shared, 0)
    with raw_writer(shared) as writer:
        if is_greeted:
            writer.greet(shared.domain)
        writer.sock.sendall(noise)
        assert writer.is_closed_by_peer()
    assert_still_serves(shared, 1)


def test_who_says_nothing_is_closed_in_time() -> None:
    domain = draw_domain()
    memory = SealedBytesMemory(10)
    receiver = SharedMemoryReceiver(memory, RECEIVER_INCARNATION, EventLog().post, domain, hello_timeout_s=0.1)
    writer = RawWriter(receiver.endpoint.address)
    assert writer.is_closed_by_peer()
    writer.close()
    receiver.close()


def test_an_admitted_writer_can_neither_shrink_nor_grow_nor_unseal_the_arena(shared: SharedMemoryRig) -> None:
    with raw_writer(shared) as writer:
        writer.greet(shared.domain)
        (descriptor,) = writer.descriptors
        assert os.fstat(descriptor).st_size == ARENA_BYTES
        for size in (0, ARENA_BYTES + 4096):
            with pytest.raises(OSError, match="not permitted"):
                os.ftruncate(descriptor, size)
        with pytest.raises(OSError, match="not permitted"):
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_a_secret_travels_in_the_environment_once() -> None:
    domain = draw_domain()
    environ = {**domain.environment(), "OTHER": "1"}
    taken = take_domain(environ)
    assert taken is not None
    assert taken.name == domain.name
    assert taken.admits(domain.secret)
    assert environ == {"OTHER": "1"}
    assert take_domain(environ) is None
    for text in ("not hex", "abcd"):
        assert take_domain({SHARING_SECRET: text}) is None
    assert domain.secret.hex() not in domain.name
    assert draw_domain().name != domain.name


def test_endpoints_of_other_domains_and_memory_that_cannot_be_mapped_are_refused(shared: SharedMemoryRig) -> None:
    elsewhere = Endpoint(TransportKind.SHARED_MEMORY, f"{draw_domain().name}/x")
    for endpoint in (elsewhere, Endpoint(TransportKind.TCP, "127.0.0.1:1")):
        with pytest.raises(InternalFault, match="not shared memory of the domain"):
            shared.sender.connect(DECODE, endpoint, RECEIVER_INCARNATION)
    with pytest.raises(InternalFault, match="over tcp alone"):
        SharedMemoryReceiver(Unmappable(10), RECEIVER_INCARNATION, EventLog().post, shared.domain)


class Unmappable(BytesMemory):
    descriptor = None


def test_an_arena_that_cannot_be_mapped_can_still_be_written_from(shared: SharedMemoryRig) -> None:
    log = EventLog()
    memory = BytesMemory(data=b"staged" * 1000)
    sender = SharedMemorySender(WorkerId("gpu"), memory, log.post, shared.domain)
    sender.connect(DECODE, shared.receiver.endpoint, RECEIVER_INCARNATION)
    shared.receiver.grant(WorkerId("gpu"), KEY, (Segment(0, 6000),))
    pieces = (Segment(0, 3000), Segment(3000, 3000))
    sender.write(write_of(KEY, 0, pieces, (Segment(10, 5990), Segment(0, 10))))
    assert log.wait(WriteFinished)[0].failure is None
    assert shared.target.read((Segment(10, 5990), Segment(0, 10))) == b"staged" * 1000
    sender.close()


# --- permits -------------------------------------------------------------------------------------------------------


def test_each_word_ends_a_permit_and_the_last_one_fences(shared: SharedMemoryRig) -> None:
    shared.receiver.grant(RAW, KEY, WHOLE)
    with raw_writer(shared) as writer:
        writer.greet(shared.domain)
        for ticket in (1, 2, 3):
            writer.say(request(ticket, ticket))
            assert writer.hear() == Permit(ticket)
        shared.receiver.revoke(KEY)
        writer.say(request(4, 4))
        refused = writer.hear()
        assert isinstance(refused, Answer)
        assert "not granted" in (refused.failure or "")
        writer.say(Withdrawal(1))
        writer.say(Progress(2, 100))
        writer.say(Copied(2, 0))
        answer = writer.hear()
        assert isinstance(answer, Answer)
        assert answer.failure is not None
        assert shared.landed.of(GrantFenced) == []
        writer.say(Farewell())
        assert shared.landed.wait(GrantFenced) == [GrantFenced(KEY)]


def test_a_connection_that_ends_without_farewell_fences_nothing_while_its_process_lives(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with closing(SharedMemoryRig(fence_s=FENCE_S)) as shared:
        shared.receiver.grant(RAW, KEY, WHOLE)
        with raw_writer(shared) as writer:
            writer.greet(shared.domain)
            writer.say(request(1))
            assert writer.hear() == Permit(1)
        fenced = threading.Event()
        shared.landed.on_event = lambda event: fenced.set()
        with caplog.at_level(logging.ERROR):
            shared.receiver.revoke(KEY)
            assert not fenced.wait(2 * FENCE_S)
            # It is not ended by force.
            wait_until(lambda: "within this process" in caplog.text, DEADLINE_S, "the end of the writer's time")
        assert not fenced.is_set()
        assert shared.ended == []
        with raw_writer(shared) as again:  # the same process says by connecting anew that the old copy is over
            again.greet(shared.domain)
            assert shared.landed.wait(GrantFenced) == [GrantFenced(KEY)]
        shared.check_invariants()


@pytest.mark.parametrize("case", ["unknown ticket", "ticket twice", "write twice", "too many", "no segments"])
def test_a_writer_that_breaks_the_rules_is_heard_out_but_not_served(shared: SharedMemoryRig, case: str) -> None:
    shared.receiver.grant(RAW, KEY, WHOLE)
    with raw_writer(shared) as writer:
        writer.greet(shared.domain)
        writer.say(request(1))
        assert writer.hear() == Permit(1)
        if case == "too many":
            for ticket in range(2, MAX_TICKETS + 1):
                writer.say(request(ticket, ticket))
                assert writer.hear() == Permit(ticket)
        bad: dict[str, WriterMessage] = {
            "unknown ticket": Copied(9, 1),
            "ticket twice": request(1, 5),
            "write twice": request(2, 0),
            "too many": request(MAX_TICKETS + 1, 999),
            "no segments": msgspec.structs.replace(request(2, 5), destination=bytes(17)),
        }
        writer.say(bad[case])
        assert writer.is_closed_by_peer()
        shared.receiver.revoke(KEY)
        assert shared.landed.of(GrantFenced) == []
        writer.say(Farewell())
        assert shared.landed.wait(GrantFenced) == [GrantFenced(KEY)]


def test_permits_of_cancelled_writes_are_given_back_and_the_link_goes_on(shared: SharedMemoryRig) -> None:
    shared.receiver.grant(PREFILL, KEY, WHOLE)
    shared.relay.hold("request")
    for number in range(5):
        shared.sender.write(write_of(KEY, number, BIG, BIG))
    shared.relay.wait_held()
    shared.sender.cancel(DECODE, KEY)
    assert shared.sent.wait(WritesStopped) == [WritesStopped(DECODE, KEY)]
    assert all("cancelled" in (event.failure or "") for event in shared.sent.wait(WriteFinished, 5))
    shared.relay.release()
    shared.receiver.grant(PREFILL, b"next", BIG)
    shared.sender.write(write_of(b"next", 0, BIG, BIG))
    assert shared.sent.wait(WriteFinished, 6)[5].failure is None
    shared.receiver.revoke(KEY)
    assert shared.landed.wait(GrantFenced) == [GrantFenced(KEY)]
    assert not any(event.key == KEY for event in shared.landed.of(WriteLanded))


def test_a_peer_that_is_met_again_is_written_to_only_when_the_last_copy_for_it_has_ended(
    shared: SharedMemoryRig,
) -> None:
    """A new connection of the process tells the owner that nothing is copied any more under the permits of the old."""
    log, memory, name = EventLog(), GatedSource(data=b"s" * ARENA_BYTES), WorkerId("again")
    config = SharedMemorySenderConfig(connect_timeout_s=DEADLINE_S)
    sender = SharedMemorySender(name, memory, log.post, shared.domain, config)
    for key in (KEY, b"next"):
        shared.receiver.grant(name, key, BIG)
    fenced = threading.Event()
    shared.landed.on_event = lambda event: fenced.set() if isinstance(event, GrantFenced) else None
    sender.connect(DECODE, shared.receiver.endpoint, RECEIVER_INCARNATION)
    sender.write(write_of(KEY, 0, BIG, BIG))
    assert memory.entered.wait(DEADLINE_S)
    sender.disconnect(DECODE)
    sender.connect(DECODE, shared.receiver.endpoint, RECEIVER_INCARNATION)
    sender.write(write_of(b"next", 0, BIG, BIG))
    shared.receiver.revoke(KEY)
    assert not fenced.wait(FENCE_S)
    memory.gate.set()
    assert shared.landed.wait(GrantFenced) == [GrantFenced(KEY)]
    failures = {event.key: event.failure for event in log.wait(WriteFinished, 2)}
    assert failures[KEY] is not None
    assert failures[b"next"] is None
    sender.close()


def test_an_owner_that_answers_nothing_is_lost_after_the_stall_timeout(shared: SharedMemoryRig) -> None:
    log = EventLog()
    config = SharedMemorySenderConfig(stall_timeout_s=0.2)
    sender = SharedMemorySender(PREFILL, shared.source, log.post, shared.domain, config)
    shared.connect(sender)
    shared.receiver.grant(PREFILL, KEY, WHOLE)
    write_through(sender, log, KEY, BIG)
    lost = threading.Event()
    log.on_event = lambda event: lost.set() if isinstance(event, ConnectionLost) else None
    assert not lost.wait(0.5)  # idle: nothing is due
    shared.relay.hold("request")
    number = len(log.of(WriteFinished))
    sender.write(write_of(KEY, number, BIG, BIG))
    assert log.wait(WriteFinished, number + 1)[number].failure is not None
    assert lost.wait(DEADLINE_S)
    shared.relay.release()
    sender.close()


def test_closing_is_bounded_whatever_the_other_end_does(shared: SharedMemoryRig) -> None:
    shared.receiver.grant(PREFILL, KEY, WHOLE)
    shared.relay.hold("copied")
    shared.sender.write(write_of(KEY, 0, BIG, BIG))
    shared.relay.wait_held()
    started_s = time.monotonic()
    shared.sender.close()
    shared.receiver.close()
    assert time.monotonic() - started_s < 4.0  # within the time that threads have to end
    assert [event.failure for event in shared.sent.of(WriteFinished)] == ["the sender was closed"]


def test_nobody_else_finds_a_name_and_nothing_is_left_of_an_arena() -> None:
    domain = draw_domain()
    memory = SealedBytesMemory(mmap.PAGESIZE)
    receiver = SharedMemoryReceiver(memory, RECEIVER_INCARNATION, EventLog().post, domain)
    with open("/proc/self/maps", encoding="utf-8") as maps:
        shared = [line for line in maps if line.split()[1].endswith("s") and "disagg" in line]
    assert shared
    assert all("/memfd:disagg" in line for line in shared)  # no name in any folder
    address = receiver.endpoint.address
    receiver.close()
    with socket.socket(socket.AF_UNIX) as sock, pytest.raises(ConnectionRefusedError):
        sock.connect(abstract_address(address))


# --- measuring -----------------------------------------------------------------------------------------------------


def test_a_link_is_measured_in_memory_of_its_own(shared: SharedMemoryRig) -> None:
    assert_still_serves(shared, 0)
    before = shared.target.read(WHOLE)
    measured = shared.sender.measure(shared.receiver.endpoint, RECEIVER_INCARNATION, 0.02)
    assert measured.bytes_per_s > 1e6
    assert 0 < measured.latency_s < 1
    assert shared.target.read(WHOLE) == before
    assert_still_serves(shared, 1)
    assert shared.sent.of(ConnectionLost) == []  # the connection that carries writes is still the same
    assert len(shared.landed.of(WriteLanded)) == 2
    with pytest.raises(PeerLost, match="incarnation"):
        shared.sender.measure(shared.receiver.endpoint, Incarnation(404), 0.02)
    shared.sender.close()
    with pytest.raises(PeerLost, match="closed"):
        shared.sender.measure(shared.receiver.endpoint, RECEIVER_INCARNATION, 0.02)


@pytest.mark.parametrize(
    "message",
    [
        request(1, destination=(Segment(0, PROBE_BYTES + 1),)),
        request(1, destination=(Segment(PROBE_BYTES, 1),)),
        request(1, destination=(Segment(-1, 1),)),
        msgspec.structs.replace(request(1), destination=b"half a segment"),
        Copied(1, 0),
        Withdrawal(1),
        b"noise",
    ],
    ids=["too many", "outside", "negative", "no segments", "unasked", "withdrawn", "noise"],
)
def test_who_only_measures_can_do_nothing_else(shared: SharedMemoryRig, message: WriterMessage | bytes) -> None:
    with raw_writer(shared) as writer:
        writer.say(Greeting(RAW, RECEIVER_INCARNATION, shared.domain.secret, is_probe=True))
        assert writer.hear() == Admission(None, PROBE_BYTES)
        writer.say(message)
        assert writer.is_closed_by_peer()
    assert_still_serves(shared, 0)

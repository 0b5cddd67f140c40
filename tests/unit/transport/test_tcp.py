"""What only sockets can do: garbage, strangers, death in the middle of a frame, silence."""

import logging
import os
import random
import signal
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest
import xxhash
from tests.unit.transport.rigs import (
    ARENA_BYTES,
    DEADLINE_S,
    DECODE,
    PREFILL,
    RAW,
    RECEIVER_INCARNATION,
    SENDER_INCARNATION,
    EventLog,
    TcpRig,
    dialled,
    greet,
    is_closed_by_peer,
    raw_header,
    raw_hello,
    read_challenge,
    read_welcome,
    write_of,
)

from disagg.channel.keys import Keys
from disagg.core.endpoints import Endpoint, TransportKind
from disagg.core.errors import InternalFault, PeerLost
from disagg.core.ids import Incarnation, WorkerId
from disagg.kvcache.memory import Segment
from disagg.testing.memory import BytesMemory, SealedBytesMemory
from disagg.transport.api import ConnectionLost, GrantFenced, WriteFinished, WriteLanded
from disagg.transport.capability import grant_name
from disagg.transport.segments import SegmentArray
from disagg.transport.tcp_connection import TcpConnection
from disagg.transport.tcp_receiver import TcpReceiver
from disagg.transport.tcp_sender import TcpSender
from disagg.transport.wire import (
    MAGIC,
    MAX_HEADER_BYTES,
    NO_PROOF,
    PREFIX_BYTES,
    VERSION,
    FrameHeader,
    Hello,
    Item,
    encode,
    encode_trailer,
)

KEY = b"key-0"
BIG = (Segment(0, 256 << 10),)
WHOLE = (Segment(0, ARENA_BYTES),)
STRANGER = Hello(RAW, Incarnation(1), Incarnation(404), True, 0, NO_PROOF)


def packed(length: int) -> bytes:
    return SegmentArray.of([Segment(0, length)]).pack()


def assert_still_serves(rig: TcpRig, number: int) -> None:
    rig.sender.write(write_of(KEY, number, BIG, BIG))
    assert rig.sent.wait(WriteFinished, number + 1)[-1].failure is None


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "is the port right"),
        (struct.pack("!4sHHII", MAGIC, 999, 1, 10, 0) + bytes(10), "version 999"),
        (struct.pack("!4sHHII", MAGIC, VERSION, 1, 2**32 - 1, 0), "over the limit"),
        (struct.pack("!4sHHII", MAGIC, VERSION, 3, 10, 0), "HELLO"),
        (struct.pack("!4sHHII", MAGIC, VERSION, 1, 10, 0) + bytes(10), "checksum"),
        (encode(Item.HELLO, msgspec.structs.replace(STRANGER, sender=WorkerId("w" * 300))), "length"),
        (encode(Item.HELLO, msgspec.structs.replace(STRANGER, lane=1000)), "<= 64"),
        (encode(Item.HELLO, STRANGER), "incarnation"),
        (encode(Item.HELLO, msgspec.structs.replace(STRANGER, destination_incarnation=RECEIVER_INCARNATION)), "proof"),
    ],
    ids=["http", "version", "4 GiB", "a frame", "damaged", "long name", "lane", "incarnation", "proof"],
)
def test_a_bad_hello_is_refused_with_a_reason_and_disturbs_nobody(tcp: TcpRig, sent: bytes, reason: str) -> None:
    tcp.receiver.grant(PREFILL, KEY, BIG)
    assert_still_serves(tcp, 0)
    with dialled(tcp.receiver) as sock:
        read_challenge(sock)
        sock.sendall(sent)
        refusal = read_welcome(sock).refusal
        assert refusal is not None
        assert reason in refusal
        assert is_closed_by_peer(sock)
    assert_still_serves(tcp, 1)


def test_checksums_at_one_end_only_are_refused(tcp: TcpRig) -> None:
    with dialled(tcp.receiver) as sock:
        sock.sendall(encode(Item.HELLO, raw_hello(tcp.receiver, read_challenge(sock), checksums=False)))
        assert "checksums" in (read_welcome(sock).refusal or "")
        assert is_closed_by_peer(sock)


@pytest.mark.parametrize(
    "sent",
    [
        struct.pack("!4sHHII", MAGIC, VERSION, 3, 2**32 - 1, 0),
        struct.pack("!4sHHII", MAGIC, VERSION, 3, MAX_HEADER_BYTES + 1, 0),
        b"\x93noise" * 12,
        encode(Item.FRAME, FrameHeader(b"k" * 300, 0, b"", b"", 0, NO_PROOF)),
        encode(Item.FRAME, FrameHeader(grant_name(KEY), 0, b"", packed(2**60), 2**60, NO_PROOF)),
        encode(Item.FRAME, FrameHeader(grant_name(KEY), 0, b"", packed(5), 2**60, NO_PROOF)),
        encode(Item.FRAME, FrameHeader(grant_name(KEY), 0, b"", bytes(17), 0, NO_PROOF)),
    ],
    ids=[
        "4 GiB header",
        "long header",
        "noise",
        "long key",
        "absurd payload",
        "absurd unequal payload",
        "cut segments",
    ],
)
def test_a_bad_frame_closes_its_connection_only(tcp: TcpRig, sent: bytes) -> None:
    tcp.receiver.grant(PREFILL, KEY, BIG)
    with dialled(tcp.receiver) as sock:
        greet(sock, tcp.receiver)
        assert_still_serves(tcp, 0)
        sock.sendall(sent)
        assert is_closed_by_peer(sock)
    assert_still_serves(tcp, 1)


def test_connections_are_counted_and_limited() -> None:
    receiver = TcpReceiver(BytesMemory(10), RECEIVER_INCARNATION, EventLog().post, max_connections=3)
    with ExitStack() as stack:
        for index in range(3):
            sock = stack.enter_context(dialled(receiver))
            greet(sock, receiver, sender=WorkerId(f"w{index}"))
        fourth = stack.enter_context(dialled(receiver))
        assert is_closed_by_peer(fourth)
        receiver.check_invariants()
    receiver.close()


def test_a_damaged_header_lands_nothing_and_ends_the_connection(tcp: TcpRig) -> None:
    tcp.receiver.grant(PREFILL, KEY, WHOLE)
    assert_still_serves(tcp, 0)
    before = tcp.target.read(WHOLE)
    tcp.relay.flip_ahead(PREFIX_BYTES + 20)
    tcp.sender.write(write_of(KEY, 1, BIG, (Segment(512 << 10, 256 << 10),)))
    assert tcp.sent.wait(WriteFinished, 2)[1].failure is not None
    tcp.sent.wait(ConnectionLost)
    assert tcp.target.read(WHOLE) == before
    tcp.sender.write(write_of(KEY, 2, BIG, BIG))  # connects again by itself
    assert tcp.sent.wait(WriteFinished, 3)[2].failure is None


def test_a_new_connection_of_the_same_sender_ends_the_old_one_first(tcp: TcpRig) -> None:
    tcp.receiver.grant(WorkerId("raw"), KEY, (Segment(0, 1000),))
    with dialled(tcp.receiver) as old, dialled(tcp.receiver) as new:
        heads = []
        for sock, letter in ((old, b"o"), (new, b"n")):
            heads.append(encode(Item.FRAME, raw_header(KEY, greet(sock, tcp.receiver), 0, (Segment(0, 1000),), 1000)))
            if sock is old:
                sock.sendall(heads[0] + letter * 500)
        head = heads[1]
        assert is_closed_by_peer(old)
        checksum = _checksum(b"n" * 1000, head)
        new.sendall(head + b"n" * 1000 + encode_trailer(checksum))
        assert tcp.landed.wait(WriteLanded)[0].failure is None
        assert tcp.target.read((Segment(0, 1000),)) == b"n" * 1000
        tcp.check_invariants()


def test_a_sender_killed_inside_a_frame_leaves_the_receiver_well(tcp: TcpRig) -> None:
    token = tcp.receiver.endpoint_for(WorkerId("doomed"), Incarnation(3)).token
    script = (
        "import sys, time\n"
        "from disagg.transport.tcp_sender import TcpSender\n"
        "from disagg.transport.api import Write\n"
        "from disagg.core.endpoints import Endpoint, TransportKind\n"
        "from disagg.kvcache.memory import Segment\n"
        "from disagg.testing.memory import BytesMemory\n"
        f"sender = TcpSender('doomed', 3, BytesMemory({ARENA_BYTES}), print)\n"
        f"endpoint = Endpoint(TransportKind.TCP, {tcp.relay.address!r}, {token!r})\n"
        f"sender.connect('decode-0', endpoint, {RECEIVER_INCARNATION})\n"
        f"run = (Segment(0, {ARENA_BYTES}),)\n"
        f"sender.write(Write('decode-0', {KEY!r}, 0, b'', run, run))\n"
        "time.sleep(60)\n"
    )
    tcp.receiver.grant(WorkerId("doomed"), KEY, WHOLE)
    tcp.hold_next()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.Popen([sys.executable, "-c", script], env=environment)
    try:
        tcp.wait_held()
        child.send_signal(signal.SIGKILL)
    finally:
        child.kill()
        child.wait(DEADLINE_S)
    tcp.release()
    tcp.receiver.revoke(KEY)
    assert tcp.landed.wait(GrantFenced) == [GrantFenced(KEY)]
    assert tcp.landed.of(WriteLanded) == []
    tcp.receiver.grant(PREFILL, b"next", BIG)
    tcp.sender.write(write_of(b"next", 0, BIG, BIG))
    assert tcp.sent.wait(WriteFinished)[0].failure is None


def test_memory_that_fails_ends_one_connection_and_not_the_receiver(caplog: pytest.LogCaptureFixture) -> None:
    class Boastful(BytesMemory):
        @property
        def num_bytes(self) -> int:
            return 2000  # more than it has: its landings fail above

    sent, landed = EventLog(), EventLog()
    memory = Boastful(1000)
    receiver = TcpReceiver(memory, RECEIVER_INCARNATION, landed.post)
    sender = TcpSender(PREFILL, SENDER_INCARNATION, BytesMemory(2000), sent.post)
    sender.connect(DECODE, receiver.endpoint_for(PREFILL, SENDER_INCARNATION), RECEIVER_INCARNATION)
    receiver.grant(PREFILL, KEY, (Segment(0, 2000),))
    with caplog.at_level(logging.CRITICAL):
        sender.write(write_of(KEY, 0, (Segment(0, 2000),), (Segment(0, 2000),)))
        assert sent.wait(WriteFinished)[0].failure is not None
    sender.write(write_of(KEY, 0, (Segment(0, 1000),), (Segment(0, 1000),)))
    assert sent.wait(WriteFinished, 2)[1].failure is None
    receiver.revoke(KEY)
    assert landed.wait(GrantFenced) == [GrantFenced(KEY)]
    sender.close()
    receiver.close()


def test_a_header_over_its_bound_fails_its_write_only(tcp: TcpRig) -> None:
    tcp.receiver.grant(PREFILL, KEY, BIG)
    tcp.sender.write(write_of(KEY, 0, BIG, BIG, tag=bytes(MAX_HEADER_BYTES)))
    failure = tcp.sent.wait(WriteFinished)[0].failure
    assert failure is not None
    assert "over the limit" in failure
    tcp.sender.write(write_of(KEY, 1, BIG, BIG))
    assert tcp.sent.wait(WriteFinished, 2)[1].failure is None
    assert tcp.sent.of(ConnectionLost) == []


def test_endpoints_of_another_kind_are_refused(tcp: TcpRig) -> None:
    unusable = ["no port", "127.0.0.1:70000", ":9"]
    for endpoint in (
        Endpoint(TransportKind.IN_PROCESS, "x"),
        *(Endpoint(TransportKind.TCP, each) for each in unusable),
    ):
        with pytest.raises(InternalFault, match="endpoint"):
            tcp.sender.connect(DECODE, endpoint, RECEIVER_INCARNATION)


def test_a_name_that_no_host_can_have_is_nobody(tcp: TcpRig) -> None:
    nobody = Endpoint(TransportKind.TCP, "a..b:9")
    tcp.sender.connect(DECODE, nobody, RECEIVER_INCARNATION)
    for number in range(2):  # the link goes on
        tcp.sender.write(write_of(KEY, number, BIG, BIG))
        assert "nobody can be there" in (tcp.sent.wait(WriteFinished, number + 1)[number].failure or "")
    assert isinstance(tcp.sender, TcpSender)
    with pytest.raises(PeerLost, match="nobody can be there"):
        tcp.sender.measure(nobody, RECEIVER_INCARNATION, 0.02)


@pytest.mark.parametrize("where", ["opening", "hearing"])
def test_a_fault_of_ours_fails_the_writes_of_a_link_and_not_the_link(
    tcp: TcpRig, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of its threads may end and leave somebody waiting for a write."""
    faults = [ZeroDivisionError("once")]

    def fail_once(act: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(*arguments: Any, **more: Any) -> Any:
            if faults:
                raise faults.pop()
            return act(*arguments, **more)

        return faulty

    if where == "opening":
        (link,) = tcp.sender._links[DECODE]
        monkeypatch.setattr(link, "_open_connection", fail_once(link._open_connection))
    else:
        monkeypatch.setattr(TcpConnection, "hear", fail_once(TcpConnection.hear))
    tcp.receiver.grant(PREFILL, KEY, BIG)
    tcp.sender.write(write_of(KEY, 0, BIG, BIG))
    assert "ZeroDivisionError: once" in (tcp.sent.wait(WriteFinished)[0].failure or "")
    tcp.sent.wait(ConnectionLost)
    assert_still_serves(tcp, 1)


def test_ipv6_loopback_works_where_there_is_one() -> None:
    try:
        receiver = TcpReceiver(BytesMemory(10), RECEIVER_INCARNATION, EventLog().post, host="::1")
    except OSError:
        pytest.skip("no IPv6 loopback here")
    log = EventLog()
    sender = TcpSender(PREFILL, SENDER_INCARNATION, BytesMemory(10), log.post)
    sender.connect(DECODE, receiver.endpoint_for(PREFILL, SENDER_INCARNATION), RECEIVER_INCARNATION)
    receiver.grant(PREFILL, KEY, (Segment(0, 10),))
    sender.write(write_of(KEY, 0, (Segment(0, 10),), (Segment(0, 10),)))
    assert log.wait(WriteFinished)[0].failure is None
    sender.close()
    receiver.close()


def _checksum(payload: bytes, head: bytes) -> int:
    return xxhash.xxh3_64_intdigest(payload, seed=zlib.crc32(head[PREFIX_BYTES:]))


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "tls"])
def test_many_short_runs_between_two_mapped_arenas_arrive_and_damage_is_noticed(keys: Keys, is_encrypted: bool) -> None:
    tls = (keys.dialling, keys.accepting) if is_encrypted else (None, None)
    rig = TcpRig(*tls, is_mappable=True)
    run, rng = 3 << 10, random.Random(4)
    source, destination = (
        tuple(Segment(place * run, run) for place in rng.sample(range(ARENA_BYTES // run), 200)) for _ in range(2)
    )
    rig.receiver.grant(PREFILL, KEY, destination)
    rig.sender.write(write_of(KEY, 0, source, destination))
    assert rig.sent.wait(WriteFinished)[0].failure is None
    assert rig.target.read(destination) == rig.source.read(source)
    assert rig.target.num_commits == 1
    untouched = SealedBytesMemory(ARENA_BYTES)
    for segment in destination:
        untouched.fill(segment, rig.target.read((segment,)))
    assert rig.target.read(WHOLE) == untouched.read(WHOLE)
    rig.relay.flip_ahead(300_000)  # past the header
    rig.sender.write(write_of(KEY, 1, source, destination))
    failure = rig.sent.wait(WriteFinished, 2)[1].failure
    assert failure is not None
    assert is_encrypted or "checksum" in failure
    rig.sender.write(write_of(KEY, 1, source, destination))
    assert rig.sent.wait(WriteFinished, 3)[2].failure is None
    assert rig.target.num_commits == 2
    rig.check_invariants()
    rig.close()

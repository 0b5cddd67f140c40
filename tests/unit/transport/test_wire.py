"""Whatever bytes come, the decoder gives the item that was sent or a ProtocolViolation, and stays within its bounds."""

import socket
import struct
import tracemalloc
import zlib
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.transport.rigs import DEADLINE_S, RAW, RECEIVER_INCARNATION, EventLog, greet, raw_header

from disagg.core.errors import ProtocolViolation
from disagg.kvcache.memory import Segment
from disagg.testing.memory import BytesMemory
from disagg.transport.api import WriteLanded
from disagg.transport.segments import SegmentArray
from disagg.transport.tcp_receiver import TcpReceiver
from disagg.transport.wire import (
    MAX_HEADER_BYTES,
    PREFIX_BYTES,
    VERSION,
    Ack,
    FrameHeader,
    Hello,
    Item,
    Prefix,
    Welcome,
    clip,
    decode_body,
    decode_prefix,
    encode,
)

Body = TypeVar("Body", Hello, Welcome, FrameHeader, Ack)

runs = st.lists(st.builds(Segment, st.integers(0, 2**63 - 1), st.integers(0, 2**40)), max_size=6)
segments = runs.map(lambda found: SegmentArray.of(found).pack())
counts = st.integers(0, 2**63 - 1)
names = st.binary(min_size=16, max_size=16)
proofs = st.binary(min_size=32, max_size=32)
headers = st.builds(FrameHeader, names, counts, st.binary(max_size=50), segments, counts, proofs)


def decode(data: bytes, item: Item, kind: type[Body]) -> Body:
    prefix = decode_prefix(data[:PREFIX_BYTES], item)
    return decode_body(data[PREFIX_BYTES : PREFIX_BYTES + prefix.num_bytes], prefix, kind)


@given(headers)
def test_headers_come_back_as_they_were(header: FrameHeader) -> None:
    assert decode(encode(Item.FRAME, header), Item.FRAME, FrameHeader) == header


@settings(max_examples=300)
@given(headers, st.data())
def test_a_damaged_header_never_passes(header: FrameHeader, data: st.DataObject) -> None:
    good = bytearray(encode(Item.FRAME, header))
    for at in data.draw(st.lists(st.integers(0, len(good) - 1), min_size=1, max_size=3, unique=True)):
        good[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ProtocolViolation):
        decode(bytes(good), Item.FRAME, FrameHeader)


@settings(max_examples=300)
@given(st.binary(min_size=PREFIX_BYTES, max_size=200), st.sampled_from(list(Item)))
def test_noise_is_a_violation(data: bytes, item: Item) -> None:
    with pytest.raises(ProtocolViolation):
        decode(data, item, FrameHeader)


@settings(max_examples=200)
@given(st.binary(max_size=200), st.sampled_from([Hello, Welcome, FrameHeader, Ack]))
def test_a_body_of_noise_with_a_right_checksum_is_a_violation_or_a_whole_item(
    data: bytes, kind: type[Hello] | type[Welcome] | type[FrameHeader] | type[Ack]
) -> None:
    try:
        item = decode_body(data, Prefix(len(data), zlib.crc32(data)), kind)  # type: ignore[type-var]
    except ProtocolViolation:
        return
    assert isinstance(item, kind)


@pytest.mark.parametrize("num_bytes", [MAX_HEADER_BYTES + 1, 2**32 - 1])
def test_a_length_over_the_bound_is_refused_before_a_byte_is_allocated(num_bytes: int) -> None:
    prefix = struct.pack("!4sHHII", b"DgKV", VERSION, Item.FRAME, num_bytes, 0)
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolViolation, match="over the limit"):
            decode_prefix(prefix, Item.FRAME)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_reasons_are_cut_to_fit_an_answer() -> None:
    for reason in ("short", "x" * 100_000, "\N{SNOWMAN}" * 100_000):
        ack = Ack(b"k" * 16, 2**63 - 1, clip(reason))
        assert decode(encode(Item.ACK, ack), Item.ACK, Ack) == ack


def test_a_live_receiver_survives_noise_after_a_good_hello() -> None:
    log = EventLog()
    memory = BytesMemory(1000)
    # Each connection takes the place of the one before, which has so long to end.
    receiver = TcpReceiver(memory, RECEIVER_INCARNATION, log.post, fence_timeout_s=DEADLINE_S)
    receiver.grant(RAW, b"k", [Segment(0, 1000)])
    host, _, port = receiver.endpoint.address.rpartition(":")
    length = len(encode(Item.FRAME, raw_header(b"k", bytes(16), 0, (Segment(0, 10),), 10))) + 14

    @settings(max_examples=60, deadline=None, database=None)
    @given(st.integers(0, length - 11), st.binary(min_size=1, max_size=40))
    def attack(cut: int, noise: bytes) -> None:
        with socket.create_connection((host, int(port)), DEADLINE_S) as sock:
            header = raw_header(b"k", greet(sock, receiver), 0, (Segment(0, 10),), 10)
            good = encode(Item.FRAME, header) + bytes(14)
            sock.sendall(good[:cut] + noise)
            try:
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(4096):
                    pass
            except OSError:  # reset: it was thrown out already
                pass

    attack()
    assert not any(event.failure is None for event in log.of(WriteLanded))
    assert memory.num_commits == 0
    receiver.check_invariants()
    receiver.close()

"""How fast a link is: a connection of its own that carries bytes which the receiver throws away."""

import time

import msgspec

from disagg.core.errors import PeerLost
from disagg.transport.stream import Stream
from disagg.transport.wire import (
    MAX_PROBE_BYTES,
    NO_PROOF,
    PROBE,
    Ack,
    FrameHeader,
    Item,
    decode_body,
    encode,
    encode_trailer,
)

NUM_PINGS = 3
MIN_ROUND_TRIPS = 16  # a connection over a long way takes some of them to get as fast as its link
GROWTH = 4

_CHUNK = memoryview(bytes(128 << 10))


class Measured(msgspec.Struct, frozen=True):
    """One direction of one link, as one connection sees it."""

    bytes_per_s: float
    latency_s: float  # there and back, the least of some


def measure(stream: Stream, budget_s: float) -> Measured:
    """Ask a welcomed connection. Takes little more than budget_s, or some round trips. Raises PeerFault."""
    latency_s = min(_send(stream, number, 0) for number in range(NUM_PINGS))
    num_chunks, number, left_s = 1, NUM_PINGS, max(budget_s, MIN_ROUND_TRIPS * latency_s)
    rates: list[float] = []
    while True:
        elapsed_s = _send(stream, number, num_chunks)
        left_s -= elapsed_s
        rates.append(num_chunks * len(_CHUNK) / max(elapsed_s - latency_s, 1e-6))
        if left_s < elapsed_s:
            # The best of them: whatever else runs on the two machines can only slow one down. But not the first, where
            # there are more: a link that was idle lets some bytes through faster than it can go on.
            return Measured(max(rates[1:] or rates), latency_s)
        if left_s > GROWTH * elapsed_s and GROWTH * num_chunks * len(_CHUNK) <= MAX_PROBE_BYTES:
            num_chunks *= GROWTH
        number += 1


def _send(stream: Stream, number: int, num_chunks: int) -> float:
    """Seconds from the first byte to the answer."""
    head = encode(Item.FRAME, FrameHeader(PROBE, number, b"", (), num_chunks * len(_CHUNK), NO_PROOF))
    started_s = time.perf_counter()
    stream.send_frame(head, [_CHUNK] * num_chunks, None)
    stream.send_trailer(encode_trailer(0))
    prefix = stream.receive_prefix(Item.ACK)
    ack = decode_body(stream.receive_bytes(prefix.num_bytes), prefix, Ack)
    if (ack.name, ack.number) != (PROBE, number):
        raise PeerLost(f"an answer to {ack.number} where one to {number} was due")
    return time.perf_counter() - started_s

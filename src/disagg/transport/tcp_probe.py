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

FIRST_PROBE_BYTES = 128 << 10
NUM_PINGS = 3


class Measured(msgspec.Struct, frozen=True):
    """One direction of one link, as one connection sees it."""

    bytes_per_s: float
    latency_s: float  # there and back, the least of some


def measure(stream: Stream, budget_s: float) -> Measured:
    """Ask a welcomed connection. Takes little more than budget_s. Raises PeerFault."""
    latency_s = min(_send(stream, number, 0) for number in range(NUM_PINGS))
    num_bytes, number, left_s = FIRST_PROBE_BYTES, NUM_PINGS, budget_s
    while True:
        elapsed_s = _send(stream, number, num_bytes)
        left_s -= elapsed_s
        rate = num_bytes / max(elapsed_s - latency_s, 1e-6)
        # The last one is the longest, and says the most. Four times as many bytes take about four times as long.
        if left_s < 4 * elapsed_s or 4 * num_bytes > MAX_PROBE_BYTES:
            return Measured(rate, latency_s)
        num_bytes, number = 4 * num_bytes, number + 1


def _send(stream: Stream, number: int, num_bytes: int) -> float:
    """Seconds from the first byte to the answer."""
    head = encode(Item.FRAME, FrameHeader(PROBE, number, b"", (), num_bytes, NO_PROOF))
    started_s = time.perf_counter()
    stream.send_frame(head, [memoryview(bytes(num_bytes))], None)
    stream.send_trailer(encode_trailer(0))
    prefix = stream.receive_prefix(Item.ACK)
    ack = decode_body(stream.receive_bytes(prefix.num_bytes), prefix, Ack)
    if (ack.name, ack.number) != (PROBE, number):
        raise PeerLost(f"an answer to {ack.number} where one to {number} was due")
    return time.perf_counter() - started_s

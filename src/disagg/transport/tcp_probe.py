"""Frames that only measure, over a connection of the lane for that."""

from disagg.core.errors import PeerLost
from disagg.transport.payload import payload_of
from disagg.transport.stream import Stream
from disagg.transport.wire import (
    NO_PROOF,
    PROBE,
    Ack,
    FrameHeader,
    Item,
    checksum_of,
    decode_body,
    encode,
    encode_trailer,
)

SOURCE_BYTES = 4 << 20


class Frames:
    """What a welcomed connection exchanges: summed at both ends, as any frame, but thrown away."""

    def __init__(self, stream: Stream, *, checksums: bool) -> None:
        self._stream = stream
        self._checksums = checksums
        self._number = 0
        self._source = memoryview(b"\1" * SOURCE_BYTES)  # more than stays in a cache near the core, as KV is

    def exchange(self, num_bytes: int) -> None:
        """One frame and its answer. Raises PeerFault."""
        stream, number = self._stream, self._number
        self._number += 1
        whole, rest = divmod(num_bytes, SOURCE_BYTES)
        head = encode(Item.FRAME, FrameHeader(PROBE, number, b"", b"", num_bytes, NO_PROOF))
        views = [*[self._source] * whole, self._source[:rest]]
        payload = payload_of((views,), checksum_of(head) if self._checksums else None)
        stream.send_frame(head, payload.batches)
        stream.send_trailer(encode_trailer(payload.checksum()))
        prefix = stream.receive_prefix(Item.ACK)
        ack = decode_body(stream.receive_bytes(prefix.num_bytes), prefix, Ack)
        if (ack.name, ack.number) != (PROBE, number):
            raise PeerLost(f"an answer to {ack.number} where one to {number} was due")

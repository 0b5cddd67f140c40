"""Frames that only measure, over a connection of the lane for that."""

from disagg.core.errors import PeerLost
from disagg.transport.stream import Stream
from disagg.transport.wire import NO_PROOF, PROBE, Ack, FrameHeader, Item, decode_body, encode, encode_trailer

_CHUNK = memoryview(bytes(128 << 10))


class Frames:
    """What a welcomed connection exchanges."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._number = 0

    def exchange(self, num_bytes: int) -> None:
        """One frame and its answer. Raises PeerFault."""
        stream, number = self._stream, self._number
        self._number += 1
        whole, rest = divmod(num_bytes, len(_CHUNK))
        head = encode(Item.FRAME, FrameHeader(PROBE, number, b"", (), num_bytes, NO_PROOF))
        stream.send_frame(head, ([*[_CHUNK] * whole, _CHUNK[:rest]],), None)
        stream.send_trailer(encode_trailer(0))
        prefix = stream.receive_prefix(Item.ACK)
        ack = decode_body(stream.receive_bytes(prefix.num_bytes), prefix, Ack)
        if (ack.name, ack.number) != (PROBE, number):
            raise PeerLost(f"an answer to {ack.number} where one to {number} was due")

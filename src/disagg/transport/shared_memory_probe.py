"""Copies that only measure: into memory that the owner has made for one connection, not into its arena.

They are asked for, copied, summed at both ends and answered like any write, but no grant is needed and nothing is
fenced: what lies there belongs to nobody.
"""

import numpy as np

from disagg.core.errors import PeerLost, ProtocolViolation
from disagg.engine.sealed_memory import SealedMemory
from disagg.kvcache.memory import Segment
from disagg.transport.local_stream import LocalStream
from disagg.transport.runs import MappedArena, RunCopy, RunSum
from disagg.transport.segments import SegmentArray
from disagg.transport.shared_memory_wire import (
    PROBE_BYTES,
    Admission,
    Answer,
    Copied,
    Permit,
    Progress,
    Request,
    decode_owner,
    decode_writer,
    encode,
)
from disagg.transport.wire import PROBE


class Copies:
    """What an admitted connection exchanges."""

    def __init__(self, stream: LocalStream, arena: MappedArena) -> None:
        self._stream = stream
        self._arena = arena
        self._number = 0
        self._source = np.ones(arena.num_bytes, np.uint8)  # touched: pages that nobody has written are one and the same

    def exchange(self, num_bytes: int) -> None:
        """One copy and its answer. Raises PeerFault."""
        number, runs = self._number, SegmentArray.of((Segment(0, num_bytes),))
        self._number += 1
        self._stream.send(encode(Request(number, PROBE, number, b"", runs.pack(), num_bytes)))
        self._hear(Permit(number))

        def tell(num_done: int) -> None:
            self._stream.send(encode(Progress(number, num_done)))

        checksum = RunCopy(self._source, runs, self._arena.bytes, runs).run(tell)
        self._stream.send(encode(Copied(number, checksum)))
        self._hear(Answer(number, None))

    def _hear(self, expected: Permit | Answer) -> None:
        body = self._stream.receive()
        if body is None:
            raise PeerLost("the owner does not answer a copy that measures")
        heard = decode_owner(body)
        if heard != expected:
            raise ProtocolViolation(f"{heard} where {expected} was due")


def answer_probe(stream: LocalStream) -> None:
    """The owner's end, after a greeting: until the writer ends it or says nothing for the stream's timeout.

    Raises PeerFault.
    """
    scratch = SealedMemory(PROBE_BYTES)
    stream.send(encode(Admission(None, PROBE_BYTES)), scratch.descriptor)
    summing: RunSum | None = None
    while (body := stream.receive()) is not None:
        match decode_writer(body):
            case Request(ticket, _, _, _, destination, num_bytes) if num_bytes <= PROBE_BYTES:
                summing = RunSum(scratch.array, _inside(SegmentArray.unpack(destination)))
                stream.send(encode(Permit(ticket)))
            case Progress(_, num_bytes) if summing is not None:
                summing.advance(num_bytes)
            case Copied(ticket, checksum) if summing is not None:
                failure = None if summing.finish() == checksum else "other bytes lie here; resend them"
                stream.send(encode(Answer(ticket, failure)))
            case message:
                raise ProtocolViolation(f"{type(message).__name__} from a writer that only measures")


def _inside(runs: SegmentArray) -> SegmentArray:
    if any(offset < 0 or length < 0 or offset + length > PROBE_BYTES for offset, length in runs):
        raise ProtocolViolation(f"a copy that measures stays within {PROBE_BYTES} bytes")
    return runs

"""What a link over tcp does with its connection: header, payload out of the arena, trailer; answers in order."""

import ssl
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import msgspec

from disagg.core.errors import InternalFault, PeerLost, ProtocolViolation
from disagg.kvcache.memory import Memory
from disagg.transport.api import Write
from disagg.transport.capability import frame_proof, grant_name
from disagg.transport.deadlines import DeadlineWatch
from disagg.transport.link import Answered, Connection, Target
from disagg.transport.native_runs import windows_of
from disagg.transport.payload import BATCH_BYTES, MAX_VIEWS, Payload, payload_of
from disagg.transport.runs import Bytes
from disagg.transport.segments import SegmentArray, grouped, viewed_bytes
from disagg.transport.stream import Stream
from disagg.transport.tcp_dial import Introduction, introduce, open_stream
from disagg.transport.wire import Ack, FrameHeader, Item, checksum_of, decode_body, encode, encode_trailer
from disagg.transport.write_queue import Ticket


class TcpSenderConfig(msgspec.Struct, frozen=True):
    """Limits of a tcp sender."""

    max_inflight_bytes: int = 16 << 20  # un-acknowledged, per peer
    num_lanes: int = 1  # connections per peer
    max_idle_s: float = 60.0  # a connection silent for longer may be dead without a sign: it is made anew
    checksums: bool = True  # must be the same at the receiver
    connect_timeout_s: float = 3.0
    fence_timeout_s: float = 2.0  # a cancelled key's frame that takes longer has its connection shut
    stall_timeout_s: float = 30.0  # a peer that takes no byte, or answers nothing, for so long is lost
    close_timeout_s: float = 5.0


class TcpConnection(Connection):
    """One lane's connection."""

    def __init__(self, stream: Stream, memory: Memory, source: Bytes | None, *, checksums: bool) -> None:
        """`source` is the own arena where it is host memory; `memory` gathers what lies elsewhere."""
        super().__init__()
        self._stream = stream
        self._memory = memory
        self._source = source
        self._checksums = checksums
        self._nonce = b""  # once welcomed
        self._is_late = False
        self._sent: deque[Ticket] = deque()  # not answered; frames are answered in order

    def introduce(self, who: Introduction, token: bytes, lane: int) -> None:
        """Be welcomed. Raises PeerFault."""
        try:
            self._nonce = introduce(self._stream, who, token, lane)
        except PeerLost as error:
            raise PeerLost(f"no welcome in time: {error}" if self._is_late else str(error)) from error

    def give_up(self) -> None:
        """At the deadline of introduce(), from any thread."""
        if not self._nonce:
            self._is_late = True
            self._stream.shut()

    def move(self, ticket: Ticket) -> None:
        write, stream = ticket.write, self._stream
        stream.touch()
        head = self._head(write, ticket.num_bytes)
        payload = self._payload(ticket, checksum_of(head) if self._checksums else None)
        first = next(payload.batches, ())  # before anything goes out: what the memory refuses fails this write alone
        self._sent.append(ticket)
        try:
            stream.send_frame(head, chain((first,), payload.batches))
            stream.send_trailer(encode_trailer(payload.checksum()))
        except PeerLost:
            raise
        except Exception as error:  # bytes that cannot be summed or sent: half a frame is out, so the connection ends
            raise PeerLost(f"the bytes of write {write.number} cannot be sent: {error}") from error

    def _payload(self, ticket: Ticket, seed: int | None) -> Payload:
        windows = None if self._source is None else windows_of(self._source, ticket.write.source, seed)
        if windows is not None:
            return Payload(windows.gathered(), windows.checksum)
        return payload_of(self._gathered(ticket), seed)

    def _gathered(self, ticket: Ticket) -> Iterator[Sequence[memoryview]]:
        """The payload, some segments at a time: the receiver is at work while the others are gathered."""
        num_bytes = 0
        for segments in grouped(ticket.write.source, max_bytes=BATCH_BYTES, max_segments=MAX_VIEWS):
            views = self._memory.gather(segments)
            num_bytes += viewed_bytes(views)
            if num_bytes > ticket.num_bytes:
                break
            yield views
        if num_bytes != ticket.num_bytes:
            raise InternalFault(f"memory gathered other than the {ticket.num_bytes} bytes that were asked for")

    def _head(self, write: Write, num_bytes: int) -> bytes:
        proof = frame_proof(write.key, self._nonce, write.number)
        try:
            destination = SegmentArray.of(write.destination).pack()
            header = FrameHeader(grant_name(write.key), write.number, write.tag, destination, num_bytes, proof)
            return encode(Item.FRAME, header)
        except (ProtocolViolation, OverflowError) as error:  # ours, and of this write alone
            raise InternalFault(f"it cannot be framed: {error}") from error

    def hear(self, is_due: Callable[[], bool]) -> Answered:
        stream = self._stream
        prefix = stream.receive_prefix(Item.ACK, lambda: not (stream.is_stalled() and is_due()))
        ack = decode_body(stream.receive_bytes(prefix.num_bytes), prefix, Ack)
        if not self._sent:
            raise ProtocolViolation(f"answer for write {ack.number} of grant {ack.name.hex()}, but none is in flight")
        due = self._sent.popleft()
        name = grant_name(due.write.key)
        if (ack.name, ack.number) != (name, due.write.number):
            told = f"answer for write {ack.number} of grant {ack.name.hex()}"
            raise ProtocolViolation(f"{told} where {due.write.number} of {name.hex()} was due")
        return Answered(due.number, ack.failure)

    def interrupt(self) -> None:
        self._stream.shut()

    def close(self, join: Callable[[], None]) -> None:
        self._stream.shut()
        join()
        self._stream.close()


def open_tcp(
    register: Callable[[Connection], None],
    *,
    target: Target,
    who: Introduction,
    lane: int,
    memory: Memory,
    source: Bytes | None,
    config: TcpSenderConfig,
    watch: DeadlineWatch,
    tls: ssl.SSLContext | None,
) -> TcpConnection:
    """A link's connection, welcomed. Raises PeerFault, OSError."""
    stream = open_stream(
        target.endpoint,
        connect_timeout_s=config.connect_timeout_s,
        stall_timeout_s=config.stall_timeout_s,
        tls=tls,
    )
    connection = TcpConnection(stream, memory, source, checksums=config.checksums)
    register(connection)
    watch.after(config.connect_timeout_s, connection.give_up)
    connection.introduce(who, target.endpoint.token, lane)
    return connection

"""All writes of one sender to one peer, over one connection at a time.

The writer thread owns the connection and is the only one that reads the arena or ends a connection:

    1. wait for a write that fits under the cap, for the connection's loss, or for the end
    2. connect and say hello when there is no connection
    3. header, payload out of the arena's views, trailer
    4. when the connection is lost: shut it, join the answer thread, fail every unfinished write, post ConnectionLost

The answer thread, one per connection, reads ACKs and says why the connection was lost.
"""

import ssl
import threading
from collections.abc import Callable
from functools import partial

import msgspec

from disagg.core.endpoints import Endpoint
from disagg.core.errors import InternalFault, PeerFault, PeerLost
from disagg.core.ids import Incarnation, WorkerId
from disagg.kvcache.memory import Memory
from disagg.transport.api import ConnectionLost, Write, WriteFinished
from disagg.transport.capability import frame_proof, grant_name, shown
from disagg.transport.deadlines import DeadlineWatch
from disagg.transport.outbox import Outbox
from disagg.transport.segments import total_bytes
from disagg.transport.send_queue import SendQueue
from disagg.transport.stream import Stream
from disagg.transport.tcp_dial import Introduction, introduce, open_stream
from disagg.transport.wire import Ack, FrameHeader, Item, checksum_of, decode_body, encode, encode_trailer

ANSWER_JOIN_S = 5.0  # its socket is shut before, so it returns at once


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


class _Connection:
    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.nonce = b""  # once welcomed
        self.lost: str | None = None
        self.answers: threading.Thread | None = None
        self.idle_s = 0.0  # before the write that is being sent


class PeerLink:
    """The writing side of one lane towards one peer and incarnation."""

    def __init__(
        self,
        who: Introduction,
        peer: WorkerId,
        endpoint: Endpoint,
        memory: Memory,
        config: TcpSenderConfig,
        outbox: Outbox,
        watch: DeadlineWatch,
        *,
        stopped: Callable[[bytes], None],
        lane: int = 0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`stopped` is told of each cancelled key, under this link's lock, once nothing is read for it any more."""
        self.peer = peer
        self.endpoint = endpoint
        self.who = who
        self._lane = lane
        self._tls = tls
        self._stopped = stopped
        self._memory = memory
        self._config = config
        self._outbox = outbox
        self._watch = watch
        self._changed = threading.Condition()
        self._queue = SendQueue(config.max_inflight_bytes // config.num_lanes)
        self._stopping: set[bytes] = set()  # cancelled keys whose frame is being sent
        self._connection: _Connection | None = None
        self._retired: str | None = None
        self.thread: threading.Thread | None = None

    @property
    def incarnation(self) -> Incarnation:
        return self.who.destination_incarnation

    def write(self, write: Write) -> None:
        with self._changed:
            if self._retired is not None:
                self._finish(write, self._retired)
            elif write.key in self._stopping:
                self._finish(write, f"key {shown(write.key)} is cancelled")
            else:
                self._queue.put(write)
                if self.thread is None:
                    self.thread = threading.Thread(target=self._run, name=f"disagg-tcp-send-{self.peer}", daemon=True)
                    self.thread.start()
                self._changed.notify_all()
        self._outbox.flush()

    def cancel(self, key: bytes) -> None:
        with self._changed:
            for write in self._queue.drop(key):
                self._finish(write, f"key {shown(key)} was cancelled before write {write.number} was sent")
            sending = self._queue.sending
            if sending is None or sending.key != key:
                self._stopped(key)
            elif key not in self._stopping:
                self._stopping.add(key)
                self._watch.after(self._config.fence_timeout_s, partial(self._eject, sending))
        self._outbox.flush()

    def retire(self, reason: str) -> None:
        """End this link: its unfinished writes fail with `reason`. Returns at once."""
        with self._changed:
            if self._retired is None:
                self._retired = reason
            if self._connection is not None:
                self._connection.stream.shut()
            self._changed.notify_all()

    def check_invariants(self) -> None:
        with self._changed:
            self._queue.check_invariants()
            sending = self._queue.sending
            assert len(self._stopping) <= 1, f"{len(self._stopping)} keys stop, but one frame is sent at a time"
            assert not self._stopping or (sending is not None and sending.key in self._stopping)
            assert self.thread is not None or self._queue.is_empty, "writes wait and no thread sends them"

    # ---- the writer thread

    def _run(self) -> None:
        while True:
            write = self._next()
            connection = self._connection
            if write is not None:
                failure = self._send(write)
                if failure is not None:
                    self._end_connection(failure)
            elif connection is not None and connection.lost is not None:
                self._end_connection(connection.lost)
            else:
                self._end_connection(None)
                return

    def _next(self) -> Write | None:
        """A write to send; None when the connection is lost or the link retired."""
        with self._changed:
            while True:
                if self._retired is not None or (self._connection is not None and self._connection.lost is not None):
                    return None
                if (write := self._queue.try_start()) is not None:
                    if self._connection is not None:
                        self._connection.idle_s = self._connection.stream.idle_s()
                        self._connection.stream.touch()
                    return write
                self._changed.wait()

    def _send(self, write: Write) -> str | None:
        """Send one write. Returns why the connection must end, or None."""
        try:
            self._drop_idle()
            connection = self._connection or self._connect()
        except (PeerFault, OSError) as error:
            return f"{self.endpoint.address} cannot be reached: {error}"
        if self._must_not_send(write):
            return None
        try:
            views = self._memory.gather(write.source)
            num_bytes = total_bytes(write.source)
            if sum(view.nbytes for view in views) != num_bytes:
                raise InternalFault(f"memory gathered other than the {num_bytes} bytes that were asked for")
            head = encode(Item.FRAME, self._header(write, num_bytes, connection.nonce))
        except Exception as error:  # the arena's fault or a header over its bound: this write fails, the link goes on
            self._abandon(write, f"write {write.number} cannot be read or framed: {error}")
            return None
        try:
            start = checksum_of(head) if self._config.checksums else None
            checksum = connection.stream.send_frame(head, views, start)
            connection.stream.send_trailer(encode_trailer(checksum))
        except PeerLost as error:
            return connection.lost or str(error)
        except Exception as error:  # views that cannot be summed or sent: half a frame is out, so the connection ends
            return f"the bytes of write {write.number} cannot be sent: {error}"
        with self._changed:
            self._queue.sent()
            self._post_stopped()
            self._changed.notify_all()
        self._outbox.flush()
        return None

    def _drop_idle(self) -> None:
        """A connection that was silent for long may be dead without a sign: close it before anything depends on it."""
        with self._changed:
            connection = self._connection
            if connection is None or not self._queue.is_only_sending or connection.idle_s <= self._config.max_idle_s:
                return
            self._connection = None
        connection.stream.shut()
        if connection.answers is not None:
            connection.answers.join(ANSWER_JOIN_S)
        connection.stream.close()

    def _header(self, write: Write, num_bytes: int, nonce: bytes) -> FrameHeader:
        proof = frame_proof(write.key, nonce, write.number)
        return FrameHeader(grant_name(write.key), write.number, write.tag, write.destination, num_bytes, proof)

    def _connect(self) -> _Connection:
        """Open a connection and be welcomed. Raises PeerFault, OSError."""
        config = self._config
        stream = open_stream(
            self.endpoint,
            connect_timeout_s=config.connect_timeout_s,
            stall_timeout_s=config.stall_timeout_s,
            tls=self._tls,
        )
        connection = _Connection(stream)
        with self._changed:
            self._connection = connection
            if self._retired is not None:
                raise PeerLost(self._retired)
        self._watch.after(config.connect_timeout_s, partial(self._give_up, connection))
        connection.nonce = introduce(stream, self.who, self.endpoint.token, self._lane)
        answers = threading.Thread(
            target=self._read_answers, args=(connection,), name=f"disagg-tcp-answers-{self.peer}", daemon=True
        )
        connection.answers = answers
        answers.start()
        return connection

    def _must_not_send(self, write: Write) -> bool:
        with self._changed:
            if self._retired is None and write.key not in self._stopping:
                return False
        cancelled = f"key {shown(write.key)} was cancelled before write {write.number} was sent"
        self._abandon(write, self._retired or cancelled)
        return True

    def _abandon(self, write: Write, failure: str) -> None:
        with self._changed:
            self._queue.abandon()
            self._finish(write, failure)
            self._post_stopped()
        self._outbox.flush()

    def _end_connection(self, lost: str | None) -> None:
        """Close the connection and fail every unfinished write; with None the link itself ends."""
        connection = self._connection
        if connection is not None:
            self._lose(connection, lost or "the link ended")  # also wakes the answer thread where it waits for us
            if connection.answers is not None:
                connection.answers.join(ANSWER_JOIN_S)
            connection.stream.close()
        with self._changed:
            self._connection = None
            reason = self._retired or lost or "the link ended"
            for write in self._queue.drop_all():
                self._finish(write, reason)
            self._post_stopped()
            if self._retired is None:
                self._outbox.put(ConnectionLost(self.peer, reason))
        self._outbox.flush()

    # ---- the answer thread

    def _read_answers(self, connection: _Connection) -> None:
        stream = connection.stream
        try:
            while True:
                prefix = stream.receive_prefix(Item.ACK, partial(self._may_be_silent, stream))
                ack = decode_body(stream.receive_bytes(prefix.num_bytes), prefix, Ack)
                self._take_answer(connection, ack)
        except PeerFault as error:
            self._lose(connection, str(error))

    def _may_be_silent(self, stream: Stream) -> bool:
        with self._changed:
            return not self._queue.has_inflight or not stream.is_stalled()

    def _take_answer(self, connection: _Connection, ack: Ack) -> None:
        with self._changed:
            write = self._queue.next_acknowledged(ack.name, ack.number)
            # An answer may overtake the writer's return from its last call; the arena is free only after that.
            while self._queue.sending is write:
                if connection.lost is not None or not self._changed.wait(self._config.stall_timeout_s):
                    raise PeerLost("an answer came before the whole frame was sent")
            if not self._queue.has_inflight:
                return  # failed meanwhile
            self._queue.acknowledge()
            self._finish(write, ack.failure)
            self._changed.notify_all()
        self._outbox.flush()

    # ---- called from any thread

    def _lose(self, connection: _Connection, reason: str) -> None:
        with self._changed:
            connection.lost = connection.lost or reason
            connection.stream.shut()
            self._changed.notify_all()

    def _eject(self, write: Write) -> None:
        """The frame of a cancelled key has taken too long."""
        with self._changed:
            connection = self._connection
            is_inside = self._queue.sending is write
        if is_inside and connection is not None:
            self._lose(connection, f"key {shown(write.key)} was cancelled and its frame was not taken in time")

    def _give_up(self, connection: _Connection) -> None:
        """The peer took the connection and does not answer the hello."""
        with self._changed:
            is_waiting = self._connection is connection and connection.answers is None
        if is_waiting:
            self._lose(connection, f"no welcome within {self._config.connect_timeout_s} s")

    def _finish(self, write: Write, failure: str | None) -> None:
        self._outbox.put(WriteFinished(self.peer, write.key, write.number, failure))

    def _post_stopped(self) -> None:
        for key in self._stopping:
            self._stopped(key)
        self._stopping.clear()

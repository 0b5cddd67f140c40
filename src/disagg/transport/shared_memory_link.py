"""All copies of one sender into one peer's arena, over one connection at a time.

The copier thread owns the connection and is the only one that writes into the peer's arena or ends a connection:

    1. wait for something to do: a permit to give back, a write to ask for, a permitted write, a loss, the end
    2. connect, prove the domain's secret and map the arena when there is no connection
    3. ask; or copy, sum and say so
    4. when the connection is lost: say farewell, close, join the answer thread, unmap, fail every unfinished write

The answer thread, one per connection, reads permits and answers and says why the connection was lost. The connection
is never shut for writing while a copy is under way: the owner of the arena takes the end of a connection whose last
word was not Farewell for a writer that may still write.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from functools import partial

import msgspec

from disagg.core.endpoints import Endpoint
from disagg.core.errors import InternalFault, PeerFault, PeerLost, ProtocolViolation
from disagg.core.ids import Incarnation, WorkerId
from disagg.kvcache.memory import Memory
from disagg.transport.api import ConnectionLost, Write, WriteFinished, WritesStopped
from disagg.transport.capability import shown
from disagg.transport.copy_queue import CopyQueue, Ticket
from disagg.transport.local_stream import LocalStream, abstract_address, peer_pid
from disagg.transport.outbox import Outbox
from disagg.transport.runs import Bytes, MappedArena, copy_buffers, copy_runs
from disagg.transport.shared_memory_wire import (
    Admission,
    Answer,
    Copied,
    Farewell,
    Greeting,
    Permit,
    Progress,
    Request,
    Withdrawal,
    decode_owner,
    encode,
)

ANSWER_JOIN_S = 5.0  # it is woken before, so it returns at once
FAREWELL_TIMEOUT_S = 0.2


class SharedMemorySenderConfig(msgspec.Struct, frozen=True):
    """Limits of a shared memory sender."""

    max_ahead_bytes: int = 16 << 20  # asked for and not verified yet, per peer
    max_ahead: int = 16  # writes
    connect_timeout_s: float = 3.0  # also for a peer to take one message
    stall_timeout_s: float = 30.0  # a peer that answers nothing for so long is lost
    close_timeout_s: float = 5.0


class _Connection:
    def __init__(self, stream: LocalStream, arena: MappedArena) -> None:
        self.stream = stream
        self.arena = arena
        self.lost: str | None = None
        self.progress_s = time.monotonic()
        self.answers: threading.Thread | None = None


class SharedMemoryLink:
    """The writing side towards one peer and incarnation."""

    def __init__(
        self,
        greeting: Greeting,
        peer: WorkerId,
        endpoint: Endpoint,
        memory: Memory,
        source: Bytes | None,
        config: SharedMemorySenderConfig,
        outbox: Outbox,
    ) -> None:
        """`source` is the own arena where it is host memory; `memory` gathers what lies elsewhere."""
        self.peer = peer
        self.endpoint = endpoint
        self._greeting = greeting
        self._memory = memory
        self._source = source
        self._config = config
        self._outbox = outbox
        self._changed = threading.Condition()
        self._queue = CopyQueue(config.max_ahead_bytes, config.max_ahead)
        self._stopping: set[bytes] = set()  # cancelled keys whose write is being copied
        self._connection: _Connection | None = None
        self._retired: str | None = None
        self.thread: threading.Thread | None = None

    @property
    def incarnation(self) -> Incarnation:
        return self._greeting.destination_incarnation

    def write(self, write: Write) -> None:
        with self._changed:
            if self._retired is not None:
                self._finish(write, self._retired)
            elif write.key in self._stopping:
                self._finish(write, f"key {shown(write.key)} is cancelled")
            else:
                self._queue.put(write)
                if self.thread is None:
                    self.thread = threading.Thread(target=self._run, name=f"disagg-shm-copy-{self.peer}", daemon=True)
                    self.thread.start()
                self._changed.notify_all()
        self._outbox.flush()

    def cancel(self, key: bytes) -> None:
        with self._changed:
            for write in self._queue.drop(key):
                self._finish(write, f"key {shown(key)} was cancelled before write {write.number} was copied")
            copying = self._queue.copying
            if copying is not None and copying.write.key == key:
                self._stopping.add(key)
            else:
                self._outbox.put(WritesStopped(self.peer, key))
            self._changed.notify_all()  # permits may have to be given back
        self._outbox.flush()

    def retire(self, reason: str) -> None:
        """End this link: its unfinished writes fail with `reason`. Returns at once."""
        with self._changed:
            self._retired = self._retired or reason
            self._changed.notify_all()

    def check_invariants(self) -> None:
        with self._changed:
            self._queue.check_invariants()
            copying = self._queue.copying
            assert not self._stopping or (copying is not None and self._stopping == {copying.write.key})
            assert self.thread is not None or self._queue.is_empty, "writes wait and no thread copies them"

    # ---- the copier thread

    def _run(self) -> None:
        while True:
            step = self._next()
            if step is not None:
                try:
                    step()
                except (PeerFault, OSError) as error:
                    self._end_connection(self._reason(error))
                continue
            with self._changed:
                lost = None if self._retired is not None or self._connection is None else self._connection.lost
            self._end_connection(lost)
            if lost is None:
                return

    def _next(self) -> Callable[[], None] | None:
        """What to do; None when the connection is lost or the link retired."""
        queue = self._queue
        with self._changed:
            while True:
                if self._retired is not None or (self._connection is not None and self._connection.lost is not None):
                    return None
                if (number := queue.next_withdrawn()) is not None:
                    return partial(self._say, Withdrawal(number))
                if (ticket := queue.try_request()) is not None:  # before copies: they must not wait for permits
                    return partial(self._request, ticket)
                if (ticket := queue.try_copy()) is not None:
                    return partial(self._copy, ticket)
                self._changed.wait()

    def _request(self, ticket: Ticket) -> None:
        if self._connection is None:
            self._connect()
        write = ticket.write
        request = Request(ticket.number, write.key, write.number, write.tag, write.destination, ticket.num_bytes)
        try:
            self._say(request)
        except ProtocolViolation as error:  # over its bound: this write fails, the link goes on
            with self._changed:
                if (failed := self._queue.unrequest(ticket.number)) is not None:
                    self._finish(failed, f"write {write.number} cannot be asked for: {error}")
            self._outbox.flush()

    def _copy(self, ticket: Ticket) -> None:
        write, connection = ticket.write, self._connection
        assert connection is not None, "no permit outlives its connection"
        failure, checksum = None, 0
        try:
            checksum = self._copy_bytes(ticket, connection.arena)
        except PeerFault:  # the connection's: every write fails
            raise
        except Exception as error:  # the arena's fault: this write fails, the link goes on
            failure = f"write {write.number} could not be copied: {error}"
        with self._changed:
            if failure is None:
                self._queue.copied()
            else:
                self._queue.abandon()
                self._finish(write, failure)
            self._post_stopped()
        self._outbox.flush()
        if failure is None:
            self._say(Copied(ticket.number, checksum))

    def _copy_bytes(self, ticket: Ticket, arena: MappedArena) -> int:
        write = ticket.write

        def tell(num_bytes: int) -> None:
            self._say(Progress(ticket.number, num_bytes))

        if self._source is not None and all(offset < self._source.nbytes for offset, _ in write.source):
            return copy_runs(self._source, write.source, arena.bytes, write.destination, tell)
        views = self._memory.gather(write.source)
        if sum(view.nbytes for view in views) != sum(length for _, length in write.source):
            raise InternalFault("memory gathered other than the bytes that were asked for")
        return copy_buffers(views, arena.bytes, write.destination)

    def _say(self, message: Request | Progress | Copied | Withdrawal) -> None:
        connection = self._connection
        assert connection is not None, "nothing is said without a connection"
        connection.progress_s = time.monotonic()
        connection.stream.send(encode(message))

    def _connect(self) -> None:
        """Open a connection, be admitted and map the arena. Raises PeerFault, OSError."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stream = LocalStream(sock, self._config.connect_timeout_s)
        try:
            sock.connect(abstract_address(self.endpoint.address))
            peer_pid(sock)  # the secret is shown to no other user
            stream.send(encode(self._greeting))
            arena = self._admission(stream)
        except BaseException:
            stream.close()
            raise
        stream.set_timeouts(self._config.stall_timeout_s, self._config.connect_timeout_s)
        connection = _Connection(stream, arena)
        name = f"disagg-shm-answers-{self.peer}"
        connection.answers = threading.Thread(target=self._read_answers, args=(connection,), name=name, daemon=True)
        with self._changed:
            self._connection = connection
        connection.answers.start()

    def _admission(self, stream: LocalStream) -> MappedArena:
        body, descriptor = stream.receive_with_descriptor()
        try:
            admission = decode_owner(body)
            if not isinstance(admission, Admission):
                raise ProtocolViolation(f"{type(admission).__name__} where an admission was due")
            if admission.refusal is not None:
                raise PeerLost(f"it refuses: {admission.refusal}")
            if descriptor is None:
                raise ProtocolViolation("an admission without the arena's descriptor")
            return MappedArena(descriptor, admission.num_bytes)
        except InternalFault as error:
            raise ProtocolViolation(str(error)) from error
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _end_connection(self, lost: str | None) -> None:
        """Close the connection and fail every unfinished write; with None the link itself ends."""
        connection = self._connection
        if connection is not None:
            connection.stream.set_timeouts(FAREWELL_TIMEOUT_S, FAREWELL_TIMEOUT_S)
            with contextlib.suppress(PeerFault):  # the peer may be gone
                connection.stream.send(encode(Farewell()))
            connection.stream.stop_receiving()
            if connection.answers is not None:
                connection.answers.join(ANSWER_JOIN_S)
            connection.stream.close()
            connection.arena.close()
        with self._changed:
            self._connection = None
            reason = self._retired or lost or "the link ended"
            for write in self._queue.drop_all():
                self._finish(write, reason)
            self._post_stopped()
            if self._retired is None:
                self._outbox.put(ConnectionLost(self.peer, reason))
        self._outbox.flush()

    def _reason(self, error: Exception) -> str:
        with self._changed:
            if self._connection is None:
                return f"{self.endpoint.address} cannot be reached: {error}"
            return self._connection.lost or str(error)

    # ---- the answer thread

    def _read_answers(self, connection: _Connection) -> None:
        try:
            while True:
                body = connection.stream.receive()
                if body is not None:
                    self._take(connection, decode_owner(body))
                elif self._is_stalled(connection):
                    raise PeerLost(f"the peer answered nothing for {self._config.stall_timeout_s} s")
        except PeerFault as error:
            with self._changed:
                connection.lost = connection.lost or str(error)
                self._changed.notify_all()

    def _take(self, connection: _Connection, message: Admission | Permit | Answer) -> None:
        with self._changed:
            connection.progress_s = time.monotonic()
            match message:
                case Permit(ticket):
                    self._queue.permit(ticket)
                case Answer(ticket, failure):
                    write = self._queue.answer(ticket)
                    if write is not None:
                        self._finish(write, failure)
                case Admission():
                    raise ProtocolViolation("a second admission")
            self._changed.notify_all()
        self._outbox.flush()

    def _is_stalled(self, connection: _Connection) -> bool:
        with self._changed:
            waited_s = time.monotonic() - connection.progress_s
            return self._queue.awaits_peer and waited_s >= self._config.stall_timeout_s

    # ---- under the lock

    def _finish(self, write: Write, failure: str | None) -> None:
        self._outbox.put(WriteFinished(self.peer, write.key, write.number, failure))

    def _post_stopped(self) -> None:
        for key in self._stopping:
            self._outbox.put(WritesStopped(self.peer, key))
        self._stopping.clear()

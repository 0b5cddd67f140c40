"""What a link in shared memory does with its connection: ask, then copy, sum and say so.

The connection is never shut for writing while a copy is under way: the owner of the arena takes the end of a connection
whose last word was not Farewell for a writer that may still write.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from disagg.core.endpoints import Endpoint
from disagg.core.errors import InternalFault, PeerFault, PeerLost, ProtocolViolation
from disagg.kvcache.memory import Memory
from disagg.transport.deadlines import join_all
from disagg.transport.link import Answered, Connection, Permitted
from disagg.transport.local_stream import LocalStream, abstract_address, peer_pid
from disagg.transport.runs import Bytes, MappedArena, RunCopy, copy_buffers
from disagg.transport.segments import SegmentArray, viewed_bytes
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
from disagg.transport.write_queue import Ticket

FAREWELL_TIMEOUT_S = 0.2


class SharedMemorySenderConfig(msgspec.Struct, frozen=True):
    """Limits of a shared memory sender."""

    max_ahead_bytes: int = 16 << 20  # asked for and not verified yet, per peer
    max_ahead: int = 16  # writes
    connect_timeout_s: float = 3.0  # also for a peer to take one message
    stall_timeout_s: float = 30.0  # a peer that answers nothing for so long is lost
    close_timeout_s: float = 5.0


class SharedMemoryConnection(Connection):
    """Towards an arena that is mapped here."""

    def __init__(
        self,
        stream: LocalStream,
        arena: MappedArena,
        memory: Memory,
        source: Bytes | None,
        config: SharedMemorySenderConfig,
    ) -> None:
        """`source` is the own arena where it is host memory; `memory` gathers what lies elsewhere."""
        super().__init__()
        self._stream = stream
        self._arena = arena
        self._memory = memory
        self._source = source
        self._config = config
        self._copies: dict[int, RunCopy] = {}  # prepared, by ticket
        self._progress_s = time.monotonic()  # when something was last said, by either end

    def ask(self, ticket: Ticket) -> None:
        write, number = ticket.write, ticket.number
        try:
            destination = SegmentArray.of(write.destination)
        except OverflowError as error:
            raise ProtocolViolation(f"no arena has such segments: {error}") from error
        self.say(Request(number, write.key, write.number, write.tag, destination.pack(), ticket.num_bytes))
        # While the owner reads that. Few are kept: a write whose preparations are gone is copied the slower way.
        self._copies.pop(number - self._config.max_ahead, None)
        source = SegmentArray.of(write.source)
        if self._source is not None and (source.values[:, 0] < self._source.nbytes).all():
            self._copies[number] = RunCopy(self._source, source, self._arena.bytes, destination)

    def withdraw(self, number: int) -> None:
        self.say(Withdrawal(number))

    def move(self, ticket: Ticket) -> None:
        self.say(Copied(ticket.number, self.copy(ticket)))

    def copy(self, ticket: Ticket) -> int:
        """The sum of the bytes, which lie in the peer's arena now."""

        def tell(num_bytes: int) -> None:
            self.say(Progress(ticket.number, num_bytes))

        if (prepared := self._copies.pop(ticket.number, None)) is not None:
            return prepared.run(tell)
        views = self._memory.gather(ticket.write.source)
        if viewed_bytes(views) != ticket.num_bytes:
            raise InternalFault("memory gathered other than the bytes that were asked for")
        return copy_buffers(views, self._arena.bytes, ticket.write.destination)

    def say(self, message: Request | Progress | Copied | Withdrawal) -> None:
        """Raises PeerFault."""
        self._progress_s = time.monotonic()
        self._stream.send(encode(message))

    def hear(self, is_due: Callable[[], bool]) -> Permitted | Answered:
        while True:
            body = self._stream.receive()
            if body is not None:
                break
            if is_due() and time.monotonic() - self._progress_s >= self._config.stall_timeout_s:
                raise PeerLost(f"the peer answered nothing for {self._config.stall_timeout_s} s")
        self._progress_s = time.monotonic()
        match decode_owner(body):
            case Permit(ticket):
                return Permitted(ticket)
            case Answer(ticket, failure):
                return Answered(ticket, failure)
            case _:
                raise ProtocolViolation("a second admission")

    def close(self, join: Callable[[], None]) -> None:
        self._stream.set_timeouts(FAREWELL_TIMEOUT_S, FAREWELL_TIMEOUT_S)
        with contextlib.suppress(PeerFault):  # the peer may be gone
            self._stream.send(encode(Farewell()))
        self._stream.stop_receiving()
        join()
        self._copies.clear()  # they refer to the arena
        self._stream.close()
        self._arena.close()


def dial_owner(endpoint: Endpoint, greeting: Greeting, timeout_s: float) -> tuple[LocalStream, MappedArena]:
    """Be admitted and map the arena. Raises PeerFault, OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stream = LocalStream(sock, timeout_s)
    try:
        sock.connect(abstract_address(endpoint.address))
        peer_pid(sock)  # the secret is shown to no other user
        stream.send(encode(greeting))
        return stream, _admission(stream)
    except BaseException:
        stream.close()
        raise


def _admission(stream: LocalStream) -> MappedArena:
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


def open_shared_memory(
    register: Callable[[Connection], None],
    *,
    endpoint: Endpoint,
    greeting: Greeting,
    memory: Memory,
    source: Bytes | None,
    config: SharedMemorySenderConfig,
    before: Sequence[threading.Thread] = (),
) -> SharedMemoryConnection:
    """A link's connection, admitted. Raises PeerFault, OSError.

    before: of links to this peer that were let go. To connect anew says that nothing is copied for them any more.
    """
    if join_all(before, config.connect_timeout_s):
        raise PeerLost(f"a copy for an earlier connection still goes on after {config.connect_timeout_s} s")
    stream, arena = dial_owner(endpoint, greeting, config.connect_timeout_s)
    stream.set_timeouts(config.stall_timeout_s, config.connect_timeout_s)
    connection = SharedMemoryConnection(stream, arena, memory, source, config)
    register(connection)
    return connection

"""All writes of one sender to one peer, over one connection at a time, of whatever kind.

The link's thread owns the connection and is the only one that reads the arena or ends a connection:

    1. wait for something to do: a permit to give back, a write to ask for, a write to move, a loss, the end
    2. connect when there is no connection, or the one there is was silent for so long that it may be dead
    3. do it, as the connection's kind does
    4. when the connection is lost: close it, join the answer thread, fail every unfinished write, post ConnectionLost

The answer thread, one per connection, hears permits and answers, and says why the connection was lost.
"""

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import msgspec

from disagg.core.endpoints import Endpoint
from disagg.core.errors import InternalFault, PeerFault, PeerLost, ProtocolViolation
from disagg.core.ids import Incarnation, WorkerId
from disagg.transport.api import ConnectionLost, Write, WriteFinished
from disagg.transport.capability import shown
from disagg.transport.outbox import Outbox
from disagg.transport.write_queue import Ticket, WriteQueue

_log = logging.getLogger(__name__)

ANSWER_JOIN_S = 5.0  # it is woken before, so it returns at once


class Permitted(NamedTuple):
    """The peer lets a write in."""

    ticket: int


class Answered(NamedTuple):
    """The peer has verified a write (failure is None), or says why not."""

    ticket: int
    failure: str | None


class Connection(ABC):
    """One connection of a link. hear() is for the answer thread, interrupt() for any, the rest for the link's."""

    def __init__(self) -> None:
        self.lost: str | None = None  # why it is over
        self.used_s = time.monotonic()  # when a write was last moved or answered
        self.answers: threading.Thread | None = None  # once it is welcome

    def ask(self, ticket: Ticket) -> None:
        """Ask for a permit. Raises PeerFault; ProtocolViolation when there is no room for the question."""
        raise InternalFault("this kind moves writes without a permit")

    def withdraw(self, number: int) -> None:
        """Give a permit back. Raises PeerFault."""
        raise InternalFault("this kind moves writes without a permit")

    @abstractmethod
    def move(self, ticket: Ticket) -> None:
        """Returns when nothing reads the arena for it any more.

        Raises PeerFault when the connection is over; anything else that it raises fails this write alone.
        """

    @abstractmethod
    def hear(self, is_due: Callable[[], bool]) -> Permitted | Answered:
        """The peer's next word. Silence is no fault while none is_due. Raises PeerFault."""

    def interrupt(self) -> None:  # noqa: B027
        """Make move() and hear() return soon, where a move can be broken off."""

    @abstractmethod
    def close(self, join: Callable[[], None]) -> None:
        """Make hear() return; then join(), and give everything back."""


OpenConnection = Callable[[Callable[[Connection], None]], Connection]
Eject = Callable[[], None]


class Target(msgspec.Struct, frozen=True):
    """Whom a link writes to."""

    peer: WorkerId
    endpoint: Endpoint
    incarnation: Incarnation


class LinkLimits(msgspec.Struct, frozen=True):
    """Of one link."""

    stall_timeout_s: float  # a peer that answers nothing for so long is lost
    max_idle_s: float = float("inf")  # a connection silent for longer is made anew


class Link:
    """The writing side of one lane towards one peer and incarnation."""

    def __init__(
        self,
        target: Target,
        queue: WriteQueue,
        outbox: Outbox,
        limits: LinkLimits,
        open_connection: OpenConnection,
        *,
        name: str,
        stopped: Callable[[bytes], None],
        eject_later: Callable[[Eject], None] = lambda eject: None,
    ) -> None:
        """open_connection hands what it makes to the function it is given before it waits for the peer's welcome, so
        that interrupt() reaches it; raises PeerFault, OSError. `name` begins the names of threads.

        `stopped` is told of each cancelled key, under this link's lock, once nothing is read for it any more.
        eject_later runs an action when a write that is moving for a cancelled key has had its time.
        """
        self.target = target
        self._queue = queue
        self._outbox = outbox
        self._limits = limits
        self._open_connection = open_connection
        self._name = name
        self._stopped = stopped
        self._eject_later = eject_later
        self._changed = threading.Condition()
        self._stopping: set[bytes] = set()  # cancelled keys whose write is moving
        self._connection: Connection | None = None
        self._retired: str | None = None
        self.thread: threading.Thread | None = None

    def write(self, write: Write) -> None:
        with self._changed:
            if self._retired is not None:
                self._finish(write, self._retired)
            elif write.key in self._stopping:
                self._finish(write, f"key {shown(write.key)} is cancelled")
            else:
                self._queue.put(write)
                if self.thread is None:
                    name = f"{self._name}-send-{self.target.peer}"
                    self.thread = threading.Thread(target=self._run, name=name, daemon=True)
                    self.thread.start()
                self._changed.notify_all()
        self._outbox.flush()

    def cancel(self, key: bytes) -> None:
        with self._changed:
            for write in self._queue.drop(key):
                self._finish(write, _cancelled(write))
            moving = self._queue.moving
            if moving is None or moving.write.key != key:
                self._stopped(key)
            elif key not in self._stopping:
                self._stopping.add(key)
                self._eject_later(partial(self._eject, moving))
            self._changed.notify_all()  # permits may have to be given back
        self._outbox.flush()

    def retire(self, reason: str) -> None:
        """End this link: its unfinished writes fail with `reason`. Returns at once."""
        with self._changed:
            self._retired = self._retired or reason
            if self._connection is not None:
                self._connection.interrupt()
            self._changed.notify_all()

    def check_invariants(self) -> None:
        with self._changed:
            self._queue.check_invariants()
            moving = self._queue.moving
            assert not self._stopping or (moving is not None and self._stopping == {moving.write.key})
            assert self.thread is not None or self._queue.is_empty, "writes wait and no thread moves them"

    # ---- the link's thread

    def _run(self) -> None:
        while (step := self._next()) is not None:
            try:
                step()
            except PeerFault as error:
                self._end_connection(str(error))
            except Exception as error:  # ours: whoever waits for these writes must hear of it
                _log.exception("a write to %s could not be made", self.target.peer)
                self._end_connection(f"it failed here: {type(error).__name__}: {error}")
        self._end_connection("the link ended")

    def _next(self) -> Callable[[], None] | None:
        """What to do; None when the link is retired."""
        queue = self._queue
        with self._changed:
            while self._retired is None:
                if self._connection is not None and self._connection.lost is not None:
                    return partial(self._end_connection, self._connection.lost)
                if (number := queue.next_withdrawn()) is not None:
                    return partial(self._withdraw, number)
                if (ticket := queue.try_request()) is not None:  # before moves: they must not wait for permits
                    return partial(self._ask, ticket)
                if (ticket := queue.try_move()) is not None:
                    return partial(self._move, ticket)
                self._changed.wait()
            return None

    def _withdraw(self, number: int) -> None:
        assert self._connection is not None, "no permit outlives its connection"
        self._connection.withdraw(number)

    def _ask(self, ticket: Ticket) -> None:
        connection = self._usable()
        try:
            connection.ask(ticket)
        except ProtocolViolation as error:  # over its bound: this write fails, the link goes on
            with self._changed:
                if (failed := self._queue.unrequest(ticket.number)) is not None:
                    self._finish(failed, f"write {failed.number} cannot be asked for: {error}")
            self._outbox.flush()

    def _move(self, ticket: Ticket) -> None:
        connection = self._usable()
        if (failure := self._objection(ticket.write)) is not None:
            self._abandon(ticket.write, failure)
            return
        try:
            connection.move(ticket)
        except PeerFault:  # the connection's: every write fails
            raise
        except Exception as error:  # the arena's fault: this write fails, the link goes on
            self._abandon(ticket.write, f"write {ticket.write.number} cannot be read or moved: {error}")
            return
        with self._changed:
            connection.used_s = time.monotonic()
            self._queue.moved()
            self._post_stopped()
            self._changed.notify_all()
        self._outbox.flush()

    def _objection(self, write: Write) -> str | None:
        """Why a write must not move any more, or None."""
        with self._changed:
            return self._retired or (_cancelled(write) if write.key in self._stopping else None)

    def _abandon(self, write: Write, failure: str) -> None:
        with self._changed:
            self._queue.abandon()
            self._finish(write, failure)
            self._post_stopped()
        self._outbox.flush()

    def _usable(self) -> Connection:
        """The connection, made now where there is none to be trusted. Raises PeerLost."""
        with self._changed:
            connection = self._connection
            is_alone = self._queue.num_ahead == 1  # the write for which we are here
            if connection is not None and not (is_alone and self._is_stale(connection)):
                return connection
            self._connection = None
        if connection is not None:
            self._close(connection)
        try:
            connection = self._open_connection(self._register)
        except (PeerFault, OSError) as error:
            raise PeerLost(f"{self.target.endpoint.address} cannot be reached: {error}") from error
        name = f"{self._name}-answers-{self.target.peer}"
        connection.answers = threading.Thread(target=self._hear, args=(connection,), name=name, daemon=True)
        connection.answers.start()
        return connection

    def _is_stale(self, connection: Connection) -> bool:
        return time.monotonic() - connection.used_s > self._limits.max_idle_s

    def _register(self, connection: Connection) -> None:
        """Raises PeerLost when there is no use for it any more."""
        with self._changed:
            self._connection = connection
            if self._retired is not None:
                raise PeerLost(self._retired)

    def _end_connection(self, lost: str) -> None:
        """Close the connection and fail every unfinished write."""
        connection = self._connection
        if connection is not None:
            lost = self._lose(connection, lost)
            self._close(connection)
        with self._changed:
            self._connection = None
            reason = self._retired or lost
            for write in self._queue.drop_all():
                self._finish(write, reason)
            self._post_stopped()
            if self._retired is None:
                self._outbox.put(ConnectionLost(self.target.peer, reason))
        self._outbox.flush()

    def _close(self, connection: Connection) -> None:
        def join() -> None:
            if connection.answers is not None:
                connection.answers.join(ANSWER_JOIN_S)

        connection.close(join)

    # ---- the answer thread

    def _hear(self, connection: Connection) -> None:
        try:
            while True:
                self._take(connection, connection.hear(self._is_due))
        except PeerFault as error:
            self._lose(connection, str(error))
        except Exception as error:  # ours: a connection that nobody hears any more must not look alive
            _log.exception("an answer of %s could not be taken", self.target.peer)
            self._lose(connection, f"an answer could not be taken: {type(error).__name__}: {error}")

    def _is_due(self) -> bool:
        with self._changed:
            return self._queue.awaits_peer

    def _take(self, connection: Connection, heard: Permitted | Answered) -> None:
        with self._changed:
            connection.used_s = time.monotonic()
            if isinstance(heard, Permitted):
                self._queue.permit(heard.ticket)
            else:
                self._wait_moved(connection, heard.ticket)
                write = self._queue.answer(heard.ticket)
                if write is not None:
                    self._finish(write, heard.failure)
            self._changed.notify_all()
        self._outbox.flush()

    def _wait_moved(self, connection: Connection, number: int) -> None:
        """An answer may overtake the return from move(); the arena is free only after that. Raises PeerLost."""
        while self._queue.moving is not None and self._queue.moving.number == number:
            if connection.lost is not None or not self._changed.wait(self._limits.stall_timeout_s):
                raise PeerLost("an answer came before the whole write was sent")

    # ---- any thread

    def _lose(self, connection: Connection, reason: str) -> str:
        """Returns the first reason."""
        with self._changed:
            connection.lost = connection.lost or reason
            connection.interrupt()
            self._changed.notify_all()
            return connection.lost

    def _eject(self, ticket: Ticket) -> None:
        """The write of a cancelled key has moved for too long."""
        with self._changed:
            connection = self._connection
            is_inside = self._queue.moving is ticket
        if is_inside and connection is not None:
            self._lose(connection, f"key {shown(ticket.write.key)} was cancelled and its write was not taken in time")

    # ---- under the lock

    def _finish(self, write: Write, failure: str | None) -> None:
        self._outbox.put(WriteFinished(self.target.peer, write.key, write.number, failure))

    def _post_stopped(self) -> None:
        for key in self._stopping:
            self._stopped(key)
        self._stopping.clear()


def _cancelled(write: Write) -> str:
    return f"key {shown(write.key)} was cancelled before write {write.number} was moved"

"""Writes to one peer, from queued to answered. No locks, no sockets: its owner guards it.

queued (per key, round-robin) -> requested -> permitted -> moving (one) -> moved -> answered

Where the peer permits each write, requests run ahead of moves; where nobody asks (`asks` is false), a write
goes from queued to moving. Bytes between leaving the queue and being answered stay under a cap. A cancelled write that
was requested already is told as failed at once; its ticket stays, to be withdrawn when it is permitted.
"""

import math
from collections import deque
from typing import NamedTuple

from disagg.core.errors import ProtocolViolation
from disagg.transport.api import Write
from disagg.transport.segments import total_bytes


class Ticket(NamedTuple):
    """A write that has left the queue."""

    number: int
    write: Write
    num_bytes: int


class WriteQueue:
    """Takes one write per key in turn."""

    def __init__(self, max_ahead_bytes: int, max_ahead: float = math.inf, *, asks: bool) -> None:
        self._max_ahead_bytes = max_ahead_bytes
        self._max_ahead = max_ahead
        self._asks = asks
        self._num_tickets = 0
        self._ahead_bytes = 0
        self._ahead: set[tuple[bytes, int]] = set()  # key and number of each write that is not told as finished
        self._queued: dict[bytes, deque[Write]] = {}  # the first key is next
        self._requested: dict[int, Ticket] = {}
        self._permitted: deque[Ticket] = deque()
        self._moved: dict[int, Ticket] = {}
        self._void: set[int] = set()  # cancelled while requested
        self._withdrawn: deque[int] = deque()  # permits to give back
        self.moving: Ticket | None = None

    @property
    def num_ahead(self) -> int:
        """Tickets the peer has not answered."""
        tickets = len(self._requested) + len(self._permitted) + len(self._moved) + len(self._void)
        return tickets + (self.moving is not None)

    @property
    def awaits_peer(self) -> bool:
        """Whether something cannot go on without a word of the peer."""
        return bool(self._requested or self._moved or self._void)

    @property
    def is_empty(self) -> bool:
        return not self._queued and not self._withdrawn and self.num_ahead == 0

    def put(self, write: Write) -> None:
        self._queued.setdefault(write.key, deque()).append(write)

    def try_request(self) -> Ticket | None:
        """The next write to ask for; None when there is none, the cap is reached or nobody asks."""
        ticket = self._try_take() if self._asks else None
        if ticket is not None:
            self._requested[ticket.number] = ticket
        return ticket

    def unrequest(self, number: int) -> Write | None:
        """The request could not be sent: the write, to be told as failed; None when it was cancelled meanwhile."""
        self._void.discard(number)
        return self._end(self._requested.pop(number, None))

    def permit(self, number: int) -> None:
        """The peer lets a request in. Raises ProtocolViolation for a ticket that was not requested."""
        if number in self._void:
            self._void.remove(number)
            self._withdrawn.append(number)
        elif (ticket := self._requested.pop(number, None)) is not None:
            self._permitted.append(ticket)
        else:
            raise ProtocolViolation(f"permit for ticket {number}, which waits for none")

    def answer(self, number: int) -> Write | None:
        """The peer has ended a ticket: its write, or None when it was cancelled. Raises ProtocolViolation."""
        if number in self._void:
            self._void.remove(number)
            return None
        ticket = self._requested.pop(number, None) or self._moved.pop(number, None)
        if ticket is None:
            raise ProtocolViolation(f"answer for ticket {number}, which waits for none")
        return self._end(ticket)

    def next_withdrawn(self) -> int | None:
        """A permit to give back, if there is one."""
        return self._withdrawn.popleft() if self._withdrawn else None

    def try_move(self) -> Ticket | None:
        """The next write that may move, now moving; None when there is none."""
        assert self.moving is None, "one write at a time"
        if self._asks:
            self.moving = self._permitted.popleft() if self._permitted else None
        else:
            self.moving = self._try_take()
        return self.moving

    def moved(self) -> None:
        """All bytes of the write that was moving are on their way, or there."""
        assert self.moving is not None
        self._moved[self.moving.number] = self.moving
        self.moving = None

    def abandon(self) -> None:
        """The write that was moving has failed here; its permit, if it needed one, is to be given back."""
        assert self.moving is not None
        if self._asks:
            self._withdrawn.append(self.moving.number)
        self._end(self.moving)
        self.moving = None

    def drop(self, key: bytes) -> tuple[Write, ...]:
        """Take out what is neither moving nor moved under a key."""
        dropped = list(self._queued.pop(key, ()))
        for ticket in [each for each in self._requested.values() if each.write.key == key]:
            del self._requested[ticket.number]
            self._void.add(ticket.number)
            dropped.append(ticket.write)
            self._end(ticket)
        for ticket in [each for each in self._permitted if each.write.key == key]:
            self._permitted.remove(ticket)
            self._withdrawn.append(ticket.number)
            dropped.append(ticket.write)
            self._end(ticket)
        return tuple(dropped)

    def drop_all(self) -> tuple[Write, ...]:
        """Take out everything, oldest first; the connection has ended, and its tickets with it."""
        dropped = [ticket.write for ticket in sorted(self._known(), key=lambda ticket: ticket.number)]
        dropped += [write for writes in self._queued.values() for write in writes]
        for container in (self._queued, self._requested, self._permitted, self._moved, self._void, self._withdrawn):
            container.clear()
        self._ahead.clear()
        self.moving = None
        self._ahead_bytes = 0
        return tuple(dropped)

    def check_invariants(self) -> None:
        assert all(self._queued.values()), "an empty queue is kept for a key"
        known = self._known()
        assert self._ahead_bytes == sum(ticket.num_bytes for ticket in known)
        assert self._ahead == {(ticket.write.key, ticket.write.number) for ticket in known}
        numbers = [*(ticket.number for ticket in known), *self._void, *self._withdrawn]
        assert len(set(numbers)) == len(numbers), "a ticket is in two places"
        assert len(known) <= 1 or self._ahead_bytes <= self._max_ahead_bytes, "the cap is passed"
        assert self.num_ahead <= self._max_ahead
        permits = (self._requested, self._permitted, self._void, self._withdrawn)
        assert self._asks or not any(permits), "something waits for a permit that nobody asks for"

    def _try_take(self) -> Ticket | None:
        """The next write out of the queue, under the cap; a large one goes alone.

        A repeated write waits for the answer to the one before, so that it cannot land twice.
        """
        if not self._queued or self.num_ahead >= self._max_ahead:
            return None
        turns = ((key, writes) for key, writes in self._queued.items() if (key, writes[0].number) not in self._ahead)
        key, writes = next(turns, (b"", None))
        if writes is None:
            return None
        num_bytes = total_bytes(writes[0].source)
        if self._ahead_bytes and self._ahead_bytes + num_bytes > self._max_ahead_bytes:
            return None
        write = writes.popleft()
        del self._queued[key]
        if writes:
            self._queued[key] = writes  # to the end: the other keys come first
        self._num_tickets += 1
        self._ahead.add((key, write.number))
        self._ahead_bytes += num_bytes
        return Ticket(self._num_tickets, write, num_bytes)

    def _known(self) -> list[Ticket]:
        """Tickets whose write is not told as finished."""
        moving = [] if self.moving is None else [self.moving]
        return [*self._requested.values(), *self._permitted, *moving, *self._moved.values()]

    def _end(self, ticket: Ticket | None) -> Write | None:
        if ticket is None:
            return None
        self._ahead.remove((ticket.write.key, ticket.write.number))
        self._ahead_bytes -= ticket.num_bytes
        return ticket.write

"""Writes to one peer's arena, from queued to answered. No locks, no sockets: its owner guards it.

queued (per key, round-robin) -> requested -> permitted -> copying (one) -> copied -> answered

Requests run ahead of copies while the bytes between requested and answered stay under a cap. A cancelled write that was
requested already is told as failed at once; its ticket stays, to be withdrawn when it is permitted.
"""

from collections import deque
from typing import NamedTuple

from disagg.core.errors import ProtocolViolation
from disagg.transport.api import Write
from disagg.transport.segments import total_bytes


class Ticket(NamedTuple):
    """A write that the peer knows of."""

    number: int
    write: Write
    num_bytes: int


class CopyQueue:
    """Takes one write per key in turn."""

    def __init__(self, max_ahead_bytes: int, max_ahead: int) -> None:
        self._max_ahead_bytes = max_ahead_bytes
        self._max_ahead = max_ahead
        self._num_tickets = 0
        self._ahead_bytes = 0
        self._queued: dict[bytes, deque[Write]] = {}  # the first key is next
        self._requested: dict[int, Ticket] = {}
        self._permitted: deque[Ticket] = deque()
        self._copied: dict[int, Ticket] = {}
        self._void: set[int] = set()  # cancelled while requested
        self._withdrawn: deque[int] = deque()  # permits to give back
        self.copying: Ticket | None = None

    @property
    def num_ahead(self) -> int:
        """Tickets the peer has not answered."""
        tickets = len(self._requested) + len(self._permitted) + len(self._copied) + len(self._void)
        return tickets + (self.copying is not None)

    @property
    def awaits_peer(self) -> bool:
        """Whether something cannot go on without a word of the peer."""
        return bool(self._requested or self._copied or self._void)

    @property
    def is_empty(self) -> bool:
        return not self._queued and not self._withdrawn and self.num_ahead == 0

    def put(self, write: Write) -> None:
        self._queued.setdefault(write.key, deque()).append(write)

    def try_request(self) -> Ticket | None:
        """The next write to ask for; None when there is none or the cap is reached. A large one goes alone.

        A repeated write waits for the answer to the one before, so that it cannot land twice.
        """
        if not self._queued or self.num_ahead >= self._max_ahead:
            return None
        ahead = {(ticket.write.key, ticket.write.number) for ticket in self._known()}
        turns = ((key, writes) for key, writes in self._queued.items() if (key, writes[0].number) not in ahead)
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
        ticket = Ticket(self._num_tickets, write, num_bytes)
        self._requested[ticket.number] = ticket
        self._ahead_bytes += num_bytes
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
        ticket = self._requested.pop(number, None) or self._copied.pop(number, None)
        if ticket is None:
            raise ProtocolViolation(f"answer for ticket {number}, which waits for none")
        return self._end(ticket)

    def next_withdrawn(self) -> int | None:
        """A permit to give back, if there is one."""
        return self._withdrawn.popleft() if self._withdrawn else None

    def try_copy(self) -> Ticket | None:
        """The next permitted write, now being copied."""
        assert self.copying is None, "one write at a time"
        self.copying = self._permitted.popleft() if self._permitted else None
        return self.copying

    def copied(self) -> None:
        """The write being copied lies in the peer's arena."""
        assert self.copying is not None
        self._copied[self.copying.number] = self.copying
        self.copying = None

    def abandon(self) -> None:
        """The write being copied has failed here; its permit is to be given back."""
        assert self.copying is not None
        self._withdrawn.append(self.copying.number)
        self._end(self.copying)
        self.copying = None

    def drop(self, key: bytes) -> tuple[Write, ...]:
        """Take out what is not being copied, nor copied, under a key."""
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
        for container in (self._queued, self._requested, self._permitted, self._copied, self._void, self._withdrawn):
            container.clear()
        self.copying = None
        self._ahead_bytes = 0
        return tuple(dropped)

    def check_invariants(self) -> None:
        assert all(self._queued.values()), "an empty queue is kept for a key"
        known = self._known()
        assert self._ahead_bytes == sum(ticket.num_bytes for ticket in known)
        numbers = [*(ticket.number for ticket in known), *self._void, *self._withdrawn]
        assert len(set(numbers)) == len(numbers), "a ticket is in two places"
        assert len(known) <= 1 or self._ahead_bytes <= self._max_ahead_bytes, "the cap is passed"
        assert self.num_ahead <= self._max_ahead

    def _known(self) -> list[Ticket]:
        """Tickets whose write is not told as finished."""
        copying = [] if self.copying is None else [self.copying]
        return [*self._requested.values(), *self._permitted, *copying, *self._copied.values()]

    def _end(self, ticket: Ticket | None) -> Write | None:
        if ticket is None:
            return None
        self._ahead_bytes -= ticket.num_bytes
        return ticket.write

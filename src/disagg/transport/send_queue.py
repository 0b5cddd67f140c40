"""Writes to one peer, from queued to acknowledged. No locks, no sockets: its owner guards it.

queued (per key, round-robin) -> sending (one) -> in flight (in order) -> acknowledged
"""

from collections import deque
from collections.abc import Iterable

from disagg.core.errors import ProtocolViolation
from disagg.transport.api import Write
from disagg.transport.capability import grant_name
from disagg.transport.segments import total_bytes


class SendQueue:
    """Takes one write per key in turn while un-acknowledged bytes stay under a cap."""

    def __init__(self, max_inflight_bytes: int) -> None:
        self._max_inflight_bytes = max_inflight_bytes
        self._queued: dict[bytes, deque[Write]] = {}  # the first key is next
        self._inflight: deque[tuple[Write, int]] = deque()  # the write being sent is the last
        self._inflight_bytes = 0
        self.sending: Write | None = None

    @property
    def is_empty(self) -> bool:
        return not self._queued and not self._inflight

    @property
    def has_inflight(self) -> bool:
        return bool(self._inflight)

    @property
    def is_only_sending(self) -> bool:
        """Whether no write but the one being sent, if any, waits for its answer."""
        return all(write is self.sending for write, _ in self._inflight)

    def put(self, write: Write) -> None:
        self._queued.setdefault(write.key, deque()).append(write)

    def try_start(self) -> Write | None:
        """The next write, now being sent; None when there is none or the cap is reached.

        A write larger than the cap goes alone.
        """
        assert self.sending is None, "one write at a time"
        if not self._queued:
            return None
        key, writes = next(iter(self._queued.items()))
        num_bytes = total_bytes(writes[0].source)
        if self._inflight and self._inflight_bytes + num_bytes > self._max_inflight_bytes:
            return None
        write = writes.popleft()
        del self._queued[key]
        if writes:
            self._queued[key] = writes  # to the end: the other keys come first
        self._inflight.append((write, num_bytes))
        self._inflight_bytes += num_bytes
        self.sending = write
        return write

    def sent(self) -> None:
        """The write being sent has left the arena."""
        self.sending = None

    def abandon(self) -> None:
        """Take the write being sent out again; no byte of it went out."""
        assert self.sending is self._inflight[-1][0]
        self._inflight_bytes -= self._inflight.pop()[1]
        self.sending = None

    def next_acknowledged(self, name: bytes, number: int) -> Write:
        """The oldest write in flight, which this answer must be for. Raises ProtocolViolation."""
        if not self._inflight:
            raise ProtocolViolation(f"answer for write {number} of grant {name.hex()}, but none is in flight")
        write = self._inflight[0][0]
        due = grant_name(write.key)
        if (due, write.number) != (name, number):
            text = f"answer for write {number} of grant {name.hex()} where {write.number} of {due.hex()} was due"
            raise ProtocolViolation(text)
        return write

    def acknowledge(self) -> None:
        """The oldest write in flight is done."""
        self._inflight_bytes -= self._inflight.popleft()[1]

    def drop(self, key: bytes) -> tuple[Write, ...]:
        """Take out what is queued under a key."""
        return tuple(self._queued.pop(key, ()))

    def drop_all(self) -> tuple[Write, ...]:
        """Take out everything, oldest first; nothing is being sent after this."""
        waiting: Iterable[Write] = (write for writes in self._queued.values() for write in writes)
        dropped = (*(write for write, _ in self._inflight), *waiting)
        self._queued.clear()
        self._inflight.clear()
        self._inflight_bytes = 0
        self.sending = None
        return dropped

    def check_invariants(self) -> None:
        assert all(self._queued.values()), "an empty queue is kept for a key"
        assert self._inflight_bytes == sum(num_bytes for _, num_bytes in self._inflight)
        assert len(self._inflight) <= 1 or self._inflight_bytes <= self._max_inflight_bytes, "the cap is passed"
        assert self.sending is None or self._inflight[-1][0] is self.sending, "the write being sent is not the last"

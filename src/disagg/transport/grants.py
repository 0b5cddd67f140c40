"""Who may write where. Shared by every receiver.

A visit is the time that one frame spends between being let in and being either committed or thrown away:

    enter -> (bytes arrive, checksum) -> can_commit -> commit -> leave

A revoked grant lets nobody in; it is fenced when its last visit has left.
"""

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from disagg.core.errors import InternalFault
from disagg.core.ids import WorkerId
from disagg.kvcache.memory import Segment
from disagg.transport.api import GrantFenced, WriteLanded
from disagg.transport.capability import shown
from disagg.transport.outbox import Outbox
from disagg.transport.segments import SegmentSet, total_bytes

MAX_LANDED_AHEAD = 65_536  # numbers remembered above the first gap, per grant


class Visit(msgspec.Struct, frozen=True, eq=False):
    """A frame that is being received. Compared by identity."""

    peer: WorkerId
    key: bytes
    number: int
    tag: bytes
    num_bytes: int
    eject: Callable[[], None]  # makes the receiving thread return soon


class Refused(msgspec.Struct, frozen=True):
    """Why a frame was not let in."""

    reason: str


class AlreadyLanded(msgspec.Struct, frozen=True):
    """The number landed before: acknowledge it again and throw the bytes away."""


class Arrival(NamedTuple):
    """All bytes of a visit are here: how to commit them, and their sum as found here and as told by the writer."""

    commit: Callable[[], None]
    found: int
    told: int


class LandedNumbers:
    """A set of numbers, small when they come nearly in order: all below `floor`, and some above it."""

    def __init__(self) -> None:
        self.floor = 0
        self.ahead: set[int] = set()

    def __contains__(self, number: int) -> bool:
        return 0 <= number < self.floor or number in self.ahead

    def can_add(self, number: int) -> bool:
        return number == self.floor or len(self.ahead) < MAX_LANDED_AHEAD

    def add(self, number: int) -> None:
        self.ahead.add(number)
        while self.floor in self.ahead:
            self.ahead.remove(self.floor)
            self.floor += 1


class _Grant:
    def __init__(self, peer: WorkerId, segments: SegmentSet) -> None:
        self.peer = peer
        self.segments = segments
        self.landed = LandedNumbers()
        self.is_revoked = False
        self.visits: set[Visit] = set()


class GrantTable:
    """Grants of one arena by key. Thread-safe; posts WriteLanded and GrantFenced."""

    def __init__(self, arena_bytes: int, outbox: Outbox) -> None:
        self._arena_bytes = arena_bytes
        self._outbox = outbox
        self._lock = threading.Lock()
        self._grants: dict[bytes, _Grant] = {}

    def grant(self, peer: WorkerId, key: bytes, segments: Sequence[Segment]) -> None:
        """Open a grant. Raises InternalFault for a key in use or a segment outside the arena."""
        outside = SegmentSet([Segment(0, self._arena_bytes)]).first_outside(segments)
        if outside is not None:
            raise InternalFault(f"{outside} is outside the arena of {self._arena_bytes} bytes; grant own blocks only")
        merged = SegmentSet(segments)
        with self._lock:
            if key in self._grants:
                raise InternalFault(
                    f"key {shown(key)} is granted already or not fenced yet; draw a fresh key per grant"
                )
            self._grants[key] = _Grant(peer, merged)

    def enter(
        self,
        peer: WorkerId,
        key: bytes,
        number: int,
        tag: bytes,
        destination: Sequence[Segment],
        num_bytes: int,
        eject: Callable[[], None],
    ) -> Visit | AlreadyLanded | Refused:
        """Ask for a frame of `num_bytes` to be let in; a visit returned must be ended by leave()."""
        total = total_bytes(destination)
        if total != num_bytes:
            return Refused(f"payload of {num_bytes} bytes for destination segments of {total}; they must be equal")
        with self._lock:
            grant = self._grants.get(key)
            if grant is None or grant.is_revoked or grant.peer != peer:
                # One answer for all three, so that a stranger cannot probe for keys.
                return Refused(f"key {shown(key)} is not granted to {peer}; ask for a new grant")
            if number in grant.landed:
                return AlreadyLanded()
            if not grant.landed.can_add(number):
                return Refused(f"write {number} is too far ahead: {MAX_LANDED_AHEAD} landed above {grant.landed.floor}")
            visit = Visit(peer, key, number, tag, num_bytes, eject)
            grant.visits.add(visit)
        # Searching many segments is slow; the visit already holds the fence, so the lock is not needed.
        outside = grant.segments.first_outside(destination)
        if outside is None:
            return visit
        self.leave(visit)
        return Refused(f"{outside} is outside the segments granted under key {shown(key)}; write only into those")

    def can_commit(self, visit: Visit) -> bool:
        """Whether the grant still stands."""
        with self._lock:
            return not self._grants[visit.key].is_revoked

    def leave(self, visit: Visit, *, landed: bool = False, failure: str | None = None) -> None:
        """End a visit: landed and committed; or wrong (failure); or, with neither, as if it had never come."""
        with self._lock:
            grant = self._grants[visit.key]
            grant.visits.remove(visit)
            if landed:
                grant.landed.add(visit.number)
            if landed or failure is not None:
                told = None if landed else failure
                self._outbox.put(WriteLanded(visit.peer, visit.key, visit.number, visit.tag, visit.num_bytes, told))
            if grant.is_revoked and not grant.visits:
                self._fence(visit.key)
        self._outbox.flush()

    def settle(self, visit: Visit, arrive: Callable[[], Arrival]) -> str | None:
        """See a visit through. Returns why it did not land, or None; passes on what arrive() raises.

        arrive() returns when all bytes are there. They are committed when the sums agree and the grant still stands.
        """
        landed, wrong = False, None
        try:
            commit, found, told = arrive()
            if found != told:
                wrong = f"write {visit.number} is here with checksum {found:08x}, not {told:08x}; resend it"
                return wrong
            if not self.can_commit(visit):
                return f"key {shown(visit.key)} was revoked while write {visit.number} was under way"
            commit()
            landed = True
            return None
        finally:
            self.leave(visit, landed=landed, failure=wrong)

    def revoke(self, key: bytes) -> tuple[Visit, ...]:
        """Let nobody in any more. Returns the visits that GrantFenced still waits for."""
        with self._lock:
            grant = self._grants.get(key)
            visits: tuple[Visit, ...] = ()
            if grant is None:
                self._outbox.put(GrantFenced(key))
            elif not grant.is_revoked:
                grant.is_revoked = True
                visits = tuple(grant.visits)
                if not visits:
                    self._fence(key)
        self._outbox.flush()
        return visits

    def eject(self, visit: Visit) -> None:
        """End a visit that has outstayed its fence; nothing happens when it has left."""
        with self._lock:
            grant = self._grants.get(visit.key)
            is_inside = grant is not None and visit in grant.visits
        if is_inside:
            visit.eject()

    def check_invariants(self) -> None:
        with self._lock:
            for key, grant in self._grants.items():
                grant.segments.check_invariants()
                assert grant.segments.stop <= self._arena_bytes, f"grant {shown(key)} reaches past the arena"
                assert not grant.is_revoked or grant.visits, f"grant {shown(key)} is revoked, empty and not fenced"
                assert all(visit.key == key and visit.peer == grant.peer for visit in grant.visits)
                assert grant.landed.floor not in grant.landed.ahead, "landed numbers are not folded"
                assert len(grant.landed.ahead) <= MAX_LANDED_AHEAD

    def _fence(self, key: bytes) -> None:
        del self._grants[key]
        self._outbox.put(GrantFenced(key))

"""Whose turn it is when there is room again, among hand-offs whose reservation was refused here.

The higher priority first, then the tenant that has had least (`policy/fairness.py`), then the oldest. One is told at a
time and has a moment to ask; nothing is kept for it, so nobody waits while holding. Whoever is refused once more is
listed once more.
"""

import heapq

from disagg.core.errors import InternalFault
from disagg.core.ids import HandoffId
from disagg.policy.fairness import TenantService
from disagg.protocol.handoff import DestinationState
from disagg.scheduler.destination import HandoffDestination
from disagg.scheduler.sequence import Sequence

_Class = tuple[int, str]  # (-priority, tenant)


class RoomOffers:
    """Of one worker. `sequences` is the worker's own table of them."""

    def __init__(self, sequences: dict[HandoffId, Sequence], tenants: TenantService) -> None:
        self._sequences = sequences
        self._tenants = tenants
        # Heaps by arrival; who has ended leaves one at the front. None is empty.
        self._refused: dict[_Class, list[tuple[int, HandoffId]]] = {}
        self._told: HandoffId | None = None
        self._told_until_s = 0.0

    def refuse(self, sequence: Sequence, destination: HandoffDestination) -> None:
        """There was no room for it."""
        if not destination.awaits_room:
            heapq.heappush(self._refused.setdefault(_class_of(sequence), []), (sequence.arrival, sequence.attempt_id))
        destination.awaits_room = True

    def asked(self, handoff_id: HandoffId) -> None:
        """A source asks."""
        if self._told == handoff_id:
            self._told = None

    def next_sequences(self, now_s: float) -> list[Sequence]:
        """The oldest of each priority and tenant, in turn; nobody while one that was told may still ask."""
        if self._is_told(now_s):
            return []
        return sorted(self._oldest(), key=self._turn)

    def tell(self, sequence: Sequence, destination: HandoffDestination, until_s: float) -> None:
        """One of next_sequences() is told, and has until then."""
        of_class = _class_of(sequence)
        heapq.heappop(self._refused[of_class])
        if not self._refused[of_class]:
            del self._refused[of_class]
        destination.awaits_room = False
        self._told, self._told_until_s = sequence.attempt_id, until_s

    def next_due_s(self, now_s: float) -> float:
        """When the next one is to be told although who was told has not asked; infinity for never."""
        return self._told_until_s if self._is_told(now_s) and self._oldest() else float("inf")

    def _oldest(self) -> list[Sequence]:
        """Of each class."""
        found: list[Sequence] = []
        for of_class, refused in list(self._refused.items()):
            while refused:
                sequence = self._sequences.get(refused[0][1])
                if sequence is not None and _awaits_room(sequence):
                    found.append(sequence)
                    break
                heapq.heappop(refused)
            else:
                del self._refused[of_class]
        return found

    def _turn(self, sequence: Sequence) -> tuple[int, float, int]:
        return -sequence.spec.priority, self._tenants.had(sequence.spec.tenant), sequence.arrival

    def _is_told(self, now_s: float) -> bool:
        sequence = self._sequences.get(self._told) if self._told is not None and now_s < self._told_until_s else None
        destination = sequence.destination if sequence is not None else None
        return destination is not None and destination.state is DestinationState.EXPECTED

    def check_invariants(self) -> None:
        """Raises InternalFault when a refused hand-off would not be told of room."""
        listed = [each for refused in self._refused.values() for each in refused]
        if len(set(listed)) != len(listed) or not all(self._refused.values()):
            raise InternalFault("a refused hand-off is listed twice, or a class of none")
        for handoff_id, sequence in self._sequences.items():
            entry = (sequence.arrival, handoff_id)
            if _awaits_room(sequence) and entry not in self._refused.get(_class_of(sequence), ()):
                raise InternalFault(f"{handoff_id} waits to be told of room and is not listed")


def _class_of(sequence: Sequence) -> _Class:
    return -sequence.spec.priority, sequence.spec.tenant


def _awaits_room(sequence: Sequence) -> bool:
    destination = sequence.destination
    return destination is not None and destination.state is DestinationState.EXPECTED and destination.awaits_room

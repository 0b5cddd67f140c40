"""Whose turn it is when there is room again: hand-offs whose reservation was refused here, the oldest first.

One is told at a time and has a moment to ask; nothing is kept for it, so nobody waits while holding. Whoever is refused
once more is listed once more.
"""

import heapq

from disagg.core.errors import InternalFault
from disagg.core.ids import HandoffId
from disagg.protocol.handoff import DestinationState
from disagg.scheduler.destination import HandoffDestination
from disagg.scheduler.sequence import Sequence


class RoomOffers:
    """Of one worker. `sequences` is the worker's own table of them."""

    def __init__(self, sequences: dict[HandoffId, Sequence]) -> None:
        self._sequences = sequences
        self._refused: list[tuple[int, HandoffId]] = []  # a heap, by arrival; who has ended leaves it at the front
        self._told: HandoffId | None = None
        self._told_until_s = 0.0

    def refuse(self, sequence: Sequence, destination: HandoffDestination) -> None:
        """There was no room for it."""
        if not destination.awaits_room:
            heapq.heappush(self._refused, (sequence.arrival, sequence.attempt_id))
        destination.awaits_room = True

    def asked(self, handoff_id: HandoffId) -> None:
        """A source asks."""
        if self._told == handoff_id:
            self._told = None

    def next_sequence(self, now_s: float) -> Sequence | None:
        """Who is to be told next; None while another, who was told, may still ask."""
        return None if self._is_told(now_s) else self._oldest()

    def tell(self, sequence: Sequence, destination: HandoffDestination, until_s: float) -> None:
        """next_sequence() is told, and has until then."""
        heapq.heappop(self._refused)
        destination.awaits_room = False
        self._told, self._told_until_s = sequence.attempt_id, until_s

    def next_due_s(self, now_s: float) -> float:
        """When the next one is to be told although who was told has not asked; infinity for never."""
        return self._told_until_s if self._is_told(now_s) and self._oldest() is not None else float("inf")

    def _oldest(self) -> Sequence | None:
        while self._refused:
            sequence = self._sequences.get(self._refused[0][1])
            if sequence is not None and _awaits_room(sequence):
                return sequence
            heapq.heappop(self._refused)
        return None

    def _is_told(self, now_s: float) -> bool:
        sequence = self._sequences.get(self._told) if self._told is not None and now_s < self._told_until_s else None
        destination = sequence.destination if sequence is not None else None
        return destination is not None and destination.state is DestinationState.EXPECTED

    def check_invariants(self) -> None:
        """Raises InternalFault when a refused hand-off would not be told of room."""
        listed = set(self._refused)
        if len(listed) != len(self._refused):
            raise InternalFault("a refused hand-off is listed twice")
        for handoff_id, sequence in self._sequences.items():
            if _awaits_room(sequence) and (sequence.arrival, handoff_id) not in listed:
                raise InternalFault(f"{handoff_id} waits to be told of room and is not listed")


def _awaits_room(sequence: Sequence) -> bool:
    destination = sequence.destination
    return destination is not None and destination.state is DestinationState.EXPECTED and destination.awaits_room

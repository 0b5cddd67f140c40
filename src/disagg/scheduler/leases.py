"""When the ends of hand-offs are due, so that whoever asks for the next one looks at no other.

An end is listed under a time at which it is due or, where its lease was renewed since, at which it is looked at again:
renewing, refusing and ending change no list. What has passed is taken out when it comes to the front.
"""

import heapq

from disagg.core.errors import InternalFault
from disagg.core.ids import HandoffId
from disagg.protocol.handoff import DestinationState, SourceState
from disagg.scheduler.destination import HandoffDestination
from disagg.scheduler.sequence import Sequence
from disagg.scheduler.source import HandoffSource

End = HandoffSource | HandoffDestination

# Ends that are given up when the other end is silent. A complete destination needs nothing more of its source.
LEASED_SOURCE = (SourceState.ASKING, SourceState.OPEN, SourceState.DRAINING, SourceState.DELIVERED)
LEASED_DESTINATION = (DestinationState.EXPECTED, DestinationState.RECEIVING)

_NEVER = float("inf")


class Leases:
    """Of one worker. `sequences` is the worker's own table of them."""

    def __init__(self, sequences: dict[HandoffId, Sequence]) -> None:
        self._sequences = sequences
        self._due: list[tuple[float, HandoffId]] = []  # a heap
        self._listed_s: dict[HandoffId, float] = {}  # the earliest time in it
        self._retries: list[tuple[float, HandoffId]] = []  # a heap: when refused sources ask again

    def lease(self, end: End, until_s: float) -> None:
        """It is given up then, unless it is leased anew or needs no lease any more."""
        end.lease_until_s = until_s
        if until_s < self._listed_s.get(end.handoff_id, _NEVER):
            self._listed_s[end.handoff_id] = until_s
            heapq.heappush(self._due, (until_s, end.handoff_id))

    def retry(self, source: HandoffSource, at_s: float) -> None:
        """A refused source may ask again then."""
        source.lease_until_s = _NEVER
        source.retry_at_s = at_s
        heapq.heappush(self._retries, (at_s, source.handoff_id))

    def next_due_s(self) -> float:
        """When the next end is given up; infinity for never."""
        while self._due:
            listed_s, handoff_id = self._due[0]
            until_s = self._until_s(handoff_id)
            if until_s == listed_s == self._listed_s.get(handoff_id):
                return until_s
            self._take_out(until_s)
        return _NEVER

    def take_due(self, now_s: float) -> list[HandoffId]:
        """Ends whose lease is over."""
        due: list[HandoffId] = []
        while self.next_due_s() <= now_s:
            due.append(self._due[0][1])
            self._take_out(_NEVER)
        return due

    def next_retry_s(self, now_s: float) -> float:
        """When the next refused source may ask again, after now; infinity for never."""
        while self._retries and not self._is_refused(*self._retries[0], now_s):
            heapq.heappop(self._retries)
        return self._retries[0][0] if self._retries else _NEVER

    def _take_out(self, until_s: float) -> None:
        """The front; its end is listed anew if it is leased until later."""
        listed_s, handoff_id = heapq.heappop(self._due)
        if self._listed_s.get(handoff_id) != listed_s:
            return  # it is listed under an earlier time, or was
        del self._listed_s[handoff_id]
        if until_s < _NEVER:
            self._listed_s[handoff_id] = until_s
            heapq.heappush(self._due, (until_s, handoff_id))

    def _until_s(self, handoff_id: HandoffId) -> float:
        """The end's lease as it is now; infinity where it needs none."""
        sequence = self._sequences.get(handoff_id)
        end = leased_end(sequence) if sequence is not None else None
        return end.lease_until_s if end is not None else _NEVER

    def _is_refused(self, at_s: float, handoff_id: HandoffId, now_s: float) -> bool:
        sequence = self._sequences.get(handoff_id)
        source = sequence.source if sequence is not None else None
        is_queued = source is not None and source.state is SourceState.QUEUED and source.retry_at_s == at_s
        return is_queued and at_s > now_s

    def check_invariants(self, now_s: float) -> None:
        """Raises InternalFault when an end would not be given up in time: others would wait for it for ever."""
        if not {(listed_s, handoff_id) for handoff_id, listed_s in self._listed_s.items()} <= set(self._due):
            raise InternalFault("an end is taken for listed and is not")
        retries = set(self._retries)
        for handoff_id, sequence in self._sequences.items():
            end = leased_end(sequence)
            if end is not None and end.lease_until_s < self._listed_s.get(handoff_id, _NEVER):
                raise InternalFault(f"the lease of {handoff_id} ends at {end.lease_until_s}, it is listed later")
            source = sequence.source
            is_to_ask = source is not None and source.state is SourceState.QUEUED and source.retry_at_s > now_s
            if source is not None and is_to_ask and (source.retry_at_s, handoff_id) not in retries:
                raise InternalFault(f"{handoff_id} was refused and is not listed to ask again")


def leased_end(sequence: Sequence) -> End | None:
    """The end of a hand-off that would be given up if the other one were silent."""
    source, destination = sequence.source, sequence.destination
    if source is not None and source.state in LEASED_SOURCE:
        return source
    if destination is not None and destination.state in LEASED_DESTINATION:
        return destination
    return None

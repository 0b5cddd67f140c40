"""Which sequences have a first step that began before all of their KV was here."""

from collections.abc import Iterator

from disagg.core.errors import InternalFault
from disagg.policy.partial_start import PartialOutcome
from disagg.scheduler.partial_step import PartialStep
from disagg.scheduler.sequence import Sequence
from disagg.telemetry.counters import Counters
from disagg.telemetry.metrics import PARTIAL_STARTS


class BegunSteps:
    """In order of their beginnings. Counts what becomes of each."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._sequences: dict[int, Sequence] = {}  # by arrival

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def __len__(self) -> int:
        return len(self._sequences)

    def add(self, sequence: Sequence) -> PartialStep:
        sequence.partial = PartialStep(f"{sequence.attempt_id}")
        self._sequences[sequence.arrival] = sequence
        return sequence.partial

    def end(self, sequence: Sequence, outcome: PartialOutcome | None = None) -> None:
        """It is over; None where that has been counted."""
        sequence.partial = None
        del self._sequences[sequence.arrival]
        if outcome is not None:
            self._counters.add(PARTIAL_STARTS, label=outcome.value)

    def give_up(self, sequence: Sequence, outcome: PartialOutcome) -> None:
        """Throw away what was begun, if anything was; what is in the engine ends when that is back."""
        if sequence.partial is None:
            return
        sequence.partial.give_up(is_in_engine=sequence.is_in_step)
        if sequence.is_in_step:
            self._counters.add(PARTIAL_STARTS, label=outcome.value)
        else:
            self.end(sequence, outcome)

    def check_invariants(self) -> None:
        for sequence in self:
            destination = sequence.destination
            if sequence.partial is None or destination is None:
                raise InternalFault(f"{sequence.attempt_id} is listed with a first step that it does not have")
            sequence.partial.check_invariants(destination.layers_here(), is_in_engine=sequence.is_in_step)

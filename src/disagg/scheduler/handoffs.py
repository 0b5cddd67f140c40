"""What peers say about hand-offs, and the leases that keep both ends honest."""

from collections.abc import Callable

from disagg.core.errors import Failure, FailureKind
from disagg.core.ids import HandoffId, WorkerId
from disagg.protocol.handoff import DestinationState, SourceState
from disagg.protocol.lifecycle import SequenceState
from disagg.protocol.messages import (
    AnswerReservation,
    CancelHandoff,
    FinishPrefill,
    RenewLeases,
    RequestReservation,
    TakeHandoff,
    WorkerToWorker,
)
from disagg.scheduler.destination import HandoffDestination
from disagg.scheduler.receiving import Receiving
from disagg.scheduler.sending import Sending
from disagg.scheduler.source import HandoffSource
from disagg.scheduler.state import SchedulerState

# Ends that are given up when the other end is silent. A complete destination needs nothing more of its source.
_LEASED_SOURCE = (SourceState.ASKING, SourceState.OPEN, SourceState.DRAINING, SourceState.DELIVERED)
_LEASED_DESTINATION = (DestinationState.EXPECTED, DestinationState.RECEIVING)
# A source that still queues holds nothing, but its destination expects to hear of it.
_RENEWING_SOURCE = (SourceState.QUEUED, *_LEASED_SOURCE)
# The many that decode need nobody.
_STATES_WITH_PEER = (
    SequenceState.WAITING,
    SequenceState.PREFILLING,
    SequenceState.RECEIVING,
    SequenceState.HANDING_OFF,
)

End = HandoffSource | HandoffDestination


class Handoffs:
    """Both sides, and what belongs to both."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self.sending = Sending(state)
        self.receiving = Receiving(state)
        self._renew_at_s = 0.0
        self._on_message: dict[type, Callable[..., None]] = {
            RequestReservation: self.receiving.on_request_reservation,
            AnswerReservation: self.sending.on_answer_reservation,
            FinishPrefill: self.receiving.on_finish_prefill,
            TakeHandoff: self.sending.on_take_handoff,
            CancelHandoff: self._on_cancel_handoff,
            RenewLeases: self._on_renew_leases,
        }

    def on_message(self, peer: WorkerId, message: WorkerToWorker) -> None:
        handler = self._on_message.get(type(message))
        if handler is None:
            self._state.ignore(message)
        else:
            handler(peer, message)

    def num_open(self) -> int:
        """Hand-offs under way, both ends."""
        return len(self._leased())

    def _leased(self) -> list[End]:
        return self._ends(_LEASED_SOURCE, _LEASED_DESTINATION)

    def _ends(self, source_states: tuple[SourceState, ...], states: tuple[DestinationState, ...]) -> list[End]:
        ends: list[End] = []
        for sequence in self._state.in_state(*_STATES_WITH_PEER):
            if sequence.source is not None and sequence.source.state in source_states:
                ends.append(sequence.source)
            if sequence.destination is not None and sequence.destination.state in states:
                ends.append(sequence.destination)
        return ends

    def on_clock(self) -> None:
        """Renew what we want, give up what nobody renewed."""
        state = self._state
        for end in self._leased():
            if end.lease_until_s <= state.now_s:
                text = f"nothing was heard of hand-off {end.handoff_id} from {end.peer} for {state.config.lease_s} s"
                state.fail(state.sequences[end.handoff_id], Failure(FailureKind.LEASE_EXPIRED, text))
        if state.now_s < self._renew_at_s:
            return
        by_peer: dict[WorkerId, list[HandoffId]] = {}
        for end in self._ends(_RENEWING_SOURCE, _LEASED_DESTINATION):
            by_peer.setdefault(end.peer, []).append(end.handoff_id)
        for peer, handoff_ids in by_peer.items():
            state.tell(peer, RenewLeases(tuple(handoff_ids), state.config.lease_s))
        for sequence in state.sequences.values():
            if sequence.source is not None:
                self.sending.repeat(sequence, sequence.source)
        self._renew_at_s = state.now_s + state.config.lease_s / 3

    def next_wake_s(self) -> float:
        """When on_clock has something to do, or a refused reservation may be asked again; infinity for never."""
        state, wake_s = self._state, float("inf")
        if not state.has_any(_STATES_WITH_PEER):  # nearly always, where many decode
            return wake_s
        for sequence in state.in_state(*_STATES_WITH_PEER):
            source, destination = sequence.source, sequence.destination
            if source is not None and source.state in _RENEWING_SOURCE:
                wake_s = min(wake_s, self._renew_at_s)
                if source.state in _LEASED_SOURCE:
                    wake_s = min(wake_s, source.lease_until_s)
                if source.retry_at_s > state.now_s and sequence.state is SequenceState.WAITING:
                    wake_s = min(wake_s, source.retry_at_s)
            if destination is not None and destination.state in _LEASED_DESTINATION:
                wake_s = min(wake_s, self._renew_at_s, destination.lease_until_s)
        return wake_s

    def _on_cancel_handoff(self, peer: WorkerId, message: CancelHandoff) -> None:
        sequence = self._state.sequences.get(message.handoff_id)
        end = (sequence.source or sequence.destination) if sequence is not None else None
        if sequence is None or end is None or end.fence != message.fence or end.peer != peer:
            self._state.ignore(message)
        elif not (sequence.is_live and sequence.needs_peer):
            self._state.ignore(message)  # dropped already, or ours by now
        else:
            self._state.fail(sequence, message.failure)

    def _on_renew_leases(self, peer: WorkerId, message: RenewLeases) -> None:
        for handoff_id in message.handoff_ids:
            sequence = self._state.sequences.get(handoff_id)
            for end in (sequence.source, sequence.destination) if sequence is not None else ():
                if end is not None and end.peer == peer:
                    end.lease_until_s = self._state.now_s + min(message.lease_s, self._state.config.lease_s)

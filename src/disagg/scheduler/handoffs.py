"""What peers say about hand-offs, and the leases that keep both ends honest."""

from collections.abc import Callable, Iterator

from disagg.core.errors import Failure, FailureKind
from disagg.core.ids import HandoffId, WorkerId
from disagg.core.roles import Task
from disagg.protocol.handoff import SourceState
from disagg.protocol.lifecycle import SequenceState
from disagg.protocol.messages import (
    AnswerReservation,
    CancelHandoff,
    FinishPrefill,
    OfferReservation,
    RenewLeases,
    RequestReservation,
    TakeHandoff,
    WorkerToWorker,
)
from disagg.scheduler.closing import Closing
from disagg.scheduler.leases import LEASED_SOURCE, End, leased_end
from disagg.scheduler.receiving import Receiving
from disagg.scheduler.sending import Sending
from disagg.scheduler.sequence import Sequence
from disagg.scheduler.state import SchedulerState

# A source that still queues holds nothing, but its destination expects to hear of it.
_RENEWING_SOURCE = (SourceState.QUEUED, *LEASED_SOURCE)
# The many that decode need nobody.
_STATES_WITH_PEER = (
    SequenceState.WAITING,
    SequenceState.PREFILLING,
    SequenceState.RECEIVING,
    SequenceState.HANDING_OFF,
)


class Handoffs:
    """Both sides, and what belongs to both."""

    def __init__(self, state: SchedulerState, closing: Closing) -> None:
        self._state = state
        self._closing = closing
        self.sending = Sending(state, closing)
        self.receiving = Receiving(state, closing)
        self._renew_at_s = 0.0
        self._on_message: dict[type, Callable[..., None]] = {
            RequestReservation: self.receiving.on_request_reservation,
            AnswerReservation: self.sending.on_answer_reservation,
            OfferReservation: self.sending.on_offer_reservation,
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
        return sum(1 for sequence in self._with_peer() if leased_end(sequence) is not None)

    def _with_peer(self) -> Iterator[Sequence]:
        return self._state.table.in_state(*_STATES_WITH_PEER)

    def on_clock(self) -> None:
        """Renew what we want, give up what nobody renewed."""
        state = self._state
        for handoff_id in state.leases.take_due(state.now_s):
            sequence = state.sequences[handoff_id]
            leased = leased_end(sequence)
            if leased is not None:
                text = f"nothing was heard of hand-off {handoff_id} from {leased.peer} for {state.config.lease_s} s"
                self._closing.fail(sequence, Failure(FailureKind.LEASE_EXPIRED, text))
        if state.now_s < self._renew_at_s:
            return
        by_peer: dict[WorkerId, list[HandoffId]] = {}
        for end in map(_renewing_end, list(self._with_peer())):
            if end is not None:
                by_peer.setdefault(end.peer, []).append(end.handoff_id)
        for peer, handoff_ids in by_peer.items():
            state.tell(peer, RenewLeases(tuple(handoff_ids), state.config.lease_s))
        for sequence in state.sequences.values():
            if sequence.source is not None:
                self.sending.repeat(sequence, sequence.source)
        self._renew_at_s = state.now_s + state.config.lease_s / 3

    def next_wake_s(self) -> float:
        """When the clock decides something: leases, questions to ask again, offers not used; infinity for never."""
        leases, now_s = self._state.leases, self._state.now_s
        wake_s = min(leases.next_due_s(), leases.next_retry_s(now_s), self.receiving.next_offer_s())
        return min(wake_s, self._renew_at_s) if self._has_to_renew() else wake_s

    def _has_to_renew(self) -> bool:
        """Whether there is an end that the other one is to hear of now and then."""
        table = self._state.table
        if table.asking or table.waiting(Task.PREFILL) or table.waiting(Task.DECODE):
            return True
        for sequence in table.in_state(SequenceState.PREFILLING, SequenceState.RECEIVING, SequenceState.HANDING_OFF):
            if _renewing_end(sequence) is not None:
                return True
        return False

    def _on_cancel_handoff(self, peer: WorkerId, message: CancelHandoff) -> None:
        sequence = self._state.sequences.get(message.handoff_id)
        end = (sequence.source or sequence.destination) if sequence is not None else None
        if sequence is None or end is None or end.fence != message.fence or end.peer != peer:
            self._state.ignore(message)
        elif not (sequence.is_live and sequence.needs_peer):
            self._state.ignore(message)  # dropped already, or ours by now
        else:
            self._closing.fail(sequence, message.failure)

    def _on_renew_leases(self, peer: WorkerId, message: RenewLeases) -> None:
        state, own_s = self._state, self._state.config.lease_s
        lease_s = min(own_s, max(0.0, message.lease_s))  # in this order, so that what is no number is 0
        wanted: list[HandoffId] = []
        for handoff_id in message.handoff_ids:
            sequence = state.sequences.get(handoff_id)
            if sequence is None:
                continue
            for end in (sequence.source, sequence.destination):
                if end is not None and end.peer == peer:
                    state.leases.lease(end, state.now_s + lease_s)
            renewing = _renewing_end(sequence)
            if renewing is not None and renewing.peer == peer:
                wanted.append(handoff_id)
        # A peer with a shorter lease would give up before it is our turn to renew: it hears of us whenever it speaks.
        if wanted and lease_s < own_s:
            state.tell(peer, RenewLeases(tuple(wanted), own_s))


def _renewing_end(sequence: Sequence) -> End | None:
    """The end that tells its peer that it is still there."""
    source = sequence.source
    if source is not None and source.state in _RENEWING_SOURCE:
        return source
    return leased_end(sequence)

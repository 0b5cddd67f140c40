"""The destination side of a worker's hand-offs: reserve, let bytes land, take over once all is verified and fenced."""

from disagg.core.errors import Failure, FailureKind
from disagg.core.ids import HandoffId, WorkerId
from disagg.core.request import EmittedToken
from disagg.core.roles import FirstToken, PartialStart
from disagg.kvcache.conversion import shared_heads
from disagg.policy.partial_start import PartialOutcome
from disagg.protocol.handoff import DestinationState, DestinationTrigger
from disagg.protocol.lifecycle import SequenceTrigger
from disagg.protocol.messages import (
    AnswerReservation,
    CancelHandoff,
    FinishPrefill,
    OfferReservation,
    RequestReservation,
    TakeHandoff,
)
from disagg.scheduler.actions import OpenGrant, RevokeGrant
from disagg.scheduler.closing import Closing
from disagg.scheduler.destination import HandoffDestination
from disagg.scheduler.events import GrantFenced, WriteLanded
from disagg.scheduler.room_offers import RoomOffers
from disagg.scheduler.sequence import Sequence
from disagg.scheduler.state import SchedulerState
from disagg.telemetry.metrics import (
    HANDOFFS,
    LANDINGS_REJECTED,
    PARTIAL_STARTS,
    PROMPT_TOKENS_RECEIVED,
    RESERVATIONS_REFUSED,
)
from disagg.telemetry.stages import Stage


class Receiving:
    """Every hand-off that comes to this worker."""

    def __init__(self, state: SchedulerState, closing: Closing) -> None:
        self._state = state
        self._closing = closing
        self._offers = RoomOffers(state.sequences, state.tenants)

    def on_request_reservation(self, peer: WorkerId, message: RequestReservation) -> None:
        sequence, destination = self.find(message.handoff_id)
        self._offers.asked(message.handoff_id)
        if sequence is None or destination is None or not destination.is_of(peer, message.fence):
            answer = self._refuse(message, FailureKind.CANCELLED, f"hand-off {message.handoff_id} is not expected here")
        elif destination.state is DestinationState.RECEIVING and destination.answer is not None:
            answer = destination.answer  # the source has missed it
        elif destination.state is not DestinationState.EXPECTED:
            text = f"hand-off {message.handoff_id} is {destination.state.value} here"
            answer = self._refuse(message, FailureKind.CANCELLED, text)
        elif message.num_tokens != sequence.num_to_read:
            text = f"{message.num_tokens} tokens offered, the sequence has {sequence.num_to_read}"
            answer = self._refuse(message, FailureKind.INVALID_REQUEST, text)
        else:
            answer = self._try_reserve(sequence, destination, message)
        if answer.failure is not None:
            self._state.counters.add(RESERVATIONS_REFUSED, label=answer.failure.kind.value)
        self._state.tell(peer, answer)

    def _refuse(self, message: RequestReservation, kind: FailureKind, text: str) -> AnswerReservation:
        config = self._state.config
        # Where room is lacking, the source is told when there is some.
        retry_s = config.lease_s / 3 if kind is FailureKind.OVERLOADED else config.retry_s
        return AnswerReservation(message.handoff_id, message.fence, Failure(kind, text), retry_s)

    def _try_reserve(
        self, sequence: Sequence, destination: HandoffDestination, message: RequestReservation
    ) -> AnswerReservation:
        state, config, num_tokens = self._state, self._state.config, message.num_tokens
        hashes = state.extend_hashes(sequence, num_tokens)
        to_hold = sequence.num_tokens_to_hold(config.answer_headroom)
        allocation = None
        if self._may_have_blocks(sequence):
            allocation = state.cache.try_reserve(hashes, num_tokens, to_hold, state.num_spare_blocks)
        if allocation is None:
            state.refuse(sequence)
            self._offers.refuse(sequence, destination)
            text = f"{state.cache.num_available} of {config.num_blocks} blocks are free or cached now"
            return self._refuse(message, FailureKind.OVERLOADED, text)
        first_missing = min(allocation.num_cached * state.cache.block_size, num_tokens)
        theirs = state.peers[destination.peer].layout
        destination.reserve(allocation, first_missing, num_tokens, config.layout, shared_heads(theirs, config.layout))
        state.tenants.charge(sequence.spec.tenant, to_hold, state.now_s)
        state.leases.lease(destination, state.now_s + config.lease_s)
        state.move(sequence, SequenceTrigger.BLOCKS_RESERVED)
        sequence.num_cached = first_missing
        state.count_lookup(sequence)
        state.act(OpenGrant(destination.grant_key, destination.peer, allocation.reserved))
        destination.answer = AnswerReservation(
            handoff_id=message.handoff_id,
            fence=message.fence,
            blocks=allocation.blocks[: state.cache.num_blocks_for(num_tokens)],
            first_missing_token=first_missing,
            grant_key=destination.grant_key,
            num_blocks=config.num_blocks,
        )
        return destination.answer

    def _may_have_blocks(self, sequence: Sequence) -> bool:
        """Whether it may have blocks if there are any."""
        return not self._state.is_full() and not self._state.would_overtake(sequence)

    def offer_room(self) -> None:
        """Tell the source of the refused hand-off whose turn it is once that fits; those behind it wait."""
        state = self._state
        for sequence in self._offers.next_sequences(state.now_s):
            destination = sequence.destination
            if destination is None or not self._may_have_blocks(sequence):
                continue
            to_hold = sequence.num_tokens_to_hold(state.config.answer_headroom)
            if state.cache.can_reserve(sequence.hashes, sequence.num_to_read, to_hold, state.num_spare_blocks):
                self._offers.tell(sequence, destination, state.now_s + state.config.retry_s)
                state.tell(destination.peer, OfferReservation(destination.handoff_id, destination.fence))
            return

    def next_offer_s(self) -> float:
        """When offer_room() may have something to tell although nothing has happened; infinity for never."""
        return self._offers.next_due_s(self._state.now_s)

    def check_invariants(self) -> None:
        self._offers.check_invariants()

    def on_write_landed(self, event: WriteLanded) -> None:
        sequence, destination = self.find(event.handoff_id)
        if sequence is None or destination is None or destination.state is not DestinationState.RECEIVING:
            self._state.ignore(event)
        elif event.failure is not None:
            self._state.counters.add(LANDINGS_REJECTED)  # the source sends it again
        else:
            destination.land(event.span)
            self._complete_if_all_here(destination)

    def on_finish_prefill(self, peer: WorkerId, message: FinishPrefill) -> None:
        sequence, destination = self.find(message.handoff_id)
        is_mine = destination is not None and destination.is_of(peer, message.fence)
        is_over = sequence is None or destination is None or not sequence.is_live or destination.is_prefill_finished
        if sequence is None or destination is None or not is_mine or is_over:
            self._state.ignore(message)
            self._answer_repeat(peer, message, destination)
            return
        if not self._is_first_token_right(sequence, message.first_token):
            text = f"{peer} finished with the token {message.first_token}, which is not the next of this answer"
            self._closing.fail(sequence, Failure(FailureKind.TRANSFER_FAILED, text))
            return
        destination.finish_prefill(message)
        self._state.stages.enter(sequence, Stage.TRANSFER, self._state.now_s)
        self._complete_if_all_here(destination)

    def _answer_repeat(self, peer: WorkerId, message: FinishPrefill, destination: HandoffDestination | None) -> None:
        """The source has not heard what became of the hand-off."""
        is_here = destination is not None and destination.state in (DestinationState.COMPLETE, DestinationState.CLOSED)
        if is_here or (destination is None and self._state.has_taken(message.handoff_id)):
            self._state.tell(peer, TakeHandoff(message.handoff_id, message.fence))
        elif destination is None:
            failure = Failure(FailureKind.CANCELLED, f"hand-off {message.handoff_id} is not known here")
            self._state.tell(peer, CancelHandoff(message.handoff_id, message.fence, failure))

    def _is_first_token_right(self, sequence: Sequence, token: EmittedToken) -> bool:
        return token.sequence_id == sequence.sequence_id and token.position == len(sequence.answer_ids)

    def on_grant_fenced(self, event: GrantFenced) -> None:
        sequence, destination = self.find(event.handoff_id)
        states = (DestinationState.COMPLETE, DestinationState.FENCING)
        if sequence is None or destination is None or destination.state not in states:
            self._state.ignore(event)
            return
        if destination.state is DestinationState.COMPLETE:
            destination.machine.fire(DestinationTrigger.GRANT_FENCED)
            self._take_over(sequence, destination)
        else:
            self._closing.fence_given_up(sequence, destination)

    def _complete_if_all_here(self, destination: HandoffDestination) -> None:
        if destination.is_all_here:
            destination.machine.fire(DestinationTrigger.ALL_VERIFIED)
            self._state.tell(destination.peer, TakeHandoff(destination.handoff_id, destination.fence))
            self._state.act(RevokeGrant(destination.grant_key))

    def _take_over(self, sequence: Sequence, destination: HandoffDestination) -> None:
        """The KV is ours: decode from here."""
        state, allocation, first_token = self._state, destination.allocation, destination.first_token
        assert allocation is not None
        assert first_token is not None
        state.cache.confirm(allocation)
        sequence.blocks = allocation.blocks
        sequence.num_computed = destination.num_tokens
        state.counters.add(PROMPT_TOKENS_RECEIVED, destination.num_tokens - destination.first_missing_token)
        state.counters.add(HANDOFFS, label="received")
        if sequence.is_in_step:  # a part of its first step is reading its blocks: they stay
            state.cache.commit(sequence.hashes, sequence.blocks, sequence.num_committed)
        else:
            sequence.blocks = state.cache.commit_shared(sequence.hashes, sequence.blocks, sequence.num_committed)
        sequence.num_committed = len(sequence.hashes)
        state.move(sequence, SequenceTrigger.KV_COMPLETE)
        sequence.answer_ids.append(first_token.token_id)
        is_over = sequence.finish_reason() is not None
        self._tell_first_token(sequence, first_token, is_last=is_over)
        if sequence.partial is None:
            state.counters.add(PARTIAL_STARTS, label=self._why_whole(destination, is_over=is_over).value)
        if is_over:
            self._closing.finish(sequence)

    def _tell_first_token(self, sequence: Sequence, token: EmittedToken, *, is_last: bool) -> None:
        """The source may have sent it to the router too; should the source die, ours still arrives. Positions tell
        repeats.
        """
        state = self._state
        if state.config.first_token is FirstToken.STEADY and sequence.partial is None and not is_last:
            state.first_tokens.hold(sequence, token, state.now_s)
            return
        state.stages.report(sequence, token.position, state.now_s)
        state.emit_tokens((token,))

    def _why_whole(self, destination: HandoffDestination, *, is_over: bool) -> PartialOutcome:
        """Why its first step has not begun before all was here."""
        if self._state.config.partial_start is PartialStart.OFF:
            return PartialOutcome.OFF
        return PartialOutcome.NO_STEP if is_over else destination.why_whole

    def find(self, handoff_id: HandoffId) -> tuple[Sequence | None, HandoffDestination | None]:
        sequence = self._state.sequences.get(handoff_id)
        return sequence, sequence.destination if sequence is not None else None

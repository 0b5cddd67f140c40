"""Both ends of every hand-off of one worker: what the messages and the transport's events mean.

Reservations are try-only. Nobody waits while holding: a refused source lets go of its blocks and asks again later,
and the next sequence goes.
"""

from disagg.core.errors import Failure, FailureKind
from disagg.core.ids import HandoffId, WorkerId
from disagg.core.roles import HandoffMode, Task
from disagg.protocol.handoff import DestinationState, DestinationTrigger, SourceState, SourceTrigger
from disagg.protocol.lifecycle import SequenceState, SequenceTrigger
from disagg.protocol.messages import (
    AnswerReservation,
    CancelHandoff,
    FinishPrefill,
    RenewLeases,
    RequestReservation,
    TakeHandoff,
    WorkerToWorker,
)
from disagg.scheduler.actions import OpenGrant, PushSpan, RevokeGrant
from disagg.scheduler.destination import HandoffDestination
from disagg.scheduler.events import GrantFenced, LayersComputed, WriteFinished, WriteLanded, WritesStopped
from disagg.scheduler.sequence import Sequence
from disagg.scheduler.source import HandoffSource
from disagg.scheduler.state import SchedulerState
from disagg.telemetry.metrics import (
    HANDOFFS,
    LANDINGS_REJECTED,
    PROMPT_TOKENS_RECEIVED,
    PUSH_RETRIES,
    PUSHES,
    RESERVATIONS_REFUSED,
)

_LEASED_SOURCE = (SourceState.ASKING, SourceState.OPEN, SourceState.DRAINING, SourceState.DELIVERED)
_LEASED_DESTINATION = (DestinationState.RECEIVING, DestinationState.COMPLETE)

MAX_BACK_OFF = 4  # doublings of the wait before a refused reservation is asked again
UNKNOWN_GRACE_S = 1.0  # the router tells both ends at once: one may hear of the other first


class Handoffs:
    """The part of the scheduler that speaks with peers."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._renew_at_s = 0.0
        self._on_message = {
            RequestReservation: self._on_request_reservation,
            AnswerReservation: self._on_answer_reservation,
            FinishPrefill: self._on_finish_prefill,
            TakeHandoff: self._on_take_handoff,
            CancelHandoff: self._on_cancel_handoff,
            RenewLeases: self._on_renew_leases,
        }

    def open_ends(self) -> list[HandoffSource | HandoffDestination]:
        """Hand-offs under way, both ends."""
        ends: list[HandoffSource | HandoffDestination] = []
        for sequence in self._state.sequences.values():
            if sequence.source is not None and sequence.source.state in _LEASED_SOURCE:
                ends.append(sequence.source)
            if sequence.destination is not None and sequence.destination.state in _LEASED_DESTINATION:
                ends.append(sequence.destination)
        return ends

    def on_message(self, peer: WorkerId, message: WorkerToWorker) -> None:
        handler = self._on_message.get(type(message))
        if handler is None:
            self._state.ignore(message)
        else:
            handler(peer, message)  # type: ignore[operator]

    # --- source ------------------------------------------------------------------------------------------------

    def ask_reservation(self, sequence: Sequence) -> bool:
        """Pin or take the source's own blocks and ask the peer. False when there is no room here now."""
        state, source = self._state, sequence.source
        assert source is not None
        hashes = state.cache.extend_hashes(sequence.hashes, sequence.spec.prompt_ids)
        num_tokens = sequence.num_prompt_tokens
        if sequence.task is Task.SEND_PREFIX:
            num_tokens = state.cache.num_matching_tokens(hashes, num_tokens)
            if num_tokens == 0:
                state.fail(sequence, Failure(FailureKind.CANCELLED, "no full block of this prefix is cached here"))
                return True
            del hashes[num_tokens // state.cache.block_size :]
            allocation = state.cache.try_allocate(hashes, num_tokens, num_tokens)
        else:
            # The last prompt token is always computed: its logits give the first token of the answer.
            allocation = state.cache.try_allocate(hashes, num_tokens - 1, num_tokens)
        if allocation is None:
            return False
        sequence.blocks = allocation.blocks
        sequence.num_cached = allocation.num_cached * state.cache.block_size
        source.machine.fire(SourceTrigger.RESERVATION_REQUESTED)
        source.lease_until_s = state.now_s + state.config.lease_s
        state.tell(source.peer, RequestReservation(source.handoff_id, source.fence, num_tokens, state.config.lease_s))
        return True

    def on_layers_computed(self, event: LayersComputed, rows: tuple[tuple[Sequence, int, int], ...]) -> None:
        """rows: (sequence, first, past-the-last token of its chunk) of the running step."""
        if self._state.config.handoff_mode is not HandoffMode.LAYERWISE:
            return
        for sequence, start, stop in rows:
            source = sequence.source
            if source is None or source.state is not SourceState.OPEN:
                continue
            min_bytes = self._state.config.min_push_bytes
            self._push(source.push_layers(sequence.blocks, start, stop, event.num_layers, min_bytes))

    def finish_prefill(self, sequence: Sequence) -> None:
        """The prompt is computed: send what is still to send, and the first token."""
        state, source = self._state, sequence.source
        assert source is not None
        if state.config.handoff_mode is HandoffMode.SYNC and sequence.task is Task.PREFILL:
            self._push(source.push_computed(sequence.blocks, sequence.num_computed, state.config.max_push_bytes))
        source.machine.fire(SourceTrigger.PREFILL_FINISHED)
        sequence.machine.fire(SequenceTrigger.PROMPT_COMPUTED_FOR_PEER)
        first_token = sequence.output[0] if sequence.output else None
        state.tell(source.peer, FinishPrefill(source.handoff_id, source.fence, first_token))
        self._finish_source_if_done(sequence, source)

    def on_write_finished(self, event: WriteFinished) -> None:
        sequence, source = self._source(event.handoff_id)
        if sequence is None or source is None or not source.is_outstanding(event.number):
            self._state.ignore(event)
            return
        if event.failure is None or source.is_taken:
            source.acknowledge(event.number)
            self._finish_source_if_done(sequence, source)
        elif source.state in (SourceState.OPEN, SourceState.DRAINING):
            again = source.retry(event.number)
            if again is not None:
                self._state.counters.add(PUSH_RETRIES)
                self._state.act(again)
            else:
                self._state.fail(sequence, Failure(FailureKind.TRANSFER_FAILED, event.failure))

    def on_writes_stopped(self, event: WritesStopped) -> None:
        sequence, source = self._source(event.handoff_id)
        if sequence is None or source is None or source.state is not SourceState.STOPPING:
            self._state.ignore(event)
            return
        source.machine.fire(SourceTrigger.WRITES_STOPPED)
        self._state.end_if_unused(sequence)

    def _on_answer_reservation(self, peer: WorkerId, message: AnswerReservation) -> None:
        state = self._state
        sequence, source = self._source(message.handoff_id)
        is_expected = source is not None and source.state is SourceState.ASKING and source.fence == message.fence
        if sequence is None or source is None or not is_expected:
            state.ignore(message)
            if message.failure is None:  # nobody here wants these blocks any more
                failure = Failure(FailureKind.CANCELLED, "the source has dropped this hand-off")
                state.tell(peer, CancelHandoff(message.handoff_id, message.fence, failure))
            return
        if message.failure is not None:
            self._on_refused(sequence, source, message, message.failure)
            return
        source.grant(message)
        source.lease_until_s = state.now_s + state.config.lease_s
        sequence.machine.fire(SequenceTrigger.BLOCKS_ALLOCATED)
        sequence.num_computed = sequence.num_cached
        if state.config.handoff_mode is HandoffMode.LAYERWISE or sequence.task is Task.SEND_PREFIX:
            self._push(source.push_computed(sequence.blocks, sequence.num_cached, state.config.max_push_bytes))
        if sequence.task is Task.SEND_PREFIX:
            self.finish_prefill(sequence)

    def _on_refused(
        self, sequence: Sequence, source: HandoffSource, message: AnswerReservation, failure: Failure
    ) -> None:
        state = self._state
        source.machine.fire(SourceTrigger.RESERVATION_REFUSED)
        state.cache.release(sequence.blocks)
        sequence.blocks = ()
        source.lease_until_s = float("inf")
        wait_s = max(message.retry_after_s, state.config.retry_s) * 2 ** min(source.num_refusals, MAX_BACK_OFF)
        source.retry_at_s = state.now_s + wait_s
        source.num_refusals += 1
        if failure.kind is FailureKind.INVALID_REQUEST:
            state.fail(sequence, failure)
        elif failure.kind is FailureKind.CANCELLED:
            if source.unknown_since_s is None:
                source.unknown_since_s = state.now_s
            if state.now_s - source.unknown_since_s > UNKNOWN_GRACE_S:
                state.fail(sequence, failure)

    def _on_take_handoff(self, peer: WorkerId, message: TakeHandoff) -> None:
        sequence, source = self._source(message.handoff_id)
        if (
            sequence is None
            or source is None
            or source.fence != message.fence
            or source.state not in (SourceState.DRAINING, SourceState.DELIVERED)
        ):
            self._state.ignore(message)
            return
        source.is_taken = True
        self._finish_source_if_done(sequence, source)

    def _finish_source_if_done(self, sequence: Sequence, source: HandoffSource) -> None:
        if source.close_if_done():
            self._state.finish(sequence)

    def _push(self, pushes: list[PushSpan]) -> None:
        self._state.counters.add(PUSHES, len(pushes))
        self._state.act(*pushes)

    # --- destination -------------------------------------------------------------------------------------------

    def _on_request_reservation(self, peer: WorkerId, message: RequestReservation) -> None:
        sequence, destination = self._destination(message.handoff_id)
        if sequence is None or destination is None or destination.peer != peer or destination.fence != message.fence:
            answer = self._refuse(message, "is not expected here")
        elif destination.state is not DestinationState.EXPECTED:
            answer = self._refuse(message, f"is {destination.state.value} here")
        else:
            answer = self._try_reserve(sequence, destination, message)
        if answer.failure is not None:
            self._state.counters.add(RESERVATIONS_REFUSED, label=answer.failure.kind.value)
        self._state.tell(peer, answer)

    def _refuse(self, message: RequestReservation, why: str) -> AnswerReservation:
        failure = Failure(FailureKind.CANCELLED, f"hand-off {message.handoff_id} {why}")
        return AnswerReservation(message.handoff_id, message.fence, failure, self._state.config.retry_s)

    def _try_reserve(
        self, sequence: Sequence, destination: HandoffDestination, message: RequestReservation
    ) -> AnswerReservation:
        state, config = self._state, self._state.config
        if not 0 < message.num_tokens <= sequence.num_prompt_tokens:
            text = f"{message.num_tokens} tokens offered, the prompt has {sequence.num_prompt_tokens}"
            failure = Failure(FailureKind.INVALID_REQUEST, text)
            return AnswerReservation(message.handoff_id, message.fence, failure)
        hashes = state.cache.extend_hashes(sequence.hashes, sequence.spec.prompt_ids[: message.num_tokens])
        allocation = None
        if not state.must_wait(sequence):
            to_hold = sequence.num_tokens_to_hold if sequence.task is Task.DECODE else message.num_tokens
            allocation = state.cache.try_reserve(hashes, message.num_tokens, to_hold)
        if allocation is None:
            sequence.refused_since_s = min(sequence.refused_since_s, state.now_s)
            text = f"{state.cache.num_available} of {config.num_blocks} blocks are free or cached now"
            failure = Failure(FailureKind.OVERLOADED, text)
            return AnswerReservation(message.handoff_id, message.fence, failure, config.retry_s)
        first_missing = min(allocation.num_cached * state.cache.block_size, message.num_tokens)
        destination.reserve(allocation, first_missing, message.num_tokens, config.layout.num_layers)
        destination.lease_until_s = state.now_s + config.lease_s
        sequence.machine.fire(SequenceTrigger.BLOCKS_RESERVED)
        sequence.num_cached = first_missing
        state.act(OpenGrant(destination.grant_key, destination.peer, allocation.reserved))
        num_prompt_blocks = state.cache.num_blocks_for(message.num_tokens)
        return AnswerReservation(
            handoff_id=message.handoff_id,
            fence=message.fence,
            blocks=allocation.blocks[:num_prompt_blocks],
            first_missing_token=first_missing,
            lease_s=config.lease_s,
            grant_key=destination.grant_key,
            num_blocks=config.num_blocks,
        )

    def on_write_landed(self, event: WriteLanded) -> None:
        sequence, destination = self._destination(event.handoff_id)
        if sequence is None or destination is None or destination.state is not DestinationState.RECEIVING:
            self._state.ignore(event)
        elif event.failure is not None:
            self._state.counters.add(LANDINGS_REJECTED)  # the source sends it again
        else:
            destination.land(event.span)
            self._complete_if_all_here(destination)

    def on_grant_fenced(self, event: GrantFenced) -> None:
        sequence, destination = self._destination(event.handoff_id)
        if sequence is None or destination is None or destination.allocation is None:
            self._state.ignore(event)
            return
        was_complete = destination.state is DestinationState.COMPLETE
        destination.machine.fire(DestinationTrigger.GRANT_FENCED)
        if was_complete:
            self._take_over(sequence, destination)
        else:
            self._state.cache.unquarantine(destination.allocation.reserved)
            self._state.end_if_unused(sequence)

    def _on_finish_prefill(self, peer: WorkerId, message: FinishPrefill) -> None:
        _, destination = self._destination(message.handoff_id)
        if destination is None or destination.fence != message.fence or destination.is_prefill_finished:
            self._state.ignore(message)
            return
        destination.finish_prefill(message)
        self._complete_if_all_here(destination)

    def _complete_if_all_here(self, destination: HandoffDestination) -> None:
        if destination.is_all_here:
            destination.machine.fire(DestinationTrigger.ALL_VERIFIED)
            self._state.tell(destination.peer, TakeHandoff(destination.handoff_id, destination.fence))
            self._state.act(RevokeGrant(destination.grant_key))

    def _take_over(self, sequence: Sequence, destination: HandoffDestination) -> None:
        """The KV is ours: decode from here, or keep it for the prefix index."""
        state, allocation = self._state, destination.allocation
        assert allocation is not None
        state.cache.confirm(allocation)
        sequence.blocks = allocation.blocks
        sequence.num_computed = destination.num_tokens
        sequence.num_received = destination.num_tokens - destination.first_missing_token
        state.counters.add(PROMPT_TOKENS_RECEIVED, sequence.num_received)
        state.counters.add(HANDOFFS, label="received")
        state.cache.commit(sequence.hashes, sequence.blocks, sequence.num_committed)
        sequence.num_committed = len(sequence.hashes)
        if sequence.task is Task.RECEIVE_PREFIX or destination.first_token is None:
            state.finish(sequence)
            return
        sequence.machine.fire(SequenceTrigger.KV_COMPLETE)
        sequence.output.append(destination.first_token)
        # The source sent it to the router too; should the source die, ours still arrives. Positions tell repeats.
        state.emit_token(destination.first_token)
        if sequence.finish_reason() is not None:
            state.finish(sequence)

    # --- both ends ---------------------------------------------------------------------------------------------

    def _on_cancel_handoff(self, peer: WorkerId, message: CancelHandoff) -> None:
        sequence = self._state.sequences.get(message.handoff_id.sequence_id)
        end = (sequence.source or sequence.destination) if sequence is not None else None
        if sequence is None or end is None or end.fence != message.fence or end.peer != peer:
            self._state.ignore(message)
        elif sequence.state is SequenceState.DECODING:
            self._state.ignore(message)  # it is ours by now
        else:
            self._state.fail(sequence, message.failure)

    def _on_renew_leases(self, peer: WorkerId, message: RenewLeases) -> None:
        for handoff_id in message.handoff_ids:
            sequence = self._state.sequences.get(handoff_id.sequence_id)
            for end in (sequence.source, sequence.destination) if sequence is not None else ():
                if end is not None and end.handoff_id == handoff_id and end.peer == peer:
                    end.lease_until_s = self._state.now_s + message.lease_s

    def on_clock(self) -> None:
        """Renew what we want, give up what nobody renewed."""
        state = self._state
        for end in self.open_ends():
            if end.lease_until_s <= state.now_s:
                sequence = state.sequences[end.handoff_id.sequence_id]
                text = f"nothing was heard of hand-off {end.handoff_id} from {end.peer} for {state.config.lease_s} s"
                state.fail(sequence, Failure(FailureKind.LEASE_EXPIRED, text))
        if state.now_s < self._renew_at_s:
            return
        by_peer: dict[WorkerId, list[HandoffId]] = {}
        for end in self.open_ends():
            by_peer.setdefault(end.peer, []).append(end.handoff_id)
        for peer, handoff_ids in by_peer.items():
            state.tell(peer, RenewLeases(tuple(handoff_ids), state.config.lease_s))
        self._renew_at_s = state.now_s + state.config.lease_s / 3

    def next_wake_s(self) -> float:
        """When on_clock has something to do; infinity when nothing is held for anybody."""
        ends = self.open_ends()
        if not ends:
            return float("inf")
        return min(self._renew_at_s, *(end.lease_until_s for end in ends))

    def _source(self, handoff_id: HandoffId) -> tuple[Sequence | None, HandoffSource | None]:
        sequence = self._state.sequences.get(handoff_id.sequence_id)
        if sequence is None or sequence.source is None or sequence.source.handoff_id != handoff_id:
            return None, None
        return sequence, sequence.source

    def _destination(self, handoff_id: HandoffId) -> tuple[Sequence | None, HandoffDestination | None]:
        sequence = self._state.sequences.get(handoff_id.sequence_id)
        if sequence is None or sequence.destination is None or sequence.destination.handoff_id != handoff_id:
            return None, None
        return sequence, sequence.destination

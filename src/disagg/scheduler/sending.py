"""The source side of a worker's hand-offs: ask, push what is computed, finish, let go.

Reservations are try-only. Nobody waits while holding: a refused source lets go of its own blocks, and the
next sequence goes. It asks again when the destination says that there is room, or much later by itself.
"""

import msgspec

from disagg.core.errors import Failure, FailureKind
from disagg.core.ids import HandoffId, WorkerId
from disagg.core.request import EmittedToken
from disagg.core.roles import HandoffMode
from disagg.protocol.handoff import CAPABILITY_BYTES, SourceState, SourceTrigger, decode_grant_key
from disagg.protocol.lifecycle import SequenceTrigger
from disagg.protocol.messages import (
    AnswerReservation,
    CancelHandoff,
    FinishPrefill,
    OfferReservation,
    RequestReservation,
    TakeHandoff,
)
from disagg.scheduler.actions import PushSpan
from disagg.scheduler.closing import Closing
from disagg.scheduler.events import LayersComputed, WriteFinished, WritesStopped
from disagg.scheduler.sequence import Sequence
from disagg.scheduler.source import HandoffSource
from disagg.scheduler.state import SchedulerState
from disagg.telemetry.metrics import PUSH_RETRIES, PUSHES
from disagg.telemetry.stages import Stage

MAX_BACK_OFF = 4  # doublings of the wait before a refused reservation is asked again
UNKNOWN_GRACE_S = 1.0  # the router tells both ends at once: one may hear of the other first


class Sending:
    """Every hand-off that leaves this worker."""

    def __init__(self, state: SchedulerState, closing: Closing) -> None:
        self._state = state
        self._closing = closing

    def ask_reservation(self, sequence: Sequence, source: HandoffSource) -> bool:
        """Pin or take the source's own blocks and ask the peer. False when there is no room here now."""
        state, cache = self._state, self._state.cache
        num_tokens = sequence.num_to_read
        hashes = state.extend_hashes(sequence, num_tokens)
        allocation = cache.try_allocate(hashes, sequence.max_cached_tokens, num_tokens)
        if allocation is None:
            return False
        state.table.set_blocks(sequence, allocation.blocks)
        sequence.num_cached = allocation.num_cached * cache.block_size
        source.machine.fire(SourceTrigger.RESERVATION_REQUESTED)
        state.leases.lease(source, state.now_s + state.config.lease_s)
        state.stages.enter(sequence, Stage.RESERVATION, state.now_s)
        self._tell_request(sequence, source)
        return True

    def repeat(self, sequence: Sequence, source: HandoffSource) -> None:
        """Say again what the destination may have missed; it answers a repeat like the first time."""
        if source.state is SourceState.ASKING:
            self._tell_request(sequence, source)
        elif source.state in (SourceState.DRAINING, SourceState.DELIVERED):
            self._tell_finish(source)

    def _tell_request(self, sequence: Sequence, source: HandoffSource) -> None:
        request = RequestReservation(source.handoff_id, source.fence, sequence.num_to_read)
        self._state.tell(source.peer, request)

    def _tell_finish(self, source: HandoffSource) -> None:
        assert source.first_token is not None  # known since its prefill finished
        link = self._state.links.get(source.peer)
        bytes_per_s = link.likely_bytes_per_s if link is not None else 0.0
        self._state.tell(source.peer, FinishPrefill(source.handoff_id, source.fence, source.first_token, bytes_per_s))

    def on_layers_computed(self, event: LayersComputed, rows: tuple[tuple[Sequence, int, int], ...]) -> None:
        """rows: (sequence, first, past-the-last token of its chunk) of the running step."""
        if self._state.config.handoff_mode is not HandoffMode.LAYERWISE:
            return
        min_bytes = self._state.config.min_push_bytes
        for sequence, start, stop in rows:
            source = sequence.source
            if source is not None and source.state is SourceState.OPEN:
                self._push(source, source.push_layers(sequence.blocks, start, stop, event.num_layers, min_bytes))

    def finish_prefill(self, sequence: Sequence, source: HandoffSource, first_token: EmittedToken) -> None:
        """All is computed: send what is still to send, and the first token."""
        config = self._state.config
        if config.handoff_mode is HandoffMode.SYNC:
            self._push(source, source.push_computed(sequence.blocks, sequence.num_computed, config.max_push_bytes))
        source.first_token = first_token
        source.machine.fire(SourceTrigger.PREFILL_FINISHED)
        self._state.move(sequence, SequenceTrigger.PROMPT_COMPUTED_FOR_PEER)
        self._tell_finish(source)
        self._finish_if_done(sequence, source)

    def on_write_finished(self, event: WriteFinished) -> None:
        sequence, source = self.find(event.handoff_id)
        if sequence is None or source is None or not source.is_outstanding(event.number):
            self._state.ignore(event)
        elif event.failure is None or source.is_taken:
            num_bytes, sent_s = source.acknowledge(event.number, self._state.now_s)
            if event.failure is None:
                self._state.observe_link(source.peer, num_bytes, sent_s)
            self._finish_if_done(sequence, source)
        elif source.state in (SourceState.OPEN, SourceState.DRAINING):
            again = source.retry(event.number)
            if again is not None:
                self._state.counters.add(PUSH_RETRIES)
                source.send(again.number, self._state.now_s)
                self._state.act(again)
            else:
                self._closing.fail(sequence, Failure(FailureKind.TRANSFER_FAILED, event.failure))
        else:
            self._state.ignore(event)  # dropped: the transport's last word is WritesStopped

    def on_writes_stopped(self, event: WritesStopped) -> None:
        sequence, source = self.find(event.handoff_id)
        if sequence is None or source is None or source.state is not SourceState.STOPPING:
            self._state.ignore(event)
            return
        source.machine.fire(SourceTrigger.WRITES_STOPPED)
        self._closing.end_if_unused(sequence)

    def on_answer_reservation(self, peer: WorkerId, message: AnswerReservation) -> None:
        state = self._state
        sequence, source = self.find(message.handoff_id)
        is_expected = source is not None and source.state is SourceState.ASKING and source.is_of(peer, message.fence)
        if sequence is None or source is None or not is_expected:
            state.ignore(message)
            is_wanted = source is not None and source.is_of(peer, message.fence) and source.is_live
            if message.failure is None and not is_wanted:  # nobody here wants these blocks any more
                failure = Failure(FailureKind.CANCELLED, "the source has dropped this hand-off")
                state.tell(peer, CancelHandoff(message.handoff_id, message.fence, failure))
            return
        if message.failure is not None:
            self._on_refused(sequence, source, message, message.failure)
            return
        flaw = self._flaw(sequence, source, message)
        if flaw:
            failure = Failure(FailureKind.TRANSFER_FAILED, f"{peer} granted what cannot be: {flaw}")
            self._closing.fail(sequence, failure)
            return
        source.grant(message)
        state.leases.lease(source, state.now_s + state.config.lease_s)
        state.move(sequence, SequenceTrigger.BLOCKS_ALLOCATED)
        state.stages.enter(sequence, Stage.PREFILL_QUEUE, state.now_s)
        sequence.num_computed = sequence.num_cached
        state.count_lookup(sequence)
        if state.config.handoff_mode is HandoffMode.LAYERWISE:
            self._push(source, source.push_computed(sequence.blocks, sequence.num_cached, state.config.max_push_bytes))

    def _flaw(self, sequence: Sequence, source: HandoffSource, message: AnswerReservation) -> str:
        """What is wrong with a grant; "" when it can be used. Peers are other programs."""
        try:
            named = decode_grant_key(message.grant_key)
        except msgspec.DecodeError:
            return "a key of nothing"
        if len(named.capability) > CAPABILITY_BYTES:
            return "a key of nothing"
        if (named.handoff_id, named.fence) != (source.handoff_id, source.fence):
            return "a key of another hand-off"
        num_tokens = len(message.blocks) * self._state.peers[source.peer].layout.block_size
        if num_tokens < sequence.num_to_read or not all(0 <= block < message.num_blocks for block in message.blocks):
            return f"{len(message.blocks)} blocks of {message.num_blocks} for {sequence.num_to_read} tokens"
        if not 0 <= message.first_missing_token <= sequence.num_to_read:
            return f"first missing token {message.first_missing_token} of {sequence.num_to_read}"
        return ""

    def _on_refused(
        self, sequence: Sequence, source: HandoffSource, message: AnswerReservation, failure: Failure
    ) -> None:
        state = self._state
        source.machine.fire(SourceTrigger.RESERVATION_REFUSED)
        state.cache.release(sequence.blocks)
        state.table.set_blocks(sequence, ())
        wait_s = max(message.retry_after_s, state.config.retry_s) * 2 ** min(source.num_refusals, MAX_BACK_OFF)
        state.leases.retry(source, state.now_s + wait_s)
        source.num_refusals += 1
        if failure.kind is FailureKind.INVALID_REQUEST:
            self._closing.fail(sequence, failure)
        elif failure.kind is FailureKind.CANCELLED:
            if source.unknown_since_s is None:
                source.unknown_since_s = state.now_s
            if state.now_s - source.unknown_since_s > UNKNOWN_GRACE_S:
                self._closing.fail(sequence, failure)

    def on_offer_reservation(self, peer: WorkerId, message: OfferReservation) -> None:
        sequence, source = self.find(message.handoff_id)
        is_waiting = source is not None and source.state is SourceState.QUEUED and source.retry_at_s > self._state.now_s
        if sequence is None or source is None or not is_waiting or not source.is_of(peer, message.fence):
            self._state.ignore(message)
        else:
            source.retry_at_s = self._state.now_s

    def on_take_handoff(self, peer: WorkerId, message: TakeHandoff) -> None:
        sequence, source = self.find(message.handoff_id)
        states = (SourceState.DRAINING, SourceState.DELIVERED)
        if sequence is None or source is None or not source.is_of(peer, message.fence) or source.state not in states:
            self._state.ignore(message)
            return
        source.is_taken = True
        self._finish_if_done(sequence, source)

    def find(self, handoff_id: HandoffId) -> tuple[Sequence | None, HandoffSource | None]:
        sequence = self._state.sequences.get(handoff_id)
        return sequence, sequence.source if sequence is not None else None

    def _finish_if_done(self, sequence: Sequence, source: HandoffSource) -> None:
        if source.close_if_done():
            self._closing.finish(sequence)

    def _push(self, source: HandoffSource, pushes: list[PushSpan]) -> None:
        self._state.counters.add(PUSHES, len(pushes))
        for push in pushes:
            source.send(push.number, self._state.now_s)
        self._state.act(*pushes)

"""How a sequence's part on this worker ends: well, or given up.

Blocks go back at once, or when nothing uses them any more: the step that computes with them, the writes that read them,
the grant under which a peer may still write. Until then the sequence is CLOSING, and blocks that a peer may still write
into are quarantined.
"""

from disagg.core.errors import Failure
from disagg.policy.partial_start import PartialOutcome
from disagg.protocol.handoff import DestinationState, DestinationTrigger, SourceState, SourceTrigger
from disagg.protocol.lifecycle import SequenceState, SequenceTrigger
from disagg.protocol.messages import CancelHandoff, ReportFailure
from disagg.scheduler.actions import RevokeGrant, SendToRouter, StopPushes
from disagg.scheduler.destination import HandoffDestination
from disagg.scheduler.sequence import Sequence
from disagg.scheduler.state import SchedulerState
from disagg.telemetry.metrics import HANDOFF_BYTES, HANDOFFS, SEQUENCES

_LIVE_DESTINATION = (DestinationState.EXPECTED, DestinationState.RECEIVING, DestinationState.COMPLETE)


class Closing:
    """Of every sequence of one worker."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def finish(self, sequence: Sequence) -> None:
        """This worker's part has ended well."""
        state, source = self._state, sequence.source
        state.move(sequence, SequenceTrigger.FINISHED)
        if source is not None:
            state.counters.add(HANDOFFS, label="sent")
            state.counters.add(HANDOFF_BYTES, source.hidden_bytes, label="hidden")
            state.counters.add(HANDOFF_BYTES, source.acknowledged_bytes - source.hidden_bytes, label="visible")
            # Nobody reads them any more: blocks computed twice at once can become the ones that are indexed.
            hashes = sequence.hashes[: sequence.num_committed]
            sequence.blocks = state.cache.commit_shared(hashes, sequence.blocks, 0)
        state.counters.add(SEQUENCES, label="finished")
        self._remove(sequence)

    def fail(self, sequence: Sequence, failure: Failure) -> None:
        """Give up, tell the router and the peer why."""
        if sequence.is_live:
            kept = self._num_kept_blocks(sequence) * self._state.cache.block_size
            self._state.act(SendToRouter(ReportFailure(sequence.sequence_id, sequence.attempt, failure, kept)))
            self.drop(sequence, failure)

    def drop(self, sequence: Sequence, failure: Failure) -> None:
        """Give up. Blocks go back at once, or when the step, the writes and the fence that use them are over."""
        if not sequence.is_live:
            return
        self._state.end_attempt(sequence)
        self._state.begun.give_up(sequence, PartialOutcome.DROPPED)
        in_use = sequence.is_in_step
        in_use |= self._cancel_source(sequence, failure)
        in_use |= self._cancel_destination(sequence, failure)
        self._state.counters.add(SEQUENCES, label=failure.kind.value)
        if in_use:
            self._state.move(sequence, SequenceTrigger.DROPPED_IN_USE)
        else:
            self._state.move(sequence, SequenceTrigger.DROPPED)
            self._remove(sequence)

    def end_if_unused(self, sequence: Sequence) -> None:
        """Called whenever a step, the writes or a fence of a dropped sequence are over."""
        if sequence.state is not SequenceState.CLOSING or sequence.is_in_step:
            return
        if sequence.source is not None and sequence.source.state is SourceState.STOPPING:
            return
        destination = sequence.destination
        if destination is not None and destination.state is DestinationState.FENCING:
            return
        if destination is not None and destination.state is DestinationState.IN_STEP:
            destination.machine.fire(DestinationTrigger.STEP_OVER)
            self._end_quarantine(sequence, destination)
        self._state.move(sequence, SequenceTrigger.RELEASED)
        self._remove(sequence)

    def _remove(self, sequence: Sequence) -> None:
        """Nothing uses its blocks."""
        destination = sequence.destination
        is_closed = destination is not None and destination.state is DestinationState.CLOSED
        self._state.remove(sequence, was_taken=is_closed and sequence.num_computed > 0)

    def _num_kept_blocks(self, sequence: Sequence) -> int:
        """Blocks from the start that stay in the index when the sequence is dropped now."""
        destination = sequence.destination
        if destination is not None and destination.allocation is not None:
            return destination.complete_until() // self._state.cache.block_size
        return sequence.num_committed

    def fence_given_up(self, sequence: Sequence, destination: HandoffDestination) -> None:
        """No late byte can land any more; but a part of its first step may still be in the engine."""
        if sequence.is_in_step:
            destination.machine.fire(DestinationTrigger.GRANT_FENCED_IN_STEP)
            return
        destination.machine.fire(DestinationTrigger.GRANT_FENCED)
        self._end_quarantine(sequence, destination)
        self.end_if_unused(sequence)

    def _end_quarantine(self, sequence: Sequence, destination: HandoffDestination) -> None:
        """Keep what is complete and verified, free the rest."""
        if destination.allocation is not None:
            num_kept = self._num_kept_blocks(sequence)
            self._state.cache.end_quarantine(destination.allocation, sequence.hashes, num_kept)

    def _cancel_source(self, sequence: Sequence, failure: Failure) -> bool:
        """True when the transport may still read our blocks."""
        source = sequence.source
        if source is None or not source.is_live:
            return False
        self._state.tell(source.peer, CancelHandoff(source.handoff_id, source.fence, failure))
        self._state.counters.add(HANDOFFS, label="send_cancelled")
        if source.num_outstanding == 0:
            source.machine.fire(SourceTrigger.CANCELLED)
            return False
        source.machine.fire(SourceTrigger.CANCELLED_MIDWAY)
        self._state.act(StopPushes(source.grant_key, source.peer))
        return True

    def _cancel_destination(self, sequence: Sequence, failure: Failure) -> bool:
        """True when a late byte may still land in our blocks."""
        destination = sequence.destination
        if destination is None or destination.state not in _LIVE_DESTINATION:
            return False
        was = destination.state
        destination.machine.fire(DestinationTrigger.CANCELLED)
        if was is not DestinationState.COMPLETE:
            self._state.tell(destination.peer, CancelHandoff(destination.handoff_id, destination.fence, failure))
        if destination.allocation is None:
            return False
        self._state.counters.add(HANDOFFS, label="receive_cancelled")
        self._state.cache.quarantine(destination.allocation, keeps_empty=sequence.is_in_step)
        if sequence.is_in_step:
            sequence.blocks = destination.allocation.empty  # until the part that is in the engine is back
        if was is DestinationState.RECEIVING:  # else it has been revoked already
            self._state.act(RevokeGrant(destination.grant_key))
        return True

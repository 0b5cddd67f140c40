"""What the parts of one worker's scheduler share: blocks, sequences, peers, counters, and the actions so far."""

from collections import OrderedDict

from disagg.core.errors import Failure, InternalFault
from disagg.core.ids import BlockId, HandoffId, SequenceId, WorkerId
from disagg.core.request import EmittedToken
from disagg.kvcache.block_hash import root_hash
from disagg.kvcache.block_pool import BlockState
from disagg.kvcache.kv_cache import KvCache
from disagg.protocol.handoff import DestinationState, DestinationTrigger, SourceState, SourceTrigger
from disagg.protocol.lifecycle import SequenceState, SequenceTrigger
from disagg.protocol.messages import (
    CancelHandoff,
    EmitTokens,
    PromptReport,
    ReportFailure,
    SequenceReport,
    WorkerCard,
    WorkerToWorker,
)
from disagg.scheduler.actions import Action, RevokeGrant, SendToPeer, SendToRouter, StopPushes
from disagg.scheduler.config import SchedulerConfig
from disagg.scheduler.destination import HandoffDestination
from disagg.scheduler.sequence import Sequence
from disagg.telemetry.counters import Counters
from disagg.telemetry.metrics import HANDOFF_BYTES, HANDOFFS, MESSAGES_IGNORED, SEQUENCES

MAX_REMEMBERED = 4096  # ended attempts

_LIVE_SOURCE = (SourceState.QUEUED, SourceState.ASKING, SourceState.OPEN, SourceState.DRAINING, SourceState.DELIVERED)
_LIVE_DESTINATION = (DestinationState.EXPECTED, DestinationState.RECEIVING, DestinationState.COMPLETE)


class SchedulerState:
    """Changed by the scheduler's parts only, inside one handle() call at a time."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.role = config.role
        self.is_draining = False
        root = root_hash(config.model_digest, config.numerics.value)
        self.cache = KvCache(config.num_blocks, config.layout.block_size, root)
        self.counters = Counters()
        # In order of arrival. An attempt that was dropped stays until nothing uses its blocks any more.
        self.sequences: dict[HandoffId, Sequence] = {}
        self.peers: dict[WorkerId, WorkerCard] = {}
        self.now_s = 0.0
        self._live: dict[SequenceId, Sequence] = {}
        # So that a late repeat starts nothing, and a source that asks hears whether its hand-off was taken.
        self._ended: OrderedDict[HandoffId, bool] = OrderedDict()
        self._has_freed = False
        self._actions: list[Action] = []
        self._tokens: list[EmittedToken] = []
        self._prompts: list[PromptReport] = []
        self._reports: list[SequenceReport] = []

    # --- sequences ---------------------------------------------------------------------------------------------

    def live(self, sequence_id: SequenceId) -> Sequence | None:
        """The attempt that is under way."""
        return self._live.get(sequence_id)

    def add(self, sequence: Sequence) -> None:
        self.sequences[sequence.attempt_id] = sequence
        self._live[sequence.sequence_id] = sequence

    def has_taken(self, attempt_id: HandoffId) -> bool:
        """Whether the KV of an attempt that has ended here had come from its peer, whole."""
        return self._ended.get(attempt_id, False)

    def has_seen(self, attempt_id: HandoffId) -> bool:
        return attempt_id in self.sequences or attempt_id in self._ended

    # --- what the loop will do ---------------------------------------------------------------------------------

    def act(self, *actions: Action) -> None:
        self._actions.extend(actions)

    def tell(self, peer: WorkerId, message: WorkerToWorker) -> None:
        self._actions.append(SendToPeer(peer, message))

    def emit_token(self, token: EmittedToken) -> None:
        self._tokens.append(token)

    def report_prompt(self, sequence: Sequence) -> None:
        num_computed = sequence.num_to_read - sequence.num_cached
        self._prompts.append(PromptReport(sequence.attempt_id, sequence.num_cached, num_computed))

    def take_actions(self) -> list[Action]:
        """All tokens and reports since the last call travel in one message, before anything else."""
        actions = self._actions
        if self._tokens or self._prompts or self._reports:
            message = EmitTokens(tuple(self._tokens), tuple(self._prompts), tuple(self._reports))
            actions = [SendToRouter(message), *actions]
            self._tokens, self._prompts, self._reports = [], [], []
        self._actions = []
        return actions

    def take_has_freed(self) -> bool:
        """Whether a sequence has ended or been dropped since the last call."""
        has_freed, self._has_freed = self._has_freed, False
        return has_freed

    def ignore(self, message: object) -> None:
        """Late, repeated or unknown: no effect, one counter."""
        self.counters.add(MESSAGES_IGNORED, label=type(message).__name__)

    # --- room --------------------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks to compute or receive into."""
        sequences = self.sequences.values()
        return sum(1 for sequence in sequences if sequence.blocks or sequence.state is not SequenceState.WAITING)

    @property
    def num_spare_blocks(self) -> int:
        """Blocks to leave at an admission: running streams grow, and preempting them would cost more than waiting."""
        return sum(1 for sequence in self.sequences.values() if sequence.state is SequenceState.DECODING)

    def must_wait(self, sequence: Sequence) -> bool:
        """Too many run already, or somebody older has been refused room for too long to be overtaken again."""
        if self.num_running >= self.config.budget.max_running:
            return True
        limit_s = self.now_s - self.config.starvation_s
        return any(
            other.refused_since_s < limit_s and other.arrival < sequence.arrival
            for other in self.sequences.values()
            if other.state is SequenceState.WAITING
        )

    # --- ends of sequences -------------------------------------------------------------------------------------

    def finish(self, sequence: Sequence) -> None:
        """This worker's part has ended well."""
        sequence.machine.fire(SequenceTrigger.FINISHED)
        source = sequence.source
        reason = sequence.finish_reason() if sequence.writes_answer else None
        self._reports.append(
            SequenceReport(
                sequence_id=sequence.sequence_id,
                task=sequence.task,
                finish_reason=reason,
                num_computed_tokens=min(sequence.num_computed, sequence.num_to_read)
                - sequence.num_cached
                - sequence.num_received,
                num_received_tokens=sequence.num_received,
                handoff_bytes=source.acknowledged_bytes if source else 0,
                hidden_bytes=source.hidden_bytes if source else 0,
            )
        )
        if source is not None:
            self.counters.add(HANDOFFS, label="sent")
            self.counters.add(HANDOFF_BYTES, source.hidden_bytes, label="hidden")
            self.counters.add(HANDOFF_BYTES, source.acknowledged_bytes - source.hidden_bytes, label="visible")
        self.counters.add(SEQUENCES, label="finished")
        self._forget(sequence)

    def fail(self, sequence: Sequence, failure: Failure) -> None:
        """Give up, tell the router and the peer why."""
        if sequence.is_live:
            kept = self._num_kept_blocks(sequence) * self.cache.block_size
            self.act(SendToRouter(ReportFailure(sequence.sequence_id, sequence.attempt, failure, kept)))
            self.drop(sequence, failure)

    def drop(self, sequence: Sequence, failure: Failure, *, tell_peer: bool = True) -> None:
        """Give up. Blocks go back at once, or when the step, the writes and the fence that use them are over."""
        if not sequence.is_live:
            return
        self._live.pop(sequence.sequence_id, None)
        self._has_freed = True
        in_use = sequence.is_in_step
        in_use |= self._cancel_source(sequence, failure, tell_peer=tell_peer)
        in_use |= self._cancel_destination(sequence, failure, tell_peer=tell_peer)
        self.counters.add(SEQUENCES, label=failure.kind.value)
        if in_use:
            sequence.machine.fire(SequenceTrigger.DROPPED_IN_USE)
        else:
            sequence.machine.fire(SequenceTrigger.DROPPED)
            self._forget(sequence)

    def end_if_unused(self, sequence: Sequence) -> None:
        """Called whenever a step, the writes or a fence of a dropped sequence are over."""
        if sequence.state is not SequenceState.CLOSING or sequence.is_in_step:
            return
        if sequence.source is not None and sequence.source.state is SourceState.STOPPING:
            return
        if sequence.destination is not None and sequence.destination.state is DestinationState.FENCING:
            return
        sequence.machine.fire(SequenceTrigger.RELEASED)
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        self._has_freed = True
        self.cache.release(sequence.blocks)
        sequence.blocks = ()
        del self.sequences[sequence.attempt_id]
        if self._live.get(sequence.sequence_id) is sequence:
            del self._live[sequence.sequence_id]
        destination = sequence.destination
        was_taken = (
            destination is not None and destination.state is DestinationState.CLOSED and sequence.num_computed > 0
        )
        self._ended[sequence.attempt_id] = was_taken
        if len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)

    def _num_kept_blocks(self, sequence: Sequence) -> int:
        """Blocks from the start that stay in the index when the sequence is dropped now."""
        destination = sequence.destination
        if destination is not None and destination.allocation is not None:
            return destination.complete_until() // self.cache.block_size
        return sequence.num_committed

    def end_quarantine(self, sequence: Sequence, destination: HandoffDestination) -> None:
        """The fence holds: keep what is complete and verified, free the rest."""
        if destination.allocation is not None:
            num_kept = self._num_kept_blocks(sequence)
            self.cache.end_quarantine(destination.allocation, sequence.hashes, num_kept)
        self.end_if_unused(sequence)

    def _cancel_source(self, sequence: Sequence, failure: Failure, *, tell_peer: bool) -> bool:
        """True when the transport may still read our blocks."""
        source = sequence.source
        if source is None or source.state not in _LIVE_SOURCE:
            return False
        if tell_peer:
            self.tell(source.peer, CancelHandoff(source.handoff_id, source.fence, failure))
        self.counters.add(HANDOFFS, label="send_cancelled")
        if source.num_outstanding == 0:
            source.machine.fire(SourceTrigger.CANCELLED)
            return False
        source.machine.fire(SourceTrigger.CANCELLED_MIDWAY)
        self.act(StopPushes(source.grant_key, source.peer))
        return True

    def _cancel_destination(self, sequence: Sequence, failure: Failure, *, tell_peer: bool) -> bool:
        """True when a late byte may still land in our blocks."""
        destination = sequence.destination
        if destination is None or destination.state not in _LIVE_DESTINATION:
            return False
        was = destination.state
        destination.machine.fire(DestinationTrigger.CANCELLED)
        if tell_peer and was is not DestinationState.COMPLETE:
            self.tell(destination.peer, CancelHandoff(destination.handoff_id, destination.fence, failure))
        if destination.allocation is None:
            return False
        self.counters.add(HANDOFFS, label="receive_cancelled")
        self.cache.quarantine(destination.allocation)
        if was is DestinationState.RECEIVING:  # else it has been revoked already
            self.act(RevokeGrant(destination.grant_key))
        return True

    # --- rules -------------------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        self.cache.check_invariants()
        pool = self.cache.pool
        users = [0] * pool.num_blocks
        apart: dict[BlockState, set[BlockId]] = {BlockState.RESERVED: set(), BlockState.QUARANTINED: set()}
        for attempt_id, sequence in self.sequences.items():
            if sequence.is_live != (self._live.get(attempt_id.sequence_id) is sequence):
                raise InternalFault(f"{attempt_id} is {sequence.state} and listed otherwise")
            held = [*sequence.blocks]
            destination = sequence.destination
            if destination is not None and destination.allocation is not None:
                destination.check_invariants()
                if destination.state in (DestinationState.RECEIVING, DestinationState.COMPLETE):
                    held += destination.allocation.cached + destination.allocation.empty
                    apart[BlockState.RESERVED].update(destination.allocation.reserved)
                elif destination.state is DestinationState.FENCING:
                    held += destination.allocation.cached
                    apart[BlockState.QUARANTINED].update(destination.allocation.reserved)
            for block in held:
                users[block] += 1
        if users != pool.refcounts():
            raise InternalFault(f"refcounts {pool.refcounts()} differ from the sequences' use {users}")
        for state, blocks in apart.items():
            if blocks != pool.blocks_in(state):
                raise InternalFault(f"{state} blocks are {pool.blocks_in(state)}, hand-offs say {blocks}")

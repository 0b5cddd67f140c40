"""One worker's decisions.

A sequence passes through, by its task:

  WHOLE    WAITING -> (blocks for prompt and answer) PREFILLING -> DECODING -> ENDED
  PREFILL  WAITING -> (own blocks, then the peer's) PREFILLING -> HANDING_OFF -> (peer has all) ENDED
  DECODE   WAITING -> (peer asks, blocks reserved) RECEIVING -> (all verified, fence holds) DECODING -> ENDED

One public mutator, `handle(event, now_s)`, returns what the loop must do. At most one step runs at a time; while it
runs its sequences keep their blocks, whatever else happens to them.
"""

from collections.abc import Callable

from disagg.core.errors import Failure, FailureKind
from disagg.core.ids import Fence, HandoffId, StepId
from disagg.core.roles import ROLE_TASKS, Task
from disagg.kvcache.block_pool import BlockState
from disagg.policy.batching import PromptWork, plan_chunks
from disagg.protocol.lifecycle import SequenceState, SequenceTrigger
from disagg.protocol.messages import AbortSequence, CounterValue, ReportFailure, StartSequence, WorkerState
from disagg.scheduler.actions import Action, RunStep, SendToRouter
from disagg.scheduler.config import SchedulerConfig
from disagg.scheduler.destination import HandoffDestination
from disagg.scheduler.engine import StepPlan, StepRow
from disagg.scheduler.events import (
    ClockTicked,
    Event,
    GrantFenced,
    LayersComputed,
    PeerLost,
    PeerMessageReceived,
    PeerPaired,
    RouterLost,
    RouterMessageReceived,
    StepFailed,
    StepFinished,
    WriteFinished,
    WriteLanded,
    WritesStopped,
)
from disagg.scheduler.handoffs import Handoffs
from disagg.scheduler.sequence import Sequence
from disagg.scheduler.source import HandoffSource
from disagg.scheduler.state import SchedulerState
from disagg.telemetry.counters import Counters
from disagg.telemetry.metrics import (
    BLOCKS_EVICTED,
    OUTPUT_TOKENS,
    PROMPT_TOKENS_CACHED,
    PROMPT_TOKENS_COMPUTED,
    STEP_SECONDS,
    STEPS,
)

_SENDS = (Task.PREFILL, Task.SEND_PREFIX)
_RECEIVES = (Task.DECODE, Task.RECEIVE_PREFIX)


class Scheduler:
    """Queues, blocks, hand-offs and batch plan of one worker."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._state = SchedulerState(config)
        self._handoffs = Handoffs(self._state)
        self._running: StepPlan | None = None
        self._next_step = 0
        self._next_arrival = 0
        self._handlers: dict[type, Callable[..., None]] = {
            RouterMessageReceived: self._on_router_message,
            RouterLost: self._on_router_lost,
            PeerPaired: lambda event: self._state.peers.update({event.card.worker_id: event.card}),
            PeerMessageReceived: lambda event: self._handoffs.on_message(event.peer, event.message),
            PeerLost: self._on_peer_lost,
            LayersComputed: self._on_layers_computed,
            StepFinished: self._on_step_finished,
            StepFailed: self._on_step_failed,
            WriteFinished: self._handoffs.on_write_finished,
            WriteLanded: self._handoffs.on_write_landed,
            GrantFenced: self._handoffs.on_grant_fenced,
            WritesStopped: self._handoffs.on_writes_stopped,
            ClockTicked: lambda event: self._handoffs.on_clock(),
        }

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Take one event in; give back what to do, in order. now_s never goes back."""
        self._state.now_s = now_s
        self._handlers[type(event)](event)
        if not isinstance(event, LayersComputed):  # the busiest event changes no queue
            self._admit()
            self._ask_reservations()
            self._start_step()
        return self._state.take_actions()

    def next_wake_s(self) -> float:
        """When to send ClockTicked if nothing else happens; infinity for never."""
        retries = [
            sequence.source.retry_at_s
            for sequence in self._state.sequences.values()
            if sequence.source is not None and sequence.source.retry_at_s > self._state.now_s
        ]
        return min([self._handoffs.next_wake_s(), *retries], default=float("inf"))

    @property
    def counters(self) -> Counters:
        return self._state.counters

    @property
    def is_idle(self) -> bool:
        return self._running is None and not self._state.sequences

    def snapshot(self) -> WorkerState:
        pool, sequences = self._state.cache.pool, self._state.sequences.values()
        waiting = [sequence for sequence in sequences if sequence.state is SequenceState.WAITING]
        return WorkerState(
            num_free_blocks=pool.count(BlockState.FREE),
            num_cached_blocks=pool.count(BlockState.CACHED),
            num_reserved_blocks=pool.count(BlockState.RESERVED),
            num_held_blocks=pool.count(BlockState.HELD),
            num_quarantined_blocks=pool.count(BlockState.QUARANTINED),
            num_waiting=len(waiting),
            num_running=len(sequences) - len(waiting),
            num_handoffs=len(self._handoffs.open_ends()),
            num_waiting_tokens=sum(s.num_remaining_prompt_tokens for s in sequences if s.task not in _RECEIVES),
            counters=tuple(CounterValue(*item) for item in self._state.counters.items()),
        )

    def check_invariants(self) -> None:
        self._state.check_invariants()
        self._state.counters.check_invariants()

    # --- router and peers --------------------------------------------------------------------------------------

    def _on_router_message(self, event: RouterMessageReceived) -> None:
        message = event.message
        if isinstance(message, StartSequence):
            self._on_start(message)
        elif isinstance(message, AbortSequence) and message.sequence_id in self._state.sequences:
            sequence = self._state.sequences[message.sequence_id]
            self._state.drop(sequence, Failure(FailureKind.CANCELLED, message.reason))
        else:
            self._state.ignore(message)

    def _on_router_lost(self, event: RouterLost) -> None:
        for sequence in list(self._state.sequences.values()):
            self._state.drop(sequence, Failure(FailureKind.CANCELLED, "the router has gone"))

    def _on_peer_lost(self, event: PeerLost) -> None:
        card = self._state.peers.get(event.peer)
        if card is None or card.incarnation != event.incarnation:
            self._state.ignore(event)
            return
        del self._state.peers[event.peer]
        failure = Failure(FailureKind.WORKER_LOST, f"worker {event.peer} was lost: {event.reason}")
        for sequence in list(self._state.sequences.values()):
            end = sequence.source or sequence.destination
            if end is not None and end.peer == event.peer and sequence.state is not SequenceState.DECODING:
                self._state.fail(sequence, failure)

    def _on_start(self, message: StartSequence) -> None:
        if message.spec.sequence_id in self._state.sequences:
            self._state.ignore(message)
            return
        failure = self._start_failure(message)
        if failure is not None:
            report = ReportFailure(message.spec.sequence_id, message.attempt, failure)
            self._state.act(SendToRouter(report))
            return
        sequence = Sequence(message.spec, message.task, message.attempt, self._next_arrival)
        self._next_arrival += 1
        if message.peer is not None and message.peer_incarnation is not None:
            handoff_id = HandoffId(message.spec.sequence_id, message.attempt)
            mine, theirs = self.config.incarnation, message.peer_incarnation
            if message.task in _SENDS:
                fence = Fence(mine, theirs, message.attempt)
                sequence.source = HandoffSource(handoff_id, message.peer, fence, self.config.layout)
            else:
                fence = Fence(theirs, mine, message.attempt)
                sequence.destination = HandoffDestination(handoff_id, message.peer, fence)
        self._state.sequences[sequence.sequence_id] = sequence

    def _start_failure(self, message: StartSequence) -> Failure | None:
        """Why this worker cannot take this part of this sequence at all."""
        spec, config = message.spec, self.config
        if message.task not in ROLE_TASKS[self._state.role]:
            text = f"worker {config.worker_id} has role {self._state.role.value} and takes no {message.task.value} task"
            return Failure(FailureKind.WRONG_ROLE, text)
        if message.task is not Task.WHOLE:
            card = self._state.peers.get(message.peer) if message.peer is not None else None
            if card is None or card.incarnation != message.peer_incarnation:
                text = f"worker {config.worker_id} is not paired with {message.peer} ({message.peer_incarnation})"
                return Failure(FailureKind.WORKER_LOST, text)
        if not spec.prompt_ids or not all(0 <= token < config.vocab_size for token in spec.prompt_ids):
            text = f"the prompt must have 1 or more token ids below {config.vocab_size}"
            return Failure(FailureKind.INVALID_REQUEST, text)
        if spec.max_total_tokens > config.max_context or spec.sampling.max_tokens < 1:
            text = f"{spec.max_total_tokens} tokens of prompt and answer, the context is {config.max_context} tokens"
            return Failure(FailureKind.INVALID_REQUEST, text)
        num_tokens = spec.max_total_tokens if message.task in (Task.WHOLE, Task.DECODE) else len(spec.prompt_ids)
        num_blocks = self._state.cache.num_blocks_for(num_tokens)
        if num_blocks > config.num_blocks:
            text = (
                f"the request needs {num_blocks} KV blocks of {config.layout.block_size} tokens, worker "
                f"{config.worker_id} has {config.num_blocks}; ask for fewer tokens or give it a larger --kv-memory"
            )
            return Failure(FailureKind.INVALID_REQUEST, text)
        return None

    # --- admission ---------------------------------------------------------------------------------------------

    def _waiting(self) -> list[Sequence]:
        waiting = [s for s in self._state.sequences.values() if s.state is SequenceState.WAITING]
        return sorted(waiting, key=lambda sequence: (-sequence.spec.priority, sequence.arrival))

    def _admit(self) -> None:
        """Give waiting WHOLE sequences their blocks, first come first served: who does not fit now waits."""
        state = self._state
        for sequence in self._waiting():
            if sequence.task is not Task.WHOLE:
                continue
            if state.must_wait(sequence):
                return
            hashes = state.cache.extend_hashes(sequence.hashes, sequence.spec.prompt_ids)
            allocation = state.cache.try_allocate(hashes, sequence.num_prompt_tokens - 1, sequence.num_tokens_to_hold)
            if allocation is None:
                sequence.refused_since_s = min(sequence.refused_since_s, state.now_s)
                return
            sequence.machine.fire(SequenceTrigger.BLOCKS_ALLOCATED)
            sequence.blocks = allocation.blocks
            sequence.num_cached = sequence.num_computed = allocation.num_cached * state.cache.block_size

    def _ask_reservations(self) -> None:
        """Ask peers for room shortly before the first chunk can run, for a few steps' worth of prompts at most."""
        state = self._state
        room = self.config.reserve_ahead * self.config.budget.chunk_tokens
        asked = (sequence for sequence in state.sequences.values() if sequence.source is not None and sequence.blocks)
        room -= sum(sequence.num_remaining_prompt_tokens for sequence in asked)
        for sequence in self._waiting():
            source = sequence.source
            if source is None or sequence.blocks or source.retry_at_s > state.now_s:
                continue
            if room <= 0 or state.must_wait(sequence) or not self._handoffs.ask_reservation(sequence):
                return
            room -= sequence.num_remaining_prompt_tokens

    # --- steps -------------------------------------------------------------------------------------------------

    def _start_step(self) -> None:
        if self._running is not None:
            return
        sequences = self._state.sequences
        rows = [s.decode_row() for s in sequences.values() if s.state is SequenceState.DECODING]
        prompts = sorted(
            (s for s in sequences.values() if s.state is SequenceState.PREFILLING),
            key=lambda sequence: (-sequence.spec.priority, sequence.arrival),
        )
        work = (PromptWork(s.sequence_id, s.num_remaining_prompt_tokens) for s in prompts)
        chunks = plan_chunks(work, num_streams=len(rows), budget=self.config.budget)
        rows += [sequences[chunk.sequence_id].prompt_row(chunk.num_tokens) for chunk in chunks]
        if not rows:
            return
        for row in rows:
            sequence = sequences[row.sequence_id]
            sequence.is_in_step = True
            if sequence.source is not None:
                sequence.source.start_step()
        reports_layers = any(sequences[row.sequence_id].source is not None for row in rows)
        self._running = StepPlan(StepId(self._next_step), tuple(rows), reports_layers)
        self._next_step += 1
        self._state.act(RunStep(self._running))

    def _on_layers_computed(self, event: LayersComputed) -> None:
        if self._running is None or self._running.step_id != event.step_id:
            self._state.ignore(event)
            return
        chunks = tuple(
            (sequence, row.position, row.position + len(row.token_ids))
            for row in self._running.rows
            if (sequence := self._state.sequences.get(row.sequence_id)) is not None
        )
        self._handoffs.on_layers_computed(event, chunks)

    def _on_step_finished(self, event: StepFinished) -> None:
        plan = self._running
        if plan is None or plan.step_id != event.result.step_id:
            self._state.ignore(event)
            return
        # An engine that reports no layers, or not the last one, loses nothing: what is left goes now.
        if plan.reports_layers:
            self._on_layers_computed(LayersComputed(plan.step_id, self.config.layout.num_layers))
        self._running = None
        self._count_step(plan, event.duration_s)
        tokens = {token.sequence_id: token for token in event.result.tokens}
        for row in plan.rows:
            sequence = self._state.sequences[row.sequence_id]
            sequence.is_in_step = False
            if sequence.state is SequenceState.CLOSING:
                self._state.end_if_unused(sequence)
                continue
            self._advance(sequence, row)
            token = tokens.get(row.sequence_id)
            if token is not None:
                sequence.output.append(token)
                self._state.emit_token(token)
                self._state.counters.add(OUTPUT_TOKENS, label=sequence.task.value)
                self._after_token(sequence)

    def _advance(self, sequence: Sequence, row: StepRow) -> None:
        """The row's KV is written: count it, and index the blocks that are full now."""
        cache = self._state.cache
        if sequence.num_computed < sequence.num_prompt_tokens:
            self._state.counters.add(PROMPT_TOKENS_COMPUTED, len(row.token_ids), label=sequence.task.value)
        sequence.num_computed += len(row.token_ids)
        if sequence.num_computed // cache.block_size > sequence.num_committed:
            cache.extend_hashes(sequence.hashes, sequence.token_ids(sequence.num_computed))
            num_full = sequence.num_computed // cache.block_size
            cache.commit(sequence.hashes[:num_full], sequence.blocks, sequence.num_committed)
            sequence.num_committed = num_full

    def _after_token(self, sequence: Sequence) -> None:
        if sequence.state is SequenceState.PREFILLING:
            self._state.report_prompt(sequence)
            self._state.counters.add(PROMPT_TOKENS_CACHED, sequence.num_cached, label=sequence.task.value)
            if sequence.source is not None:
                self._handoffs.finish_prefill(sequence)
                return
            sequence.machine.fire(SequenceTrigger.PROMPT_COMPUTED)
        if sequence.finish_reason() is not None:
            self._state.finish(sequence)

    def _on_step_failed(self, event: StepFailed) -> None:
        plan, self._running = self._running, None
        for row in plan.rows if plan is not None else ():
            sequence = self._state.sequences[row.sequence_id]
            sequence.is_in_step = False
            self._state.end_if_unused(sequence)
            self._state.fail(sequence, event.failure)

    def _count_step(self, plan: StepPlan, duration_s: float) -> None:
        has_prompt = any(row.sampling is None or row.output_position == 0 for row in plan.rows)
        has_stream = any(row.output_position > 0 for row in plan.rows)
        kind = "both" if has_prompt and has_stream else "prefill" if has_prompt else "decode"
        counters = self._state.counters
        counters.add(STEPS, label=kind)
        counters.add(STEP_SECONDS, max(0.0, duration_s), label=kind)
        evicted = self._state.cache.num_evicted - counters.get(BLOCKS_EVICTED)
        counters.add(BLOCKS_EVICTED, evicted)

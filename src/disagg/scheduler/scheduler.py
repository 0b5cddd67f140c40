"""One worker's decisions.

A sequence passes through, by its task:

  WHOLE    WAITING -> (blocks for prompt and answer) PREFILLING -> DECODING -> ENDED
  PREFILL  WAITING -> (own blocks, then the peer's) PREFILLING -> HANDING_OFF -> (peer has all) ENDED
  DECODE   WAITING -> (peer asks, blocks reserved) RECEIVING -> (all verified, fence holds) DECODING -> ENDED

One public mutator, `handle(event, now_s)`, returns what the loop must do. At most one step runs at a time; while it
runs its sequences keep their blocks, whatever else happens to them.
"""

from collections.abc import Callable, Iterator

import msgspec

from disagg.core.errors import Failure, FailureKind
from disagg.core.ids import Fence, HandoffId, SequenceId
from disagg.core.roles import ROLE_TASKS, Task
from disagg.kvcache.block_pool import BlockState
from disagg.kvcache.conversion import lossy_form
from disagg.protocol.handoff import make_grant_key
from disagg.protocol.lifecycle import SequenceState, SequenceTrigger
from disagg.protocol.messages import (
    AbortSequence,
    CounterValue,
    DrainWorker,
    LinkState,
    ReportFailure,
    StartSequence,
    WorkerState,
)
from disagg.scheduler.actions import Action, SendToRouter
from disagg.scheduler.closing import Closing
from disagg.scheduler.config import SchedulerConfig
from disagg.scheduler.destination import HandoffDestination
from disagg.scheduler.events import (
    ClockTicked,
    DrainRequested,
    Event,
    GrammarPrepared,
    GrantFenced,
    LayersComputed,
    PeerLost,
    PeerMessageReceived,
    PeerPaired,
    RouterLost,
    RouterMessageReceived,
    StepFailed,
    StepFinished,
    StepsFinished,
    WriteFinished,
    WriteLanded,
    WritesStopped,
)
from disagg.scheduler.grammars import Grammars
from disagg.scheduler.handoffs import Handoffs
from disagg.scheduler.sequence import Sequence
from disagg.scheduler.source import HandoffSource
from disagg.scheduler.state import SchedulerState
from disagg.scheduler.steps import Steps
from disagg.telemetry.counters import Counters

# The busiest events; they change who may be admitted only when they end a sequence.
_QUIET = (LayersComputed, WriteFinished, WriteLanded)
# Beside ends of sequences, what lets the next refused hand-off be told of room: who was told has asked, or has not.
_OFFERING = (ClockTicked, PeerMessageReceived)


class Scheduler:
    """Queues, blocks, hand-offs and batch plan of one worker."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._state = SchedulerState(config)
        self._closing = Closing(self._state)
        self._handoffs = Handoffs(self._state, self._closing)
        self._grammars = Grammars(self._state, self._closing)
        self._steps = Steps(self._state, self._closing, self._handoffs.sending)
        self._next_arrival = 0
        self._handlers: dict[type, Callable[..., None]] = {
            RouterMessageReceived: self._on_router_message,
            RouterLost: self._on_router_lost,
            PeerPaired: self._on_peer_paired,
            PeerMessageReceived: lambda event: self._handoffs.on_message(event.peer, event.message),
            PeerLost: self._on_peer_lost,
            LayersComputed: self._steps.on_layers_computed,
            StepFinished: self._steps.on_finished,
            StepsFinished: self._steps.on_all_finished,
            StepFailed: self._steps.on_failed,
            GrammarPrepared: self._grammars.on_prepared,
            WriteFinished: self._handoffs.sending.on_write_finished,
            WriteLanded: self._handoffs.receiving.on_write_landed,
            GrantFenced: self._handoffs.receiving.on_grant_fenced,
            WritesStopped: self._handoffs.sending.on_writes_stopped,
            DrainRequested: self._on_drain,
            ClockTicked: lambda event: self._on_clock(),
        }

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Take one event in; give back what to do, in order. now_s never goes back."""
        self._state.now_s = now_s
        self._handlers[type(event)](event)
        has_freed = self._state.take_has_freed()
        if has_freed or not isinstance(event, _QUIET):
            self._admit()
            self._ask_reservations()
        if has_freed or isinstance(event, _OFFERING):
            self._handoffs.receiving.offer_room()
        self._steps.start()  # what has landed may be what a part of a step waits for
        return self._state.take_actions()

    def next_wake_s(self) -> float:
        """When to send ClockTicked if nothing else happens; infinity for never."""
        return min(self._handoffs.next_wake_s(), self._grammars.next_wake_s())

    def num_alike(self, most: int) -> int:
        """Steps from the running one on, at most `most`, between which nothing would be decided if nothing else
        happens: StepsFinished may end them together. 1 or less: the running step must end by itself."""
        return self._steps.num_alike(most)

    @property
    def num_standing(self) -> int:
        """Streams that get their next tokens without rows."""
        return len(self._state.standing)

    def has_recalled(self, sequence_id: SequenceId) -> bool:
        """Whether the last event has preempted a stream that had got a token without a row."""
        return sequence_id in self._steps.recalled

    def num_written(self, sequence_id: SequenceId) -> int:
        """Tokens of an answer that is being written here; 0 where none is."""
        sequence = self._state.live(sequence_id)
        if sequence is None or sequence.state is not SequenceState.DECODING:
            return 0
        return len(sequence.answer_ids) + self._state.standing.num_tokens(sequence_id)

    @property
    def counters(self) -> Counters:
        return self._state.counters

    @property
    def is_draining(self) -> bool:
        return self._state.is_draining

    @property
    def is_idle(self) -> bool:
        return not self._steps.is_running and not self._state.sequences

    def snapshot(self) -> WorkerState:
        pool, sequences = self._state.cache.pool, self._state.sequences.values()
        num_waiting = self._state.table.num_in_state(SequenceState.WAITING)
        return WorkerState(
            num_free_blocks=pool.count(BlockState.FREE),
            num_cached_blocks=pool.count(BlockState.CACHED),
            num_reserved_blocks=pool.count(BlockState.RESERVED),
            num_held_blocks=pool.count(BlockState.HELD),
            num_quarantined_blocks=pool.count(BlockState.QUARANTINED),
            num_waiting=num_waiting,
            num_running=len(sequences) - num_waiting,
            num_handoffs=self._handoffs.num_open(),
            num_waiting_tokens=sum(s.num_unread_tokens for s in sequences if s.task is not Task.DECODE),
            counters=tuple(CounterValue(*item) for item in self._state.counters.items()),
            step_costs=msgspec.structs.astuple(self._state.step_times.costs),
            links=tuple(LinkState(peer, link.bytes_per_s) for peer, link in self._state.links.items()),
            num_decoding=self._state.table.num_in_state(SequenceState.DECODING),
        )

    def check_invariants(self) -> None:
        self._state.check_invariants()
        self._handoffs.receiving.check_invariants()
        self._steps.check_invariants()
        self._grammars.check_invariants()
        self._state.counters.check_invariants()

    def _on_clock(self) -> None:
        self._handoffs.on_clock()
        self._grammars.on_clock()

    # --- router and peers --------------------------------------------------------------------------------------

    def _on_router_message(self, event: RouterMessageReceived) -> None:
        message = event.message
        if isinstance(message, StartSequence):
            self._on_start(message)
        elif isinstance(message, AbortSequence):
            self._on_abort(message)
        elif isinstance(message, DrainWorker):
            self._state.is_draining = True
        else:
            self._state.ignore(message)

    def _on_abort(self, message: AbortSequence) -> None:
        sequence = self._state.live(message.sequence_id)
        if sequence is None or sequence.attempt > message.attempt:
            self._state.ignore(message)
        else:
            self._closing.drop(sequence, Failure(FailureKind.CANCELLED, message.reason))

    def _on_drain(self, event: DrainRequested) -> None:
        self._state.is_draining = True

    def _on_router_lost(self, event: RouterLost) -> None:
        for sequence in list(self._state.sequences.values()):
            self._closing.drop(sequence, Failure(FailureKind.CANCELLED, "the router has gone"))

    def _on_peer_paired(self, event: PeerPaired) -> None:
        self._state.peers[event.card.worker_id] = event.card
        if event.bytes_per_s:
            self._state.link_to(event.card.worker_id).measured_bytes_per_s = event.bytes_per_s

    def _on_peer_lost(self, event: PeerLost) -> None:
        card = self._state.peers.get(event.peer)
        if card is None or card.incarnation != event.incarnation:
            self._state.ignore(event)
            return
        del self._state.peers[event.peer]
        self._state.links.pop(event.peer, None)
        failure = Failure(FailureKind.WORKER_LOST, f"worker {event.peer} was lost: {event.reason}")
        for sequence in list(self._state.sequences.values()):
            end = sequence.source or sequence.destination
            if end is not None and end.peer == event.peer and sequence.needs_peer:
                self._closing.fail(sequence, failure)

    def _on_start(self, message: StartSequence) -> None:
        attempt_id = HandoffId(message.spec.sequence_id, message.attempt)
        older = self._state.live(message.spec.sequence_id)
        if self._state.has_seen(attempt_id) or (older is not None and older.attempt >= message.attempt):
            self._state.ignore(message)
            return
        if older is not None:
            self._closing.drop(older, Failure(FailureKind.CANCELLED, f"replaced by attempt {message.attempt}"))
        failure = self._start_failure(message)
        if failure is not None:
            report = ReportFailure(message.spec.sequence_id, message.attempt, failure)
            self._state.act(SendToRouter(report))
            return
        sequence = Sequence(
            message.spec,
            message.task,
            message.attempt,
            self._next_arrival,
            message.emitted_ids,
            arrived_s=self._state.now_s,
            root=self._state.root_of(message.spec.cache_salt, self._form(message)),
        )
        self._next_arrival += 1
        if message.peer is not None and message.peer_incarnation is not None:
            mine, theirs = self.config.incarnation, message.peer_incarnation
            if message.task is Task.PREFILL:
                fence = Fence(mine, theirs, message.attempt)
                card = self._state.peers[message.peer]
                sequence.source = HandoffSource(attempt_id, message.peer, fence, card.layout, card.kv_wire)
            else:
                fence = Fence(theirs, mine, message.attempt)
                key = make_grant_key(self.config.grant_seed, attempt_id, fence)
                sequence.destination = HandoffDestination(attempt_id, message.peer, fence, key)
                self._state.leases.lease(sequence.destination, self._state.now_s + self.config.lease_s)
        self._state.add(sequence)
        if message.is_timed:
            self._state.stages.start(sequence, self._state.now_s)
        self._grammars.ask(sequence)

    def _form(self, message: StartSequence) -> str:
        """What the KV of this sequence will have lost here."""
        card = self._state.peers.get(message.peer) if message.peer is not None else None
        if card is None or message.task is not Task.DECODE:
            return ""
        return lossy_form(card.layout, self.config.layout, card.kv_wire)

    def _start_failure(self, message: StartSequence) -> Failure | None:
        """Why this worker cannot take this part of this sequence at all."""
        spec, config = message.spec, self.config
        if self._state.is_draining and not self._state.is_at_work_on(spec.sequence_id.request_id):
            return Failure(FailureKind.WRONG_ROLE, f"worker {config.worker_id} is draining and takes no new work")
        if message.task not in ROLE_TASKS[config.role]:
            text = f"worker {config.worker_id} has role {config.role.value} and takes no {message.task.value} task"
            return Failure(FailureKind.WRONG_ROLE, text)
        if message.task is not Task.WHOLE:
            card = self._state.peers.get(message.peer) if message.peer is not None else None
            if card is None or card.incarnation != message.peer_incarnation:
                text = f"worker {config.worker_id} is not paired with {message.peer} ({message.peer_incarnation})"
                return Failure(FailureKind.WORKER_LOST, text)
        known_ids = spec.prompt_ids + message.emitted_ids
        if not spec.prompt_ids or min(known_ids) < 0 or max(known_ids) >= config.vocab_size:
            text = f"the prompt must have 1 or more token ids below {config.vocab_size}"
            return Failure(FailureKind.INVALID_REQUEST, text)
        num_tokens = spec.max_total_tokens if message.task in (Task.WHOLE, Task.DECODE) else len(known_ids)
        if num_tokens > config.max_context or spec.sampling.max_tokens <= len(message.emitted_ids):
            text = f"{num_tokens} tokens of prompt and answer, the context is {config.max_context} tokens"
            return Failure(FailureKind.INVALID_REQUEST, text)
        num_blocks = self._state.cache.num_blocks_for(num_tokens)
        if num_blocks > config.num_blocks:
            text = (
                f"the request needs {num_blocks} KV blocks of {config.layout.block_size} tokens, worker "
                f"{config.worker_id} has {config.num_blocks}; ask for fewer tokens or give it a larger --kv-memory"
            )
            return Failure(FailureKind.INVALID_REQUEST, text)
        return None

    # --- admission ---------------------------------------------------------------------------------------------

    def _waiting(self, task: Task) -> Iterator[Sequence]:
        """Sequences without blocks that have this task here, in the order in which they are to run."""
        state = self._state
        ready = [each for each in state.table.waiting(task) if self._may_start(each)]
        return (each for each in state.in_reading_order(ready) if not state.would_overtake(each))

    def _may_start(self, sequence: Sequence) -> bool:
        """Not while its grammar is prepared, nor before a refused reservation may be asked again."""
        is_refused = sequence.source is not None and sequence.source.retry_at_s > self._state.now_s
        return sequence.grammar_until_s is None and not is_refused

    def _admit(self) -> None:
        """Give waiting WHOLE sequences their blocks, in order: when one does not fit, those behind it wait too."""
        state = self._state
        if not state.table.waiting(Task.WHOLE) or state.is_full():
            return
        for sequence in self._waiting(Task.WHOLE):
            hashes = state.extend_hashes(sequence, sequence.num_to_read)
            to_hold = sequence.num_tokens_to_hold(self.config.answer_headroom)
            allocation = state.cache.try_allocate(hashes, sequence.max_cached_tokens, to_hold, state.num_spare_blocks)
            if allocation is None:
                state.refuse(sequence)
                return
            state.move(sequence, SequenceTrigger.BLOCKS_ALLOCATED)
            sequence.blocks = allocation.blocks
            sequence.num_cached = sequence.num_computed = allocation.num_cached * state.cache.block_size
            state.count_lookup(sequence)
            if state.is_full():
                return

    def _ask_reservations(self) -> None:
        """Ask peers for room shortly before the first chunk can run, for a few steps' worth of prompts at most."""
        state = self._state
        if not state.table.waiting(Task.PREFILL) or state.is_full():
            return
        room = self.config.reserve_ahead * self.config.budget.chunk_tokens
        room -= sum(each.num_unread_tokens for each in state.table.asking)
        reading = state.table.in_state(SequenceState.PREFILLING)
        room -= sum(each.num_unread_tokens for each in reading if each.source is not None)
        for sequence in self._waiting(Task.PREFILL) if room > 0 else ():
            source = sequence.source
            if source is None:
                continue
            if state.is_full() or not self._handoffs.sending.ask_reservation(sequence, source):
                return
            room -= sequence.num_unread_tokens
            if room <= 0:
                return

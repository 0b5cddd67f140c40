"""What runs next on one worker's engine, one step at a time.

Running streams come first, oldest first; each gets its next token. A stream whose next token needs a block takes a free
or an unused cached one, else the youngest stream gives up its blocks and starts over later (preemption by recompute:
what it has written is read again, and row independence makes that the same tokens). Prompts fill what is left.
"""

import math

from disagg.core.errors import InternalFault
from disagg.core.ids import SequenceId, StepId
from disagg.core.request import EmittedToken
from disagg.core.roles import HandoffMode
from disagg.policy.batching import plan_chunks
from disagg.policy.step_time import StepShape
from disagg.protocol.lifecycle import SequenceState
from disagg.scheduler.actions import RunStep
from disagg.scheduler.closing import Closing
from disagg.scheduler.engine import StepPlan, StepResult, StepRow
from disagg.scheduler.events import LayersComputed, StepFailed, StepFinished, StepsFinished
from disagg.scheduler.partial_starts import PartialStarts
from disagg.scheduler.progress import EndedRow, Progress
from disagg.scheduler.sending import Sending
from disagg.scheduler.sequence import Sequence
from disagg.scheduler.state import SchedulerState
from disagg.telemetry.metrics import BLOCKS_EVICTED, PREEMPTIONS, STEP_SECONDS, STEPS
from disagg.telemetry.stages import Stage

_Row = tuple[Sequence, StepRow]  # of the running step, and whose it is


class Steps:
    """At most one step runs at a time; while it does, its sequences keep their blocks."""

    def __init__(self, state: SchedulerState, closing: Closing, sending: Sending) -> None:
        self._state = state
        self._closing = closing
        self._sending = sending
        self._progress = Progress(state, closing, sending)
        self._partials = PartialStarts(state)
        self._was_part = False  # what ran last
        self._running: StepPlan | None = None
        self._rows: tuple[_Row, ...] = ()
        self._shape = StepShape()
        self._next_step = 0
        self.recalled: frozenset[SequenceId] = frozenset()  # streams that stood until now, when they were preempted
        self._untold: set[SequenceId] = set()  # streams that wrote something while they stood, and have rows now

    @property
    def is_running(self) -> bool:
        return self._running is not None

    def start(self) -> None:
        """Plan and start the next step, or a part of one, if there is something to do and none runs."""
        self.recalled = frozenset()
        if self._running is not None:
            return
        self._untold.clear()
        # Parts and shared steps take turns, so that nobody waits for more than one part.
        is_running = self._try_start_part(is_turn=not self._was_part) or self._try_start_shared()
        if not is_running and self._was_part:
            is_running = self._try_start_part(is_turn=True)
        if len(self._state.first_tokens) and not is_running:
            self._state.first_tokens.tell(self._state.now_s, is_running=False)

    def _try_start_part(self, *, is_turn: bool) -> bool:
        part = self._partials.try_start(is_turn=is_turn)
        if part is None:
            return False
        part.sequence.is_in_step = True
        self._rows = ((part.sequence, part.row),)
        if part.sequence.state is SequenceState.DECODING:
            self._state.stages.enter(part.sequence, Stage.FIRST_STEP, self._state.now_s)
        self._run(StepPlan(StepId(self._next_step), (part.row,), layers=part.layers, carried=part.carried))
        return True

    def _try_start_shared(self) -> bool:
        state, standing = self._state, self._state.standing
        self._recall(standing.due())
        alone = self._chunks(StepShape()) if state.config.budget.prompts_alone else []
        streams = [] if alone else self._streams()
        self._partials.join(streams)
        rows: list[_Row] = []
        context = 0
        for stream in streams:
            stream.is_in_step = True
            context += stream.num_computed + 1
            rows.append((stream, stream.decode_row()))
        shape = StepShape(num_streams=len(rows) + len(standing), stream_context=context + standing.context)
        prompts: list[_Row] = []
        for sequence, num_tokens in alone or self._chunks(shape):
            sequence.is_in_step = True
            shape = shape.add_chunk(sequence.num_computed, num_tokens)
            prompts.append((sequence, sequence.prompt_row(num_tokens)))
            if sequence.source is not None:
                sequence.source.start_step()
        rows += prompts
        if not rows and not standing:
            return False
        self._rows, self._shape = tuple(rows), shape
        if len(state.first_tokens):
            state.first_tokens.tell(state.now_s, is_running=True)
        if state.stages.is_any:
            state.stages.start_step(prompts, state.now_s)
        self._run(
            StepPlan(
                StepId(self._next_step),
                tuple([row for _, row in rows]),
                self._report_every(prompts),
                num_standing=len(standing),
                standing_context=standing.context,
            )
        )
        return True

    def _run(self, plan: StepPlan) -> None:
        self._running, self._was_part = plan, plan.layers is not None
        self._next_step += 1
        self._state.act(RunStep(plan))

    def _recall(self, streams: list[Sequence]) -> None:
        """They have rows again; no step runs."""
        standing = self._state.standing
        self._untold.update(each.sequence_id for each in streams if standing.num_tokens(each.sequence_id))
        for stream in streams:
            stream.is_in_step = False
            self._state.recall(stream)

    def _chunks(self, streams: StepShape) -> list[tuple[Sequence, int]]:
        """Prompts of a step with these streams, and how many tokens of each."""
        state = self._state
        prompts = {each.sequence_id: each for each in state.table.in_state(SequenceState.PREFILLING)}
        if not prompts:
            return []
        chunks = plan_chunks(
            (sequence.prompt_work for sequence in state.in_reading_order(prompts.values())),
            streams=streams,
            budget=state.config.budget,
            costs=state.step_times.costs if state.step_times.is_learned else None,
            min_tokens=state.cache.block_size,
        )
        return [(prompts[chunk.sequence_id], chunk.num_tokens) for chunk in chunks]

    def _report_every(self, rows: list[_Row]) -> int:
        """Layers that make up the smallest push of this step; 0 when nothing is pushed while it runs."""
        config = self._state.config
        layers = [
            sequence.source.layers_per_push(row.position, row.position + len(row.token_ids), config.min_push_bytes)
            for sequence, row in rows
            if sequence.source is not None
        ]
        return min(layers, default=0) if config.handoff_mode is HandoffMode.LAYERWISE else 0

    def _streams(self) -> list[Sequence]:
        """Streams that have room for their next token; makes room at the expense of the youngest."""
        waiting = [stream for stream in self._state.table.streams() if stream.grammar_until_s is None]
        block_size = self._state.cache.block_size
        ready: list[Sequence] = []
        first, past_last = 0, len(waiting)
        while first < past_last:
            stream = waiting[first]
            first += 1
            while stream.num_computed >= len(stream.blocks) * block_size and not self._try_grow(stream):
                if self._state.standing:  # some of those may have to give up their blocks
                    self._recall(self._state.standing.all())
                    return self._streams()
                if first == past_last:
                    if ready:  # itself the youngest; alone, it waits for a hand-off to land or to be given up
                        self._preempt(stream)
                    break
                past_last -= 1
                self._preempt(waiting[past_last])
            else:
                ready.append(stream)
        return ready

    def _try_grow(self, stream: Sequence) -> bool:
        cache = self._state.cache
        missing = cache.num_blocks_for(stream.num_computed + 1) - len(stream.blocks)
        if missing <= 0:
            return True
        blocks = cache.try_extend(missing)
        if blocks is None:
            return False
        stream.blocks = (*stream.blocks, *blocks)
        self._state.tenants.charge(stream.spec.tenant, missing * cache.block_size, self._state.now_s)
        return True

    def _preempt(self, stream: Sequence) -> None:
        """What it wrote while it stood is told by its last token, while that is new."""
        if stream.sequence_id in self._untold:
            self.recalled |= {stream.sequence_id}
            last = len(stream.answer_ids) - 1
            self._state.emit_tokens((EmittedToken(stream.sequence_id, last, stream.answer_ids[last]),))
        self._state.counters.add(PREEMPTIONS)
        self._state.preempt(stream)

    def on_layers_computed(self, event: LayersComputed) -> None:
        if self._running is None or self._running.step_id != event.step_id:
            self._state.ignore(event)
            return
        chunks = tuple((sequence, row.position, row.position + len(row.token_ids)) for sequence, row in self._rows)
        self._sending.on_layers_computed(event, chunks)

    def on_finished(self, event: StepFinished) -> None:
        plan = self._running
        if plan is None or plan.step_id != event.result.step_id:
            self._state.ignore(event)
            return
        # An engine that reports no layers, or not the last one, loses nothing: what is left goes now.
        if plan.report_every:
            self.on_layers_computed(LayersComputed(plan.step_id, self._state.config.layout.num_layers))
        if plan.layers is not None:
            self._finish_part(event)
            return
        self._count(event.duration_s)
        if self._state.stages.is_any:
            self._state.stages.end_step(self._state.now_s)
        self._state.step_times.observe(self._shape, event.duration_s)
        streams = self._progress.take(self._ended(event.result), event.result)
        self._end_standing(1)
        self._stand(streams)

    def _finish_part(self, event: StepFinished) -> None:
        """Its time says nothing of a whole step's."""
        self._count(event.duration_s, kind="part")
        ((sequence, _),) = self._rows
        stages = self._state.stages
        if self._partials.finish(sequence, event.result.carried):
            if sequence.is_live:
                stages.report(sequence, len(sequence.answer_ids), self._state.now_s)
            self._stand(self._progress.take(self._ended(event.result), event.result))
            return
        if sequence.state is SequenceState.DECODING:
            stages.enter(sequence, Stage.DECODE_QUEUE, self._state.now_s)
        self._ended(event.result)
        self._closing.end_if_unused(sequence)

    def _end_standing(self, num_steps: int) -> None:
        """So many steps of those without rows are over."""
        state = self._state
        state.standing.step(num_steps)
        left, state.left_standing = state.left_standing, []
        for sequence in left:
            sequence.is_in_step = False
            self._closing.end_if_unused(sequence)

    def _stand(self, streams: list[Sequence]) -> None:
        """Those to which nothing can happen in the next step have no row in it, where rows are left out at all."""
        state, block_size = self._state, self._state.cache.block_size
        may_stand = state.config.sure_token_id is not None and not state.config.budget.prompts_alone
        for stream in streams if may_stand and not state.stages.is_any else ():
            num_steps = min(
                block_size * (stream.num_committed + 1) - 1 - stream.num_computed,  # until a block is full
                block_size * len(stream.blocks) - stream.num_computed,  # until one is needed
                stream.sure_length - 1 - len(stream.answer_ids),  # until its last token
            )
            if num_steps > 0 and stream.state is SequenceState.DECODING:
                state.table.stand(stream)
                state.standing.enter(stream, num_steps)

    def num_alike(self, most: int) -> int:
        """See Scheduler.num_alike."""
        state = self._state
        if self._running is None or self._rows or state.table.streams() or state.left_standing:
            return 1
        if state.stages.is_any:
            return 1
        if state.table.num_in_state(SequenceState.PREFILLING) or state.table.starts_something:
            return 1
        if self._partials.is_any_due():
            return 1
        return min(most, state.standing.num_free_steps)

    def on_all_finished(self, event: StepsFinished) -> None:
        """What on_finished and start would have done step by step."""
        plan, num_steps = self._running, len(event.durations_s)
        if plan is None or plan.step_id != event.step_id or num_steps > self.num_alike(num_steps):
            self._state.ignore(event)
            return
        self._running = None
        self._next_step += num_steps - 1
        self._count(math.fsum(event.durations_s), num_steps=num_steps)
        for duration_s in event.durations_s:
            self._state.step_times.observe(self._shape, duration_s)
            self._shape = self._shape.add_context(self._shape.num_streams)
        self._end_standing(num_steps)

    def on_failed(self, event: StepFailed) -> None:
        """The engine raised: the step's sequences cannot go on here."""
        if self._running is None or self._running.step_id != event.step_id:
            self._state.ignore(event)
            return
        standing: list[Sequence] = []
        if self._running.layers is None:  # those that stand have no share in a part
            standing = self._state.standing.all()
            self._recall(standing)
            self._end_standing(0)
        ended = [sequence for sequence, _, _ in self._ended(StepResult(event.step_id, ()))]
        for sequence in ended:
            self._partials.fail(sequence)
        for sequence in (*ended, *standing):
            self._closing.end_if_unused(sequence)
            self._closing.fail(sequence, event.failure)

    def _ended(self, result: StepResult) -> list[EndedRow]:
        """Rows of the step that is over, with their tokens, which mostly come in the order of the rows."""
        rows, self._rows, self._running = self._rows, (), None
        for sequence, _ in rows:
            sequence.is_in_step = False
        sampled = [row.sequence_id for _, row in rows if row.sampling is not None]
        if sampled == [token.sequence_id for token in result.tokens]:
            following = iter(result.tokens)
            return [(sequence, row, next(following) if row.sampling is not None else None) for sequence, row in rows]
        tokens = {token.sequence_id: token for token in result.tokens}
        return [(sequence, row, tokens.get(row.sequence_id)) for sequence, row in rows]

    def check_invariants(self) -> None:
        """Raises InternalFault when a sequence is held for a step that it is not in, or is in one and not held."""
        state, rows = self._state, [sequence for sequence, _ in self._rows]
        if rows and self._running is None:
            raise InternalFault(f"{len(rows)} rows are kept and no step runs")
        inside = {*rows, *state.standing.all(), *state.left_standing}
        held = {sequence for sequence in state.sequences.values() if sequence.is_in_step}
        if inside != held:
            names = sorted(str(sequence.attempt_id) for sequence in inside ^ held)
            raise InternalFault(f"in a step or held for one, but not both: {names}")

    def _count(self, duration_s: float, kind: str = "", num_steps: int = 1) -> None:
        has_stream, has_prompt = self._shape.num_streams > 0, self._shape.num_prompt_tokens > 0
        kind = kind or ("both" if has_prompt and has_stream else "prefill" if has_prompt else "decode")
        counters = self._state.counters
        counters.add(STEPS, num_steps, label=kind)
        counters.add(STEP_SECONDS, max(0.0, duration_s), label=kind)
        counters.add(BLOCKS_EVICTED, self._state.cache.num_evicted - counters.get(BLOCKS_EVICTED))

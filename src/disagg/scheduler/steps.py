"""What runs next on one worker's engine, and what follows from it.

Running streams come first, oldest first; each gets its next token. A stream whose next token needs a block takes a free
or an unused cached one, else the youngest stream gives up its blocks and starts over later (preemption by recompute:
what it has written is read again, and row independence makes that the same tokens). Prompts fill what is left.
"""

from collections import Counter, defaultdict
from itertools import groupby, repeat

import msgspec

from disagg.core.errors import InternalFault
from disagg.core.ids import StepId
from disagg.core.request import EmittedToken, finish_reason
from disagg.core.roles import HandoffMode, Task
from disagg.policy.batching import plan_chunks
from disagg.policy.step_time import StepShape
from disagg.protocol.lifecycle import SequenceState, SequenceTrigger
from disagg.scheduler.actions import RunStep
from disagg.scheduler.engine import StepPlan, StepResult, StepRow
from disagg.scheduler.events import LayersComputed, StepFailed, StepFinished, StepsFinished
from disagg.scheduler.partial_starts import PartialStarts
from disagg.scheduler.sending import Sending
from disagg.scheduler.sequence import OVER, Sequence
from disagg.scheduler.state import SchedulerState
from disagg.telemetry.metrics import (
    BLOCKS_EVICTED,
    OUTPUT_TOKENS,
    PREEMPTIONS,
    PROMPT_TOKENS_CACHED,
    PROMPT_TOKENS_COMPUTED,
    STEP_SECONDS,
    STEPS,
)
from disagg.telemetry.stages import Stage

_Ended = tuple[Sequence, StepRow, EmittedToken | None]
_Row = tuple[Sequence, StepRow]  # of the running step, and whose it is
_Full = tuple[int, int, Sequence, int]  # n-th of some steps, row, whose last block it fills, tokens computed then


class Steps:
    """At most one step runs at a time; while it does, its sequences keep their blocks."""

    def __init__(self, state: SchedulerState, sending: Sending) -> None:
        self._state = state
        self._sending = sending
        self._partials = PartialStarts(state)
        self._was_part = False  # what ran last
        self._running: StepPlan | None = None
        self._rows: tuple[_Row, ...] = ()
        self._shape = StepShape()
        self._next_step = 0
        self._planned: tuple[Sequence, ...] = ()  # the streams when it was planned
        self._num_open: int | None = None  # steps from the running one on after which none of its answers has ended

    @property
    def is_running(self) -> bool:
        return self._running is not None

    def start(self) -> None:
        """Plan and start the next step, or a part of one, if there is something to do and none runs."""
        if self._running is not None:
            return
        # Parts and shared steps take turns, so that nobody waits for more than one part.
        is_running = self._try_start_part(is_turn=not self._was_part) or self._try_start_shared()
        if not is_running and self._was_part:
            self._try_start_part(is_turn=True)

    def _try_start_part(self, *, is_turn: bool) -> bool:
        part = self._partials.try_start(is_turn=is_turn)
        if part is None:
            return False
        part.sequence.is_in_step = True
        self._rows, self._planned, self._num_open = ((part.sequence, part.row),), (), None
        if part.sequence.state is SequenceState.DECODING:
            self._state.stages.enter(part.sequence, Stage.FIRST_STEP, self._state.now_s)
        self._run(StepPlan(StepId(self._next_step), (part.row,), layers=part.layers, carried=part.carried))
        return True

    def _try_start_shared(self) -> bool:
        alone = self._chunks(StepShape()) if self._state.config.budget.prompts_alone else []
        streams = [] if alone else self._streams()
        self._partials.join(streams)
        rows: list[_Row] = []
        context = 0
        for stream in streams:
            stream.is_in_step = True
            context += stream.num_computed + 1
            rows.append((stream, stream.decode_row()))
        shape = StepShape(num_streams=len(rows), stream_context=context)
        prompts: list[_Row] = []
        for sequence, num_tokens in alone or self._chunks(shape):
            sequence.is_in_step = True
            shape = shape.add_chunk(sequence.num_computed, num_tokens)
            prompts.append((sequence, sequence.prompt_row(num_tokens)))
            if sequence.source is not None:
                sequence.source.start_step()
        rows += prompts
        if not rows:
            return False
        self._rows, self._shape = tuple(rows), shape
        self._planned, self._num_open = self._state.table.streams(), None
        if self._state.stages.is_any:
            self._state.stages.start_step(prompts, self._state.now_s)
        plan_rows = tuple([row for _, row in rows])
        self._run(StepPlan(StepId(self._next_step), plan_rows, self._report_every(prompts)))
        return True

    def _run(self, plan: StepPlan) -> None:
        self._running, self._was_part = plan, plan.layers is not None
        self._next_step += 1
        self._state.act(RunStep(plan))

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
        return True

    def _preempt(self, stream: Sequence) -> None:
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
        self._take(event.result)

    def _finish_part(self, event: StepFinished) -> None:
        """Its time says nothing of a whole step's."""
        self._count(event.duration_s, kind="part")
        ((sequence, _),) = self._rows
        stages = self._state.stages
        if self._partials.finish(sequence, event.result.carried):
            if sequence.is_live:
                stages.report(sequence, len(sequence.answer_ids), self._state.now_s)
            self._take(event.result)
            return
        if sequence.state is SequenceState.DECODING:
            stages.enter(sequence, Stage.DECODE_QUEUE, self._state.now_s)
        self._ended(event.result)
        self._state.end_if_unused(sequence)

    def _take(self, result: StepResult) -> None:
        """What has come of each row of the step that is over."""
        failures = dict(result.failures)
        sampled: defaultdict[Task, list[EmittedToken]] = defaultdict(list)
        scores = {each.sequence_id: each.logprobs for each in result.scores}
        block_size = self._state.cache.block_size
        for sequence, row, token in self._ended(result):
            state = sequence.machine.state
            if state is SequenceState.DECODING and token is not None:  # nearly all of them
                sequence.num_computed += 1
                if sequence.num_computed // block_size > sequence.num_committed:
                    self._commit(sequence)
                sampled[sequence.task].append(token)
                self._write(sequence, token)
                continue
            if state in OVER:
                self._state.end_if_unused(sequence)
                continue
            if state is SequenceState.DECODING:
                sequence.num_computed += 1
            else:
                self._count_prompt(sequence, len(row.token_ids))
            if sequence.num_computed // block_size > sequence.num_committed:
                self._commit(sequence)
            if sequence.needs_prompt_logprobs:
                sequence.prompt_logprobs += scores.get(sequence.sequence_id, ())
            if token is not None:
                if sequence.needs_prompt_logprobs:
                    token = msgspec.structs.replace(token, prompt_logprobs=tuple(sequence.prompt_logprobs))
                sampled[sequence.task].append(token)
                self._take_first_token(sequence, token)
            elif sequence.sequence_id in failures:
                self._state.fail(sequence, failures[sequence.sequence_id])
        for task, tokens in sampled.items():
            self._state.emit_tokens(tokens)
            self._state.counters.add(OUTPUT_TOKENS, len(tokens), label=task.value)

    def num_alike(self, most: int) -> int:
        """See Scheduler.num_alike."""
        state, num_rows = self._state, len(self._rows)
        # The tuple of streams is made anew whenever one begins or ends.
        if self._running is None or state.table.streams() is not self._planned or len(self._planned) != num_rows:
            return 1
        if state.stages.is_any:
            return 1
        if state.table.num_in_state(SequenceState.PREFILLING) or state.table.starts_something:
            return 1
        if self._partials.is_any_due():
            return 1
        if self._num_open is None:
            self._num_open = min([sequence.sure_length - len(sequence.answer_ids) for sequence, _ in self._rows]) - 1
        # As if every stream filled a block at once: whatever comes, none has to give up its blocks.
        num_with_room = (state.cache.num_available // num_rows - 1) * state.cache.block_size
        return min(most, self._num_open, num_with_room)

    def on_all_finished(self, event: StepsFinished) -> None:
        """What on_finished and start would have done step by step, in their order, without looking at every row."""
        plan, num_steps = self._running, len(event.durations_s)
        if plan is None or plan.step_id != event.step_id or num_steps > self.num_alike(num_steps):
            self._state.ignore(event)
            return
        rows, self._rows, self._running, self._planned = self._rows, (), None, ()
        self._next_step += num_steps - 1
        for duration_s in event.durations_s:
            self._count(duration_s)
            self._state.step_times.observe(self._shape, duration_s)
            self._shape = self._shape.add_context(len(rows))
        tokens: list[EmittedToken] = []
        full: list[_Full] = []
        block_size = self._state.cache.block_size
        for index, ((sequence, row), token_ids) in enumerate(zip(rows, event.token_ids, strict=True)):
            sequence.is_in_step = False
            positions = range(row.output_position, row.output_position + num_steps)
            tokens += map(EmittedToken, repeat(row.sequence_id), positions, token_ids)
            sequence.answer_ids += token_ids
            first = block_size - row.position % block_size
            full += [(step, index, sequence, row.position + step) for step in range(first, num_steps + 1, block_size)]
        self._fill_blocks(full, num_steps)
        for sequence, row in rows:
            sequence.num_computed = row.position + num_steps
        self._state.emit_tokens(tokens)
        for task, num_rows in Counter([sequence.task for sequence, _ in rows]).items():
            self._state.counters.add(OUTPUT_TOKENS, num_rows * num_steps, label=task.value)

    def _fill_blocks(self, full: list["_Full"], num_steps: int) -> None:
        """Index what each step fills, then give those streams room for the next step."""
        full.sort(key=lambda each: each[:2])
        for step, each_full in groupby(full, key=lambda each: each[0]):
            filled = list(each_full)
            for _, _, sequence, num_computed in filled:
                sequence.num_computed = num_computed
                if num_computed // self._state.cache.block_size > sequence.num_committed:
                    self._commit(sequence)
            for _, _, sequence, _ in filled if step < num_steps else ():
                if not self._try_grow(sequence):
                    raise InternalFault(f"{sequence.sequence_id} has no room though there was enough")

    def on_failed(self, event: StepFailed) -> None:
        """The engine raised: the step's sequences cannot go on here."""
        if self._running is None or self._running.step_id != event.step_id:
            self._state.ignore(event)
            return
        for sequence, _, _ in self._ended(StepResult(event.step_id, ())):
            self._partials.fail(sequence)
            self._state.end_if_unused(sequence)
            self._state.fail(sequence, event.failure)

    def _ended(self, result: StepResult) -> list[_Ended]:
        """Rows of the step that is over, with their tokens, which mostly come in the order of the rows."""
        rows, self._rows, self._running, self._planned = self._rows, (), None, ()
        for sequence, _ in rows:
            sequence.is_in_step = False
        sampled = [row.sequence_id for _, row in rows if row.sampling is not None]
        if sampled == [token.sequence_id for token in result.tokens]:
            following = iter(result.tokens)
            return [(sequence, row, next(following) if row.sampling is not None else None) for sequence, row in rows]
        tokens = {token.sequence_id: token for token in result.tokens}
        return [(sequence, row, tokens.get(row.sequence_id)) for sequence, row in rows]

    def _count_prompt(self, sequence: Sequence, num_tokens: int) -> None:
        """A chunk is written."""
        state = self._state
        state.counters.add(PROMPT_TOKENS_COMPUTED, num_tokens, label=sequence.task.value)
        state.tenants.charge(sequence.spec.tenant, num_tokens, state.now_s)
        sequence.num_computed += num_tokens

    def _commit(self, sequence: Sequence) -> None:
        """Index the blocks that are full now."""
        state = self._state
        num_full = sequence.num_computed // state.cache.block_size
        hashes = state.extend_hashes(sequence, sequence.num_computed)[:num_full]
        if sequence.source is not None:  # a write may be reading its blocks: they stay
            state.cache.commit(hashes, sequence.blocks, sequence.num_committed)
        else:
            sequence.blocks = state.cache.commit_shared(hashes, sequence.blocks, sequence.num_committed)
        sequence.num_committed = num_full

    def _take_first_token(self, sequence: Sequence, token: EmittedToken) -> None:
        """The prompt is computed."""
        state = self._state
        state.counters.add(PROMPT_TOKENS_CACHED, sequence.num_cached, label=sequence.task.value)
        if sequence.source is not None:
            sequence.answer_ids.append(token.token_id)
            self._sending.finish_prefill(sequence, sequence.source, token)
            state.report_prompt(sequence)  # now that all there is to push has been pushed
            return
        state.report_prompt(sequence)
        state.move(sequence, SequenceTrigger.PROMPT_COMPUTED)
        self._write(sequence, token)

    def _write(self, sequence: Sequence, token: EmittedToken) -> None:
        """The next token of an answer that is written here."""
        sequence.answer_ids.append(token.token_id)
        num_tokens = len(sequence.answer_ids)
        if num_tokens < sequence.sure_length:
            return
        if finish_reason(sequence.spec.sampling, token.token_id, num_tokens) is not None:
            self._state.finish(sequence)

    def _count(self, duration_s: float, kind: str = "") -> None:
        has_stream, has_prompt = self._shape.num_streams > 0, self._shape.num_prompt_tokens > 0
        kind = kind or ("both" if has_prompt and has_stream else "prefill" if has_prompt else "decode")
        counters = self._state.counters
        counters.add(STEPS, label=kind)
        counters.add(STEP_SECONDS, max(0.0, duration_s), label=kind)
        counters.add(BLOCKS_EVICTED, self._state.cache.num_evicted - counters.get(BLOCKS_EVICTED))

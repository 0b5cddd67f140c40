"""What a step that is over has brought each of its sequences: KV, full blocks for the index, the next token.

The token of a stream continues its answer, here or as its end. That of a prompt is the first of an answer: written on
here, or handed over with the KV.
"""

from collections import defaultdict

import msgspec

from disagg.core.request import EmittedToken, finish_reason
from disagg.core.roles import FirstToken, Task
from disagg.protocol.lifecycle import SequenceState, SequenceTrigger
from disagg.scheduler.closing import Closing
from disagg.scheduler.engine import StepResult, StepRow
from disagg.scheduler.sending import Sending
from disagg.scheduler.sequence import OVER, Sequence
from disagg.scheduler.state import SchedulerState
from disagg.telemetry.metrics import OUTPUT_TOKENS, PROMPT_TOKENS_CACHED, PROMPT_TOKENS_COMPUTED

EndedRow = tuple[Sequence, StepRow, EmittedToken | None]


class Progress:
    """Of the sequences of one worker."""

    def __init__(self, state: SchedulerState, closing: Closing, sending: Sending) -> None:
        self._state = state
        self._closing = closing
        self._sending = sending

    def take(self, rows: list[EndedRow], result: StepResult) -> list[Sequence]:
        """Of each row, with the token it has got, if any. Gives the streams that have got one."""
        failures = dict(result.failures)
        scores = {each.sequence_id: each.logprobs for each in result.scores}
        sampled: list[EmittedToken] = []
        num_sampled: defaultdict[Task, int] = defaultdict(int)
        streams: list[Sequence] = []
        for sequence, row, token in rows:
            state = sequence.machine.state
            if state in OVER:
                self._closing.end_if_unused(sequence)
                continue
            self._advance(sequence, len(row.token_ids))
            if sequence.needs_prompt_logprobs:
                sequence.prompt_logprobs += scores.get(sequence.sequence_id, ())
                if token is not None:
                    token = msgspec.structs.replace(token, prompt_logprobs=tuple(sequence.prompt_logprobs))
            if token is not None:
                num_sampled[sequence.task] += 1
                if state is SequenceState.DECODING:
                    self._write(sequence, token)
                    streams.append(sequence)
                else:
                    self._take_first_token(sequence, token)
                if not self._is_told_by_peer(sequence):
                    sampled.append(token)
            elif sequence.sequence_id in failures:
                self._closing.fail(sequence, failures[sequence.sequence_id])
        self._state.emit_tokens(sampled)
        for task, num_tokens in num_sampled.items():
            self._state.counters.add(OUTPUT_TOKENS, num_tokens, label=task.value)
        return streams

    def _is_told_by_peer(self, sequence: Sequence) -> bool:
        """Whether the first token goes to the router from where the next ones come, and not from here."""
        if self._state.config.first_token is FirstToken.AT_ONCE or sequence.source is None:
            return False
        return sequence.finish_reason() is None

    def _advance(self, sequence: Sequence, num_tokens: int) -> None:
        """So many of its tokens are written."""
        if sequence.machine.state is SequenceState.DECODING:
            sequence.num_computed += 1
        else:
            self._count_prompt(sequence, num_tokens)
        if sequence.num_computed // self._state.cache.block_size > sequence.num_committed:
            self._commit(sequence)

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
            self._closing.finish(sequence)

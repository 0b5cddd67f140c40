"""One sequence on one worker."""

from disagg.core.errors import InternalFault
from disagg.core.ids import BlockId, HandoffId, SequenceId
from disagg.core.request import FinishReason, SequenceSpec, TokenLogprobs, finish_reason
from disagg.core.roles import Task
from disagg.kvcache.block_hash import BlockHash
from disagg.policy.batching import PromptWork
from disagg.protocol.handoff import DestinationState
from disagg.protocol.lifecycle import SEQUENCE_TABLE, SequenceState
from disagg.protocol.table import Machine
from disagg.scheduler.destination import HandoffDestination
from disagg.scheduler.engine import Scoring, StepRow, TokenHistory
from disagg.scheduler.partial_step import PartialStep
from disagg.scheduler.source import HandoffSource

OVER = (SequenceState.CLOSING, SequenceState.ENDED)


class Sequence:
    """Token ids, sampling parameters and blocks, and how far each has got.

    positions 0 .. num_computed-1            KV written here or received
              num_computed .. num_to_read-1    known before decoding starts: prompt, and an earlier attempt's answer
              .. len(prompt)+len(answer)-1     written here; the last one has no KV yet
    """

    __slots__ = (
        "_work",
        "answer_ids",
        "arrival",
        "arrived_s",
        "attempt",
        "blocks",
        "destination",
        "grammar_until_s",
        "hashes",
        "is_counted",
        "is_in_step",
        "machine",
        "needs_history",
        "num_cached",
        "num_committed",
        "num_computed",
        "num_expected",
        "num_to_read",
        "partial",
        "prompt_logprobs",
        "refused_since_s",
        "root",
        "source",
        "spec",
        "sure_length",
        "task",
    )

    def __init__(
        self,
        spec: SequenceSpec,
        task: Task,
        attempt: int,
        arrival: int,
        emitted_ids: tuple[int, ...] = (),
        *,
        arrived_s: float,
        root: BlockHash,
    ) -> None:
        self.spec = spec
        self.task = task
        self.attempt = attempt
        self.arrival = arrival
        self.arrived_s = arrived_s
        self.root = root  # of its chain of block hashes
        self.refused_since_s = float("inf")  # first time that there was no room for it
        self.machine = Machine(SEQUENCE_TABLE, f"{spec.sequence_id} ({task.value})")
        self.source: HandoffSource | None = None
        self.destination: HandoffDestination | None = None
        self.partial: PartialStep | None = None  # its first step, while that has begun before all KV was here
        self.blocks: tuple[BlockId, ...] = ()
        self.hashes: list[BlockHash] = []
        self.answer_ids = list(emitted_ids)
        self.needs_history = spec.sampling.needs_history
        # Tokens that its answer gets whatever they are; 0 where each of them decides about the next.
        is_open = self.needs_history or spec.sampling.stop_token_ids or spec.sampling.grammar is not None
        self.sure_length = 0 if is_open else spec.sampling.max_tokens
        self.num_to_read = len(spec.prompt_ids) + len(emitted_ids)
        self.num_computed = 0
        self.num_cached = 0
        self.num_committed = 0  # blocks
        self.num_expected = 0  # tokens found in the prefix index when it came: what is cached is known at admission
        self.prompt_logprobs: list[TokenLogprobs] = []  # so far, where they are wanted
        self._work: PromptWork | None = None
        self.grammar_until_s: float | None = None  # while its grammar is prepared: for how long at most
        self.is_in_step = False
        self.is_counted = False  # among its tenant's that await their turn

    @property
    def sequence_id(self) -> SequenceId:
        return self.spec.sequence_id

    @property
    def attempt_id(self) -> HandoffId:
        return HandoffId(self.spec.sequence_id, self.attempt)

    @property
    def state(self) -> SequenceState:
        return self.machine.state

    @property
    def is_live(self) -> bool:
        return self.machine.state not in OVER

    @property
    def needs_peer(self) -> bool:
        """Whether the other end of its hand-off still has a part in it."""
        if self.state is SequenceState.DECODING:
            return False
        return self.destination is None or self.destination.state is not DestinationState.COMPLETE

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.spec.prompt_ids)

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether they are wanted and not out yet: they go with the answer's first token."""
        return self.spec.sampling.num_prompt_logprobs is not None and not self.answer_ids

    @property
    def max_cached_tokens(self) -> int:
        """How much of what is to be read may come from a cache. A scored prompt is computed from its start.

        The last token is always computed: its scores give the next token of the answer.
        """
        return 0 if self.needs_prompt_logprobs else self.num_to_read - 1

    @property
    def num_unread_tokens(self) -> int:
        """Known tokens whose KV is still to be computed before decoding starts."""
        return max(0, self.num_to_read - self.num_computed)

    @property
    def reads_here(self) -> bool:
        """Whether a prompt is still to be computed on this worker."""
        return self.awaits_turn and self.task is not Task.DECODE

    @property
    def awaits_turn(self) -> bool:
        """Whether others can go before it: it has no room here yet, or its prompt is being read."""
        return self.state in (SequenceState.WAITING, SequenceState.PREFILLING)

    @property
    def prompt_work(self) -> PromptWork:
        """What is to be read here before the next token of the answer."""
        position = self.num_expected if self.machine.state is SequenceState.WAITING else self.num_computed
        if self._work is None or self._work.position != position:  # many wait, at every step, and few get on
            self._work = self._work_from(position)
        return self._work

    def _work_from(self, position: int) -> PromptWork:
        return PromptWork(
            sequence_id=self.spec.sequence_id,
            num_remaining_tokens=self.num_to_read - position,
            position=position,
            priority=self.spec.priority,
            is_begun=bool(self.answer_ids),
            tenant=self.spec.tenant,
            arrived_s=self.arrived_s,
            arrival=self.arrival,
        )

    def num_tokens_to_hold(self, headroom: int) -> int:
        """Tokens that need room at the start where its answer is written: what is to be read, and `headroom` more."""
        return min(self.spec.max_total_tokens, self.num_to_read + headroom)

    def finish_reason(self) -> FinishReason | None:
        if not self.answer_ids:
            return None
        return finish_reason(self.spec.sampling, self.answer_ids[-1], len(self.answer_ids))

    def token_ids(self, start: int, stop: int) -> tuple[int, ...]:
        """Tokens [start, stop) of prompt and answer."""
        num_prompt = self.num_prompt_tokens
        if stop <= num_prompt:
            return self.spec.prompt_ids[start:stop]
        answer = tuple(self.answer_ids[max(0, start - num_prompt) : stop - num_prompt])
        return self.spec.prompt_ids[start:] + answer

    def start_over(self) -> None:
        """Preempted: its blocks are gone, all tokens so far are to be read again."""
        self.task = Task.WHOLE
        self.num_to_read = self.num_prompt_tokens + len(self.answer_ids)
        self.num_computed = self.num_cached = self.num_committed = self.num_expected = 0
        self._work = None
        self.hashes.clear()
        self.destination = None

    def prompt_row(self, num_tokens: int) -> StepRow:
        """The next chunk of what is to be read; the last one samples the next token of the answer."""
        stop = self.num_computed + num_tokens
        is_last = stop == self.num_to_read
        return StepRow(
            sequence_id=self.sequence_id,
            token_ids=self.token_ids(self.num_computed, stop),
            position=self.num_computed,
            block_table=self.blocks,
            sampling=self.spec.sampling if is_last else None,
            output_position=len(self.answer_ids),
            history=self._history() if is_last else None,
            scoring=self._scoring(stop),
        )

    def decode_row(self) -> StepRow:
        """The last token of the answer, to get the next."""
        spec, answer_ids = self.spec, self.answer_ids
        last, sampling, output_position = (answer_ids[-1],), spec.sampling, len(answer_ids)
        history = self._history() if self.needs_history else None
        return StepRow(spec.sequence_id, last, self.num_computed, self.blocks, sampling, output_position, history)

    def _scoring(self, stop: int) -> Scoring | None:
        """Of a chunk [num_computed, stop)."""
        num_top = self.spec.sampling.num_prompt_logprobs
        if num_top is None or not self.needs_prompt_logprobs:
            return None
        return Scoring(self.spec.prompt_ids[self.num_computed + 1 : stop + 1], num_top)

    def _history(self) -> TokenHistory | None:
        if not self.needs_history:
            return None
        return TokenHistory(self.attempt, self.spec.prompt_ids, tuple(self.answer_ids))

    def check_invariants(self, block_size: int) -> None:
        if self.num_cached > self.num_to_read or self.num_committed * block_size > self.num_computed:
            text = f"{self.num_cached} cached of {self.num_to_read}, {self.num_committed} blocks indexed"
            raise InternalFault(f"{self.attempt_id}: {text}, {self.num_computed} tokens computed")
        if self.state is not SequenceState.DECODING:
            return
        num_known = self.num_prompt_tokens + len(self.answer_ids)
        if self.num_computed != num_known - 1 or self.num_computed > len(self.blocks) * block_size:
            text = f"KV of {self.num_computed} tokens in {len(self.blocks)} blocks"
            raise InternalFault(f"{self.attempt_id} writes after {num_known} tokens, with {text}")

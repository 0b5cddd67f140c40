"""One sequence on one worker."""

from disagg.core.ids import BlockId, SequenceId
from disagg.core.request import EmittedToken, FinishReason, SequenceSpec, finish_reason
from disagg.core.roles import Task
from disagg.kvcache.block_hash import BlockHash
from disagg.protocol.lifecycle import SEQUENCE_TABLE, SequenceState
from disagg.protocol.table import Machine
from disagg.scheduler.destination import HandoffDestination
from disagg.scheduler.engine import StepRow
from disagg.scheduler.source import HandoffSource


class Sequence:
    """Token ids, sampling parameters and blocks, and how far each has got.

    positions 0 .. num_computed-1      KV written here or received
              num_computed .. len-1    known tokens without KV: prompt still to read, or the last output token
    """

    __slots__ = (
        "arrival",
        "attempt",
        "blocks",
        "destination",
        "hashes",
        "is_in_step",
        "machine",
        "num_cached",
        "num_committed",
        "num_computed",
        "num_received",
        "output",
        "refused_since_s",
        "source",
        "spec",
        "task",
    )

    def __init__(self, spec: SequenceSpec, task: Task, attempt: int, arrival: int) -> None:
        self.spec = spec
        self.task = task
        self.attempt = attempt
        self.arrival = arrival
        self.refused_since_s = float("inf")  # first time that there was no room for it
        self.machine = Machine(SEQUENCE_TABLE, f"{spec.sequence_id} ({task.value})")
        self.source: HandoffSource | None = None
        self.destination: HandoffDestination | None = None
        self.blocks: tuple[BlockId, ...] = ()
        self.hashes: list[BlockHash] = []
        self.output: list[EmittedToken] = []
        self.num_computed = 0
        self.num_cached = 0
        self.num_received = 0
        self.num_committed = 0  # blocks
        self.is_in_step = False

    @property
    def sequence_id(self) -> SequenceId:
        return self.spec.sequence_id

    @property
    def state(self) -> SequenceState:
        return self.machine.state

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.spec.prompt_ids)

    @property
    def num_remaining_prompt_tokens(self) -> int:
        return max(0, self.num_prompt_tokens - self.num_computed)

    @property
    def num_tokens_to_hold(self) -> int:
        """Tokens that need room here: with an answer to write, all of it; else the prompt."""
        writes_answer = self.task in (Task.WHOLE, Task.DECODE)
        return self.spec.max_total_tokens if writes_answer else self.num_prompt_tokens

    def finish_reason(self) -> FinishReason | None:
        if not self.output:
            return None
        return finish_reason(self.spec.sampling, self.output[-1].token_id, len(self.output))

    def token_ids(self, stop: int) -> tuple[int, ...]:
        """The first `stop` tokens of prompt and answer."""
        missing = stop - self.num_prompt_tokens
        if missing <= 0:
            return self.spec.prompt_ids[:stop]
        return self.spec.prompt_ids + tuple(token.token_id for token in self.output[:missing])

    def prompt_row(self, num_tokens: int) -> StepRow:
        """The next chunk of the prompt; the last one samples the first token of the answer."""
        stop = self.num_computed + num_tokens
        return StepRow(
            sequence_id=self.sequence_id,
            token_ids=self.spec.prompt_ids[self.num_computed : stop],
            position=self.num_computed,
            block_table=self.blocks,
            sampling=self.spec.sampling if stop == self.num_prompt_tokens else None,
        )

    def decode_row(self) -> StepRow:
        """The last token of the answer, to get the next."""
        return StepRow(
            sequence_id=self.sequence_id,
            token_ids=(self.output[-1].token_id,),
            position=self.num_computed,
            block_table=self.blocks,
            sampling=self.spec.sampling,
            output_position=len(self.output),
        )

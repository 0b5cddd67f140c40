"""What the scheduler asks of an engine. The engine room implements it with torch, `disagg.testing` without."""

from collections.abc import Callable
from typing import Protocol

import msgspec

from disagg.core.errors import Failure
from disagg.core.grammar import GrammarSpec
from disagg.core.ids import BlockId, HandoffId, SequenceId, StepId
from disagg.core.request import EmittedToken, SamplingParams, TokenLogprobs
from disagg.core.spans import KvLayout
from disagg.kvcache.memory import Memory


class TokenHistory(msgspec.Struct, frozen=True):
    """All tokens before the one that is sampled. Within one attempt an answer only grows at its end."""

    attempt: int
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]


class Scoring(msgspec.Struct, frozen=True):
    """Which known tokens of a row's sequence to give log probabilities of, and of how many likelier ones with each.

    following_ids[i] is the token after the row's token i; a row's last token may be followed by none.
    """

    following_ids: tuple[int, ...]
    num_top: int


class StepRow(msgspec.Struct, frozen=True, gc=False):
    """One sequence's part of a step: tokens to compute and where their KV goes.

    token_ids        0 .. n-1      computed now, at positions position .. position+n-1
    block_table      0 .. ceil((position+n)/block_size)-1 at least; earlier positions are already written
    """

    sequence_id: SequenceId
    token_ids: tuple[int, ...]
    position: int
    block_table: tuple[BlockId, ...]
    sampling: SamplingParams | None  # None: a chunk that is not the prompt's last; nothing is sampled
    output_position: int = 0  # position in the answer of the token that is sampled
    history: TokenHistory | None = None  # where the sampling needs it; nobody else pays for it
    scoring: Scoring | None = None


class LayerRange(msgspec.Struct, frozen=True):
    """Layers start .. stop-1."""

    start: int
    stop: int


class StepPlan(msgspec.Struct, frozen=True, gc=False):
    """One forward pass. Rows are independent: no row's result depends on another row.

    layers: only these, for one row of one token; the KV of its earlier positions need not be there in others. A part
    that is not the last one samples nothing; all parts of a row, in order, give the bits of the whole pass.
    """

    step_id: StepId
    rows: tuple[StepRow, ...]
    # Layers between two reports while a row is being handed off: KV must then be readable by other threads. 0: none.
    report_every: int = 0
    layers: LayerRange | None = None
    carried: bytes = b""  # what the part before it gave back; nothing for the first
    # Streams without rows, and what they attend to, summed: none where anything is computed. See scheduler.standing.
    num_standing: int = 0
    standing_context: int = 0

    def is_reported(self, num_layers: int, of_layers: int) -> bool:
        """Whether this many finished layers, of a model of of_layers, are worth a report."""
        return self.report_every > 0 and (num_layers % self.report_every == 0 or num_layers == of_layers)

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)


class RowScores(msgspec.Struct, frozen=True):
    """Log probabilities of one row's following tokens, in order."""

    sequence_id: SequenceId
    logprobs: tuple[TokenLogprobs, ...]


class StepResult(msgspec.Struct, frozen=True, gc=False):
    """One sampled token for each row that asked for one, and scores for each row that asked for them.

    Instead of a token there may be a reason why there is none: such a sequence cannot go on here.
    """

    step_id: StepId
    tokens: tuple[EmittedToken, ...]
    scores: tuple[RowScores, ...] = ()
    failures: tuple[tuple[SequenceId, Failure], ...] = ()
    carried: bytes = b""  # of a part that is not the last: for the next, and for nobody else


# Called on the step's own thread after each layer, with the number of layers whose KV for this step is written.
OnLayers = Callable[[int], None]


class Engine(Protocol):
    """Runs planned steps. One thread calls run_step; memory may be read and written from others.

    Grammars are prepared from other threads too, before the first step that samples with them.
    """

    @property
    def layout(self) -> KvLayout: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def memory(self) -> Memory: ...

    def run_step(self, plan: StepPlan, on_layers: OnLayers) -> StepResult:
        """Compute the plan's tokens, write their KV, sample. Blocking."""

    def prepare_grammar(self, attempt_id: HandoffId, grammar: GrammarSpec, emitted_ids: tuple[int, ...]) -> None:
        """Compile and read the answer so far, so that no step waits for it. Blocking.

        Raises InvalidRequest with the reason for what is no grammar, InternalFault for an answer it does not allow.
        """

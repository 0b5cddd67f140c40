"""Which tokens the rows of a step may take: found by a thread of its own while the step's forward pass runs.

A state is a function of the grammar and the answer so far, so it is never sent: whoever goes on with a sequence makes
it anew from the token ids. What is kept from step to step only saves that work.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as DeadlinePassed
from typing import Final, NamedTuple, Protocol, Self

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from disagg.core.errors import DisaggError, Failure, FailureKind, InternalFault, InvalidRequest
from disagg.core.grammar import GrammarSpec
from disagg.core.ids import HandoffId, SequenceId
from disagg.engine.sampler import SampleRequest
from disagg.scheduler.engine import StepRow, TokenHistory

MAX_STARTED: Final = 128  # grammars kept as they are before the first token
MAX_IDLE_STATES: Final = 128  # kept besides those of the running step
# The library bounds its work per token to milliseconds: this is for what cannot happen, before a watchdog steps in.
MASK_TIMEOUT_S: Final = 5.0

_LARGE: Final = np.float32(1e30)  # its square is more than float32 holds

Allowed = npt.NDArray[np.bool_]  # [vocab_size] by token id


class GrammarState(Protocol):
    """Where one answer is in its grammar. One thread at a time."""

    def allowed(self) -> Allowed:
        """What may come next: at least one token. Raises InvalidRequest when the grammar is too complex here."""

    def accept(self, token_ids: Sequence[int]) -> None:
        """The answer's next tokens. Raises InternalFault for one that is not allowed."""

    def copy(self) -> Self: ...


StartGrammar = Callable[[GrammarSpec], GrammarState]  # raises InvalidRequest for what is no grammar


def no_grammars(spec: GrammarSpec) -> GrammarState:
    """Where an engine has no vocabulary."""
    raise InvalidRequest("this worker cannot follow grammars: it was started without its model's vocabulary")


class _Live:
    """The state of one attempt at an answer, and how much of the answer it has seen."""

    __slots__ = ("attempt", "num_seen", "state")

    def __init__(self, attempt: int, state: GrammarState) -> None:
        self.attempt = attempt
        self.state = state
        self.num_seen = 0

    def catch_up(self, answer_ids: Sequence[int]) -> None:
        self.state.accept(answer_ids[self.num_seen :])
        self.num_seen = len(answer_ids)


class GrammarTable:
    """States of the sequences in flight. Any thread; two at once never for the same attempt."""

    def __init__(self, start: StartGrammar) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._started: dict[GrammarSpec, GrammarState] = {}  # least lately used first
        self._live: dict[SequenceId, _Live] = {}  # least lately used first

    def prepare(self, attempt_id: HandoffId, spec: GrammarSpec, answer_ids: Sequence[int]) -> None:
        """Do ahead what the first mask needs. Raises InvalidRequest for what is no grammar."""
        live = _Live(attempt_id.attempt, self._fresh(spec))
        live.catch_up(answer_ids)
        with self._lock:
            self._live.pop(attempt_id.sequence_id, None)
            self._live[attempt_id.sequence_id] = live

    def allowed(self, sequence_id: SequenceId, spec: GrammarSpec, history: TokenHistory) -> Allowed:
        """What may follow this answer."""
        with self._lock:
            live = self._live.pop(sequence_id, None)
        if live is None or live.attempt != history.attempt or live.num_seen > len(history.answer_ids):
            live = _Live(history.attempt, self._fresh(spec))
        live.catch_up(history.answer_ids)
        allowed = live.state.allowed()
        with self._lock:
            self._live.setdefault(sequence_id, live)  # a newer attempt may have been prepared meanwhile
        return allowed

    def forget(self, num_used: int) -> None:
        """Drop what has not been used for long; num_used states were in the step just now."""
        with self._lock:
            while len(self._live) > num_used + MAX_IDLE_STATES:
                self._live.pop(next(iter(self._live)))

    def check_invariants(self) -> None:
        if len(self._started) > MAX_STARTED:
            raise InternalFault(f"{len(self._started)} grammars are kept, the limit is {MAX_STARTED}")

    def _fresh(self, spec: GrammarSpec) -> GrammarState:
        with self._lock:
            known = self._started.pop(spec, None)
            if known is not None:
                self._started[spec] = known
                return known.copy()
        started = self._start(spec)
        with self._lock:
            self._started[spec] = started.copy()
            while len(self._started) > MAX_STARTED:
                self._started.pop(next(iter(self._started)))
        return started


class Masked(NamedTuple):
    """What sampling is to do, and why some rows cannot be sampled."""

    requests: list[SampleRequest]
    failures: dict[SequenceId, Failure]


class Mask(NamedTuple):
    """What one row may take."""

    bias: npt.NDArray[np.float32]  # [vocab_size of the model] added to scores: 0 or -inf
    num_allowed: int


class StepMasks:
    """The masks of one step's rows, found one after the other by a thread that lives as long as they take."""

    def __init__(self, table: GrammarTable, vocab_size: int, rows: dict[int, StepRow]) -> None:
        """rows: those with a grammar, by their place in the logits."""
        self._table = table
        self._vocab_size = vocab_size
        self._rows = rows
        self._masks: dict[int, Future[Mask]] = {place: Future() for place in rows}
        if rows:
            threading.Thread(target=self._find, name="grammar", daemon=True).start()

    def apply(self, logits: Tensor, requests: list[SampleRequest]) -> Masked:
        """Give tokens that are not allowed the score -inf in logits [S, vocab_size], row by row of the requests."""
        failures: dict[SequenceId, Failure] = {}
        requests = list(requests)
        for place, mask in self._masks.items():
            sequence_id = self._rows[place].sequence_id
            try:
                requests[place] = _apply(mask.result(MASK_TIMEOUT_S), logits[place], requests[place])
            except DeadlinePassed:
                text = f"the tokens that a grammar allows were not found within {MASK_TIMEOUT_S:g} s"
                failures[sequence_id] = Failure(FailureKind.INTERNAL, text)
            except DisaggError as error:
                failures[sequence_id] = failure_of(error)
        return Masked(requests, failures)

    def _find(self) -> None:
        for place, mask in self._masks.items():
            row = self._rows[place]
            assert row.sampling is not None  # only rows that are sampled have a mask
            assert row.sampling.grammar is not None
            assert row.history is not None
            try:
                allowed = self._table.allowed(row.sequence_id, row.sampling.grammar, row.history)
                mask.set_result(_mask(allowed, self._vocab_size))
            except Exception as error:  # raised again where the mask is waited for
                mask.set_exception(error if isinstance(error, DisaggError) else InternalFault(f"no mask: {error!r}"))


class GrammarMasks:
    """Finds the masks of steps beside their forward passes."""

    def __init__(self, start: StartGrammar, vocab_size: int) -> None:
        """vocab_size: of the model, which may be larger than the tokenizer's."""
        self.table = GrammarTable(start)
        self._vocab_size = vocab_size

    def start(self, rows: Sequence[StepRow]) -> StepMasks:
        """Begin with the rows of a step that are sampled. Raises InternalFault for one without its history."""
        masked = {
            place: row
            for place, row in enumerate(rows)
            if row.sampling is not None and row.sampling.grammar is not None
        }
        for row in masked.values():
            if row.history is None or len(row.history.answer_ids) != row.output_position:
                text = f"row of {row.sequence_id} has a grammar, but not the {row.output_position} tokens of its answer"
                raise InternalFault(f"{text}; give all of them")
        if masked:
            self.table.forget(len(masked))
        return StepMasks(self.table, self._vocab_size, masked)

    def check_invariants(self) -> None:
        self.table.check_invariants()


def failure_of(error: DisaggError) -> Failure:
    """A grammar's error as it crosses a connection: the client's fault ends the request, ours is tried elsewhere."""
    is_invalid = isinstance(error, InvalidRequest)
    return Failure(FailureKind.INVALID_REQUEST if is_invalid else FailureKind.INTERNAL, str(error))


def _mask(allowed: Allowed, vocab_size: int) -> Mask:
    """Ids past the tokenizer's vocabulary are no tokens."""
    num_known = min(len(allowed), vocab_size)
    bias = np.full(vocab_size, -np.inf, np.float32)
    # Adding costs the step a fortieth of choosing by a mask, so what is added is made here.
    with np.errstate(over="ignore"):
        np.multiply((allowed[:num_known].astype(np.float32) - 1.0) * _LARGE, _LARGE, out=bias[:num_known])
    return Mask(bias, int(np.count_nonzero(allowed[:num_known])))


def _apply(mask: Mask, scores: Tensor, request: SampleRequest) -> SampleRequest:
    """Scores [vocab_size]. What is cut or listed by number then counts allowed tokens only."""
    if mask.num_allowed == 0:
        raise InternalFault(f"the grammar allows no token at output position {request.output_position}")
    scores.add_(torch.from_numpy(mask.bias).to(scores.device))
    params = request.params
    top_k = min(params.top_k, mask.num_allowed)
    listed = None if params.num_logprobs is None else min(params.num_logprobs, mask.num_allowed)
    if (top_k, listed) == (params.top_k, params.num_logprobs):
        return request
    return request._replace(params=msgspec.structs.replace(params, top_k=top_k, num_logprobs=listed))

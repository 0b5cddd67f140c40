"""Masks of grammars: the same tokens whatever runs beside and however the state was made; a failure costs one row."""

import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import jsonschema
import msgspec
import numpy as np
import pytest
import torch
from tests.unit.engine.steps import sequence_id

from disagg.core.errors import FailureKind, InternalFault, InvalidRequest
from disagg.core.grammar import GrammarKind, GrammarSpec
from disagg.core.ids import BlockId, HandoffId, StepId
from disagg.core.request import SamplingParams
from disagg.engine.grammar import MAX_IDLE_STATES, Allowed, GrammarMasks, GrammarTable
from disagg.engine.runner import TorchEngine
from disagg.engine.sampler import SampleRequest
from disagg.modelfiles.grammar import GrammarCompiler, schema_text
from disagg.modelfiles.tokenizer import ModelTokenizer, load_tokenizer
from disagg.scheduler.engine import Scoring, StepPlan, StepResult, StepRow, TokenHistory
from disagg.testing.model_files import write_tiny_llama

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
    },
    "required": ["kind", "count", "tags"],
    "additionalProperties": False,
}
GRAMMAR = GrammarSpec(GrammarKind.JSON_SCHEMA, schema_text(SCHEMA, is_lenient=False))
PROMPT = (10, 20, 30, 40)
MAX_TOKENS = 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"), num_layers=2)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> ModelTokenizer:
    return load_tokenizer(folder)


@pytest.fixture
def engine(folder: Path, tokenizer: ModelTokenizer) -> Iterator[TorchEngine]:
    made = make_engine(folder, tokenizer)
    yield made
    made.check_invariants()


def make_engine(folder: Path, tokenizer: ModelTokenizer) -> TorchEngine:
    start = GrammarCompiler(tokenizer).start
    return TorchEngine(folder, num_blocks=120, block_size=16, num_threads=1, start_grammar=start)


def params(tokenizer: ModelTokenizer, **more: Any) -> SamplingParams:
    ends = tokenizer.eos_ids
    return SamplingParams(max_tokens=MAX_TOKENS, stop_token_ids=ends, **{"grammar": GRAMMAR, "seed": 3, **more})


def row(
    number: int, sampling: SamplingParams, answer: Sequence[int], *, choice: int = 0, attempt: int = 1, first: int = 0
) -> StepRow:
    """The next token of one sequence; all of it is read again where the answer is at `first`."""
    token_ids = (*PROMPT, *answer) if len(answer) == first else (answer[-1],)
    position = 0 if len(answer) == first else len(PROMPT) + len(answer) - 1
    blocks = tuple(BlockId(number * 12 + index) for index in range(12))
    history = TokenHistory(attempt, PROMPT, tuple(answer)) if sampling.needs_history else None
    return StepRow(sequence_id(number, choice), token_ids, position, blocks, sampling, len(answer), history)


def run(engine: TorchEngine, *rows: StepRow) -> StepResult:
    return engine.run_step(StepPlan(StepId(0), rows), lambda num_layers: None)


def write(engine: TorchEngine, sampling: SamplingParams, start: Sequence[int] = (), **more: Any) -> list[int]:
    """A whole answer, going on after `start`."""
    answer = list(start)
    while len(answer) < MAX_TOKENS and not (answer and answer[-1] in sampling.stop_token_ids):
        (token,) = run(engine, row(0, sampling, answer, first=len(start), **more)).tokens
        answer.append(token.token_id)
    return answer


@pytest.mark.parametrize("more", [{}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.05}, {"temperature": 0.0}])
@pytest.mark.parametrize("seed", range(3))
def test_every_answer_is_a_valid_document(
    engine: TorchEngine, tokenizer: ModelTokenizer, seed: int, more: dict[str, Any]
) -> None:
    answer = write(engine, params(tokenizer, seed=seed, **more))
    assert answer[-1] in tokenizer.eos_ids
    jsonschema.validate(json.loads(tokenizer.decode(answer)), SCHEMA)


def test_another_engine_goes_on_from_any_token(folder: Path, tokenizer: ModelTokenizer, engine: TorchEngine) -> None:
    sampling = params(tokenizer)
    whole = write(engine, sampling)
    for place in (1, 2, len(whole) // 2, len(whole) - 1):
        other = make_engine(folder, tokenizer)
        attempt_id = HandoffId(sequence_id(0), 2)
        if place % 2:  # with and without what was done ahead
            other.prepare_grammar(attempt_id, GRAMMAR, tuple(whole[:place]))
        assert write(other, sampling, whole[:place], attempt=2) == whole


def test_a_state_of_another_attempt_is_not_used(engine: TorchEngine, tokenizer: ModelTokenizer) -> None:
    sampling = params(tokenizer)
    whole = write(engine, sampling)
    assert write(engine, sampling, whole[:4], attempt=2) == whole


def test_rows_beside_it_change_nothing(engine: TorchEngine, folder: Path, tokenizer: ModelTokenizer) -> None:
    sampling, plain = params(tokenizer), SamplingParams(max_tokens=MAX_TOKENS, seed=9)
    alone, plain_alone = write(engine, sampling), write(engine, plain)[:20]
    other = make_engine(folder, tokenizer)
    answers: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for _ in range(20):
        kinds = {0: sampling, 1: plain, 2: params(tokenizer, seed=4)}
        rows = [row(number, kinds[number], answers[number]) for number in answers if alone[-1:] != answers[number][-1:]]
        for token in run(other, *rows).tokens:
            answers[token.sequence_id.request_id.number].append(token.token_id)
    assert answers[0] == alone[: len(answers[0])]
    # Its own noise depends on seed, choice and position only.
    assert answers[1] == plain_alone[: len(answers[1])]


def test_logprobs_are_of_what_is_allowed(engine: TorchEngine, tokenizer: ModelTokenizer) -> None:
    sampling = params(tokenizer, num_logprobs=20)
    (first,) = run(engine, row(0, sampling, ())).tokens
    assert first.logprobs is not None
    listed = dict(first.logprobs.top)
    assert 1 <= len(listed) < 20  # a document begins with a brace, whatever follows it
    assert all(tokenizer.token_bytes(token_id).startswith(b"{") for token_id in listed)
    assert np.exp(list(listed.values())).sum() == pytest.approx(1.0)


def test_what_is_no_grammar_fails_its_own_row(engine: TorchEngine, tokenizer: ModelTokenizer) -> None:
    broken = GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type": "nothing"}')
    result = run(engine, row(0, params(tokenizer, grammar=broken), ()), row(1, params(tokenizer), ()))
    ((name, failure),) = result.failures
    assert (name, failure.kind) == (sequence_id(0), FailureKind.INVALID_REQUEST)
    assert "Invalid type" in failure.message
    assert [token.sequence_id for token in result.tokens] == [sequence_id(1)]
    with pytest.raises(InvalidRequest, match="Invalid type"):
        engine.prepare_grammar(HandoffId(sequence_id(0), 1), broken, ())


def test_an_answer_outside_of_its_grammar_fails_its_own_row(engine: TorchEngine, tokenizer: ModelTokenizer) -> None:
    strange = row(0, params(tokenizer), tokenizer.encode("hello"), first=len(tokenizer.encode("hello")))
    result = run(engine, strange, row(1, params(tokenizer), ()))
    assert [(name, failure.kind) for name, failure in result.failures] == [(sequence_id(0), FailureKind.INTERNAL)]
    assert len(result.tokens) == 1


def test_a_row_without_its_history_is_refused_before_computing(engine: TorchEngine, tokenizer: ModelTokenizer) -> None:
    without = msgspec.structs.replace(row(0, params(tokenizer), ()), history=None)
    with pytest.raises(InternalFault, match="has a grammar"):
        run(engine, without)


def test_without_a_vocabulary_grammars_are_refused(folder: Path, tokenizer: ModelTokenizer) -> None:
    bare = TorchEngine(folder, num_blocks=20, block_size=16, num_threads=1)
    with pytest.raises(InvalidRequest, match="without its model's vocabulary"):
        bare.prepare_grammar(HandoffId(sequence_id(0), 1), GRAMMAR, ())


class CountingState:
    """Allows the number of tokens seen so far; counts what was started and accepted."""

    def __init__(self, log: list[str], num_seen: int = 0) -> None:
        self.log = log
        self.num_seen = num_seen

    def allowed(self) -> Allowed:
        mask: Allowed = np.arange(64) == self.num_seen
        return mask

    def accept(self, token_ids: Sequence[int]) -> None:
        self.log.append(f"accept {len(token_ids)}")
        self.num_seen += len(token_ids)

    def copy(self) -> Self:
        return type(self)(self.log, self.num_seen)


def test_only_new_tokens_are_read_and_memory_is_bounded() -> None:
    log: list[str] = []

    def start(spec: GrammarSpec) -> CountingState:
        log.append("start")
        return CountingState(log)

    table = GrammarTable(start)
    answer: tuple[int, ...] = ()
    for token_id in range(5):
        assert table.allowed(sequence_id(0), GRAMMAR, TokenHistory(1, PROMPT, answer)).argmax() == token_id
        answer += (token_id,)
    assert log == ["start", "accept 0", *["accept 1"] * 4]
    for number in range(3 * MAX_IDLE_STATES):
        table.allowed(sequence_id(number + 1), GRAMMAR, TokenHistory(1, PROMPT, ()))
        table.forget(1)
    assert log.count("start") == 1  # one grammar, compiled once
    log.clear()
    table.allowed(sequence_id(0), GRAMMAR, TokenHistory(1, PROMPT, answer))
    assert log == ["accept 5"]  # forgotten, and made anew from the answer
    table.check_invariants()


def test_masks_are_found_while_the_step_goes_on() -> None:
    going_on = threading.Event()

    class Waiting(CountingState):
        def allowed(self) -> Allowed:
            assert going_on.wait(10.0)
            return super().allowed()

    masks = GrammarMasks(lambda spec: Waiting([]), 70)
    sampling = SamplingParams(max_tokens=4, grammar=GRAMMAR, num_logprobs=5, top_k=9)
    pending = masks.start([row(0, sampling, ())])  # returns although no mask can be there yet
    going_on.set()
    logits = torch.zeros(1, 70)
    masked = pending.apply(logits, [SampleRequest(sampling, 0, 0)])
    assert logits[0].argmax() == 0
    assert torch.isinf(logits[0, 1:]).all()  # those past the vocabulary too
    assert (masked.requests[0].params.num_logprobs, masked.requests[0].params.top_k) == (1, 1)
    assert not masked.failures


def test_a_mask_that_never_comes_fails_its_row_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("disagg.engine.grammar.MASK_TIMEOUT_S", 0.05)
    given_up = threading.Event()

    class Stuck(CountingState):
        def allowed(self) -> Allowed:
            given_up.wait(10.0)
            return super().allowed()

    masks = GrammarMasks(lambda spec: Stuck([]), 70)
    sampling = SamplingParams(max_tokens=4, grammar=GRAMMAR)
    masked = masks.start([row(0, sampling, ())]).apply(torch.zeros(1, 70), [SampleRequest(sampling, 0, 0)])
    given_up.set()
    (failure,) = masked.failures.values()
    assert failure.kind is FailureKind.INTERNAL
    assert "not found within 0.05 s" in failure.message


def test_scores_of_a_prompt_know_no_grammar(engine: TorchEngine, tokenizer: ModelTokenizer) -> None:
    """Neither its own, which is for the answer alone, nor that of a row beside it."""
    scoring = Scoring(PROMPT[1:], 2)
    free, bound = params(tokenizer, grammar=None), params(tokenizer)
    rows = [row(number, sampling, ()) for number, sampling in enumerate((free, bound, bound, free))]
    scored = [msgspec.structs.replace(each, scoring=scoring) for each in rows]
    (alone,) = run(engine, scored[0]).scores
    together = run(engine, scored[0], scored[1], rows[2], scored[3])
    assert len(alone.logprobs) == len(PROMPT) - 1
    assert [(each.sequence_id, each.logprobs) for each in together.scores] == [
        (sequence_id(number), alone.logprobs) for number in (0, 1, 3)
    ]
    tokens = {token.sequence_id: token.token_id for token in together.tokens}
    assert [tokens[sequence_id(number)] for number in range(4)] == [
        token.token_id for each in rows for token in run(engine, each).tokens
    ]

"""A sequence whose grammar is not ready waits, others do not; a grammar that fails or never comes costs nobody else."""

import pytest
from tests.unit.scheduler.rigs import Duo, Solo, duo, handoff, of, sequence_id

from disagg.core.errors import Failure, FailureKind
from disagg.core.grammar import GrammarKind, GrammarSpec
from disagg.core.request import EmittedToken, SamplingParams, SequenceSpec
from disagg.core.roles import Role, Task
from disagg.scheduler import events
from disagg.scheduler.actions import PrepareGrammar
from disagg.scheduler.engine import StepResult

GRAMMAR = GrammarSpec(GrammarKind.LARK, "mod 7")


def spec(number: int, max_tokens: int = 3) -> SequenceSpec:
    return SequenceSpec(sequence_id(number), (1, 2, 3, 4, 5), SamplingParams(max_tokens, grammar=GRAMMAR))


def prepared(number: int, failure: Failure | None = None) -> events.GrammarPrepared:
    return events.GrammarPrepared(handoff(number), failure)


def rows_of(solo: Solo) -> list[int]:
    assert solo.plan is not None
    return [row.sequence_id.request_id.number for row in solo.plan.rows]


def test_it_waits_for_its_grammar_while_others_run() -> None:
    solo = Solo(Role.MIXED)
    actions = solo.start_spec(spec(0), Task.WHOLE, emitted=(7,))
    assert of(PrepareGrammar, actions) == [PrepareGrammar(handoff(0), GRAMMAR, (7,))]
    assert solo.plan is None
    solo.start(1, Task.WHOLE, (9, 9))
    assert rows_of(solo) == [1]
    solo.handle(prepared(0))
    solo.finish_step()
    assert sorted(rows_of(solo)) == [0, 1]
    solo.finish_steps()
    assert solo.scheduler.is_idle
    assert len(solo.tokens(0)) == 2


def test_rows_carry_the_answer_so_far() -> None:
    solo = Solo(Role.MIXED)
    solo.start_spec(spec(0), Task.WHOLE)
    solo.handle(prepared(0))
    for answer_ids in ((), (4,), (4, 5)):
        assert solo.plan is not None
        (row,) = solo.plan.rows
        assert row.history is not None
        assert row.history.answer_ids == answer_ids
        solo.finish_step(4 + len(answer_ids))


@pytest.mark.parametrize("kind", [FailureKind.INVALID_REQUEST, FailureKind.INTERNAL])
def test_a_grammar_that_fails_ends_its_sequence(kind: FailureKind) -> None:
    solo = Solo(Role.MIXED)
    solo.start_spec(spec(0), Task.WHOLE)
    solo.handle(prepared(0, Failure(kind, "no such type")))
    (report,) = solo.failures
    assert (report.failure.kind, report.failure.message) == (kind, "no such type")
    assert solo.scheduler.is_idle
    solo.handle(prepared(0))  # late or twice: no effect but a counter
    assert solo.ignored("GrammarPrepared") == 1


def test_a_grammar_that_never_comes_is_given_up_in_time() -> None:
    solo = Solo(Role.MIXED)
    solo.start_spec(spec(0), Task.WHOLE)
    assert solo.scheduler.next_wake_s() == solo.now_s + solo.config.grammar_timeout_s
    solo.wait(solo.config.grammar_timeout_s - 1.0)
    assert not solo.failures
    solo.wait(1.0)
    (report,) = solo.failures
    assert "was not prepared within 10 s" in report.failure.message
    assert solo.scheduler.is_idle
    assert solo.scheduler.next_wake_s() == float("inf")


def test_an_abort_while_it_waits() -> None:
    solo = Solo(Role.MIXED)
    solo.start_spec(spec(0), Task.WHOLE)
    solo.abort(0)
    assert solo.scheduler.is_idle
    solo.handle(prepared(0))
    assert solo.ignored("GrammarPrepared") == 1


def test_a_row_that_the_engine_refused_ends_alone() -> None:
    solo = Solo(Role.MIXED)
    solo.start_spec(spec(0), Task.WHOLE)
    solo.start(1, Task.WHOLE, (9, 9))
    solo.handle(prepared(0))
    solo.finish_step()
    plan, solo.plan = solo.plan, None
    assert plan is not None
    failure = Failure(FailureKind.INVALID_REQUEST, "too complex")
    tokens = (EmittedToken(sequence_id(1), 1, 7),)
    solo.handle(events.StepFinished(StepResult(plan.step_id, tokens, failures=((sequence_id(0), failure),)), 0.01))
    assert [report.failure for report in solo.failures] == [failure]
    assert rows_of(solo) == [1]
    solo.finish_steps()
    assert solo.num_used == 0


def handed_over() -> Duo:
    pair = duo()
    pair.start_spec(spec(0), (Task.PREFILL, Task.DECODE))
    return pair


def test_both_ends_of_a_handoff_prepare_and_decode_waits_for_its_own() -> None:
    pair = handed_over()
    pair.exchange()
    assert pair.source.plan is None  # no reservation is asked for what cannot run yet
    pair.take(pair.source, pair.source.handle(prepared(0)))
    pair.exchange()
    pair.step(pair.source)
    assert pair.source.scheduler.is_idle
    assert pair.destination.plan is None
    pair.destination.handle(prepared(0))
    assert rows_of(pair.destination) == [0]
    pair.destination.finish_steps()
    assert pair.destination.scheduler.is_idle

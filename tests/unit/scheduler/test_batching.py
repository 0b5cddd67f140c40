"""Blocks and steps of sequences that one worker does alone."""

import pytest
from tests.unit.scheduler.rigs import Solo, emitted, of, sequence_id

from disagg.core.errors import Failure, FailureKind
from disagg.core.ids import StepId
from disagg.core.request import EmittedToken, SamplingParams, SequenceSpec
from disagg.core.roles import Role, Task
from disagg.policy.batching import StepBudget
from disagg.protocol.messages import EmitTokens
from disagg.scheduler import events
from disagg.scheduler.actions import RunStep
from disagg.scheduler.engine import StepPlan, StepResult
from disagg.telemetry.metrics import BLOCKS_EVICTED, OUTPUT_TOKENS, PROMPT_TOKENS_COMPUTED, SEQUENCES, STEPS


def prompt(start: int, length: int) -> tuple[int, ...]:
    return tuple((start + index) % 90 for index in range(length))


def test_a_sequence_runs_from_prompt_to_last_token() -> None:
    solo = Solo(Role.DECODE, budget=StepBudget(chunk_tokens=4, mixed_chunk_tokens=2, max_running=4))
    solo.start(0, Task.WHOLE, prompt(0, 6), max_tokens=3)
    solo.finish_steps()
    rows = [plan.rows[0] for plan in solo.plans]
    assert [(row.position, row.token_ids) for row in rows] == [
        (0, (0, 1, 2, 3)),
        (4, (4, 5)),
        (6, (7,)),
        (7, (7,)),
    ]
    assert [row.sampling is not None for row in rows] == [False, True, True, True]
    assert [row.output_position for row in rows] == [0, 0, 1, 2]
    assert {row.block_table for row in rows} == {(0, 1)}
    assert solo.scheduler.is_idle
    assert solo.num_used == 0


def test_one_message_carries_token_and_report() -> None:
    solo = Solo(Role.DECODE)
    solo.start(0, Task.WHOLE, prompt(0, 6), max_tokens=1)
    (message,) = emitted(solo.finish_step())
    assert [token.position for token in message.tokens] == [0]
    assert message.prompts[0].num_computed_tokens == 6
    assert solo.scheduler.counters.get(SEQUENCES, "finished") == 1


def test_a_stop_token_ends_it_early() -> None:
    solo = Solo(Role.DECODE)
    solo.start_spec(SequenceSpec(sequence_id(0), (1, 2), SamplingParams(9, stop_token_ids=(50,))), Task.WHOLE)
    solo.finish_step(7)
    (message,) = emitted(solo.finish_step(50))
    assert [token.token_id for token in message.tokens] == [50]
    assert solo.scheduler.is_idle


def test_a_full_pool_makes_the_next_one_wait() -> None:
    solo = Solo(Role.DECODE, num_blocks=4)
    solo.start(0, Task.WHOLE, prompt(0, 10), max_tokens=3)
    assert solo.start(1, Task.WHOLE, prompt(40, 10), max_tokens=3) == []
    assert (solo.state.num_running, solo.state.num_waiting) == (1, 1)
    for _ in range(2):
        solo.finish_step()
        assert solo.state.num_waiting == 1
    solo.finish_step()
    assert (solo.state.num_running, solo.state.num_waiting) == (1, 0)
    solo.finish_steps()
    assert not solo.failures
    assert solo.scheduler.counters.get(BLOCKS_EVICTED) == 2


def test_the_first_that_does_not_fit_is_not_overtaken() -> None:
    solo = Solo(Role.DECODE, num_blocks=4)
    solo.start(0, Task.WHOLE, prompt(0, 10), max_tokens=3)
    solo.start(1, Task.WHOLE, prompt(40, 10), max_tokens=3)
    solo.start(2, Task.WHOLE, prompt(60, 10), max_tokens=1)
    assert (solo.state.num_running, solo.state.num_waiting) == (1, 2)


def test_higher_priority_gets_room_first() -> None:
    solo = Solo(Role.DECODE, num_blocks=2)
    solo.start(0, Task.WHOLE, prompt(0, 6), max_tokens=1)
    for number, priority in ((1, 0), (2, 5)):
        sampling = SamplingParams(max_tokens=1)
        solo.start_spec(SequenceSpec(sequence_id(number), prompt(30, 6), sampling, priority), Task.WHOLE)
    solo.finish_step()
    assert solo.plan is not None
    assert [row.sequence_id for row in solo.plan.rows] == [sequence_id(2)]


def test_no_more_sequences_run_than_the_budget_allows() -> None:
    solo = Solo(Role.DECODE, budget=StepBudget(64, 64, max_running=2))
    for number in range(4):
        solo.start(number, Task.WHOLE, (number, 5), max_tokens=2)
    assert (solo.state.num_running, solo.state.num_waiting) == (2, 2)
    solo.finish_steps()
    assert not solo.failures
    assert max(len(plan.rows) for plan in solo.plans) == 2


def test_every_stream_is_in_every_step_and_prompts_beside_them_keep_to_the_budget() -> None:
    budget = StepBudget(chunk_tokens=16, mixed_chunk_tokens=5, max_running=8)
    solo = Solo(Role.DECODE, num_blocks=100, budget=budget)
    streams: dict[int, int] = {}  # number -> tokens still to come, once its first token is out
    num_started = 0
    for turn in range(200):
        if turn % 2 == 0 and num_started < 12:
            solo.start(num_started, Task.WHOLE, prompt(7 * num_started, 5 + 3 * num_started), max_tokens=8)
            num_started += 1
        if solo.plan is None:
            break
        rows = {row.sequence_id.request_id.number: row for row in solo.plan.rows}
        decoding = {number for number, left in streams.items() if left}
        assert decoding <= rows.keys()
        prompt_tokens = sum(len(row.token_ids) for number, row in rows.items() if number not in decoding)
        assert prompt_tokens <= (budget.mixed_chunk_tokens if decoding else budget.chunk_tokens)
        assert all(len(rows[number].token_ids) == 1 for number in decoding)
        for number, row in rows.items():
            if row.sampling is not None:
                streams[number] = streams.get(number, 8) - 1
        solo.finish_step()
    assert num_started == 12
    assert solo.scheduler.is_idle
    assert set(streams.values()) == {0}


def test_streams_stand_still_while_prompts_are_read_alone() -> None:
    budget = StepBudget(chunk_tokens=4, mixed_chunk_tokens=4, max_running=8, prompts_alone=True)
    solo = Solo(Role.DECODE, num_blocks=100, budget=budget)
    solo.start(0, Task.WHOLE, prompt(0, 3), max_tokens=4)
    solo.finish_step()
    solo.start(1, Task.WHOLE, prompt(50, 9), max_tokens=2)
    solo.finish_steps()
    numbers = [[row.sequence_id.request_id.number for row in plan.rows] for plan in solo.plans]
    # The step that was planned when the second came, three chunks of its prompt, then both streams.
    assert numbers == [[0], [0], [1], [1], [1], [0, 1], [0]]
    assert solo.scheduler.is_idle


def test_a_prefix_is_computed_once_but_its_last_token_again() -> None:
    solo = Solo(Role.DECODE)
    solo.start(0, Task.WHOLE, prompt(0, 8), max_tokens=1)
    solo.finish_steps()
    solo.start(1, Task.WHOLE, prompt(0, 8), max_tokens=1)
    assert solo.plan is not None
    assert (solo.plan.rows[0].position, len(solo.plan.rows[0].token_ids)) == (4, 4)
    (message,) = emitted(solo.finish_step())
    assert message.prompts[0].num_cached_tokens == 4
    assert solo.scheduler.counters.get(PROMPT_TOKENS_COMPUTED, "whole") == 12


def test_full_blocks_of_an_answer_are_found_by_the_next_turn() -> None:
    solo = Solo(Role.DECODE)
    solo.start(0, Task.WHOLE, prompt(0, 6), max_tokens=7)
    solo.finish_steps()
    solo.start(1, Task.WHOLE, prompt(0, 6) + (7,) * 7, max_tokens=1)
    assert solo.plan is not None
    assert solo.plan.rows[0].position == 12  # 12 tokens of KV exist: the 7th token's was never computed


@pytest.mark.parametrize("num_before", [0, 1])
def test_a_failed_step_ends_its_sequences_and_no_other(num_before: int) -> None:
    solo = Solo(Role.DECODE, num_blocks=4, budget=StepBudget(4, 4, 8))
    solo.start(0, Task.WHOLE, prompt(0, 12), max_tokens=4)
    solo.start(1, Task.WHOLE, prompt(50, 12), max_tokens=4)
    for _ in range(num_before):
        solo.finish_step()
    assert solo.plan is not None
    plan, solo.plan = solo.plan, None
    actions = solo.handle(events.StepFailed(plan.step_id, Failure(FailureKind.INTERNAL, "out of memory")))
    assert [report.sequence_id for report in solo.failures] == [sequence_id(0)]
    assert solo.failures[0].failure.message == "out of memory"
    (step,) = of(RunStep, actions)
    assert [row.sequence_id for row in step.plan.rows] == [sequence_id(1)]
    solo.finish_steps()
    assert solo.num_used == 0


def test_steps_and_tokens_are_counted_by_kind() -> None:
    solo = Solo(Role.DECODE, budget=StepBudget(4, 4, 8))
    solo.start(0, Task.WHOLE, prompt(0, 6), max_tokens=2)
    solo.finish_step()
    solo.finish_step()
    solo.start(1, Task.WHOLE, prompt(50, 3), max_tokens=2)
    solo.finish_steps()
    counters = solo.scheduler.counters
    counted = {kind: counters.get(STEPS, kind) for kind in ("prefill", "decode", "both")}
    assert sum(counted.values()) == len(solo.plans)
    assert counted == {kind: [kind_of(plan) for plan in solo.plans].count(kind) for kind in counted}
    assert counters.get(OUTPUT_TOKENS, "whole") == 4


def kind_of(plan: StepPlan) -> str:
    kinds = {"decode" if row.output_position else "prefill" for row in plan.rows}
    return "both" if len(kinds) == 2 else kinds.pop()


NUM_TOKENS = 20


def two_streams(sure_token_id: int | None) -> Solo:
    solo = Solo(Role.DECODE, answer_headroom=1, sure_token_id=sure_token_id)
    for number, length in enumerate((3, 8)):  # they fill their blocks at the same time
        solo.start(number, Task.WHOLE, prompt(20 * number, length), NUM_TOKENS)
    return solo


def ends(solo: Solo) -> list[EmittedToken]:
    """The last tokens of two_streams(), as the router hears of them."""
    told = [token for message in solo.reports if isinstance(message, EmitTokens) for token in message.tokens]
    return [token for token in told if token.position + 1 == NUM_TOKENS]


def until_all_stand(solo: Solo) -> StepPlan:
    while solo.plan is None or solo.plan.rows:
        solo.finish_step()
    return solo.plan


def test_streams_that_stand_end_as_they_would_with_rows() -> None:
    standing, rowed = two_streams(7), two_streams(None)
    while rowed.plan is not None:
        assert standing.plan is not None
        assert len(standing.plan.rows) + standing.plan.num_standing == len(rowed.plan.rows)
        for solo in (standing, rowed):
            solo.finish_step()
        blocks = [(s.num_free_blocks, s.num_cached_blocks, s.num_held_blocks) for s in (standing.state, rowed.state)]
        assert blocks[0] == blocks[1]
    assert standing.plan is None
    assert any(plan.num_standing and not plan.rows for plan in standing.plans)
    assert not any(plan.num_standing for plan in rowed.plans)
    assert ends(standing) == ends(rowed)
    totals = [solo.scheduler.counters.get(OUTPUT_TOKENS, "whole") for solo in (standing, rowed)]
    assert totals == [40, 40]


def test_steps_without_rows_end_together_as_they_would_one_by_one() -> None:
    together, alone = two_streams(7), two_streams(7)
    first, _ = until_all_stand(together), until_all_stand(alone)
    num_steps = together.scheduler.num_alike(99)
    assert num_steps > 1
    assert together.scheduler.num_alike(1) == 1
    together.plan = None
    together.handle(events.StepsFinished(first.step_id, (0.01,) * num_steps))
    for _ in range(num_steps):
        alone.finish_step()
    assert together.plan == alone.plan
    assert together.state == alone.state
    for solo in (together, alone):
        solo.finish_steps()
    assert ends(together) == ends(alone)
    assert len(ends(alone)) == 2


def test_more_steps_than_may_end_together_are_ignored() -> None:
    solo = two_streams(7)
    plan = until_all_stand(solo)
    event = events.StepsFinished(plan.step_id, (0.01,) * (solo.scheduler.num_alike(99) + 1))
    assert solo.handle(event) == []
    assert solo.ignored("StepsFinished") == 1
    solo.start(2, Task.WHOLE, prompt(0, 3), max_tokens=9)  # it joins the next step
    assert solo.scheduler.num_alike(99) == 1


def test_a_stream_that_is_dropped_while_it_stands_keeps_its_blocks_until_the_step_is_over() -> None:
    solo = two_streams(7)
    until_all_stand(solo)
    held = solo.state.num_held_blocks
    solo.abort(0)
    assert solo.state.num_held_blocks == held
    assert solo.scheduler.num_alike(99) == 1  # the next step is another one
    solo.finish_step()
    assert solo.state.num_held_blocks < held
    solo.finish_steps()
    assert solo.num_used == 0


def test_a_stream_whose_tokens_decide_always_has_a_row() -> None:
    solo = Solo(Role.DECODE, sure_token_id=7)
    spec = SequenceSpec(sequence_id(0), (1, 2, 3), SamplingParams(max_tokens=9, stop_token_ids=(5,)))
    solo.start_spec(spec, Task.WHOLE)
    for _ in range(5):
        solo.finish_step()
        assert solo.scheduler.num_alike(99) == 1
    assert all(plan.rows and not plan.num_standing for plan in solo.plans)


def test_a_step_that_is_not_running_does_not_finish_twice() -> None:
    solo = Solo(Role.DECODE)
    solo.start(0, Task.WHOLE, (1, 2), max_tokens=2)
    first = solo.plan
    assert first is not None
    solo.finish_step()
    assert solo.handle(events.StepFinished(StepResult(StepId(first.step_id), ()), 0.1)) == []
    assert solo.ignored("StepFinished") == 1
    assert solo.state.num_running == 1

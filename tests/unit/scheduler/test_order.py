"""Whose prompt is computed next, as one worker applies it."""

import pytest
from tests.unit.scheduler.rigs import PEER, PEER_INCARNATION, Solo, sequence_id, to_peer

from disagg.core.request import SamplingParams, SequenceSpec
from disagg.core.roles import Role, Task
from disagg.policy.batching import StepBudget
from disagg.policy.step_time import MIN_OBSERVED, StepCosts
from disagg.protocol.messages import RequestReservation, StartSequence
from disagg.scheduler import events

ONE = StepBudget(chunk_tokens=8, mixed_chunk_tokens=8, max_running=1)


def prompt(number: int, length: int) -> tuple[int, ...]:
    return tuple((17 * number + index) % 90 for index in range(length))


def start(solo: Solo, number: int, length: int, tenant: str = "", priority: int = 0) -> None:
    spec = SequenceSpec(sequence_id(number), prompt(number, length), SamplingParams(1), priority, tenant=tenant)
    solo.start_spec(spec, Task.WHOLE)


def order_read(solo: Solo) -> list[int]:
    """Numbers of all sequences in the order in which their reading ends."""
    solo.finish_steps()
    rows = [row for plan in solo.plans for row in plan.rows if row.sampling is not None]
    return [row.sequence_id.request_id.number for row in rows]


def test_the_shortest_of_those_that_wait_is_next() -> None:
    solo = Solo(Role.DECODE, budget=ONE)
    for number, length in enumerate((10, 40, 5, 20)):
        start(solo, number, length)
    assert order_read(solo) == [0, 2, 3, 1]


def test_a_chunked_prompt_lets_a_short_one_by() -> None:
    solo = Solo(Role.DECODE, budget=StepBudget(8, 8, max_running=2))
    start(solo, 0, 40)
    solo.finish_step()
    start(solo, 1, 5)
    assert order_read(solo) == [1, 0]


def test_tokens_in_the_index_make_a_prompt_short() -> None:
    solo = Solo(Role.DECODE, num_blocks=64, budget=ONE)
    start(solo, 0, 40)
    solo.finish_steps()
    start(solo, 1, 30)
    start(solo, 2, 20)
    solo.start_spec(SequenceSpec(sequence_id(3), (*prompt(0, 40), 1, 2), SamplingParams(1)), Task.WHOLE)
    assert order_read(solo) == [0, 1, 3, 2]


def test_tenants_take_turns() -> None:
    solo = Solo(Role.DECODE, num_blocks=64, budget=ONE)
    for number in range(6):
        start(solo, number, 8, tenant="many")
    start(solo, 6, 8, tenant="few")
    start(solo, 7, 8, tenant="few")
    assert order_read(solo) == [0, 6, 1, 7, 2, 3, 4, 5]


def test_what_an_answer_grows_by_is_charged_to_its_tenant() -> None:
    solo = Solo(Role.DECODE, num_blocks=64, budget=ONE, answer_headroom=0)
    for number, tenant, length, max_tokens in ((0, "writes", 4, 30), (1, "reads", 8, 1)):
        spec = SequenceSpec(sequence_id(number), prompt(number, length), SamplingParams(max_tokens), tenant=tenant)
        solo.start_spec(spec, Task.WHOLE)
    solo.finish_steps()
    start(solo, 2, 8)
    start(solo, 3, 8, tenant="writes")
    start(solo, 4, 8, tenant="reads")
    assert order_read(solo)[-3:] == [2, 4, 3]


def test_who_was_refused_too_long_is_overtaken_by_a_tenant_that_has_had_less() -> None:
    solo = Solo(Role.DECODE, num_blocks=4)
    start(solo, 0, 10, tenant="many")
    spec = SequenceSpec(sequence_id(1), prompt(1, 14), SamplingParams(1), tenant="many")  # all four blocks
    solo.start_spec(spec, Task.WHOLE)
    solo.finish_step()
    start(solo, 2, 14, tenant="many")
    solo.wait(3.0)
    start(solo, 3, 2, tenant="many")
    start(solo, 4, 2, tenant="few")
    assert order_read(solo) == [0, 1, 4, 2, 3]


def test_a_moved_answer_goes_on_before_new_ones_begin() -> None:
    solo = Solo(Role.DECODE, num_blocks=64, budget=ONE)
    start(solo, 0, 8)
    start(solo, 1, 8)
    spec = SequenceSpec(sequence_id(2), prompt(2, 30), SamplingParams(9))
    solo.start_spec(spec, Task.WHOLE, emitted=tuple(range(8)))
    assert order_read(solo) == [0, 2, 1]


def test_a_prefill_worker_asks_for_the_shortest_first() -> None:
    solo = Solo(Role.PREFILL, budget=ONE)
    solo.meet(Role.DECODE)
    solo.start(0, Task.PREFILL, prompt(0, 8))
    solo.start(1, Task.PREFILL, prompt(1, 30))
    solo.start(2, Task.PREFILL, prompt(2, 6))
    actions = solo.abort(0)
    asked = to_peer(RequestReservation, actions)
    assert [request.handoff_id.sequence_id for request in asked] == [sequence_id(2)]


def test_who_was_refused_too_long_is_not_overtaken_by_a_shorter_or_a_more_important_one() -> None:
    """And does get its turn: what may not overtake it must not block it either."""
    solo = Solo(Role.DECODE, num_blocks=4)
    start(solo, 0, 10)
    solo.start(1, Task.WHOLE, prompt(1, 14), max_tokens=1)  # all four blocks
    assert solo.state.num_waiting == 1
    solo.wait(3.0)
    start(solo, 2, 2)
    start(solo, 3, 2, priority=9)
    assert (solo.state.num_running, solo.state.num_waiting) == (1, 3)
    assert order_read(solo) == [0, 1, 3, 2]


def test_before_that_a_shorter_one_may_use_the_room() -> None:
    solo = Solo(Role.DECODE, num_blocks=4)
    start(solo, 0, 10)
    solo.start(1, Task.WHOLE, prompt(1, 14), max_tokens=1)
    start(solo, 2, 2)
    assert (solo.state.num_running, solo.state.num_waiting) == (2, 1)


@pytest.mark.parametrize(("seconds_per_token", "num_tokens"), [(0.001, 40), (0.01, 4), (0.0001, 50)])
def test_steps_beside_streams_grow_to_what_their_target_bears(seconds_per_token: float, num_tokens: int) -> None:
    """After a few steps of 10 ms and so much a token; a target of 50 ms; 50 prompt tokens; blocks of 4."""
    budget = StepBudget(chunk_tokens=64, mixed_chunk_tokens=2, max_running=8, itl_target_s=0.05)
    solo = Solo(Role.DECODE, num_blocks=64, budget=budget)
    solo.start(0, Task.WHOLE, prompt(0, 20), max_tokens=40)
    for _ in range(4 * MIN_OBSERVED):
        assert solo.plan is not None
        num_prompt = sum(len(row.token_ids) for row in solo.plan.rows if row.output_position == 0)
        if num_prompt == 0:
            solo.start(len(solo.plans), Task.WHOLE, prompt(len(solo.plans), 3), max_tokens=1)
        solo.finish_step(seconds=0.01 + seconds_per_token * num_prompt)
    while solo.plan is not None and any(row.output_position == 0 for row in solo.plan.rows):
        solo.finish_step(seconds=0.01)
    solo.start(99, Task.WHOLE, prompt(99, 50), max_tokens=1)
    solo.finish_step(seconds=0.01)
    rows = {row.sequence_id: row for row in solo.plans[-1].rows}
    assert len(rows[sequence_id(99)].token_ids) == pytest.approx(num_tokens, abs=3)


def test_a_worker_that_knows_what_steps_cost_keeps_its_target_from_the_first_one_on() -> None:
    budget = StepBudget(chunk_tokens=64, mixed_chunk_tokens=2, max_running=8, itl_target_s=0.05)
    solo = Solo(Role.DECODE, num_blocks=64, budget=budget, step_costs=StepCosts(0.01, 0.004, 0.0, 0.0, 0.0))
    solo.start(0, Task.WHOLE, prompt(0, 4), max_tokens=40)
    solo.start(1, Task.WHOLE, prompt(1, 50), max_tokens=1)
    solo.finish_step(seconds=0.026)
    assert [len(row.token_ids) for row in solo.plans[-1].rows if row.output_position == 0][-1] == 10


def test_a_peers_silent_streams_do_not_count_as_prompts() -> None:
    """Sequences that receive their KV wait in no order: their peer decides."""
    solo = Solo(Role.DECODE, budget=ONE)
    solo.meet(Role.PREFILL)
    spec = SequenceSpec(sequence_id(0), prompt(0, 2), SamplingParams(1), tenant="t")
    solo.handle(events.RouterMessageReceived(StartSequence(spec, Task.DECODE, 1, (), PEER, PEER_INCARNATION)))
    start(solo, 1, 20)
    assert order_read(solo) == [1]

"""Which prompts go into one step, in which order, and how much of them beside running streams."""

import random
from collections.abc import Mapping

import pytest

from disagg.core.ids import Incarnation, RequestId, SequenceId
from disagg.policy.batching import AGEING, STREAM_SLOWDOWN, PromptWork, StepBudget, order_prompts, plan_chunks
from disagg.policy.step_time import StepCosts, StepShape

BUDGET = StepBudget(chunk_tokens=10, mixed_chunk_tokens=4, max_running=8)
# 10 ms a step, 1 ms a prompt token and a stream.
COSTS = StepCosts(0.01, 0.001, 0.0, 0.001, 0.0)
TIMED = StepBudget(chunk_tokens=100, mixed_chunk_tokens=4, max_running=8, itl_target_s=0.05)


def sequence_id(number: int) -> SequenceId:
    return SequenceId(RequestId(Incarnation(1), 1), number)


def work(*lengths: int) -> list[PromptWork]:
    return [PromptWork(sequence_id(index), length) for index, length in enumerate(lengths)]


def streams(number: int) -> StepShape:
    return StepShape(num_streams=number)


# --- how much ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "num_streams", "chunks"),
    [
        ((), 0, []),
        ((25,), 0, [10]),
        ((3, 7), 0, [3, 7]),
        ((3, 7, 1), 0, [3, 7]),
        ((6, 6), 0, [6, 4]),
        ((25,), 1, [4]),
        ((3, 9), 5, [3, 1]),
    ],
)
def test_prompts_fill_the_budget_in_order(lengths: tuple[int, ...], num_streams: int, chunks: list[int]) -> None:
    planned = plan_chunks(work(*lengths), streams=streams(num_streams), budget=BUDGET, costs=COSTS)
    assert [chunk.num_tokens for chunk in planned] == chunks
    assert [chunk.sequence_id.choice for chunk in planned] == list(range(len(chunks)))


@pytest.mark.parametrize(
    ("lengths", "num_streams", "chunks"),
    [
        ((500,), 10, [30]),  # 10 + 10 ms for the streams, 30 ms are left
        ((12, 500), 10, [12, 18]),
        ((12, 500), 0, [12, 88]),  # nobody waits for a token
        ((500,), 35, [22]),  # 45 ms for the streams: half as much again, not only 5 ms
        ((500,), 90, [50]),  # past the target anyhow
        ((2,), 10, [2]),
    ],
)
def test_beside_streams_prompts_fill_the_step_up_to_its_target(
    lengths: tuple[int, ...], num_streams: int, chunks: list[int]
) -> None:
    planned = plan_chunks(work(*lengths), streams=streams(num_streams), budget=TIMED, costs=COSTS)
    assert [chunk.num_tokens for chunk in planned] == chunks
    total_s = COSTS.predict(StepShape(sum(chunks), 0, num_streams))
    if num_streams:
        assert total_s <= max(0.05, STREAM_SLOWDOWN * COSTS.predict(streams(num_streams))) + 1e-9


def test_no_step_takes_more_than_the_largest_chunk() -> None:
    cheap = StepCosts(0.001, 1e-7, 0.0, 0.0, 0.0)
    planned = plan_chunks(work(70, 70), streams=streams(1), budget=TIMED, costs=cheap)
    assert [chunk.num_tokens for chunk in planned] == [70, 30]


def test_a_late_chunk_of_a_long_prompt_is_smaller() -> None:
    costs = StepCosts(0.01, 0.001, 1e-6, 0.0, 0.0)
    early, late = PromptWork(sequence_id(0), 500), PromptWork(sequence_id(0), 500, position=4000)
    sizes = [plan_chunks([each], streams=streams(1), budget=TIMED, costs=costs)[0].num_tokens for each in (early, late)]
    assert sizes == [39, 7]


def test_prompts_get_on_whatever_it_costs() -> None:
    dear = StepCosts(0.01, 1.0, 0.0, 0.0, 0.0)
    planned = plan_chunks(work(3, 90), streams=streams(1), budget=TIMED, costs=dear, min_tokens=16)
    assert [chunk.num_tokens for chunk in planned] == [3, 13]


def test_before_anything_is_learned_the_number_is_fixed() -> None:
    planned = plan_chunks(work(90), streams=streams(1), budget=TIMED, costs=None)
    assert [chunk.num_tokens for chunk in planned] == [4]


# --- which first -------------------------------------------------------------------------------------------------


def order(
    items: list[PromptWork], now_s: float = 100.0, services: Mapping[str, float] | None = None, costs: StepCosts = COSTS
) -> list[int]:
    ordered = order_prompts(items, now_s, costs=costs, services=services or {})
    return [item.sequence_id.choice for item in ordered]


def item(number: int, length: int, **fields: object) -> PromptWork:
    fields.setdefault("arrived_s", 100.0)
    return PromptWork(sequence_id(number), length, arrival=number, **fields)  # type: ignore[arg-type]


def test_the_shortest_rest_goes_first() -> None:
    assert order([item(0, 500), item(1, 20), item(2, 100)]) == [1, 2, 0]


def test_equal_ones_go_as_they_came() -> None:
    assert order([item(2, 20), item(0, 20), item(1, 20)]) == [0, 1, 2]


def test_what_counts_is_time_and_not_tokens() -> None:
    costs = StepCosts(0.0, 0.001, 1e-6, 0.0, 0.0)
    assert order([item(0, 100, position=4000), item(1, 200)], costs=costs) == [1, 0]


def test_who_waits_grows_more_urgent() -> None:
    waited_s = 0.48 / AGEING  # 500 tokens take 0.5 s, 20 take 0.02 s
    assert order([item(0, 500, arrived_s=100 - 0.99 * waited_s), item(1, 20)]) == [1, 0]
    assert order([item(0, 500, arrived_s=100 - 1.01 * waited_s), item(1, 20)]) == [0, 1]


def test_priority_comes_before_length_and_begun_answers_before_new_ones() -> None:
    items = [item(0, 5), item(1, 500, priority=1), item(2, 50, is_begun=True), item(3, 9, priority=-1)]
    assert order(items) == [1, 2, 0, 3]


def test_the_tenant_that_had_least_is_next_and_is_charged_as_it_is_taken() -> None:
    items = [item(n, 100, tenant="a") for n in range(3)] + [item(n, 100, tenant="b") for n in range(3, 6)]
    assert order(items) == [0, 3, 1, 4, 2, 5]
    assert order(items, services={"a": 250.0, "b": 0.0}) == [3, 4, 5, 0, 1, 2]
    assert order(items, services={"a": 150.0, "b": 0.0}) == [3, 4, 0, 5, 1, 2]


def test_a_prompt_is_overtaken_by_those_within_its_bound_only() -> None:
    """A long prompt, and twice as many short ones as can be served: those that come too late stay behind it."""
    rng, now_s, next_s, number = random.Random(4), 0.0, 0.0, 1
    waiting = {0: item(0, 1000, arrived_s=0.0)}  # 1 s
    overtook: list[float] = []
    for _ in range(1000):
        while next_s <= now_s:
            waiting[number] = item(number, rng.randint(1, 99), arrived_s=next_s)
            next_s += 0.025
            number += 1
        first = waiting.pop(order(list(waiting.values()), now_s)[0])
        now_s += first.num_remaining_tokens * 0.001
        if first.arrival == 0:
            break
        overtook.append(first.arrived_s)
    assert 0 not in waiting
    assert len(overtook) > 50
    assert max(overtook) <= 1.0 / AGEING


def test_the_order_is_found_as_it_is_asked_for() -> None:
    ordered = order_prompts([item(n, 10) for n in range(10)], 100.0, costs=COSTS, services={})
    assert next(ordered).sequence_id.choice == 0

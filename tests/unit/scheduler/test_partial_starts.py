"""A first step that begins before all KV is here: its parts, its turns, and why it does not begin.

How it is given up is in test_partial_starts_given_up.py.
"""

import math

import pytest
from tests.unit.scheduler.early_rigs import ALIGNED, PROMPT, begun, count, fence, know_token, land, running, waiting
from tests.unit.scheduler.rigs import Solo, handoff, of, sequence_id, to_peer

from disagg.core.roles import PartialStart, Task
from disagg.core.spans import Span
from disagg.policy.partial_start import PartialOutcome
from disagg.protocol.messages import TakeHandoff
from disagg.scheduler import events
from disagg.scheduler.actions import RevokeGrant, RunStep
from disagg.scheduler.engine import LayerRange
from disagg.telemetry.metrics import LANDINGS_REJECTED, STEPS

NUM_LAYERS = 3


# --- how it goes -------------------------------------------------------------------------------------------------


def test_each_layer_runs_when_it_has_landed_and_the_last_one_after_the_fence() -> None:
    solo = waiting()
    assert of(RunStep, know_token(solo)) == []
    for layer in range(NUM_LAYERS - 1):
        (step,) = of(RunStep, land(solo, layer))
        (row,) = step.plan.rows
        assert (step.plan.layers, step.plan.carried) == (LayerRange(layer, layer + 1), bytes(range(layer)))
        assert (row.token_ids, row.position, row.sampling, row.output_position) == ((42,), 10, None, 1)
        assert of(RunStep, solo.finish_step()) == []
        assert solo.state.num_reserved_blocks == 3
    actions = land(solo, 2)
    assert (len(to_peer(TakeHandoff, actions)), len(of(RevokeGrant, actions)), of(RunStep, actions)) == (1, 1, [])
    assert solo.tokens(0) == []
    (step,) = of(RunStep, fence(solo))
    (row,) = step.plan.rows
    assert (step.plan.layers, step.plan.carried) == (LayerRange(2, 3), bytes(range(2)))
    assert (row.token_ids, row.position, row.output_position) == ((42,), 10, 1)
    assert row.sampling is not None
    assert [token.position for token in solo.tokens(0)] == [0]
    solo.finish_step()
    assert running(solo).layers is None
    solo.finish_steps()
    assert [token.position for token in solo.tokens(0)] == [0, 1, 2]
    assert (count(solo, PartialOutcome.FINISHED), solo.scheduler.counters.get(STEPS, "part")) == (1, 3)
    assert (solo.scheduler.is_idle, solo.num_used) == (True, 0)


def test_alone_it_runs_all_layers_that_are_here_at_once() -> None:
    solo = waiting()
    land(solo, 0, 2)
    (step,) = of(RunStep, know_token(solo))
    assert step.plan.layers == LayerRange(0, 2)


def test_layers_out_of_order_wait_for_those_before_them() -> None:
    solo = waiting()
    know_token(solo)
    assert of(RunStep, land(solo, 1)) == []
    (step,) = of(RunStep, land(solo, 0))
    assert step.plan.layers == LayerRange(0, 2)


def test_a_layer_that_lacks_tokens_does_not_run() -> None:
    solo = waiting()
    know_token(solo)
    assert of(RunStep, solo.handle(events.WriteLanded(handoff(0), Span(0, 9, 0, 3), None))) == []
    assert of(RunStep, solo.handle(events.WriteLanded(handoff(0), Span(9, 10, 0, 1), None))) != []


def test_a_damaged_layer_runs_only_once_it_has_come_again() -> None:
    solo = begun(1, in_engine=False)
    assert of(RunStep, land(solo, 1, failure="checksum")) == []
    assert solo.scheduler.counters.get(LANDINGS_REJECTED) == 1
    (step,) = of(RunStep, land(solo, 1))
    assert step.plan.layers == LayerRange(1, 2)


def test_the_rest_may_land_and_be_fenced_while_a_part_is_in_the_engine() -> None:
    solo = begun(1, in_engine=True)
    land(solo, 1, 2)
    assert of(RunStep, fence(solo)) == []
    (step,) = of(RunStep, solo.finish_step())
    assert (step.plan.layers, step.plan.carried) == (LayerRange(1, 3), b"\0")
    solo.finish_steps()
    assert [token.position for token in solo.tokens(0)] == [0, 1, 2]
    assert (solo.scheduler.is_idle, solo.num_used, count(solo, PartialOutcome.FINISHED)) == (True, 0, 1)


def test_blocks_that_a_part_is_reading_are_not_exchanged_for_equal_ones() -> None:
    """Another prompt of the same tokens has been indexed since the reservation."""
    solo = waiting()
    solo.start(1, Task.WHOLE, PROMPT, max_tokens=1)
    solo.finish_step()
    know_token(solo)
    land(solo, 0)
    before = running(solo).rows[0].block_table
    land(solo, 1, 2)
    fence(solo)
    sequence = solo.scheduler._state.live(sequence_id(0))
    assert sequence is not None
    assert sequence.blocks == before
    solo.finish_steps()
    assert (solo.scheduler.is_idle, solo.num_used) == (True, 0)


# --- why not -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bytes_per_s", "outcome"),
    [
        (0.0, PartialOutcome.RATE_UNKNOWN),
        (math.nan, PartialOutcome.RATE_UNKNOWN),
        (-5.0, PartialOutcome.RATE_UNKNOWN),
        (1e9, PartialOutcome.WIRE_SHORT),
        (math.inf, PartialOutcome.WIRE_SHORT),
    ],
)
def test_it_does_not_begin_where_the_link_does_not_make_it_worth_while(
    bytes_per_s: float, outcome: PartialOutcome
) -> None:
    solo = waiting()
    know_token(solo, bytes_per_s)
    for layer in range(NUM_LAYERS):
        assert of(RunStep, land(solo, layer)) == []
    fence(solo)
    assert running(solo).layers is None
    assert count(solo, outcome) == 1


def test_it_does_not_begin_where_it_is_switched_off() -> None:
    solo = waiting(partial_start=PartialStart.OFF)
    know_token(solo)
    land(solo, 0)
    assert solo.plan is None
    land(solo, 1, 2)
    fence(solo)
    assert running(solo).layers is None
    assert count(solo, PartialOutcome.OFF) == 1


def test_it_does_not_begin_where_there_is_no_second_token() -> None:
    solo = waiting(max_tokens=1)
    know_token(solo)
    land(solo, 0)
    assert solo.plan is None
    land(solo, 1, 2)
    fence(solo)
    assert count(solo, PartialOutcome.NO_STEP) == 1
    assert solo.scheduler.is_idle


def test_it_does_not_begin_without_a_block_for_its_token() -> None:
    solo = waiting(ALIGNED, answer_headroom=0)
    know_token(solo)
    land(solo, 0)
    assert solo.plan is None
    land(solo, 1, 2)
    fence(solo)
    assert running(solo).layers is None
    assert count(solo, PartialOutcome.NO_ROOM) == 1


def test_what_comes_at_once_leaves_nothing_to_begin_with() -> None:
    solo = waiting()
    know_token(solo)
    land(solo, 0, 3)
    fence(solo)
    assert running(solo).layers is None
    assert count(solo, PartialOutcome.TOO_LATE) == 1


# --- beside others -----------------------------------------------------------------------------------------------


def beside_a_stream(sure_token_id: int | None = None) -> Solo:
    """Another sequence writes its answer here; its step is running, and nothing has landed."""
    solo = waiting(answer_headroom=4, sure_token_id=sure_token_id)
    solo.start(9, Task.WHOLE, (50, 51, 52), max_tokens=40)
    solo.finish_step()
    assert running(solo).layers is None
    know_token(solo)
    return solo


def test_parts_and_shared_steps_take_turns() -> None:
    solo = beside_a_stream()
    land(solo, 0, 2)
    kinds = []
    for _ in range(6):
        kinds.append(running(solo).layers)
        solo.finish_step()
    assert kinds == [None, LayerRange(0, 1), None, LayerRange(1, 2), None, None]
    land(solo, 2)
    fence(solo)
    solo.finish_step()
    assert running(solo).layers == LayerRange(2, 3)
    solo.finish_step()
    assert [len(plan.rows) for plan in solo.plans[-1:]] == [2]  # it has joined the others
    solo.finish_steps()
    assert [token.position for token in solo.tokens(0)] == [0, 1, 2]
    assert count(solo, PartialOutcome.FINISHED) == 1


def test_with_too_much_left_the_step_is_done_in_company() -> None:
    solo = beside_a_stream()
    land(solo, 0)
    solo.finish_step()
    assert running(solo).layers == LayerRange(0, 1)
    solo.finish_step()
    land(solo, 1, 2)
    fence(solo)
    solo.finish_step()
    assert (running(solo).layers, len(running(solo).rows)) == (None, 2)
    assert count(solo, PartialOutcome.JOINED) == 1
    solo.finish_steps()
    assert [token.position for token in solo.tokens(0)] == [0, 1, 2]


def test_when_its_turn_has_passed_it_joins_instead_of_waiting_for_another() -> None:
    solo = beside_a_stream()
    land(solo, 0, 2)
    solo.finish_step()
    solo.finish_step()
    solo.finish_step()
    assert running(solo).layers == LayerRange(1, 2)
    land(solo, 2)
    fence(solo)
    solo.finish_step()
    assert (running(solo).layers, len(running(solo).rows)) == (None, 2)
    assert count(solo, PartialOutcome.JOINED) == 1


def test_steps_do_not_end_together_while_a_part_is_due() -> None:
    solo = beside_a_stream(sure_token_id=7)
    while solo.scheduler.num_alike(9) == 1:
        solo.finish_step()
    land(solo, 0)
    assert solo.scheduler.num_alike(9) == 1

"""A first step that begins before all KV is here: its parts, its turns, and every way in which it is given up."""

import math

import pytest
from tests.unit.scheduler.rigs import PEER, PEER_INCARNATION, Solo, handoff, of, sequence_id, to_peer

from disagg.core.errors import Failure, FailureKind
from disagg.core.request import EmittedToken, SamplingParams, SequenceSpec
from disagg.core.roles import PartialStart, Role, Task
from disagg.core.spans import Span
from disagg.policy.partial_start import PartialOutcome
from disagg.protocol.messages import CancelHandoff, FinishPrefill, RequestReservation, TakeHandoff
from disagg.scheduler import events
from disagg.scheduler.actions import Action, RevokeGrant, RunStep
from disagg.scheduler.engine import LayerRange, StepPlan, StepResult
from disagg.telemetry.metrics import LANDINGS_REJECTED, PARTIAL_STARTS, STEPS

PROMPT = tuple(range(10))  # its next token goes into the last block that the peer may write
ALIGNED = tuple(range(12))  # its next token goes into a block of its own
NUM_LAYERS = 3
LEASE_S = 9.0
SLOW = 100.0  # bytes per second: a layer takes more than a second
TOKEN = EmittedToken(sequence_id(0), 0, 42)
BROKEN = Failure(FailureKind.INTERNAL, "the engine is broken")


def waiting(prompt: tuple[int, ...] = PROMPT, max_tokens: int = 3, **more: object) -> Solo:
    """Blocks are reserved; no byte has landed."""
    solo = Solo(Role.DECODE, **more)  # type: ignore[arg-type]
    solo.meet(Role.PREFILL)
    solo.start(0, Task.DECODE, prompt, max_tokens)
    solo.hear(RequestReservation(handoff(0), solo.fence(), len(prompt)))
    return solo


def know_token(solo: Solo, bytes_per_s: float = SLOW) -> list[Action]:
    return solo.hear(FinishPrefill(handoff(0), solo.fence(), TOKEN, bytes_per_s))


def land(solo: Solo, layer: int, num_layers: int = 1, failure: str | None = None) -> list[Action]:
    span = Span(0, 12, layer, layer + num_layers)
    return solo.handle(events.WriteLanded(handoff(0), span, failure))


def fence(solo: Solo) -> list[Action]:
    return solo.handle(events.GrantFenced(handoff(0)))


def count(solo: Solo, outcome: PartialOutcome) -> float:
    return solo.scheduler.counters.get(PARTIAL_STARTS, outcome.value)


def running(solo: Solo) -> StepPlan:
    assert solo.plan is not None
    return solo.plan


def begun(num_layers: int, prompt: tuple[int, ...] = PROMPT, *, in_engine: bool) -> Solo:
    """So many layers have landed and run, the last of them perhaps not yet."""
    solo = waiting(prompt)
    know_token(solo)
    for layer in range(num_layers):
        land(solo, layer)
        if layer < num_layers - 1 or not in_engine:
            solo.finish_step()
    assert (solo.plan is not None) is in_engine
    return solo


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


# --- given up ----------------------------------------------------------------------------------------------------


def give_up(solo: Solo, how: str) -> None:
    match how:
        case "aborted":
            solo.abort(0)
        case "cancelled":
            solo.hear(CancelHandoff(handoff(0), solo.fence(), Failure(FailureKind.TRANSFER_FAILED, "checksum, twice")))
        case "source dead":
            solo.handle(events.PeerLost(PEER, PEER_INCARNATION, "its connection ended"))
        case "router gone":
            solo.handle(events.RouterLost())
        case "lease over":
            solo.wait(LEASE_S)


WAYS = ("aborted", "cancelled", "source dead", "router gone", "lease over")


@pytest.mark.parametrize("prompt", [PROMPT, ALIGNED], ids=["inside a block", "in a new block"])
@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("how", WAYS)
def test_given_up_between_its_parts_it_leaves_nothing(how: str, num_layers: int, prompt: tuple[int, ...]) -> None:
    solo = begun(num_layers, prompt, in_engine=False)
    give_up(solo, how)
    assert count(solo, PartialOutcome.DROPPED) == 1
    assert solo.state.num_quarantined_blocks == 3
    fence(solo)
    assert (solo.scheduler.is_idle, solo.num_used, solo.tokens(0)) == (True, 0, [])


@pytest.mark.parametrize("prompt", [PROMPT, ALIGNED], ids=["inside a block", "in a new block"])
@pytest.mark.parametrize("fence_first", [True, False])
@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("how", WAYS)
def test_given_up_with_a_part_in_the_engine_its_blocks_wait_for_it_and_for_the_fence(
    how: str, num_layers: int, fence_first: bool, prompt: tuple[int, ...]
) -> None:
    solo = begun(num_layers, prompt, in_engine=True)
    plan = running(solo)
    give_up(solo, how)
    assert count(solo, PartialOutcome.DROPPED) == 1
    for is_fence in (fence_first, not fence_first):
        assert solo.state.num_quarantined_blocks == 3
        assert not solo.scheduler.is_idle
        if is_fence:
            assert of(RunStep, fence(solo)) == []
        else:
            assert solo.num_used == len(prompt) // 4 + 1  # also the block that its token goes into
            assert of(RunStep, solo.finish_step()) == []
    assert (solo.scheduler.is_idle, solo.num_used, solo.tokens(0)) == (True, 0, [])
    assert solo.handle(events.StepFinished(StepResult(plan.step_id, (), carried=b"late"), 0.01)) == []
    assert solo.ignored("StepFinished") == 1


@pytest.mark.parametrize("num_layers", [1, 2])
def test_an_engine_that_fails_at_a_part_fails_the_sequence(num_layers: int) -> None:
    solo = begun(num_layers, in_engine=True)
    plan, solo.plan = running(solo), None
    actions = solo.handle(events.StepFailed(plan.step_id, BROKEN))
    assert (len(of(RevokeGrant, actions)), len(to_peer(CancelHandoff, actions))) == (1, 1)
    assert [report.failure for report in solo.failures] == [BROKEN]
    fence(solo)
    assert (solo.scheduler.is_idle, solo.num_used, count(solo, PartialOutcome.DROPPED)) == (True, 0, 1)


def test_an_engine_that_fails_at_a_part_that_was_given_up_ends_it() -> None:
    solo = begun(1, in_engine=True)
    solo.abort(0)
    fence(solo)
    plan, solo.plan = running(solo), None
    solo.handle(events.StepFailed(plan.step_id, BROKEN))
    assert (solo.scheduler.is_idle, solo.num_used, solo.failures) == (True, 0, [])
    assert count(solo, PartialOutcome.DROPPED) == 1


@pytest.mark.parametrize("in_engine", [True, False])
def test_aborted_after_the_hand_over_it_is_a_stream_like_others(in_engine: bool) -> None:
    """Its blocks are its own: nothing but the engine is waited for."""
    solo = begun(2, in_engine=True)
    if not in_engine:
        solo.finish_step()
    land(solo, 2)
    if in_engine:
        fence(solo)
        solo.abort(0)
        assert not solo.scheduler.is_idle
        solo.finish_step()
    else:
        solo.abort(0)  # all is here, the fence is not
        fence(solo)
    assert (solo.scheduler.is_idle, solo.num_used, count(solo, PartialOutcome.DROPPED)) == (True, 0, 1)


def test_a_source_that_dies_when_all_is_here_is_not_missed() -> None:
    solo = begun(2, in_engine=True)
    land(solo, 2)
    give_up(solo, "source dead")
    fence(solo)
    solo.finish_steps()
    assert [token.position for token in solo.tokens(0)] == [0, 1, 2]
    assert not solo.failures


def test_what_was_verified_is_kept_when_it_is_given_up() -> None:
    solo = begun(1, in_engine=True)
    solo.handle(events.WriteLanded(handoff(0), Span(0, 8, 1, 3), None))
    give_up(solo, "source dead")
    assert [report.num_kept_tokens for report in solo.failures] == [8]
    fence(solo)
    solo.finish_step()
    assert (solo.scheduler.is_idle, solo.num_used, solo.state.num_cached_blocks) == (True, 0, 2)


def test_the_next_attempt_begins_anew() -> None:
    solo = begun(2, in_engine=False)
    solo.abort(0)
    fence(solo)
    spec = SequenceSpec(sequence_id(0), PROMPT, SamplingParams(3))
    (step,) = of(RunStep, solo.start_spec(spec, Task.WHOLE, attempt=2))
    assert (step.plan.layers, step.plan.carried) == (None, b"")
    solo.finish_steps()
    assert [token.position for token in solo.tokens(0)] == [0, 1, 2]
    assert (solo.scheduler.is_idle, solo.num_used) == (True, 0)

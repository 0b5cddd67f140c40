"""Every way in which a first step that has begun before all KV is here is given up, and what is left of it."""

import pytest
from tests.unit.scheduler.early_rigs import ALIGNED, LEASE_S, PROMPT, begun, count, fence, land, running
from tests.unit.scheduler.rigs import PEER, PEER_INCARNATION, Solo, handoff, of, sequence_id, to_peer

from disagg.core.errors import Failure, FailureKind
from disagg.core.request import SamplingParams, SequenceSpec
from disagg.core.roles import Task
from disagg.core.spans import Span
from disagg.policy.partial_start import PartialOutcome
from disagg.protocol.messages import CancelHandoff
from disagg.scheduler import events
from disagg.scheduler.actions import RevokeGrant, RunStep
from disagg.scheduler.engine import StepResult

BROKEN = Failure(FailureKind.INTERNAL, "the engine is broken")


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

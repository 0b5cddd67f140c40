"""Giving up in every state: blocks are free exactly when nothing can touch them any more."""

import math

import msgspec
import pytest
from tests.unit.scheduler.rigs import PEER, PEER_INCARNATION, Duo, Solo, handoff, of, sequence_id, to_peer

from disagg.core.errors import Failure, FailureKind
from disagg.core.ids import Incarnation, WorkerId
from disagg.core.request import EmittedToken
from disagg.core.roles import Role, Task
from disagg.core.spans import Span
from disagg.policy.batching import StepBudget
from disagg.protocol.messages import CancelHandoff, FinishPrefill, RenewLeases, RequestReservation, TakeHandoff
from disagg.scheduler import events
from disagg.scheduler.actions import RevokeGrant, RunStep, StopPushes

PROMPT = tuple(range(10))
LEASE_S = 9.0


def source(**more: object) -> Solo:
    solo = Solo(Role.PREFILL, **more)  # type: ignore[arg-type]
    solo.meet(Role.DECODE)
    solo.start(0, Task.PREFILL, PROMPT)
    return solo


def destination() -> Solo:
    solo = Solo(Role.DECODE)
    solo.meet(Role.PREFILL)
    solo.start(0, Task.DECODE, PROMPT)
    return solo


def receiving() -> Solo:
    solo = destination()
    solo.hear(RequestReservation(handoff(0), solo.fence(), 10))
    return solo


def complete() -> Solo:
    solo = receiving()
    solo.handle(events.WriteLanded(handoff(0), Span(0, 10, 0, 3), None))
    solo.hear(FinishPrefill(handoff(0), solo.fence(), EmittedToken(sequence_id(0), 0, 42)))
    return solo


def is_gone(solo: Solo) -> bool:
    return solo.scheduler.is_idle and solo.num_used == 0


# --- aborts ------------------------------------------------------------------------------------------------------


def test_waiting_is_gone_at_once() -> None:
    solo = Solo(Role.DECODE, num_blocks=4)
    solo.start(0, Task.WHOLE, PROMPT)
    solo.start(1, Task.WHOLE, PROMPT)
    used = solo.num_used
    assert solo.abort(1) == []
    assert (solo.state.num_waiting, solo.num_used) == (0, used)
    solo.finish_steps()
    assert is_gone(solo)


def test_asking_frees_its_blocks_at_once_and_tells_the_peer() -> None:
    solo = source()
    assert solo.num_used == 3
    (cancel,) = to_peer(CancelHandoff, solo.abort(0))
    assert (cancel.handoff_id, cancel.fence) == (handoff(0), solo.fence())
    assert is_gone(solo)


def test_a_late_grant_after_an_abort_is_given_back() -> None:
    solo = source()
    solo.abort(0)
    (cancel,) = to_peer(CancelHandoff, solo.hear(solo.answer(0)))
    assert (cancel.handoff_id, cancel.fence) == (handoff(0), solo.fence())
    assert solo.ignored("AnswerReservation") == 1
    assert is_gone(solo)


def test_a_late_refusal_after_an_abort_needs_no_answer() -> None:
    solo = source()
    solo.abort(0)
    refusal = msgspec.structs.replace(solo.answer(0), failure=Failure(FailureKind.OVERLOADED, "full"))
    assert solo.hear(refusal) == []


def test_prefilling_keeps_its_blocks_until_the_step_is_over() -> None:
    solo = Solo(Role.DECODE)
    solo.start(0, Task.WHOLE, PROMPT)
    solo.abort(0)
    assert solo.num_used == 3
    assert not solo.scheduler.is_idle
    solo.finish_step()
    assert is_gone(solo)
    assert solo.state.num_cached_blocks == 0  # what a dropped sequence computed is not indexed
    assert solo.reports == []  # nobody hears of its token


def test_prefilling_outside_the_step_is_gone_at_once() -> None:
    solo = Solo(Role.DECODE, budget=StepBudget(4, 4, 8))
    solo.start(0, Task.WHOLE, PROMPT)
    solo.start(1, Task.WHOLE, tuple(range(50, 60)))
    solo.abort(1)
    assert solo.num_used == 3
    solo.finish_steps()
    assert is_gone(solo)


@pytest.mark.parametrize("step_first", [True, False])
def test_prefilling_with_writes_waits_for_step_and_transport(step_first: bool) -> None:
    solo = source()
    solo.hear(solo.answer(0))
    solo.layers(1)
    actions = solo.abort(0)
    assert (len(of(StopPushes, actions)), len(to_peer(CancelHandoff, actions))) == (1, 1)
    for is_step in (step_first, not step_first):
        assert solo.num_used == 3
        ended = solo.finish_step() if is_step else solo.handle(events.WritesStopped(handoff(0)))
        assert of(StopPushes, ended) == []
    assert is_gone(solo)


def test_layers_computed_after_an_abort_are_not_pushed() -> None:
    solo = source()
    solo.hear(solo.answer(0))
    solo.abort(0)
    assert solo.layers(3) == []
    assert of(RunStep, solo.finish_step()) == []
    assert is_gone(solo)


def test_handing_off_waits_for_its_outstanding_writes() -> None:
    solo = source()
    solo.hear(solo.answer(0))
    solo.finish_step()
    assert len(of(StopPushes, solo.abort(0))) == 1
    solo.handle(events.WriteFinished(handoff(0), 0, None))
    assert solo.num_used == 3
    solo.handle(events.WritesStopped(handoff(0)))
    assert is_gone(solo)


def test_delivered_is_gone_at_once() -> None:
    solo = source()
    solo.hear(solo.answer(0))
    solo.finish_step()
    solo.handle(events.WriteFinished(handoff(0), 0, None))
    actions = solo.abort(0)
    assert of(StopPushes, actions) == []
    assert is_gone(solo)


def test_expected_is_gone_at_once() -> None:
    solo = destination()
    solo.abort(0)
    assert is_gone(solo)


def test_receiving_quarantines_what_the_peer_may_still_write() -> None:
    solo = receiving()
    assert (solo.state.num_reserved_blocks, solo.num_used) == (3, 3)
    actions = solo.abort(0)
    assert (len(of(RevokeGrant, actions)), len(to_peer(CancelHandoff, actions))) == (1, 1)
    assert (solo.state.num_quarantined_blocks, solo.num_used) == (3, 3)
    solo.handle(events.WriteLanded(handoff(0), Span(0, 10, 0, 3), None))
    assert solo.state.num_quarantined_blocks == 3
    solo.handle(events.GrantFenced(handoff(0)))
    assert is_gone(solo)
    assert solo.state.num_cached_blocks == 0


def test_complete_waits_for_the_fence_that_is_under_way() -> None:
    solo = complete()
    actions = solo.abort(0)
    assert of(RevokeGrant, actions) == []  # a second one would be answered twice
    assert to_peer(CancelHandoff, actions) == []  # the peer has let go
    assert solo.state.num_quarantined_blocks == 3
    solo.handle(events.GrantFenced(handoff(0)))
    assert is_gone(solo)
    assert solo.reports == []


def test_decoding_keeps_its_blocks_until_the_step_is_over() -> None:
    solo = complete()
    solo.handle(events.GrantFenced(handoff(0)))
    assert solo.plan is not None
    solo.abort(0)
    assert solo.num_used == 3
    num_reports = len(solo.reports)
    solo.finish_step()
    assert is_gone(solo)
    assert len(solo.reports) == num_reports


def test_aborting_twice_has_no_second_effect() -> None:
    solo = receiving()
    solo.abort(0)
    for num_ignored in (1, 2):  # while its fence is awaited, and when it is gone
        assert solo.abort(0) == []
        assert solo.ignored("AbortSequence") == num_ignored
        solo.handle(events.GrantFenced(handoff(0)))
    assert is_gone(solo)


def test_a_cancel_by_the_peer_is_a_failure_with_its_reason() -> None:
    solo = receiving()
    cancel = CancelHandoff(handoff(0), solo.fence(), Failure(FailureKind.TRANSFER_FAILED, "no luck"))
    solo.hear(cancel)
    assert [report.failure.message for report in solo.failures] == ["no luck"]
    solo.handle(events.GrantFenced(handoff(0)))
    assert is_gone(solo)
    solo.hear(cancel)
    assert solo.ignored("CancelHandoff") == 1


def test_a_cancel_that_comes_after_the_take_over_is_ignored() -> None:
    solo = complete()
    solo.handle(events.GrantFenced(handoff(0)))
    solo.hear(CancelHandoff(handoff(0), solo.fence(), Failure(FailureKind.CANCELLED, "late")))
    assert not solo.failures
    solo.finish_steps()
    assert is_gone(solo)


def test_without_router_everything_is_dropped_and_nobody_is_told_but_peers() -> None:
    solo = receiving()
    solo.start(1, Task.WHOLE, PROMPT)
    actions = solo.handle(events.RouterLost())
    assert len(to_peer(CancelHandoff, actions)) == 1
    solo.handle(events.GrantFenced(handoff(0)))
    solo.finish_step()
    assert is_gone(solo)
    assert solo.reports == []


def queued() -> Solo:
    """A source that has asked, was refused, and waits to ask again."""
    solo = source(num_blocks=4)
    solo.start(1, Task.PREFILL, tuple(range(50, 60)))
    assert solo.state.num_waiting == 2
    return solo


def test_a_queued_source_that_loses_its_router_tells_the_destination() -> None:
    solo = queued()
    cancels = to_peer(CancelHandoff, solo.handle(events.RouterLost()))
    assert {cancel.handoff_id for cancel in cancels} == {handoff(0), handoff(1)}


# --- leases ------------------------------------------------------------------------------------------------------


def test_a_source_gives_up_when_nothing_is_heard_of_the_destination() -> None:
    solo = source()
    solo.hear(solo.answer(0))
    solo.finish_step()
    solo.handle(events.WriteFinished(handoff(0), 0, None))
    solo.wait(LEASE_S - 0.1)
    assert solo.num_used == 3
    assert solo.scheduler.next_wake_s() <= solo.now_s + 0.1
    actions = solo.wait(0.2)
    assert [report.failure.kind for report in solo.failures] == [FailureKind.LEASE_EXPIRED]
    assert str(handoff(0)) in solo.failures[0].failure.message
    assert len(to_peer(CancelHandoff, actions)) == 1
    assert is_gone(solo)


def test_a_source_gives_up_when_its_question_is_not_answered() -> None:
    solo = source()
    solo.wait(LEASE_S + 0.1)
    assert [report.failure.kind for report in solo.failures] == [FailureKind.LEASE_EXPIRED]
    assert is_gone(solo)


def test_a_destination_gives_up_when_nothing_is_heard_of_the_source() -> None:
    solo = receiving()
    solo.wait(LEASE_S - 0.1)
    assert solo.state.num_reserved_blocks == 3
    actions = solo.wait(0.2)
    assert [report.failure.kind for report in solo.failures] == [FailureKind.LEASE_EXPIRED]
    assert len(of(RevokeGrant, actions)) == 1
    assert solo.state.num_quarantined_blocks == 3
    solo.handle(events.GrantFenced(handoff(0)))
    assert is_gone(solo)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_renewed_lease_lasts_from_the_renewal_on(role: Role) -> None:
    solo = source() if role is Role.PREFILL else receiving()
    if role is Role.PREFILL:
        solo.hear(solo.answer(0))
        solo.finish_step()
    for _ in range(4):
        solo.wait(LEASE_S - 1)
        solo.hear(RenewLeases((handoff(0), handoff(9)), LEASE_S))
        assert not solo.failures
    solo.wait(LEASE_S + 0.1)
    assert len(solo.failures) == 1


def test_a_renewal_by_somebody_else_does_not_count() -> None:
    solo = receiving()
    solo.wait(LEASE_S - 1)
    solo.handle(events.PeerMessageReceived(WorkerId("stranger"), RenewLeases((handoff(0),), LEASE_S)))
    solo.wait(1.1)
    assert len(solo.failures) == 1


def test_each_end_renews_a_third_of_the_way_by_the_clock_alone() -> None:
    for solo in (source(), receiving()):
        renewals = 0
        for _ in range(3):
            solo.hear(RenewLeases((handoff(0),), LEASE_S))
            renewals += len(to_peer(RenewLeases, solo.wait(LEASE_S / 3 + 0.01)))
            assert to_peer(RenewLeases, solo.wait(0.01)) == []
        assert renewals == 3


def test_hand_offs_outlive_the_shorter_of_two_unlike_leases() -> None:
    """One is read, the other waits in the queue, both for longer than the destination waits for a silent source."""
    budget = StepBudget(chunk_tokens=64, mixed_chunk_tokens=8, max_running=1)
    long = Solo(Role.PREFILL, name=WorkerId("p"), incarnation=Incarnation(1), budget=budget, lease_s=30.0)
    short = Solo(Role.DECODE, name=WorkerId("d"), incarnation=Incarnation(2), lease_s=1.0)
    pair = Duo(long, short)
    for number in range(2):
        pair.start(number, (Task.PREFILL, Task.DECODE), PROMPT, max_tokens=1)
    pair.exchange()
    for _ in range(50):
        for end in (long, short):
            pair.take(end, end.wait(0.1))
        pair.exchange()
    for _ in range(2):
        pair.step(long)
    assert (long.failures, short.failures) == ([], [])
    assert long.scheduler.is_idle
    assert short.scheduler.is_idle


def test_only_a_shorter_lease_is_answered_by_a_renewal() -> None:
    solo = source()
    for lease_s, answered in ((LEASE_S / 3, [LEASE_S]), (LEASE_S, []), (2 * LEASE_S, [])):
        answers = to_peer(RenewLeases, solo.hear(RenewLeases((handoff(0), handoff(9)), lease_s)))
        assert [(each.handoff_ids, each.lease_s) for each in answers] == [((handoff(0),), each) for each in answered]


def test_a_decoding_sequence_needs_no_lease() -> None:
    solo = complete()
    solo.handle(events.GrantFenced(handoff(0)))
    solo.wait(100 * LEASE_S)
    assert not solo.failures
    assert solo.scheduler.next_wake_s() == float("inf")


def test_an_expected_hand_off_that_nobody_begins_is_given_up() -> None:
    solo = destination()
    for _ in range(10):
        solo.wait(LEASE_S)
    assert solo.failures


def test_a_complete_hand_off_needs_nothing_more_of_its_source() -> None:
    solo = complete()
    solo.wait(LEASE_S + 0.1)
    assert not solo.failures


@pytest.mark.parametrize("lease_s", [1e12, math.inf, math.nan, -1.0])
def test_a_lease_is_never_longer_than_the_workers_own(lease_s: float) -> None:
    solo = receiving()
    solo.hear(RenewLeases((handoff(0),), lease_s))
    solo.wait(10 * LEASE_S)
    assert solo.failures


def test_a_peer_lost_while_receiving_fails_the_sequence_and_waits_for_the_fence() -> None:
    solo = receiving()
    solo.handle(events.PeerLost(PEER, PEER_INCARNATION, "its connection ended"))
    assert [report.failure.kind for report in solo.failures] == [FailureKind.WORKER_LOST]
    assert solo.state.num_quarantined_blocks == 3
    solo.handle(events.GrantFenced(handoff(0)))
    assert is_gone(solo)


def test_take_before_the_prompt_is_computed_is_ignored() -> None:
    solo = source()
    solo.hear(solo.answer(0))
    solo.hear(TakeHandoff(handoff(0), solo.fence()))
    assert solo.ignored("TakeHandoff") == 1
    assert solo.num_used == 3

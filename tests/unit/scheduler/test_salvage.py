"""A hand-off breaks: what is complete and verified stays in the prefix index; what never begins has an end too."""

import pytest
from tests.unit.scheduler.rigs import PEER, PEER_INCARNATION, Solo, duo, handoff, of, sequence_id, to_peer

from disagg.core.errors import Failure, FailureKind
from disagg.core.request import EmittedToken, SamplingParams, SequenceSpec
from disagg.core.roles import Role, Task
from disagg.core.spans import Span
from disagg.policy.batching import StepBudget
from disagg.protocol.messages import AnswerReservation, CancelHandoff, FinishPrefill, RenewLeases, RequestReservation
from disagg.scheduler import events
from disagg.scheduler.actions import RevokeGrant

PROMPT = tuple(range(10))
LEASE_S = 9.0
LOST = events.PeerLost(PEER, PEER_INCARNATION, "its connection ended")


def destination(prompt: tuple[int, ...] = PROMPT) -> Solo:
    solo = Solo(Role.DECODE)
    solo.meet(Role.PREFILL)
    solo.start(0, Task.DECODE, prompt)
    return solo


def receiving(*landed: Span) -> Solo:
    solo = destination()
    solo.hear(RequestReservation(handoff(0), solo.fence(), 10))
    for span in landed:
        solo.handle(events.WriteLanded(handoff(0), span, None))
    return solo


def again(solo: Solo) -> int:
    """The router's second attempt, here alone: how many tokens need not be read."""
    solo.start_spec(SequenceSpec(sequence_id(0), PROMPT, SamplingParams(3)), Task.WHOLE, attempt=2)
    assert solo.plan is not None
    return solo.plan.rows[0].position


# --- what is kept ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("landed", "num_kept"),
    [
        ([], 0),
        ([Span(0, 3, 0, 3)], 0),
        ([Span(0, 4, 0, 3)], 4),
        ([Span(0, 7, 0, 3)], 4),
        ([Span(0, 10, 0, 3)], 8),
        ([Span(0, 10, 0, 2)], 0),
        ([Span(0, 10, 0, 2), Span(0, 5, 2, 3)], 4),
        ([Span(4, 10, 0, 3)], 0),
        ([Span(8, 10, 0, 3), Span(0, 8, 0, 1), Span(0, 8, 1, 3)], 8),
    ],
)
def test_whole_blocks_that_are_here_in_all_layers_are_kept(landed: list[Span], num_kept: int) -> None:
    solo = receiving(*landed)
    solo.handle(LOST)
    (report,) = solo.failures
    assert (report.failure.kind, report.num_kept_tokens) == (FailureKind.WORKER_LOST, num_kept)
    assert (solo.state.num_quarantined_blocks, solo.state.num_cached_blocks) == (3, 0)  # a late byte may still land
    solo.handle(events.GrantFenced(handoff(0)))
    assert solo.scheduler.is_idle
    assert (solo.num_used, solo.state.num_cached_blocks) == (0, num_kept // 4)
    assert again(solo) == num_kept


def test_nothing_is_built_upon_before_the_fence_holds() -> None:
    solo = receiving(Span(0, 10, 0, 3))
    solo.handle(LOST)
    assert again(solo) == 0


def test_what_lands_after_the_end_does_not_count() -> None:
    solo = receiving(Span(0, 4, 0, 3))
    solo.handle(LOST)
    solo.handle(events.WriteLanded(handoff(0), Span(4, 10, 0, 3), None))
    solo.handle(events.GrantFenced(handoff(0)))
    assert again(solo) == 4


def test_what_landed_with_a_wrong_checksum_does_not_count() -> None:
    solo = receiving(Span(0, 4, 0, 3))
    solo.handle(events.WriteLanded(handoff(0), Span(4, 8, 0, 3), "checksum"))
    solo.handle(LOST)
    assert solo.failures[0].num_kept_tokens == 4
    solo.handle(events.GrantFenced(handoff(0)))
    assert again(solo) == 4


def test_a_prefix_that_was_here_before_is_kept_with_what_came_after_it() -> None:
    solo = Solo(Role.DECODE)
    solo.meet(Role.PREFILL)
    solo.start(9, Task.WHOLE, (*PROMPT[:4], 50), max_tokens=1)
    solo.finish_steps()
    solo.start(0, Task.DECODE, PROMPT)
    actions = solo.hear(RequestReservation(handoff(0), solo.fence(), 10))
    (answer,) = to_peer(AnswerReservation, actions)
    assert answer.first_missing_token == 4
    solo.handle(events.WriteLanded(handoff(0), Span(4, 9, 0, 3), None))
    solo.handle(LOST)
    assert solo.failures[0].num_kept_tokens == 8
    solo.handle(events.GrantFenced(handoff(0)))
    assert again(solo) == 8


def test_two_broken_hand_offs_of_one_prompt_keep_it_once() -> None:
    solo = receiving(Span(0, 8, 0, 3))
    solo.start(1, Task.DECODE, PROMPT)
    solo.hear(RequestReservation(handoff(1), solo.fence(), 10))
    solo.handle(events.WriteLanded(handoff(1), Span(0, 8, 0, 3), None))
    solo.handle(LOST)
    for number in (1, 0):
        solo.handle(events.GrantFenced(handoff(number)))
    assert (solo.state.num_cached_blocks, solo.num_used) == (2, 0)


def test_an_abort_keeps_what_is_whole_too() -> None:
    solo = receiving(Span(0, 10, 0, 3))
    assert len(of(RevokeGrant, solo.abort(0))) == 1
    solo.handle(events.GrantFenced(handoff(0)))
    assert again(solo) == 8


def test_a_source_keeps_the_blocks_that_it_has_computed() -> None:
    solo = Solo(Role.PREFILL, budget=StepBudget(chunk_tokens=6, mixed_chunk_tokens=6, max_running=8))
    solo.meet(Role.DECODE)
    solo.start(0, Task.PREFILL, PROMPT)
    solo.hear(solo.answer(0))
    solo.finish_step()
    solo.handle(LOST)
    assert solo.failures[0].num_kept_tokens == 4
    solo.finish_step()
    solo.handle(events.WritesStopped(handoff(0)))
    assert solo.scheduler.is_idle
    assert solo.state.num_cached_blocks == 1


def test_a_failed_step_keeps_the_blocks_before_it() -> None:
    solo = Solo(Role.DECODE)
    solo.start(0, Task.WHOLE, PROMPT, max_tokens=9)
    for _ in range(3):
        solo.finish_step()
    assert solo.plan is not None
    plan, solo.plan = solo.plan, None
    solo.handle(events.StepFailed(plan.step_id, Failure(FailureKind.INTERNAL, "out of luck")))
    assert solo.failures[0].num_kept_tokens == 12
    assert solo.state.num_cached_blocks == 3


# --- a complete hand-off -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["lost", "cancelled"])
def test_a_complete_hand_off_does_not_miss_its_source(how: str) -> None:
    """All is here and verified: only the own transport's fence is awaited."""
    solo = receiving(Span(0, 10, 0, 3))
    solo.hear(FinishPrefill(handoff(0), solo.fence(), EmittedToken(sequence_id(0), 0, 42)))
    if how == "lost":
        solo.handle(LOST)
    else:
        solo.hear(CancelHandoff(handoff(0), solo.fence(), Failure(FailureKind.LEASE_EXPIRED, "late")))
        assert solo.ignored("CancelHandoff") == 1
    assert solo.failures == []
    solo.handle(events.GrantFenced(handoff(0)))
    solo.finish_steps()
    assert [token.position for token in solo.tokens(0)] == [0, 1, 2]
    assert solo.scheduler.is_idle


# --- leases of what has not begun --------------------------------------------------------------------------------


def test_an_expected_hand_off_is_given_up_after_one_lease() -> None:
    solo = destination()
    assert solo.wait(LEASE_S - 0.1) != []  # a renewal: it is still wanted
    assert not solo.failures
    assert solo.scheduler.next_wake_s() <= solo.now_s + 0.1
    actions = solo.wait(0.1)
    (report,) = solo.failures
    assert (report.failure.kind, report.num_kept_tokens) == (FailureKind.LEASE_EXPIRED, 0)
    assert len(to_peer(CancelHandoff, actions)) == 1
    assert of(RevokeGrant, actions) == []
    assert solo.scheduler.is_idle


def test_an_expected_hand_off_lives_as_long_as_its_source_renews() -> None:
    solo = destination()
    for _ in range(5):
        solo.wait(LEASE_S - 1)
        solo.hear(RenewLeases((handoff(0),), LEASE_S))
    assert not solo.failures
    solo.wait(LEASE_S)
    assert len(solo.failures) == 1


def test_a_source_renews_while_it_queues_and_holds_nothing() -> None:
    """Two prompts share a pool with room for one: the second waits for many leases, and its destination with it."""
    pair = duo(num_blocks=4)
    for number in range(2):
        prompt = tuple(range(40 * number, 40 * number + 10))
        pair.start(number, (Task.PREFILL, Task.DECODE), prompt, max_tokens=1)
        pair.exchange()
    assert pair.source.plan is not None
    assert len(pair.source.plan.rows) == 1  # and this step takes its time
    for _ in range(12):
        for end in (pair.source, pair.destination):
            pair.take(end, end.wait(LEASE_S / 3 + 0.01))
        pair.exchange()
    assert [*pair.source.failures, *pair.destination.failures] == []
    assert pair.destination.state.num_waiting == 1
    pair.step(pair.source)
    pair.step(pair.source)
    assert [token.position for number in range(2) for token in pair.destination.tokens(number)] == [0, 0]
    assert pair.source.scheduler.is_idle
    assert pair.destination.scheduler.is_idle


def test_a_queued_source_that_was_renewed_once_does_not_keep_the_clock_busy() -> None:
    solo = Solo(Role.PREFILL)
    solo.meet(Role.DECODE)
    solo.start(0, Task.PREFILL, PROMPT)
    failure = Failure(FailureKind.OVERLOADED, "full")
    solo.hear(AnswerReservation(handoff(0), solo.fence(), failure, retry_after_s=1e6))
    solo.hear(RenewLeases((handoff(0),), LEASE_S))
    for _ in range(5):
        solo.wait(LEASE_S)
        assert solo.scheduler.next_wake_s() > solo.now_s
    assert not solo.failures

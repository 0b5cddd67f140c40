"""What a worker refuses to start, and what it ignores and counts."""

import pytest
from tests.unit.scheduler.rigs import (
    MAX_CONTEXT,
    OWN,
    PEER,
    PEER_INCARNATION,
    VOCAB,
    Solo,
    card,
    handoff,
    sequence_id,
    with_fence,
)

from disagg.core.errors import Failure, FailureKind
from disagg.core.ids import Fence, Incarnation, StepId, WorkerId
from disagg.core.request import EmittedToken, SamplingParams, SequenceSpec
from disagg.core.roles import Role, Task
from disagg.core.spans import Span
from disagg.protocol.messages import (
    AbortSequence,
    AnnouncePeers,
    Beat,
    CancelHandoff,
    FinishPrefill,
    RequestPairing,
    StartSequence,
    TakeHandoff,
)
from disagg.scheduler import events
from disagg.scheduler.actions import SendToPeer
from disagg.scheduler.engine import StepResult


def refused(solo: Solo, message: StartSequence) -> Failure:
    solo.handle(events.RouterMessageReceived(message))
    assert solo.scheduler.is_idle
    (report,) = solo.failures
    assert (report.sequence_id, report.attempt) == (message.spec.sequence_id, message.attempt)
    return report.failure


def spec(prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 3) -> SequenceSpec:
    return SequenceSpec(sequence_id(0), prompt, SamplingParams(max_tokens))


@pytest.mark.parametrize(
    ("role", "task"),
    [
        (Role.PREFILL, Task.WHOLE),
        (Role.PREFILL, Task.DECODE),
        (Role.DECODE, Task.PREFILL),
        (Role.MIXED, Task.PREFILL),
        (Role.MIXED, Task.DECODE),
    ],
)
def test_a_task_of_another_role_is_refused(role: Role, task: Task) -> None:
    solo = Solo(role)
    solo.meet(Role.DECODE if role is Role.PREFILL else Role.PREFILL)
    failure = refused(solo, StartSequence(spec(), task, 3, (), PEER, PEER_INCARNATION))
    assert failure.kind is FailureKind.WRONG_ROLE
    assert role.value in failure.message
    assert task.value in failure.message


@pytest.mark.parametrize(
    ("peer", "incarnation"), [(None, None), (WorkerId("nobody"), PEER_INCARNATION), (PEER, Incarnation(78))]
)
def test_a_peer_that_was_not_met_in_this_incarnation_is_refused(
    peer: WorkerId | None, incarnation: Incarnation | None
) -> None:
    solo = Solo(Role.DECODE)
    solo.meet(Role.PREFILL)
    failure = refused(solo, StartSequence(spec(), Task.DECODE, 1, (), peer, incarnation))
    assert failure.kind is FailureKind.WORKER_LOST
    assert str(peer) in failure.message


@pytest.mark.parametrize("prompt", [(), (1, VOCAB), (-1,), (2**40,)])
def test_ids_outside_the_vocabulary_are_refused_with_its_size(prompt: tuple[int, ...]) -> None:
    failure = refused(Solo(Role.DECODE), StartSequence(spec(prompt), Task.WHOLE, 1))
    assert failure.kind is FailureKind.INVALID_REQUEST
    assert str(VOCAB) in failure.message


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(MAX_CONTEXT + 1, 1), (60, 6), (3, 0)])
def test_what_is_longer_than_the_context_is_refused_with_the_numbers(num_prompt: int, max_tokens: int) -> None:
    solo = Solo(Role.DECODE, num_blocks=100)
    failure = refused(solo, StartSequence(spec((1,) * num_prompt, max_tokens), Task.WHOLE, 1))
    assert failure.kind is FailureKind.INVALID_REQUEST
    assert str(MAX_CONTEXT) in failure.message


@pytest.mark.parametrize(("num_prompt", "max_tokens", "fits"), [(30, 3, True), (30, 4, False), (31, 3, False)])
def test_what_never_fits_into_the_pool_is_refused_with_the_numbers(
    num_prompt: int, max_tokens: int, fits: bool
) -> None:
    """8 blocks of 4 tokens; the last token of an answer needs no room."""
    solo = Solo(Role.DECODE, num_blocks=8)
    message = StartSequence(spec((1,) * num_prompt, max_tokens), Task.WHOLE, 1)
    if fits:
        solo.handle(events.RouterMessageReceived(message))
        assert solo.plan is not None
        return
    failure = refused(solo, message)
    assert failure.kind is FailureKind.INVALID_REQUEST
    assert "9 KV blocks of 4 tokens" in failure.message
    assert "has 8" in failure.message


def test_a_prefill_worker_needs_room_for_the_prompt_only() -> None:
    solo = Solo(Role.PREFILL, num_blocks=8)
    solo.meet(Role.DECODE)
    solo.start(0, Task.PREFILL, (1,) * 32, max_tokens=30)
    assert not solo.failures


def test_a_repeated_start_changes_nothing() -> None:
    solo = Solo(Role.DECODE)
    solo.start(0, Task.WHOLE, (1, 2, 3))
    assert solo.start(0, Task.WHOLE, (4, 5, 6)) == []
    assert solo.ignored("StartSequence") == 1
    assert (solo.state.num_running, solo.state.num_held_blocks) == (1, 2)


def test_late_messages_of_an_ended_sequence_are_ignored() -> None:
    solo = Solo(Role.PREFILL)
    solo.meet(Role.DECODE)
    fence = solo.fence()
    for message in (
        TakeHandoff(handoff(0), fence),
        CancelHandoff(handoff(0), fence, Failure(FailureKind.CANCELLED, "")),
        Beat(2.5),
        RequestPairing(card(PEER, PEER_INCARNATION, Role.DECODE)),
    ):
        assert solo.hear(message) == []
        assert solo.ignored(type(message).__name__) == 1


def test_who_hands_over_what_is_not_known_here_is_told_so() -> None:
    solo = Solo(Role.DECODE)
    solo.meet(Role.PREFILL)
    (answer,) = solo.hear(FinishPrefill(handoff(0), solo.fence(), EmittedToken(sequence_id(0), 0, 42)))
    assert isinstance(answer, SendToPeer)
    assert isinstance(answer.message, CancelHandoff)
    assert solo.ignored("FinishPrefill") == 1


@pytest.mark.parametrize(
    "event",
    [
        events.WriteFinished(handoff(0), 0, None),
        events.WriteLanded(handoff(0), Span(0, 1, 0, 1), None),
        events.GrantFenced(handoff(0)),
        events.WritesStopped(handoff(0)),
        events.LayersComputed(StepId(0), 1),
        events.StepFinished(StepResult(StepId(0), ()), 0.1),
        events.PeerLost(PEER, Incarnation(78), "another incarnation"),
    ],
    ids=lambda event: type(event).__name__,
)
def test_events_about_nothing_known_are_ignored(event: events.Event) -> None:
    solo = Solo(Role.PREFILL)
    solo.meet(Role.DECODE)
    assert solo.handle(event) == []
    assert solo.ignored(type(event).__name__) == 1


def test_messages_of_the_router_that_are_not_for_a_scheduler_are_ignored() -> None:
    solo = Solo(Role.DECODE)
    for message in (AbortSequence(sequence_id(9), 1, "late"), AnnouncePeers(()), Beat(2.5)):
        assert solo.handle(events.RouterMessageReceived(message)) == []
        assert solo.ignored(type(message).__name__) == 1


def test_another_attempt_or_incarnation_is_fenced_off() -> None:
    solo = Solo(Role.PREFILL)
    solo.meet(Role.DECODE)
    solo.start(0, Task.PREFILL, (1, 2, 3))
    late = Fence(OWN, Incarnation(78), 1)
    solo.hear(CancelHandoff(handoff(0), late, Failure(FailureKind.CANCELLED, "")))
    solo.hear(TakeHandoff(handoff(0), late))
    solo.hear(with_fence(solo.answer(0), attempt=2))
    assert [solo.ignored(name) for name in ("CancelHandoff", "TakeHandoff", "AnswerReservation")] == [1, 1, 1]
    assert not solo.failures
    solo.hear(solo.answer(0))
    assert solo.plan is not None


def test_a_cancel_from_another_worker_than_the_peer_is_ignored() -> None:
    solo = Solo(Role.PREFILL)
    solo.meet(Role.DECODE)
    solo.start(0, Task.PREFILL, (1, 2, 3))
    cancel = CancelHandoff(handoff(0), solo.fence(), Failure(FailureKind.CANCELLED, ""))
    solo.handle(events.PeerMessageReceived(WorkerId("stranger"), cancel))
    assert solo.ignored("CancelHandoff") == 1
    assert not solo.failures

"""The receiving end: whom it gives room, when it takes over, and when blocks may be used again."""

import msgspec
import pytest
from tests.unit.scheduler.rigs import PEER, PEER_INCARNATION, Solo, duo, emitted, handoff, of, sequence_id, to_peer

from disagg.core.errors import FailureKind
from disagg.core.ids import Fence, Incarnation, WorkerId
from disagg.core.request import EmittedToken
from disagg.core.roles import Role, Task
from disagg.core.spans import Span
from disagg.policy.batching import StepBudget
from disagg.protocol.handoff import decode_grant_key
from disagg.protocol.messages import AnswerReservation, CancelHandoff, FinishPrefill, RequestReservation, TakeHandoff
from disagg.scheduler import events
from disagg.scheduler.actions import Action, OpenGrant, RevokeGrant, RunStep, SendToPeer
from disagg.telemetry.metrics import LANDINGS_REJECTED, PROMPT_TOKENS_RECEIVED, RESERVATIONS_REFUSED

PROMPT = tuple(range(10))
TOKEN = EmittedToken(sequence_id(0), 0, 42)


def destination(**more: object) -> Solo:
    solo = Solo(Role.DECODE, **more)  # type: ignore[arg-type]
    solo.meet(Role.PREFILL)
    return solo


def ask(solo: Solo, number: int = 0, num_tokens: int = 10, fence: Fence | None = None) -> AnswerReservation:
    """The peer asks; exactly one answer comes."""
    actions = solo.hear(RequestReservation(handoff(number), fence or solo.fence(), num_tokens))
    (answer,) = to_peer(AnswerReservation, actions)
    return answer


def land(solo: Solo, span: Span, number: int = 0, failure: str | None = None) -> list[Action]:
    return list(solo.handle(events.WriteLanded(handoff(number), span, failure)))


def receiving(**more: object) -> Solo:
    solo = destination(**more)
    solo.start(0, Task.DECODE, PROMPT)
    assert ask(solo).failure is None
    return solo


def finish(token: EmittedToken = TOKEN) -> FinishPrefill:
    return FinishPrefill(handoff(0), Fence(PEER_INCARNATION, Incarnation(11), 1), token)


def test_a_grant_is_open_before_the_peer_is_told_of_it() -> None:
    solo = destination()
    solo.start(0, Task.DECODE, PROMPT, max_tokens=8)
    actions = solo.hear(RequestReservation(handoff(0), solo.fence(), 10))
    assert [type(action) for action in actions] == [OpenGrant, SendToPeer]
    (grant,), (answer,) = of(OpenGrant, actions), to_peer(AnswerReservation, actions)
    assert (answer.grant_key, answer.blocks) == (grant.grant_key, grant.blocks)
    assert decode_grant_key(answer.grant_key).handoff_id == handoff(0)
    assert (answer.num_blocks, answer.first_missing_token, len(answer.blocks)) == (16, 0, 3)
    assert (solo.state.num_reserved_blocks, solo.state.num_held_blocks) == (3, 2)  # the answer's room is there too


@pytest.mark.parametrize("num_tokens", [0, 1, 9, 11])
def test_an_offer_of_another_length_than_the_prompts_is_refused_for_good(num_tokens: int) -> None:
    solo = destination()
    solo.start(0, Task.DECODE, PROMPT)
    failure = ask(solo, num_tokens=num_tokens).failure
    assert failure is not None
    assert failure.kind is FailureKind.INVALID_REQUEST
    assert f"{num_tokens} tokens offered, the sequence has 10" in failure.message


@pytest.mark.parametrize(
    ("peer", "fence"),
    [
        (WorkerId("stranger"), Fence(PEER_INCARNATION, Incarnation(11), 1)),
        (PEER, Fence(Incarnation(78), Incarnation(11), 1)),
        (PEER, Fence(PEER_INCARNATION, Incarnation(11), 2)),
    ],
)
def test_nobody_else_is_given_blocks(peer: WorkerId, fence: Fence) -> None:
    solo = destination()
    solo.start(0, Task.DECODE, PROMPT)
    actions = solo.handle(events.PeerMessageReceived(peer, RequestReservation(handoff(0), fence, 10)))
    (answer,) = to_peer(AnswerReservation, actions)
    assert answer.failure is not None
    assert answer.failure.kind is FailureKind.CANCELLED
    assert (answer.grant_key, answer.blocks) == (b"", ())
    assert solo.num_used == 0


def test_a_sequence_nobody_announced_is_refused() -> None:
    solo = destination()
    failure = ask(solo, number=3).failure
    assert failure is not None
    assert "not expected" in failure.message
    assert solo.scheduler.counters.get(RESERVATIONS_REFUSED, "cancelled") == 1


def test_a_repeated_request_gets_the_first_answer_again_and_no_second_reservation() -> None:
    solo = destination()
    solo.start(0, Task.DECODE, PROMPT)
    first = ask(solo)
    before = solo.num_used
    assert first.failure is None
    assert ask(solo) == first
    assert solo.num_used == before


def test_a_request_for_what_is_complete_is_refused() -> None:
    solo = receiving()
    land(solo, Span(0, 10, 0, 3))
    solo.hear(finish())
    failure = ask(solo).failure
    assert failure is not None
    assert "COMPLETE" in failure.message


def test_no_room_now_is_an_overload_with_the_numbers() -> None:
    solo = destination(num_blocks=5)
    solo.start(9, Task.WHOLE, (1, 2, 3, 4, 5), max_tokens=8)
    solo.start(0, Task.DECODE, PROMPT)
    answer = ask(solo)
    assert answer.failure is not None
    assert answer.failure.kind is FailureKind.OVERLOADED
    assert "2 of 5 blocks" in answer.failure.message
    assert answer.retry_after_s > 0


def test_decoding_begins_when_everything_is_here_verified_and_fenced() -> None:
    solo = receiving()
    assert land(solo, Span(0, 10, 0, 2)) == []
    assert solo.hear(finish()) == []
    actions = solo.handle(events.WriteLanded(handoff(0), Span(0, 10, 2, 3), None))
    assert len(to_peer(TakeHandoff, actions)) == 1
    assert len(of(RevokeGrant, actions)) == 1
    assert (solo.plan, solo.state.num_reserved_blocks) == (None, 3)
    actions = solo.handle(events.GrantFenced(handoff(0)))
    (step,) = of(RunStep, actions)
    (row,) = step.plan.rows
    assert (row.position, row.token_ids, row.output_position) == (10, (42,), 1)
    (message,) = emitted(actions)
    assert message.tokens == (TOKEN,)  # again, in case the source died before the router had it
    assert solo.state.num_reserved_blocks == 0


def test_the_end_of_the_prompt_may_come_before_or_after_the_last_byte() -> None:
    solo = receiving()
    assert land(solo, Span(0, 10, 0, 3)) == []
    assert len(to_peer(TakeHandoff, solo.hear(finish()))) == 1


def test_a_landing_with_a_wrong_checksum_does_not_count() -> None:
    solo = receiving()
    solo.hear(finish())
    assert land(solo, Span(0, 10, 0, 3), failure="checksum") == []
    assert solo.scheduler.counters.get(LANDINGS_REJECTED) == 1
    assert to_peer(TakeHandoff, land(solo, Span(0, 10, 0, 3)))


def test_an_answer_of_one_token_ends_with_the_hand_off() -> None:
    solo = destination()
    solo.start(0, Task.DECODE, PROMPT, max_tokens=1)
    ask(solo)
    land(solo, Span(0, 10, 0, 3))
    solo.hear(finish())
    actions = solo.handle(events.GrantFenced(handoff(0)))
    (message,) = emitted(actions)
    assert message.tokens == (TOKEN,)
    assert solo.scheduler.counters.get(PROMPT_TOKENS_RECEIVED) == 10
    assert solo.scheduler.is_idle
    assert solo.state.num_cached_blocks == 2


def test_a_received_prompt_is_reused_by_the_next() -> None:
    pair = duo()
    pair.start(0, (Task.PREFILL, Task.DECODE), PROMPT, max_tokens=1)
    pair.exchange()
    pair.step(pair.source)
    pair.start(1, (Task.PREFILL, Task.DECODE), (*PROMPT[:8], 90, 91, 92), max_tokens=2)
    pair.exchange()
    before = len(pair.pushes)
    pair.step(pair.source)
    assert {push.span for push in pair.pushes[before:]} == {Span(8, 11, 0, 3)}
    pair.step(pair.destination)
    assert pair.destination.scheduler.is_idle
    assert pair.source.scheduler.is_idle
    assert not [*pair.source.failures, *pair.destination.failures]


def test_who_was_refused_for_long_is_not_overtaken_any_more() -> None:
    solo = destination(num_blocks=6)
    solo.start(9, Task.WHOLE, (1, 2, 3, 4, 5), max_tokens=9)  # 4 of 6 blocks, for 9 steps
    solo.start(0, Task.DECODE, PROMPT, max_tokens=3)  # needs 3
    for number in (1, 2):
        solo.start(number, Task.DECODE, (1, 2), max_tokens=1)  # needs 1
    first = ask(solo, 0).failure
    assert first is not None
    assert first.kind is FailureKind.OVERLOADED
    solo.wait(1.9)
    assert ask(solo, 1, num_tokens=2).failure is None
    solo.wait(0.2)
    second = ask(solo, 2, num_tokens=2).failure
    assert second is not None
    assert second.kind is FailureKind.OVERLOADED
    for _ in range(9):
        solo.finish_step()
    assert ask(solo, 0).failure is None
    assert ask(solo, 2, num_tokens=2).failure is None


def test_the_older_of_two_starving_sequences_may_still_go() -> None:
    solo = destination(num_blocks=6)
    solo.start(9, Task.WHOLE, (1, 2, 3, 4, 5), max_tokens=9)
    for number in (0, 1):
        solo.start(number, Task.DECODE, PROMPT, max_tokens=3)
        assert ask(solo, number).failure is not None
    solo.wait(5)
    for _ in range(9):
        solo.finish_step()
    assert ask(solo, 1).failure is not None
    assert ask(solo, 0).failure is None
    assert ask(solo, 1).failure is None


def test_receivers_count_against_the_number_of_running_sequences() -> None:
    solo = destination(budget=StepBudget(8, 8, max_running=1))
    for number in (0, 1):
        solo.start(number, Task.DECODE, PROMPT)
    assert ask(solo, 0).failure is None
    failure = ask(solo, 1).failure
    assert failure is not None
    assert failure.kind is FailureKind.OVERLOADED


@pytest.mark.parametrize("token", [EmittedToken(sequence_id(0), 1, 42), EmittedToken(sequence_id(1), 0, 42)])
def test_a_finish_without_the_right_first_token_is_the_peers_fault(token: EmittedToken) -> None:
    solo = receiving()
    land(solo, Span(0, 10, 0, 3))
    actions = solo.hear(finish(token))
    (report,) = solo.failures
    assert report.failure.kind is FailureKind.TRANSFER_FAILED
    assert "which is not the next of this answer" in report.failure.message
    assert report.num_kept_tokens == 8  # the KV is whole, whatever the token was
    assert (len(of(RevokeGrant, actions)), len(to_peer(CancelHandoff, actions))) == (1, 1)
    solo.handle(events.GrantFenced(handoff(0)))
    assert solo.scheduler.is_idle
    assert (solo.num_used, solo.state.num_cached_blocks) == (0, 2)


def test_late_landings_and_fences_of_a_running_sequence_are_ignored() -> None:
    solo = receiving()
    land(solo, Span(0, 10, 0, 3))
    solo.hear(finish())
    solo.handle(events.GrantFenced(handoff(0)))
    assert land(solo, Span(0, 4, 0, 3)) == []
    assert solo.ignored("WriteLanded") == 1
    # A source that says it again has missed that it was taken; what it says is not believed a second time.
    (answer,) = solo.hear(finish(msgspec.structs.replace(TOKEN, token_id=50)))
    assert isinstance(answer, SendToPeer)
    assert isinstance(answer.message, TakeHandoff)
    assert solo.ignored("FinishPrefill") == 1
    assert solo.state.num_running == 1


def test_a_peer_that_is_lost_after_the_hand_off_is_not_missed() -> None:
    solo = receiving()
    land(solo, Span(0, 10, 0, 3))
    solo.hear(finish())
    solo.handle(events.GrantFenced(handoff(0)))
    solo.handle(events.PeerLost(PEER, PEER_INCARNATION, "its connection ended"))
    assert not solo.failures
    solo.finish_steps()
    assert solo.scheduler.is_idle


def test_a_second_fence_is_ignored() -> None:
    solo = receiving()
    land(solo, Span(0, 10, 0, 3))
    solo.hear(finish())
    solo.handle(events.GrantFenced(handoff(0)))
    assert solo.handle(events.GrantFenced(handoff(0))) == []
    assert solo.ignored("GrantFenced") == 1

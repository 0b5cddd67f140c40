"""A sequence that comes again: from where it stopped, instead of what is left of it here, and never twice."""

from collections.abc import Callable

import msgspec
import pytest
from tests.unit.scheduler.rigs import (
    LAYOUT,
    PEER,
    PEER_INCARNATION,
    VOCAB,
    Solo,
    emitted,
    handoff,
    of,
    sequence_id,
    to_peer,
)

from disagg.core.errors import FailureKind
from disagg.core.ids import SequenceId
from disagg.core.request import EmittedToken, SamplingParams, SequenceSpec
from disagg.core.roles import Role, Task
from disagg.core.spans import Span
from disagg.protocol.messages import (
    AbortSequence,
    AnswerReservation,
    CancelHandoff,
    DrainWorker,
    FinishPrefill,
    RequestReservation,
)
from disagg.scheduler import events
from disagg.scheduler.actions import PushSpan
from disagg.testing.engine import FakeEngine, expected_tokens

PROMPT = tuple(range(10))


def spec(max_tokens: int = 4, number: int = 0) -> SequenceSpec:
    return SequenceSpec(sequence_id(number), PROMPT, SamplingParams(max_tokens, temperature=0.0))


def solo_of(role: Role) -> Solo:
    solo = Solo(role)
    solo.meet(Role.DECODE if role is Role.PREFILL else Role.PREFILL)
    return solo


# --- tokens that are known already -------------------------------------------------------------------------------


def test_known_tokens_of_the_answer_are_read_like_the_prompt() -> None:
    solo = Solo(Role.DECODE)
    solo.start_spec(spec(), Task.WHOLE, attempt=2, emitted=(70, 71))
    assert solo.plan is not None
    (row,) = solo.plan.rows
    assert (row.position, row.token_ids, row.output_position) == (0, (*PROMPT, 70, 71), 2)
    (message,) = emitted(solo.finish_step(72))
    assert message.tokens == (EmittedToken(sequence_id(0), 2, 72),)
    assert (message.prompts[0].attempt_id, message.prompts[0].num_computed_tokens) == (handoff(0, 2), 12)
    (row,) = solo.plan.rows
    assert (row.position, row.token_ids, row.output_position) == (12, (72,), 3)
    (message,) = emitted(solo.finish_step(73))
    assert message.tokens == (EmittedToken(sequence_id(0), 3, 73),)
    assert solo.scheduler.is_idle


@pytest.mark.parametrize("num_known", [0, 1, 3, 7])
def test_an_answer_that_goes_on_elsewhere_is_the_same_answer(num_known: int) -> None:
    expected = expected_tokens(LAYOUT, sequence_id(0), PROMPT, spec(8).sampling, VOCAB)
    solo, engine = Solo(Role.DECODE), FakeEngine(LAYOUT, 16, VOCAB)
    solo.start_spec(spec(8), Task.WHOLE, attempt=2, emitted=tuple(expected[:num_known]))
    while solo.plan is not None:
        solo.compute_step(engine)
    assert [(token.position, token.token_id) for token in solo.tokens(0)] == [*enumerate(expected)][num_known:]


def test_a_prefill_worker_hands_over_the_next_token() -> None:
    solo = solo_of(Role.PREFILL)
    (request,) = to_peer(RequestReservation, solo.start_spec(spec(), Task.PREFILL, emitted=(70, 71)))
    assert request.num_tokens == 12
    solo.hear(solo.answer(0))
    actions = solo.finish_step(72)
    assert [push.span for push in of(PushSpan, actions)] == [Span(0, 12, 0, 3)]
    (finish,) = to_peer(FinishPrefill, actions)
    assert finish.first_token == EmittedToken(sequence_id(0), 2, 72)


def test_a_decode_worker_receives_all_that_was_read_and_goes_on() -> None:
    solo = solo_of(Role.DECODE)
    solo.start_spec(spec(), Task.DECODE, emitted=(70, 71))
    (answer,) = to_peer(AnswerReservation, solo.hear(RequestReservation(handoff(0), solo.fence(), 12)))
    assert answer.failure is None
    solo.handle(events.WriteLanded(handoff(0), Span(0, 12, 0, 3), None))
    solo.hear(FinishPrefill(handoff(0), solo.fence(), EmittedToken(sequence_id(0), 2, 72)))
    solo.handle(events.GrantFenced(handoff(0)))
    assert solo.plan is not None
    (row,) = solo.plan.rows
    assert (row.position, row.token_ids, row.output_position) == (12, (72,), 3)


@pytest.mark.parametrize(
    ("max_tokens", "known", "said"), [(2, (70, 71), "tokens of prompt and answer"), (9, (VOCAB,), "token ids below")]
)
def test_known_tokens_that_cannot_be_are_refused(max_tokens: int, known: tuple[int, ...], said: str) -> None:
    solo = Solo(Role.DECODE)
    solo.start_spec(spec(max_tokens), Task.WHOLE, emitted=known)
    (report,) = solo.failures
    assert report.failure.kind is FailureKind.INVALID_REQUEST
    assert said in report.failure.message
    assert solo.scheduler.is_idle


# --- a higher attempt --------------------------------------------------------------------------------------------


def waiting() -> Solo:
    solo = Solo(Role.DECODE, num_blocks=4)
    solo.start(8, Task.WHOLE, tuple(range(50, 60)), max_tokens=4)
    solo.start_spec(spec(), Task.WHOLE)
    assert solo.state.num_waiting == 1
    return solo


def prefilling() -> Solo:
    solo = Solo(Role.DECODE)
    solo.start_spec(spec(), Task.WHOLE)
    return solo


def decoding() -> Solo:
    solo = prefilling()
    solo.finish_step()
    return solo


def expected() -> Solo:
    solo = solo_of(Role.DECODE)
    solo.start_spec(spec(), Task.DECODE)
    return solo


def receiving() -> Solo:
    solo = expected()
    solo.hear(RequestReservation(handoff(0), solo.fence(), 10))
    return solo


@pytest.mark.parametrize(
    ("begin", "num_cancels"),
    [(waiting, 0), (prefilling, 0), (decoding, 0), (expected, 1), (receiving, 1)],
)
def test_a_higher_attempt_replaces_a_lower_one_wherever_it_stands(begin: Callable[[], Solo], num_cancels: int) -> None:
    solo = begin()
    num_tokens = len(solo.tokens(0))
    actions = solo.start_spec(spec(), Task.WHOLE, attempt=2)
    cancels = to_peer(CancelHandoff, actions)
    assert [(each.handoff_id, each.failure.message) for each in cancels] == [
        (handoff(0), "replaced by attempt 2")
    ] * num_cancels
    assert solo.failures == []  # the router knows: it was its word
    solo.handle(events.GrantFenced(handoff(0)))
    solo.finish_steps()
    assert [token.position for token in solo.tokens(0)[num_tokens:]] == [0, 1, 2, 3]
    assert solo.scheduler.is_idle
    assert solo.num_used == 0


def test_a_source_is_replaced_by_a_new_hand_off_with_a_fence_of_its_own() -> None:
    solo = solo_of(Role.PREFILL)
    solo.start_spec(spec(), Task.PREFILL)
    solo.hear(solo.answer(0))
    actions = solo.start_spec(spec(), Task.PREFILL, attempt=2, emitted=(70,))
    assert [each.handoff_id for each in to_peer(CancelHandoff, actions)] == [handoff(0)]
    (request,) = to_peer(RequestReservation, actions)
    assert (request.handoff_id, request.fence, request.num_tokens) == (handoff(0, 2), solo.fence(attempt=2), 11)
    assert solo.finish_step() == []  # what the old attempt computed is nobody's any more
    (cancel,) = to_peer(CancelHandoff, solo.hear(solo.answer(0)))  # a late grant is given back
    assert (cancel.handoff_id, cancel.fence) == (handoff(0), solo.fence())
    assert solo.plan is None


def test_the_new_attempt_finds_what_the_old_one_had_computed() -> None:
    solo = decoding()
    solo.start_spec(spec(), Task.WHOLE, attempt=2, emitted=(7,))
    solo.finish_step()
    assert solo.plan is not None
    (row,) = solo.plan.rows
    assert (row.position, row.token_ids) == (8, (8, 9, 7))


def test_an_expected_hand_off_of_an_earlier_attempt_is_refused() -> None:
    solo = expected()
    solo.start_spec(spec(), Task.DECODE, attempt=2)
    (answer,) = to_peer(AnswerReservation, solo.hear(RequestReservation(handoff(0), solo.fence(), 10)))
    assert answer.failure is not None
    assert answer.failure.kind is FailureKind.CANCELLED
    request = RequestReservation(handoff(0, 2), solo.fence(attempt=2), 10)
    (answer,) = to_peer(AnswerReservation, solo.hear(request))
    assert answer.failure is None


@pytest.mark.parametrize("attempt", [1, 2])
def test_an_attempt_that_is_not_higher_changes_nothing(attempt: int) -> None:
    solo = Solo(Role.DECODE)
    solo.start_spec(spec(), Task.WHOLE, attempt=2)
    assert solo.start_spec(spec(), Task.WHOLE, attempt=attempt) == []
    assert solo.ignored("StartSequence") == 1
    solo.finish_steps()
    assert len(solo.tokens(0)) == 4


@pytest.mark.parametrize("end", ["finished", "aborted", "failed"])
def test_a_repeat_that_comes_after_the_end_starts_nothing(end: str) -> None:
    solo = expected() if end == "failed" else prefilling()
    if end == "aborted":
        solo.abort(0)
    elif end == "failed":
        solo.handle(events.PeerLost(PEER, PEER_INCARNATION, "its connection ended"))
        assert len(solo.failures) == 1
    solo.finish_steps()
    assert solo.scheduler.is_idle
    assert solo.start_spec(spec(), Task.WHOLE) == []
    assert solo.ignored("StartSequence") == 1
    assert solo.scheduler.is_idle
    solo.start_spec(spec(), Task.WHOLE, attempt=2)
    assert solo.plan is not None


@pytest.mark.parametrize(("attempt", "is_dropped"), [(1, False), (2, True), (3, True)])
def test_an_abort_reaches_attempts_up_to_its_own(attempt: int, is_dropped: bool) -> None:
    solo = Solo(Role.DECODE)
    solo.start_spec(spec(), Task.WHOLE, attempt=2)
    solo.abort(0, attempt)
    assert solo.ignored("AbortSequence") == int(not is_dropped)
    solo.finish_steps()
    assert len(solo.tokens(0)) == (0 if is_dropped else 4)
    assert solo.scheduler.is_idle


# --- draining ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", [events.DrainRequested(), events.RouterMessageReceived(DrainWorker())])
def test_a_draining_worker_takes_no_new_work_and_finishes_what_it_has(event: events.Event) -> None:
    solo = prefilling()
    assert not solo.scheduler.is_draining
    assert solo.handle(event) == []
    assert solo.scheduler.is_draining
    solo.start_spec(spec(number=1), Task.WHOLE)
    (report,) = solo.failures
    assert (report.sequence_id, report.failure.kind) == (sequence_id(1), FailureKind.WRONG_ROLE)
    assert "is draining" in report.failure.message
    solo.finish_steps()
    assert len(solo.tokens(0)) == 4
    assert solo.scheduler.is_idle


def test_a_draining_worker_still_takes_other_choices_of_a_request_that_it_is_at_work_on() -> None:
    solo = prefilling()
    solo.handle(events.DrainRequested())
    other = SequenceId(sequence_id(0).request_id, 1)
    solo.start_spec(msgspec.structs.replace(spec(), sequence_id=other), Task.WHOLE)
    assert solo.failures == []
    solo.finish_steps()
    assert solo.scheduler.is_idle
    solo.start_spec(msgspec.structs.replace(spec(), sequence_id=SequenceId(other.request_id, 2)), Task.WHOLE)
    assert [report.failure.kind for report in solo.failures] == [FailureKind.WRONG_ROLE]


def test_a_draining_worker_still_takes_the_hand_offs_that_were_announced() -> None:
    solo = expected()
    solo.handle(events.DrainRequested())
    (answer,) = to_peer(AnswerReservation, solo.hear(RequestReservation(handoff(0), solo.fence(), 10)))
    assert answer.failure is None


def test_a_draining_worker_still_drops_what_it_is_told_to() -> None:
    solo = prefilling()
    solo.handle(events.DrainRequested())
    solo.handle(events.RouterMessageReceived(AbortSequence(sequence_id(0), 1, "moved")))
    solo.finish_steps()
    assert solo.tokens(0) == []
    assert solo.scheduler.is_idle

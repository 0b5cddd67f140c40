"""The sending end: when it asks, what it pushes and in which pieces, what it does about failures."""

import pytest
from tests.unit.scheduler.rigs import (
    LAYER_TOKEN_BYTES,
    PEER,
    PEER_INCARNATION,
    Solo,
    emitted,
    handoff,
    of,
    to_peer,
)

from disagg.core.errors import Failure, FailureKind
from disagg.core.roles import HandoffMode, Role, Task
from disagg.core.spans import Span
from disagg.policy.batching import StepBudget
from disagg.protocol.messages import (
    AnswerReservation,
    CancelHandoff,
    FinishPrefill,
    LinkState,
    RequestReservation,
    TakeHandoff,
)
from disagg.scheduler import events
from disagg.scheduler.actions import Action, PushSpan, RunStep, StopPushes
from disagg.scheduler.sending import UNKNOWN_GRACE_S
from disagg.telemetry.metrics import HANDOFF_BYTES, HANDOFFS, PUSH_RETRIES, SEQUENCES

PROMPT = tuple(range(10))


def source(**more: object) -> Solo:
    solo = Solo(Role.PREFILL, **more)  # type: ignore[arg-type]
    solo.meet(Role.DECODE)
    return solo


def spans(actions: list[Action]) -> list[Span]:
    return [push.span for push in of(PushSpan, actions)]


def acknowledge(solo: Solo, *numbers: int, failure: str | None = None, sequence: int = 0) -> list[Action]:
    actions: list[Action] = []
    for number in numbers:
        actions += solo.handle(events.WriteFinished(handoff(sequence), number, failure))
    return actions


def refusal(solo: Solo, kind: FailureKind, number: int = 0) -> AnswerReservation:
    return AnswerReservation(handoff(number), solo.fence(), Failure(kind, "no"), retry_after_s=0.05)


# --- asking ------------------------------------------------------------------------------------------------------


def test_nothing_is_computed_before_the_peer_has_granted_room() -> None:
    solo = source()
    (request,) = to_peer(RequestReservation, solo.start(0, Task.PREFILL, PROMPT))
    assert (request.num_tokens, request.fence) == (10, solo.fence())
    assert solo.plan is None
    (step,) = of(RunStep, solo.hear(solo.answer(0)))
    assert step.plan.report_every == 1
    assert step.plan.rows[0].token_ids == PROMPT


def test_a_refused_source_lets_go_of_its_blocks_and_asks_again_later_and_ever_later() -> None:
    solo = source(lease_s=900.0)
    solo.start(0, Task.PREFILL, PROMPT)
    solo.wait(0)  # the first renewal of its lease, which is not due again in this test
    waits = []
    for _ in range(7):
        assert solo.num_used == 3
        assert to_peer(RequestReservation, solo.hear(refusal(solo, FailureKind.OVERLOADED))) == []
        assert solo.num_used == 0
        waits.append(solo.scheduler.next_wake_s() - solo.now_s)
        assert to_peer(RequestReservation, solo.wait(waits[-1] * 0.9)) == []
        assert len(to_peer(RequestReservation, solo.wait(waits[-1] * 0.11))) == 1
    assert waits == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 0.8, 0.8])


def test_while_one_waits_to_ask_again_the_next_one_goes() -> None:
    solo = source()
    solo.start(0, Task.PREFILL, PROMPT)
    solo.hear(refusal(solo, FailureKind.OVERLOADED))
    (request,) = to_peer(RequestReservation, solo.start(1, Task.PREFILL, PROMPT))
    assert request.handoff_id == handoff(1)
    assert of(RunStep, solo.hear(solo.answer(1)))


def test_what_the_peer_can_never_hold_fails_at_once() -> None:
    solo = source()
    solo.start(0, Task.PREFILL, PROMPT)
    solo.hear(refusal(solo, FailureKind.INVALID_REQUEST))
    assert [report.failure.kind for report in solo.failures] == [FailureKind.INVALID_REQUEST]
    assert solo.scheduler.is_idle


def test_a_peer_that_does_not_know_the_sequence_yet_is_given_a_moment() -> None:
    solo = source()
    solo.start(0, Task.PREFILL, PROMPT)
    began_s = solo.now_s
    while not solo.failures and solo.now_s < began_s + 10:
        solo.hear(refusal(solo, FailureKind.CANCELLED))
        if not solo.failures:
            solo.wait(solo.scheduler.next_wake_s() - solo.now_s)
    assert UNKNOWN_GRACE_S < solo.now_s - began_s < UNKNOWN_GRACE_S + 1.0
    assert solo.scheduler.is_idle


def test_no_more_prompts_hold_reservations_than_a_few_steps_can_compute() -> None:
    solo = source(budget=StepBudget(chunk_tokens=8, mixed_chunk_tokens=8, max_running=16), reserve_ahead=2)
    asked = [len(to_peer(RequestReservation, solo.start(n, Task.PREFILL, PROMPT))) for n in range(4)]
    assert asked == [1, 1, 0, 0]
    solo.hear(solo.answer(0))
    actions = solo.finish_step()  # 8 of 10 tokens: 2 + 10 of 16 are left
    assert [request.handoff_id for request in to_peer(RequestReservation, actions)] == [handoff(2)]


def test_no_more_sequences_hold_blocks_than_the_budget_allows() -> None:
    solo = source(budget=StepBudget(chunk_tokens=64, mixed_chunk_tokens=64, max_running=2))
    for number in range(5):
        solo.start(number, Task.PREFILL, (number, 1, 2))
    for number in range(5):
        solo.hear(solo.answer(number))
    assert solo.state.num_held_blocks <= 2


# --- pushing -----------------------------------------------------------------------------------------------------


def test_each_layer_is_pushed_as_soon_as_it_is_computed() -> None:
    solo = source()
    solo.start(0, Task.PREFILL, PROMPT)
    solo.hear(solo.answer(0))
    assert [spans(solo.layers(layer)) for layer in (1, 2, 3)] == [
        [Span(0, 10, 0, 1)],
        [Span(0, 10, 1, 2)],
        [Span(0, 10, 2, 3)],
    ]
    assert spans(solo.finish_step()) == []


@pytest.mark.parametrize(
    ("min_bytes", "pushed"),
    [
        (10 * LAYER_TOKEN_BYTES, [[Span(0, 10, 0, 1)], [Span(0, 10, 1, 2)], [Span(0, 10, 2, 3)]]),
        (10 * LAYER_TOKEN_BYTES + 1, [[], [Span(0, 10, 0, 2)], [Span(0, 10, 2, 3)]]),
        (10**9, [[], [], [Span(0, 10, 0, 3)]]),
    ],
)
def test_small_layers_wait_for_the_next_but_never_past_the_last(min_bytes: int, pushed: list[list[Span]]) -> None:
    solo = source(min_push_bytes=min_bytes)
    solo.start(0, Task.PREFILL, PROMPT)
    solo.hear(solo.answer(0))
    assert [spans(solo.layers(layer)) for layer in (1, 2, 3)] == pushed
    assert spans(solo.finish_step()) == []


def test_an_engine_that_reports_no_layers_loses_nothing() -> None:
    solo = source()
    solo.start(0, Task.PREFILL, PROMPT)
    solo.hear(solo.answer(0))
    assert spans(solo.finish_step()) == [Span(0, 10, 0, 3)]


@pytest.mark.parametrize("first_missing", [0, 4, 8])
def test_only_the_missing_tokens_travel_chunk_by_chunk(first_missing: int) -> None:
    solo = source(budget=StepBudget(chunk_tokens=6, mixed_chunk_tokens=6, max_running=8), min_push_bytes=10**9)
    solo.start(0, Task.PREFILL, PROMPT)
    solo.hear(solo.answer(0, first_missing=first_missing))
    pushed = spans(solo.layers(3)) + spans(solo.finish_step()) + spans(solo.layers(3))
    assert pushed == [
        Span(max(start, first_missing), stop, 0, 3) for start, stop in ((0, 6), (6, 10)) if stop > first_missing
    ]


def test_a_prefix_that_is_cached_here_is_pushed_with_the_grant() -> None:
    solo = source(max_push_bytes=2 * 4 * LAYER_TOKEN_BYTES)
    solo.start(0, Task.PREFILL, PROMPT)
    solo.hear(solo.answer(0))
    solo.finish_step()
    acknowledge(solo, 0)
    solo.hear(TakeHandoff(handoff(0), solo.fence()))
    assert solo.scheduler.is_idle
    solo.start(1, Task.PREFILL, PROMPT)
    actions = solo.hear(solo.answer(1, first_missing=4))
    assert spans(actions) == [Span(4, 8, 0, 2), Span(4, 8, 2, 3)]  # cut to max_push_bytes
    assert solo.plan is not None
    assert (solo.plan.rows[0].position, solo.plan.rows[0].token_ids) == (8, (8, 9))


def test_pushes_name_both_block_tables_and_count_up() -> None:
    solo = source()
    solo.start(0, Task.PREFILL, PROMPT)
    answer = solo.answer(0)
    solo.hear(answer)
    pushes = of(PushSpan, [*solo.layers(1), *solo.finish_step()])
    assert [push.number for push in pushes] == [0, 1]
    assert {(push.peer, push.grant_key) for push in pushes} == {(PEER, answer.grant_key)}
    assert {(push.source_blocks, push.destination_blocks) for push in pushes} == {((0, 1, 2), answer.blocks)}
    assert {push.destination_num_blocks for push in pushes} == {answer.num_blocks}


def test_sync_mode_sends_nothing_before_the_prompt_is_computed() -> None:
    solo = source(
        mode=HandoffMode.SYNC,
        budget=StepBudget(chunk_tokens=6, mixed_chunk_tokens=6, max_running=8),
        max_push_bytes=10 * LAYER_TOKEN_BYTES,
    )
    solo.start(0, Task.PREFILL, PROMPT)
    early = solo.hear(solo.answer(0, first_missing=4))
    early += [*solo.layers(1), *solo.layers(3), *solo.finish_step(), *solo.layers(3)]
    assert spans(early) == []
    assert spans(solo.finish_step()) == [Span(4, 10, layer, layer + 1) for layer in range(3)]


def test_sync_mode_keeps_a_cached_prefix_back_too() -> None:
    solo = source(mode=HandoffMode.SYNC)
    solo.start(0, Task.PREFILL, PROMPT)
    solo.hear(solo.answer(0))
    solo.finish_step()
    acknowledge(solo, 0)
    solo.hear(TakeHandoff(handoff(0), solo.fence()))
    solo.start(1, Task.PREFILL, PROMPT)
    assert spans(solo.hear(solo.answer(1))) == []
    assert solo.plan is not None
    assert solo.plan.rows[0].position == 8
    assert spans(solo.finish_step()) == [Span(0, 10, 0, 3)]


def test_the_first_token_goes_to_router_and_peer_and_the_report_says_what_was_hidden() -> None:
    solo = source()
    solo.start(0, Task.PREFILL, PROMPT)
    solo.hear(solo.answer(0))
    solo.layers(1)
    acknowledge(solo, 0)
    actions = solo.finish_step(42)
    (told,), (finish,) = emitted(actions), to_peer(FinishPrefill, actions)
    assert finish.first_token is not None
    assert (finish.first_token.token_id, finish.first_token.position) == (42, 0)
    assert solo.num_used == 3
    acknowledge(solo, 1)
    assert solo.num_used == 3  # verified, and still kept until the peer has taken it
    solo.hear(TakeHandoff(handoff(0), solo.fence()))
    assert (solo.num_used, solo.scheduler.is_idle) == (0, True)
    layer, counters = 10 * LAYER_TOKEN_BYTES, solo.scheduler.counters
    (report,) = told.prompts
    assert (report.num_computed_tokens, report.handoff_bytes, report.hidden_bytes) == (10, 3 * layer, layer)
    counted = [counters.get(HANDOFF_BYTES, label) for label in ("hidden", "visible")]
    assert (counted, counters.get(SEQUENCES, "finished")) == ([layer, 2 * layer], 1)


def test_taken_can_overtake_the_last_acknowledgement() -> None:
    solo = source()
    solo.start(0, Task.PREFILL, PROMPT)
    solo.hear(solo.answer(0))
    solo.finish_step()
    solo.hear(TakeHandoff(handoff(0), solo.fence()))
    assert solo.num_used == 3  # the transport may still read them
    # The connection broke after the last byte had landed: the peer's word counts.
    assert of(PushSpan, acknowledge(solo, 0, failure="connection lost")) == []
    assert solo.scheduler.is_idle
    assert solo.scheduler.counters.get(HANDOFFS, "sent") == 1


# --- failures ----------------------------------------------------------------------------------------------------


def test_a_failed_write_is_sent_again_once_as_it_was() -> None:
    solo = source()
    solo.start(0, Task.PREFILL, PROMPT)
    solo.hear(solo.answer(0))
    (push,) = of(PushSpan, solo.layers(1))
    assert of(PushSpan, acknowledge(solo, 0, failure="checksum")) == [push]
    assert solo.scheduler.counters.get(PUSH_RETRIES) == 1
    acknowledge(solo, 0)
    assert not solo.failures
    assert acknowledge(solo, 0, failure="checksum") == []  # a repeat of something acknowledged
    assert solo.ignored("WriteFinished") == 1


def test_a_write_that_fails_twice_ends_the_hand_off_with_its_reason() -> None:
    solo = source()
    solo.start(0, Task.PREFILL, PROMPT)
    solo.hear(solo.answer(0))
    solo.finish_step()
    acknowledge(solo, 0, failure="first")
    actions = acknowledge(solo, 0, failure="checksum mismatch")
    (report,) = solo.failures
    assert (report.failure.kind, report.failure.message) == (FailureKind.TRANSFER_FAILED, "checksum mismatch")
    (cancel,) = to_peer(CancelHandoff, actions)
    assert cancel.fence == solo.fence()
    # The transport has not said yet that it reads our blocks no more.
    assert (len(of(StopPushes, actions)), solo.num_used) == (1, 3)
    solo.handle(events.WritesStopped(handoff(0)))
    assert (solo.num_used, solo.scheduler.is_idle) == (0, True)


def test_a_lost_peer_fails_its_hand_offs_and_no_others() -> None:
    solo = source()
    for number in range(2):
        solo.start(number, Task.PREFILL, PROMPT)
        solo.hear(solo.answer(number))
    actions = solo.handle(events.PeerLost(PEER, PEER_INCARNATION, "its connection ended"))
    assert [report.failure.kind for report in solo.failures] == [FailureKind.WORKER_LOST] * 2
    assert "its connection ended" in solo.failures[0].failure.message
    assert of(StopPushes, actions) == []
    solo.finish_step()
    assert solo.scheduler.is_idle
    solo.start(2, Task.PREFILL, PROMPT)
    assert solo.failures[-1].failure.kind is FailureKind.WORKER_LOST


def test_the_speed_of_a_link_is_learned_from_its_pushes_and_forgotten_with_the_peer() -> None:
    solo = Solo(Role.PREFILL)
    solo.meet(Role.DECODE)
    assert not solo.state.links
    solo.start(0, Task.PREFILL, tuple(range(10)))
    solo.hear(solo.answer(0))
    pushes = of(PushSpan, solo.layers(1))
    assert len(pushes) == 1
    solo.wait(0.5)
    solo.handle(events.WriteFinished(handoff(0), pushes[0].number, None))
    assert solo.state.links == (LinkState(PEER, 10 * LAYER_TOKEN_BYTES / 0.5),)
    solo.handle(events.PeerLost(PEER, PEER_INCARNATION, "gone"))
    assert not solo.state.links

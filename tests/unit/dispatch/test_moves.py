"""A worker fails or is lost: the choice goes on elsewhere from where it stopped, or is given up with the reason."""

import pytest
from tests.unit.dispatch.rigs import Desk, card, decisions, error_in, events_of, sent, tokens_of

from disagg.core.errors import Failure, FailureKind, InvalidRequest, Unavailable
from disagg.core.ids import RequestId, SequenceId
from disagg.core.request import FinishReason
from disagg.core.roles import Role, Task
from disagg.dispatch.actions import DispatchAction
from disagg.dispatch.events import ChoiceStopped, ClientGone
from disagg.dispatch.stream import TokensDelivered
from disagg.policy.recovery import RecoveryLimits
from disagg.protocol.messages import AbortSequence, AnnouncePeers, ReportFailure, StartSequence
from disagg.telemetry.metrics import MESSAGES_IGNORED, MOVES, PLACEMENTS, REQUESTS

LIMITS = RecoveryLimits(max_attempts=3, max_unplaced_s=30.0)


def site(num_prefill: int = 1, num_decode: int = 1, *, local_prefill_tokens: int = 0) -> Desk:
    """Prefill workers p0.. and decode workers d0.., all of which have paired."""
    desk = Desk(local_prefill_tokens=local_prefill_tokens, recovery=LIMITS)
    sources = [f"p{number}" for number in range(num_prefill)]
    targets = [f"d{number}" for number in range(num_decode)]
    for name in sources:
        desk.register(card(name, Role.PREFILL))
    for name in targets:
        desk.register(card(name, Role.DECODE))
        for source in sources:
            desk.pair(source, name)
    return desk


def failed(
    request_id: RequestId, kind: FailureKind, *, attempt: int = 1, kept: int = 0, choice: int = 0
) -> ReportFailure:
    return ReportFailure(SequenceId(request_id, choice), attempt, Failure(kind, "the step failed"), kept)


def starts(actions: list[DispatchAction]) -> list[tuple[str, Task, int, tuple[int, ...]]]:
    return [(name, start.task, start.attempt, start.emitted_ids) for name, start in sent(StartSequence, actions)]


# --- from where it stopped ---------------------------------------------------------------------------------------


def test_an_answer_goes_on_at_another_decode_worker_after_its_last_token() -> None:
    desk = site(num_decode=2)
    request_id, _ = desk.submit()
    desk.emit("p0", request_id, 0, token_id=50)
    desk.emit("d0", request_id, 1, token_id=51)
    other, _ = desk.submit()  # d1's
    actions = desk.lose("d0")
    assert events_of(actions) == []  # the client sees a pause
    assert starts(actions) == [("d1", Task.DECODE, 2, (50, 51)), ("p0", Task.PREFILL, 2, (50, 51))]
    aborts = sent(AbortSequence, actions)
    assert ("p0", SequenceId(request_id, 0), 1) in [(name, each.sequence_id, each.attempt) for name, each in aborts]
    assert other not in {each.sequence_id.request_id for _, each in aborts}
    (text,) = decisions(actions)
    said = (str(SequenceId(request_id, 0)), "after 2 tokens", "worker d0", "its connection ended")
    assert [part for part in said if part not in text] == []
    assert desk.dispatcher.counters.get(MOVES, "worker_lost") == 1
    assert desk.claims() == {"p0": (0, 10 + 12), "d1": (4 + 4, 0)}
    assert tokens_of(desk.emit("d1", request_id, 2)) == [2]


def test_tokens_of_the_worker_that_was_left_are_ignored() -> None:
    desk = site(num_decode=2)
    request_id, _ = desk.submit()
    desk.emit("p0", request_id, 0)
    desk.lose("d0")
    desk.register(card("d0", Role.DECODE, incarnation=2))
    desk.pair("p0", "d0", target_incarnation=2)
    late = desk.dispatcher.counters.get(MESSAGES_IGNORED, "EmitTokens")
    assert desk.emit("d0", request_id, 1) == []  # its connection was another
    assert desk.dispatcher.counters.get(MESSAGES_IGNORED, "EmitTokens") == late + 1
    desk.hear("d1", failed(request_id, FailureKind.INTERNAL, attempt=2))  # to d0, away from d1
    assert desk.choice(request_id).workers == ("d0", "p0")
    assert desk.emit("d1", request_id, 1, token_id=66) == []
    assert desk.dispatcher.counters.get(MESSAGES_IGNORED, "token") == 1
    assert desk.choice(request_id).emitted_ids == (9,)


def test_a_failure_told_by_both_ends_is_one_move() -> None:
    desk = site()
    request_id, _ = desk.submit()
    assert len(starts(desk.hear("d0", failed(request_id, FailureKind.LEASE_EXPIRED)))) == 2
    assert desk.hear("p0", failed(request_id, FailureKind.LEASE_EXPIRED)) == []
    assert desk.choice(request_id).attempt == 2
    assert desk.dispatcher.counters.get(MESSAGES_IGNORED, "ReportFailure") == 1


def test_a_failure_told_by_a_stranger_is_ignored() -> None:
    desk = site(num_decode=2)
    request_id, _ = desk.submit()
    assert desk.hear("d1", failed(request_id, FailureKind.INTERNAL)) == []
    assert desk.choice(request_id).attempt == 1
    assert desk.dispatcher.counters.get(MESSAGES_IGNORED, "ReportFailure") == 1


def test_one_choice_moves_and_the_others_stay() -> None:
    desk = site(num_decode=2)
    request_id, _ = desk.submit(num_choices=2)
    desk.emit("d0", request_id, 0)
    actions = desk.hear("d0", failed(request_id, FailureKind.INTERNAL, choice=0))
    assert {start.spec.sequence_id.choice for _, start in sent(StartSequence, actions)} == {0}
    assert [desk.choice(request_id, index).attempt for index in range(2)] == [2, 1]


@pytest.mark.parametrize(("read", "known"), [((3,), 3), ((3, 8), 3), ((), 0)])
def test_cached_tokens_are_those_of_the_first_attempt(read: tuple[int, ...], known: int) -> None:
    """What a retry finds cached is this request's own."""
    desk = site()
    request_id, _ = desk.submit()
    for attempt, num_cached in enumerate(read, 1):
        desk.read("p0", request_id, num_cached=num_cached, attempt=attempt)
        desk.hear("d0", failed(request_id, FailureKind.LEASE_EXPIRED, attempt=attempt))
    assert desk.choice(request_id).num_cached_tokens == known


def test_a_late_prompt_report_of_an_earlier_attempt_frees_no_claim() -> None:
    desk = site()
    request_id, _ = desk.submit()
    desk.hear("d0", failed(request_id, FailureKind.LEASE_EXPIRED))
    desk.read("p0", request_id, attempt=1)
    assert desk.claims() == {"p0": (0, 10), "d0": (4, 0)}
    desk.read("p0", request_id, attempt=2)
    assert desk.claims() == {"p0": (0, 0), "d0": (4, 0)}


# --- where to ----------------------------------------------------------------------------------------------------


def test_a_lost_prefill_worker_is_the_decode_workers_to_judge() -> None:
    desk = site(num_prefill=2)
    request_id, _ = desk.submit()
    actions = desk.lose("p0")
    assert (events_of(actions), starts(actions)) == ([], [])
    assert desk.choice(request_id).attempt == 1


def test_a_decode_worker_that_never_heard_of_its_lost_reader_is_not_waited_for() -> None:
    """The prefill worker was never told: its link to the router was silent, the one to the decode worker works."""
    desk = site(num_prefill=2)
    request_id, _ = desk.submit()
    begun, _ = desk.submit()
    answering, _ = desk.submit()
    desk.lose("p0")
    desk.emit("d0", answering, 0)
    wake_s = desk.dispatcher.next_wake_s()
    assert wake_s == desk.now_s + RecoveryLimits().max_judging_s
    assert starts(desk.wait(wake_s - desk.now_s - 0.01)) == []
    actions = desk.wait(0.01)
    assert starts(actions) == [("d0", Task.DECODE, 2, ()), ("p1", Task.PREFILL, 2, ())]
    assert [desk.choice(each).attempt for each in (request_id, begun, answering)] == [2, 1, 1]
    assert starts(desk.wait(10.0)) == []


@pytest.mark.parametrize(
    ("kept", "expected"),
    [
        (8, [("d0", Task.WHOLE, 2, ())]),
        (6, [("d0", Task.WHOLE, 2, ())]),
        (5, [("d0", Task.DECODE, 2, ()), ("p1", Task.PREFILL, 2, ())]),
        (0, [("d0", Task.DECODE, 2, ()), ("p1", Task.PREFILL, 2, ())]),
    ],
)
def test_what_arrived_before_the_loss_is_built_upon(kept: int, expected: list[object]) -> None:
    """10 tokens, of which a decode worker reads up to 4 itself. d1 is idle, but d0 has the KV."""
    desk = site(num_prefill=2, num_decode=2, local_prefill_tokens=4)
    first, _ = desk.submit()
    desk.submit()
    desk.submit()
    assert desk.choice(first).workers == ("d0", "p0")
    assert desk.claims()["d1"] < desk.claims()["d0"]
    desk.lose("p0")
    assert starts(desk.hear("d0", failed(first, FailureKind.WORKER_LOST, kept=kept))) == expected


def test_kept_tokens_count_only_where_they_are() -> None:
    desk = site(num_decode=2, local_prefill_tokens=4)
    request_id, _ = desk.submit()
    actions = desk.hear("d0", failed(request_id, FailureKind.INTERNAL, kept=8))  # away from d0
    assert starts(actions) == [("d1", Task.DECODE, 2, ()), ("p0", Task.PREFILL, 2, ())]


def test_a_worker_that_came_back_as_another_process_keeps_nothing() -> None:
    desk = site(local_prefill_tokens=4)
    request_id, _ = desk.submit()
    desk.hear("d0", failed(request_id, FailureKind.CANCELLED, kept=8))
    assert desk.choice(request_id).workers == ("d0",)
    desk.lose("d0")
    desk.register(card("d1", Role.DECODE, model="other"))  # no writer for it
    assert not desk.choice(request_id).is_placed
    desk.register(card("d0", Role.DECODE, incarnation=2))
    assert desk.dispatcher.counters.get(PLACEMENTS, "no_prefill_worker") == 1  # not a short prompt: 10 tokens to read


def test_without_any_prefill_worker_the_decode_worker_reads_it_all() -> None:
    desk = site()
    request_id, _ = desk.submit()
    desk.lose("p0")
    actions = desk.hear("d0", failed(request_id, FailureKind.WORKER_LOST))
    assert starts(actions) == [("d0", Task.WHOLE, 2, ())]
    assert desk.dispatcher.counters.get(PLACEMENTS, "no_prefill_worker") == 1


def test_the_prefill_worker_that_has_read_it_reads_it_again_even_when_it_is_busier() -> None:
    desk = site(num_prefill=2, num_decode=2)
    first, _ = desk.submit(num_prompt=10)
    second, _ = desk.submit(num_prompt=30)
    desk.submit(num_prompt=40)
    desk.read("p1", second)
    assert (desk.claims()["p0"], desk.claims()["p1"]) == ((0, 50), (0, 0))
    decode = desk.choice(first).workers[0]
    actions = desk.hear(decode, failed(first, FailureKind.LEASE_EXPIRED))
    assert [name for name, task, _, _ in starts(actions) if task is Task.PREFILL] == ["p0"]


@pytest.mark.parametrize(
    ("kind", "goes_to"),
    [
        (FailureKind.INTERNAL, "d1"),
        (FailureKind.TRANSFER_FAILED, "d1"),
        (FailureKind.WRONG_ROLE, "d1"),
        (FailureKind.LEASE_EXPIRED, "d0"),
        (FailureKind.CANCELLED, "d0"),
        (FailureKind.OVERLOADED, "d0"),
    ],
)
def test_who_failed_by_its_own_fault_is_not_asked_again(kind: FailureKind, goes_to: str) -> None:
    desk = site(num_decode=2)
    request_id, _ = desk.submit()
    desk.submit(num_prompt=100)  # d1 is busier
    desk.hear("d0", failed(request_id, kind))
    assert desk.choice(request_id).placement is not None
    assert desk.choice(request_id).workers[0] == goes_to
    assert desk.dispatcher.counters.get(MOVES, kind.value) == 1


def test_a_failing_prefill_worker_is_not_asked_again_either() -> None:
    desk = site(num_prefill=2)
    request_id, _ = desk.submit()
    desk.submit(num_prompt=50)  # p1 is busier
    desk.hear("p0", failed(request_id, FailureKind.INTERNAL))
    assert desk.choice(request_id).workers == ("d0", "p1")
    desk.hear("p1", failed(request_id, FailureKind.INTERNAL, attempt=2))
    assert desk.choice(request_id).workers == ("d0",)


def test_the_only_worker_is_asked_again_although_it_has_failed() -> None:
    desk = site()
    request_id, _ = desk.submit()
    desk.hear("d0", failed(request_id, FailureKind.INTERNAL))
    assert (desk.choice(request_id).attempt, desk.choice(request_id).workers) == (2, ("d0", "p0"))


def test_a_pair_that_has_lost_each_other_is_not_used_until_it_has_met_again() -> None:
    desk = site(num_prefill=2)
    request_id, _ = desk.submit()
    actions = desk.hear("d0", failed(request_id, FailureKind.WORKER_LOST))
    assert desk.choice(request_id).workers == ("d0", "p1")
    (asked,) = [message for name, message in sent(AnnouncePeers, actions) if name == "p0"]
    assert [peer.worker_id for peer in asked.peers] == ["d0"]  # so that it says how it stands
    for _ in range(3):
        other, _ = desk.submit()
        assert desk.choice(other).workers == ("d0", "p1")
    desk.pair("p0", "d0")
    other, _ = desk.submit()
    assert desk.choice(other).workers == ("d0", "p0")


# --- nobody can take it ------------------------------------------------------------------------------------------


def test_a_choice_without_a_worker_waits_for_one() -> None:
    desk = site()
    request_id, _ = desk.submit()
    desk.emit("p0", request_id, 0, token_id=50)
    desk.wait(1000.0)  # the answer is long; time counts from the loss only
    actions = desk.lose("d0")
    assert (starts(actions), events_of(actions)) == ([], [])
    assert desk.claims() == {"p0": (0, 0)}
    assert desk.dispatcher.next_wake_s() == desk.now_s + 30.0
    assert desk.wait(29.9) == []
    actions = desk.register(card("d1", Role.DECODE))
    assert starts(actions) == [("d1", Task.WHOLE, 2, (50,))]
    assert tokens_of(desk.emit("d1", request_id, 1)) == [1]


def test_what_waits_too_long_is_given_up_with_both_reasons() -> None:
    desk = site()
    request_id, _ = desk.submit()
    desk.lose("d0")
    assert desk.wait(29.9) == []
    actions = desk.wait(0.1)
    error = error_in(actions)
    assert isinstance(error, Unavailable)
    assert error.retry_after_s > 0
    said = ("worker d0", "its connection ended", "for 30 s", "no decode worker has registered")
    assert [part for part in said if part not in str(error)] == []
    assert (desk.dispatcher.num_open, desk.claims()) == (0, {"p0": (0, 0)})
    assert desk.dispatcher.counters.get(REQUESTS, "failed") == 1
    assert desk.dispatcher.open_request(request_id) is None
    assert desk.dispatcher.next_wake_s() == float("inf")


def test_each_wait_begins_anew() -> None:
    desk = site()
    desk.submit()
    for incarnation in (2, 3):
        desk.lose("d0", incarnation=incarnation - 1)
        assert desk.wait(29.0) == []
        assert len(starts(desk.register(card("d0", Role.DECODE, incarnation=incarnation)))) == 1


def test_no_more_attempts_than_the_limit() -> None:
    desk = site()
    request_id, _ = desk.submit(num_choices=2)
    desk.emit("d0", request_id, 0)
    for attempt in (1, 2):
        actions = desk.hear("d0", failed(request_id, FailureKind.INTERNAL, attempt=attempt))
        assert len(starts(actions)) == 2
    actions = desk.hear("d0", failed(request_id, FailureKind.INTERNAL, attempt=3))
    error = error_in(actions)
    assert isinstance(error, Unavailable)
    assert str(error) == "attempt 3 of 3 failed: the step failed"
    assert error.retry_after_s > 0
    aborted = {(name, each.sequence_id.choice, each.attempt) for name, each in sent(AbortSequence, actions)}
    assert aborted == {("d0", 0, 3), ("p0", 0, 3), ("d0", 1, 1)}
    assert (desk.dispatcher.num_open, desk.claims()) == (0, {"p0": (0, 0), "d0": (0, 0)})
    assert desk.dispatcher.counters.get(MOVES, "internal") == 2


@pytest.mark.parametrize("name", ["p0", "d0"])
def test_what_can_be_served_nowhere_is_not_moved(name: str) -> None:
    desk = site(num_prefill=2, num_decode=2)
    request_id, _ = desk.submit()
    actions = desk.hear(name, failed(request_id, FailureKind.INVALID_REQUEST))
    error = error_in(actions)
    assert isinstance(error, InvalidRequest)
    assert str(error) == "the step failed"
    assert starts(actions) == []
    assert desk.dispatcher.num_open == 0


def test_an_answer_may_end_while_no_worker_has_it() -> None:
    """By a token that was on its way when the other worker was lost."""
    desk = site()
    request_id, _ = desk.submit(max_tokens=1)
    desk.lose("d0")
    (event,) = events_of(desk.emit("p0", request_id, 0))
    assert isinstance(event, TokensDelivered)
    assert event.finish_reason is FinishReason.LENGTH
    assert desk.dispatcher.num_open == 0
    assert starts(desk.register(card("d1", Role.DECODE))) == []


@pytest.mark.parametrize("how", ["client", "stop"])
def test_nobody_is_told_to_start_what_has_ended_meanwhile(how: str) -> None:
    desk = site()
    request_id, _ = desk.submit()
    desk.lose("d0")
    desk.handle(ClientGone(request_id) if how == "client" else ChoiceStopped(request_id, 0))
    assert desk.dispatcher.num_open == 0
    assert starts(desk.register(card("d1", Role.DECODE))) == []


def test_a_placed_choice_without_any_token_is_given_up_in_the_end() -> None:
    """Nothing older is before it at its reader, so its prompt may be under way: the longer of the two limits counts."""
    desk = site()
    request_id, _ = desk.submit()
    other, _ = desk.submit()
    desk.emit("p0", other, 0)
    timeout_s = desk.dispatcher.config.recovery.max_first_token_s
    assert desk.dispatcher.next_wake_s() == desk.now_s + timeout_s
    assert desk.wait(timeout_s - 0.1) == []
    error = error_in(desk.wait(0.1))
    assert isinstance(error, Unavailable)
    assert f"no token came within {timeout_s:g} s" in str(error)
    assert desk.dispatcher.open_request(request_id) is None
    assert desk.dispatcher.open_request(other) is not None
    assert desk.dispatcher.next_wake_s() == float("inf")

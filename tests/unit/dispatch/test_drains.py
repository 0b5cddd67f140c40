"""A worker is to end: it gets no new work, gives long answers away and finishes the short ones."""

import pytest
from tests.unit.dispatch.rigs import Desk, card, decisions, error_in, events_of, sent, tokens_of

from disagg.core.errors import Failure, FailureKind, Unavailable
from disagg.core.ids import SequenceId, WorkerId
from disagg.core.roles import Role, Task
from disagg.dispatch.actions import DispatchAction
from disagg.dispatch.events import DrainAsked
from disagg.policy.recovery import RecoveryLimits
from disagg.protocol.messages import AbortSequence, DrainWorker, ReportFailure, ReportState, StartSequence, WorkerState
from disagg.telemetry.metrics import MOVES

LIMITS = RecoveryLimits(max_attempts=2, max_unplaced_s=30.0, finish_in_place_tokens=4)


def site(num_prefill: int = 1, num_decode: int = 2) -> Desk:
    desk = Desk(recovery=LIMITS)
    for number in range(num_prefill):
        desk.register(card(f"p{number}", Role.PREFILL))
    for number in range(num_decode):
        desk.register(card(f"d{number}", Role.DECODE))
        for source in range(num_prefill):
            desk.pair(f"p{source}", f"d{number}")
    return desk


def drain(desk: Desk, name: str) -> list[DispatchAction]:
    return desk.handle(DrainAsked(WorkerId(name)))


def test_the_worker_is_told_once() -> None:
    desk = site()
    actions = drain(desk, "d0")
    assert [name for name, _ in sent(DrainWorker, actions)] == ["d0"]
    assert decisions(actions) == ["worker d0 drains"]
    assert drain(desk, "d0") == []
    assert drain(desk, "nobody") == []


@pytest.mark.parametrize(("max_tokens", "num_written", "is_moved"), [(4, 0, False), (5, 0, True), (9, 5, False)])
def test_long_answers_move_and_short_ones_end_where_they_are(max_tokens: int, num_written: int, is_moved: bool) -> None:
    desk = site()
    request_id, _ = desk.submit(max_tokens=max_tokens)
    for position in range(num_written):
        desk.emit("d0", request_id, position)
    actions = drain(desk, "d0")
    assert events_of(actions) == []
    started = [(name, each.task, each.attempt) for name, each in sent(StartSequence, actions)]
    assert started == ([("d1", Task.DECODE, 2), ("p0", Task.PREFILL, 2)] if is_moved else [])
    aborted = [(name, each.attempt) for name, each in sent(AbortSequence, actions)]
    assert aborted == ([("d0", 1), ("p0", 1)] if is_moved else [])
    assert desk.dispatcher.counters.get(MOVES, "drain") == int(is_moved)
    writer = "d1" if is_moved else "d0"
    assert tokens_of(desk.emit(writer, request_id, num_written)) == [num_written]


def test_a_move_at_a_drain_says_why() -> None:
    desk = site()
    request_id, _ = desk.submit(max_tokens=50)
    desk.emit("p0", request_id, 0)
    texts = decisions(drain(desk, "d0"))
    assert texts[1] == (
        f"moving {SequenceId(request_id, 0)} after 1 tokens: its worker drains and up to 49 tokens are left"
    )


def test_without_another_worker_everything_ends_where_it_is() -> None:
    desk = site(num_decode=1)
    request_id, _ = desk.submit(max_tokens=100)
    actions = drain(desk, "d0")
    assert (sent(AbortSequence, actions), sent(StartSequence, actions)) == ([], [])
    assert tokens_of(desk.emit("d0", request_id, 0)) == [0]


def test_a_draining_worker_gets_no_new_work() -> None:
    desk = site()
    drain(desk, "d0")
    for _ in range(4):
        request_id, _ = desk.submit()
        assert desk.choice(request_id).workers == ("d1", "p0")
    assert "d0" not in desk.claims()


def test_the_last_of_a_kind_that_drains_leaves_requests_waiting() -> None:
    desk = site(num_decode=1)
    drain(desk, "d0")
    assert (desk.is_ready, desk.missing) == (False, "a prefill worker is here, no decode worker has registered")
    request_id, actions = desk.submit()
    assert sent(StartSequence, actions) == []
    desk.lose("d0")
    desk.register(card("d0", Role.DECODE, incarnation=2))
    assert desk.choice(request_id).workers == ("d0",)


@pytest.mark.parametrize("is_draining", [False, True])
def test_a_worker_that_says_itself_that_it_drains_is_believed(is_draining: bool) -> None:
    desk = site()
    request_id, _ = desk.submit(max_tokens=50)
    actions = desk.hear("d0", ReportState(WorkerState(), is_draining))
    assert sent(DrainWorker, actions) == []  # it knows
    assert desk.choice(request_id).workers[0] == ("d1" if is_draining else "d0")
    assert desk.hear("d0", ReportState(WorkerState(), is_draining)) == []


def test_a_worker_that_registers_while_it_drains_gets_nothing() -> None:
    desk = site(num_decode=1)
    desk.register(card("d1", Role.DECODE), is_draining=True)
    desk.pair("p0", "d1")
    for _ in range(3):
        request_id, _ = desk.submit()
        assert desk.choice(request_id).workers == ("d0", "p0")
    assert drain(desk, "d1") == []


def test_a_prefill_worker_that_drains_finishes_its_prompts() -> None:
    desk = site(num_prefill=2)
    request_id, _ = desk.submit(max_tokens=100)
    actions = drain(desk, "p0")
    assert (sent(AbortSequence, actions), sent(StartSequence, actions)) == ([], [])
    assert desk.choice(request_id).workers == ("d0", "p0")
    for _ in range(3):
        other, _ = desk.submit()
        assert desk.choice(other).workers[1] == "p1"


def test_who_refuses_because_it_drains_is_not_asked_again() -> None:
    """The start and the worker's report of its drain crossed."""
    desk = site()
    request_id, _ = desk.submit(max_tokens=100)
    failure = Failure(FailureKind.WRONG_ROLE, "worker d0 is draining and takes no new work")
    actions = desk.hear("d0", ReportFailure(SequenceId(request_id, 0), 1, failure))
    assert [name for name, _ in sent(StartSequence, actions)] == ["d1", "p0"]


def test_moves_away_from_draining_workers_count_as_attempts() -> None:
    desk = site()
    request_id, _ = desk.submit(max_tokens=100)
    drain(desk, "d0")
    failure = Failure(FailureKind.INTERNAL, "no luck")
    error = error_in(desk.hear("d1", ReportFailure(SequenceId(request_id, 0), 2, failure)))
    assert isinstance(error, Unavailable)
    assert str(error) == "attempt 2 of 2 failed: no luck"

"""More than the workers can do: who waits too long is told so, who is turned away hears when to come back."""

import pytest
from tests.unit.dispatch.rigs import Desk, card, decisions, error_in, events_of, sent

from disagg.core.errors import Overloaded, Unavailable
from disagg.core.roles import Role
from disagg.dispatch.events import ClientGone
from disagg.dispatch.stream import RequestFailed
from disagg.policy.recovery import RecoveryLimits
from disagg.protocol.messages import AbortSequence, StartSequence
from disagg.telemetry.metrics import REJECTIONS

LIMITS = RecoveryLimits(max_queue_s=20.0, max_first_token_s=50.0)


def test_who_queues_too_long_is_given_up_and_its_workers_hear_of_it() -> None:
    desk = Desk(recovery=LIMITS).with_pair()
    first, _ = desk.submit()
    second, _ = desk.submit()
    assert desk.dispatcher.next_wake_s() == desk.now_s + 20.0
    assert desk.wait(19.9) == []
    actions = desk.wait(0.2)
    error = error_in(actions)
    assert isinstance(error, Unavailable)
    assert not isinstance(error, Overloaded)
    assert "no token came within 20 s" in str(error)
    assert "20 s behind others (--max-queue-s)" in str(error)
    assert error.retry_after_s >= 1.0
    assert [(name, abort.sequence_id.request_id) for name, abort in sent(AbortSequence, actions)] == [
        ("d0", second),
        ("p0", second),
    ]
    assert desk.dispatcher.open_request(second) is None
    assert desk.dispatcher.open_request(first) is not None
    assert desk.dispatcher.counters.get(REJECTIONS, "queued_too_long") == 1
    assert desk.claims() == {"d0": (4, 0), "p0": (0, 10)}
    assert decisions(actions) == []


def test_who_is_next_at_its_reader_may_be_under_way_and_gets_more_time() -> None:
    desk = Desk(recovery=LIMITS).with_pair()
    first, _ = desk.submit()
    second, _ = desk.submit()
    desk.now_s += 15.0
    desk.read("p0", first)
    assert desk.dispatcher.next_wake_s() == desk.now_s + 35.0
    assert desk.wait(34.9) == []
    failed = [event for event in events_of(desk.wait(0.2)) if isinstance(event, RequestFailed)]
    assert len(failed) == 2
    assert desk.dispatcher.num_open == 0
    assert desk.dispatcher.open_request(second) is None


def test_a_client_that_left_does_not_hold_up_the_next() -> None:
    desk = Desk(recovery=LIMITS).with_pair()
    first, _ = desk.submit()
    second, _ = desk.submit()
    desk.handle(ClientGone(first))
    assert desk.wait(30.0) == []
    assert desk.dispatcher.open_request(second) is not None


def test_one_whose_answer_has_begun_is_never_given_up_for_its_time() -> None:
    desk = Desk(recovery=LIMITS).with_pair()
    desk.submit()
    second, _ = desk.submit()
    desk.emit("p0", second, 0)
    desk.wait(40.0)
    assert desk.dispatcher.open_request(second) is not None


def test_another_reader_has_another_queue() -> None:
    desk = Desk(recovery=LIMITS)
    for name in ("m0", "m1"):
        desk.register(card(name, Role.MIXED))
    placed = [sent(StartSequence, desk.submit()[1])[0][0] for _ in range(2)]
    assert sorted(placed) == ["m0", "m1"]
    assert desk.wait(30.0) == []


def test_retry_after_follows_how_fast_requests_end() -> None:
    desk = Desk(max_open_requests=10).with_pair()
    opened = [desk.submit()[0] for _ in range(10)]
    for request_id in opened[:5]:  # one in 4 s
        desk.now_s += 4.0
        desk.handle(ClientGone(request_id))
        desk.submit()
    told = []
    for _ in range(4):
        with pytest.raises(Overloaded, match="10 requests are open, the limit is 10") as caught:
            desk.submit()
        told.append(caught.value.retry_after_s)
    assert told == [4.0, 8.0, 12.0, 16.0]
    desk.now_s += 100.0  # nothing has ended for the whole window
    with pytest.raises(Overloaded) as caught:
        desk.submit()
    assert caught.value.retry_after_s == 30.0

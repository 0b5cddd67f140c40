"""Which choices are looked at when time passes: few of many."""

from tests.unit.dispatch.rigs import Desk, card

from disagg.core.ids import RequestId
from disagg.core.roles import Role
from disagg.policy.recovery import RecoveryLimits

LIMITS = RecoveryLimits(max_queue_s=20.0, max_first_token_s=50.0, max_unplaced_s=40.0)


def due(desk: Desk, in_s: float = 0.0) -> list[RequestId]:
    choices = desk.dispatcher._requests.due(desk.now_s + in_s)
    return [choice.sequence_id.request_id for choice in choices]


def test_a_placed_request_is_looked_at_when_it_may_have_waited_too_long() -> None:
    desk = Desk(recovery=LIMITS).with_pair()
    first, _ = desk.submit()
    desk.wait(5.0)
    second, _ = desk.submit()
    assert due(desk, 14.9) == []
    assert due(desk, 15.1) == [first]
    assert due(desk, 20.1) == [first, second]


def test_one_that_is_answered_is_never_looked_at() -> None:
    desk = Desk(recovery=LIMITS).with_pair()
    first, _ = desk.submit(max_tokens=3)
    second, _ = desk.submit()
    desk.emit("p0", first, 0)
    assert due(desk, 1e9) == [second]
    desk.emit("d0", first, 1)
    desk.emit("d0", first, 2)
    assert desk.dispatcher.open_request(first) is None
    assert due(desk, 1e9) == [second]


def test_one_without_a_worker_is_always_looked_at() -> None:
    desk = Desk(recovery=LIMITS).with_pair()
    request_id, _ = desk.submit()
    desk.lose("d0")
    assert due(desk) == [request_id]
    desk.register(card("d1", Role.DECODE))
    desk.pair("p0", "d1")
    assert due(desk) == []
    assert due(desk, 20.0) == [request_id]


def test_one_whose_reader_is_lost_is_looked_at_until_its_writer_goes_on() -> None:
    desk = Desk(recovery=LIMITS).with_pair()
    first, _ = desk.submit()
    second, _ = desk.submit()
    desk.lose("p0")
    assert due(desk) == [first, second]
    desk.emit("d0", first, 0)
    assert due(desk) == [second]


def test_they_come_in_the_order_of_requests_whatever_they_wait_for() -> None:
    desk = Desk(recovery=LIMITS)
    desk.register(card("m0", Role.MIXED))
    ids = [desk.submit()[0] for _ in range(4)]
    desk.emit("m0", ids[1], 0)
    desk.lose("m0")
    assert due(desk) == ids

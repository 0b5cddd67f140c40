"""Writes on their way to one peer: turns, caps, permits, cancellation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.transport.rigs import write_of

from disagg.core.errors import ProtocolViolation
from disagg.kvcache.memory import Segment
from disagg.transport.api import Write
from disagg.transport.write_queue import WriteQueue


def queued(number: int, num_bytes: int = 10, key: bytes = b"a") -> Write:
    return write_of(key, number, (Segment(0, num_bytes),), (Segment(0, num_bytes),))


def test_keys_take_turns() -> None:
    queue = WriteQueue(1000, asks=False)
    for key in (b"a", b"b", b"c"):
        for number in range(3 if key != b"c" else 1):
            queue.put(queued(number, key=key))
    order = []
    while (ticket := queue.try_move()) is not None:
        order.append((ticket.write.key, ticket.write.number))
        queue.check_invariants()
        queue.moved()
    assert order == [(b"a", 0), (b"b", 0), (b"c", 0), (b"a", 1), (b"b", 1), (b"a", 2), (b"b", 2)]


def test_what_is_not_answered_is_capped_but_a_large_write_goes_alone() -> None:
    queue = WriteQueue(100, asks=False)
    for number, size in enumerate((60, 40, 1, 500, 1)):
        queue.put(queued(number, size))
    tickets = []
    for _ in range(2):
        ticket = queue.try_move()
        assert ticket is not None
        tickets.append(ticket)
        queue.moved()
    assert queue.try_request() is None  # nobody asks here
    assert queue.try_move() is None
    assert queue.awaits_peer
    assert queue.answer(tickets[0].number) == tickets[0].write
    third = queue.try_move()
    assert third is not None
    assert third.write.number == 2
    queue.moved()
    assert queue.try_move() is None
    queue.answer(tickets[1].number)
    queue.answer(third.number)
    large = queue.try_move()
    assert large is not None
    assert large.write.number == 3
    queue.moved()
    assert queue.try_move() is None
    queue.check_invariants()
    assert [write.number for write in queue.drop_all()] == [3, 4]
    assert queue.is_empty


def test_what_was_moving_and_failed_here_leaves_nothing_where_nobody_asks() -> None:
    queue = WriteQueue(100, asks=False)
    queue.put(queued(0))
    assert queue.try_move() is not None
    queue.abandon()
    assert queue.is_empty
    queue.check_invariants()


def test_requests_run_ahead_under_the_cap_and_a_repeated_write_waits() -> None:
    queue = WriteQueue(100, 3, asks=True)
    for number, size in ((0, 60), (0, 60), (1, 30), (2, 500)):
        queue.put(queued(number, size))
    queue.put(queued(7, 20, key=b"b"))
    first = queue.try_request()
    assert first is not None
    second = queue.try_request()
    assert second is not None
    assert (second.write.key, second.write.number) == (b"b", 7)
    assert queue.try_request() is None  # 0 again: only after its answer
    queue.permit(first.number)
    assert queue.try_move() == first
    queue.check_invariants()
    queue.moved()
    assert queue.answer(first.number) == first.write
    again = queue.try_request()
    assert again is not None
    assert again.write.number == 0
    assert queue.try_request() is None  # 30 more would pass the cap
    queue.check_invariants()
    for ticket in (second.number, again.number):
        assert queue.answer(ticket) is not None
    third = queue.try_request()
    assert third is not None
    assert queue.try_request() is None
    queue.answer(third.number)
    alone = queue.try_request()
    assert alone is not None
    assert alone.num_bytes == 500
    queue.check_invariants()
    assert queue.drop_all() == (alone.write,)
    assert queue.is_empty


def test_what_is_cancelled_is_told_at_once_and_withdrawn_when_permitted() -> None:
    queue = WriteQueue(100, 8, asks=True)
    for number in range(5):
        queue.put(queued(number))
    tickets = [queue.try_request() for _ in range(4)]
    numbers = [ticket.number for ticket in tickets if ticket is not None]
    queue.permit(numbers[0])
    queue.permit(numbers[1])
    moving = queue.try_move()
    assert moving is not None
    assert sorted(write.number for write in queue.drop(b"a")) == [1, 2, 3, 4]
    queue.check_invariants()
    assert queue.next_withdrawn() == numbers[1]
    queue.permit(numbers[2])
    assert queue.next_withdrawn() == numbers[2]
    assert queue.answer(numbers[3]) is None  # it was refused anyway
    queue.abandon()
    assert queue.next_withdrawn() == numbers[0]
    assert queue.is_empty
    for strange in (numbers[0], 99):
        with pytest.raises(ProtocolViolation, match="waits for none"):
            queue.permit(strange)
        with pytest.raises(ProtocolViolation, match="waits for none"):
            queue.answer(strange)
    queue.check_invariants()


@given(st.booleans(), st.lists(st.integers(0, 9), max_size=60), st.data())
def test_any_order_of_events_keeps_the_books(asks: bool, steps: list[int], data: st.DataObject) -> None:
    """Every write is told of exactly once, however permits, answers, failures and cancellations come."""
    queue, told, num_put = WriteQueue(50, 4, asks=asks), list[Write](), 0
    requested, moved = list[int](), list[int]()
    for step in steps:
        if step <= 2:
            queue.put(queued(num_put, data.draw(st.integers(0, 30)), key=bytes([step])))
            num_put += 1
        elif step == 3 and (ticket := queue.try_request()) is not None:
            requested.append(ticket.number)
        elif step == 4 and requested:
            queue.permit(requested.pop(0))
        elif step == 5 and queue.moving is None and (ticket := queue.try_move()) is not None:
            moved.append(ticket.number)
        elif step == 6 and queue.moving is not None:
            queue.moved()
        elif step == 7 and queue.moving is not None:
            told.append(queue.moving.write)
            moved.remove(queue.moving.number)
            queue.abandon()
        elif step == 8 and moved and (queue.moving is None or queue.moving.number != moved[0]):
            answered = queue.answer(moved.pop(0))
            assert answered is not None
            told.append(answered)
        elif step == 9:
            told += queue.drop(bytes([data.draw(st.integers(0, 2))]))
        queue.check_invariants()
    told += queue.drop_all()
    assert sorted(write.number for write in told) == list(range(num_put))
    assert queue.is_empty

"""Counts of the last seconds."""

from disagg.dispatch.turnover import WINDOW_S, TurnoverCounts
from disagg.policy.admission import Turnover


def test_counts_since_there_was_something_to_do() -> None:
    counts = TurnoverCounts()
    counts.note_busy(100.0)
    assert counts.lately(100.2) == Turnover(0, 0, 1.0)
    counts.note_ended(103.1)
    counts.note_ended(103.9)
    counts.note_turned_away(104.0)
    assert counts.lately(105.0) == Turnover(2, 1, 5.0)
    counts.check_invariants()


def test_what_is_older_than_the_window_is_forgotten() -> None:
    counts = TurnoverCounts()
    counts.note_busy(0.0)
    counts.note_ended(10.5)
    counts.note_turned_away(11.5)
    assert counts.lately(10.5 + WINDOW_S) == Turnover(1, 1, WINDOW_S)
    assert counts.lately(11.5 + WINDOW_S) == Turnover(0, 1, WINDOW_S)
    assert counts.lately(12.5 + WINDOW_S) == Turnover(0, 0, WINDOW_S)


def test_a_time_without_requests_says_nothing_of_the_next() -> None:
    counts = TurnoverCounts()
    counts.note_busy(0.0)
    counts.note_ended(20.0)
    counts.note_busy(21.0)
    assert counts.lately(23.0) == Turnover(0, 0, 2.0)


def test_any_number_of_requests_takes_the_same_room() -> None:
    counts = TurnoverCounts()
    for step in range(5000):
        counts.note_ended(step / 25)
        counts.note_turned_away(step / 25)
        counts.check_invariants()
    assert counts.lately(200.0).num_ended == 25 * WINDOW_S

"""When a client that is turned away should come back, and how long one that was let in may queue."""

import pytest

from disagg.policy.admission import MAX_RETRY_S, MIN_RETRY_S, Turnover, retry_after_s
from disagg.policy.recovery import RecoveryLimits, queue_limit_s, queued_too_long


@pytest.mark.parametrize(
    ("num_open", "num_ended", "num_turned_away", "seconds", "expected_s"),
    [
        (100, 60, 0, 30.0, 1.0),  # half a second each: never less than a second
        (100, 15, 0, 30.0, 2.0),  # the next end
        (100, 15, 4, 30.0, 10.0),  # four others are told to come as well
        (100, 30, 500, 30.0, MAX_RETRY_S),  # 100 s until all that is open has ended
        (8, 15, 500, 30.0, 16.0),  # until all that is open has ended, there is room then
        (1, 0, 0, 5.0, 5.0),  # nothing has ended yet: as long again
        (1000, 0, 3, 2.0, 8.0),
        (0, 10, 50, 30.0, 3.0),
        (1, 1, 0, 1.0, MIN_RETRY_S),
    ],
)
def test_prediction(num_open: int, num_ended: int, num_turned_away: int, seconds: float, expected_s: float) -> None:
    assert retry_after_s(num_open, Turnover(num_ended, num_turned_away, seconds)) == expected_s


def test_it_stays_within_its_limits_and_follows_the_load() -> None:
    ends, aways = (0, 1, 7, 100, 10_000), (0, 1, 50, 10_000)
    for num_open in (0, 1, 10, 1024):
        for num_ended in ends:
            told = [retry_after_s(num_open, Turnover(num_ended, away, 30.0)) for away in aways]
            assert told == sorted(told)
            assert all(MIN_RETRY_S <= each <= MAX_RETRY_S for each in told)
        told = [retry_after_s(num_open, Turnover(num_ended, 20, 30.0)) for num_ended in ends]
        assert told == sorted(told, reverse=True)


def test_what_may_be_under_way_gets_the_longer_limit() -> None:
    limits = RecoveryLimits(max_queue_s=10.0, max_first_token_s=50.0)
    assert queue_limit_s(limits, is_first=False) == 10.0
    assert queue_limit_s(limits, is_first=True) == 50.0
    patient = RecoveryLimits(max_queue_s=90.0, max_first_token_s=50.0)
    assert queue_limit_s(patient, is_first=True) == queue_limit_s(patient, is_first=False) == 90.0


def test_the_reason_names_the_value_the_limits_and_the_flag() -> None:
    text = queued_too_long(12.3, RecoveryLimits(max_queue_s=10.0, max_first_token_s=50.0))
    assert "within 12 s" in text
    assert "10 s behind others (--max-queue-s), 50 s else" in text
    assert text.endswith("try again later")

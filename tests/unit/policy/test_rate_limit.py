"""Token buckets of one client, with time as an argument."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.policy.rate_limit import RateLimits, RateMeter


def test_a_minutes_worth_at_once_and_then_evenly() -> None:
    meter = RateMeter(RateLimits(requests_per_minute=3))
    assert [meter.try_admit(5, 100.0) for _ in range(4)] == [True, True, True, False]
    assert meter.wait_s(5, 100.0) == pytest.approx(20.0)
    assert not meter.try_admit(5, 119.9)
    assert meter.try_admit(5, 120.0)
    assert not meter.try_admit(5, 120.0)
    meter.check_invariants()


def test_an_answer_is_paid_for_afterwards() -> None:
    meter = RateMeter(RateLimits(tokens_per_minute=60))
    assert meter.try_admit(10, 0.0)
    meter.charge(110, 0.0)  # 60 below zero
    assert meter.wait_s(10, 0.0) == pytest.approx(70.0)
    assert not meter.try_admit(10, 69.0)
    assert meter.try_admit(10, 70.0)


def test_a_prompt_over_the_limit_needs_a_full_bucket() -> None:
    meter = RateMeter(RateLimits(tokens_per_minute=60))
    assert meter.try_admit(1000, 0.0)
    assert not meter.try_admit(1, 900.0)
    assert meter.try_admit(1, 942.0)


def test_without_limits_nothing_waits() -> None:
    meter = RateMeter(RateLimits())
    assert all(meter.try_admit(10**9, 0.0) for _ in range(100))


@pytest.mark.parametrize("limits", [RateLimits(0), RateLimits(None, -5)])
def test_a_limit_that_lets_nothing_through_is_refused(limits: RateLimits) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        RateMeter(limits)


@given(st.lists(st.tuples(st.floats(0.0, 30.0), st.integers(0, 50)), max_size=60))
def test_never_more_than_a_bucket_and_what_has_flowed_in(steps: list[tuple[float, int]]) -> None:
    meter, now_s, admitted, spent = RateMeter(RateLimits(10, 100)), 0.0, 0, 0
    for gap_s, num_tokens in steps:
        now_s += gap_s
        was_due = meter.wait_s(num_tokens, now_s) == 0.0
        assert meter.try_admit(num_tokens, now_s) == was_due
        admitted += was_due
        spent += num_tokens * was_due
        meter.check_invariants()
        assert admitted <= 10 + now_s * 10 / 60 + 1e-6
        assert spent <= 100 + now_s * 100 / 60 + 50 + 1e-6

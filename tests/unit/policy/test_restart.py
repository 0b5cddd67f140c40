"""Restart delays: doubling, capped, forgotten, given up."""

from hypothesis import given
from hypothesis import strategies as st

from disagg.policy.restart import RestartPolicy, restart_delay

POLICY = RestartPolicy(first_delay_s=0.5, max_delay_s=3.0, max_crashes=5, window_s=60.0)


def test_delays_double_up_to_the_cap_and_then_it_is_given_up() -> None:
    crashes: list[float] = []
    delays = []
    for n in range(5):
        crashes.append(10.0 + n)
        delays.append(restart_delay(crashes, 10.0 + n, POLICY).delay_s)
    assert delays == [0.5, 1.0, 2.0, 3.0, None]


def test_giving_up_says_how_many_crashes_in_which_time() -> None:
    assert restart_delay([1, 2, 3, 4, 5], 5.0, POLICY).reason == "5 crashes within 60 s: left dead"


def test_crashes_of_long_ago_are_forgotten() -> None:
    assert restart_delay([0, 1, 2, 3, 100.0], 100.0, POLICY).delay_s == 0.5


@given(
    crashes=st.lists(st.floats(0, 1e6), min_size=1, max_size=200),
    max_crashes=st.integers(1, 10_000),
    window_s=st.floats(0.1, 1e7),
)
def test_a_delay_is_always_within_its_bounds(crashes: list[float], max_crashes: int, window_s: float) -> None:
    policy = RestartPolicy(max_crashes=max_crashes, window_s=window_s)
    decision = restart_delay(sorted(crashes), max(crashes), policy)
    if decision.delay_s is None:
        assert len(crashes) >= max_crashes
    else:
        assert policy.first_delay_s <= decision.delay_s <= policy.max_delay_s

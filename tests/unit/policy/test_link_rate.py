"""The speed of a link, out of pushes that overlap on it."""

import random

import pytest

from disagg.policy.link_rate import HALF_LIFE_BYTES, LinkRate

MIB = 1 << 20


def full_link(
    rate: LinkRate, bytes_per_s: float, num_pushes: int, start_s: float = 0.0, latency_s: float = 0.0
) -> float:
    """Pushes given all at once, sent one after the other; returns the time of the last acknowledgement."""
    now_s = start_s
    for _ in range(num_pushes):
        now_s += MIB / bytes_per_s
        rate.observe(MIB, start_s, now_s + latency_s)
    rate.check_invariants()
    return now_s


def test_nothing_is_known_before_anything_was_seen_or_measured() -> None:
    rate = LinkRate()
    assert (rate.bytes_per_s, rate.likely_bytes_per_s) == (0.0, 0.0)


def test_what_was_measured_counts_until_something_was_learned() -> None:
    rate = LinkRate()
    rate.measured_bytes_per_s = 5e8
    assert (rate.bytes_per_s, rate.likely_bytes_per_s) == (0.0, 5e8)
    full_link(rate, 1e7, 1)
    assert rate.likely_bytes_per_s == rate.bytes_per_s == pytest.approx(1e7)


@pytest.mark.parametrize("bytes_per_s", [1e6, 125e6, 5e9])
def test_a_full_links_rate_is_its_bandwidth_however_many_pushes_overlap(bytes_per_s: float) -> None:
    rate = LinkRate()
    full_link(rate, bytes_per_s, 20)
    assert rate.bytes_per_s == pytest.approx(bytes_per_s)


def test_idle_time_between_pushes_does_not_count() -> None:
    rate, now_s = LinkRate(), 0.0
    for _ in range(10):
        now_s = full_link(rate, 1e8, 1, start_s=now_s + 60.0)
    assert rate.bytes_per_s == pytest.approx(1e8)


def test_a_link_that_becomes_slower_is_seen_within_a_few_half_lives() -> None:
    rate = LinkRate()
    now_s = full_link(rate, 1e9, 100)
    full_link(rate, 1e7, 4 * HALF_LIFE_BYTES // MIB, start_s=now_s)
    assert rate.bytes_per_s == pytest.approx(1e7, rel=0.1)


def test_acknowledgements_at_one_moment_or_out_of_order_do_no_harm() -> None:
    rate, rng = LinkRate(), random.Random(1)
    for _ in range(500):
        at = rng.choice([1.0, 1.0, 2.0, 5.0])
        rate.observe(rng.randrange(MIB), at - rng.random(), at)
        rate.check_invariants()
    assert rate.bytes_per_s > 0

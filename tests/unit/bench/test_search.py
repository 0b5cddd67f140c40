"""The highest rate that holds is found, in few runs, and doubt is said."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.bench.search import RateSearch
from disagg.core.errors import ConfigurationError


def run(search: RateSearch, capacity: float, num: int = 1000) -> int:
    runs = 0
    while (rate := search.next_rate()) is not None:
        runs += 1
        assert runs <= 100
        search.tell(rate, num if rate <= capacity else num // 2, num)
        search.check_invariants()
    return runs


@given(st.floats(0.05, 50.0), st.floats(0.1, 20.0))
def test_the_limit_is_bracketed_within_the_factor(capacity: float, first: float) -> None:
    search = RateSearch(first, max_runs=60)
    run(search, capacity)
    limit = search.limit()
    assert limit.rate_per_s <= capacity < limit.first_too_high_per_s
    assert limit.first_too_high_per_s / limit.rate_per_s <= 1.1 + 1e-9
    assert limit.is_sure


def test_runs_are_bounded_and_what_is_known_by_then_is_said() -> None:
    search = RateSearch(1.0, max_runs=3)
    assert run(search, 100.0) == 3
    limit = search.limit()
    assert (limit.rate_per_s, limit.first_too_high_per_s, limit.is_sure) == (4.0, math.inf, False)


def test_a_rate_that_proves_nothing_is_run_once_more_and_both_runs_count() -> None:
    search = RateSearch(1.0)
    search.tell(1.0, 18, 20)  # 90 %, but of twenty
    assert search.next_rate() == 1.0
    search.tell(1.0, 12, 20)
    assert search.trials[1.0].num == 40
    assert search.next_rate() == 0.5  # 75 % of forty do not hold


def test_noise_around_the_limit_does_not_keep_it_going() -> None:
    rng = random.Random(5)
    search = RateSearch(1.0, max_runs=12)
    while (rate := search.next_rate()) is not None:
        share = 1 / (1 + math.exp(4 * (rate - 3)))
        search.tell(rate, sum(rng.random() < share for _ in range(50)), 50)
    assert 1.5 < search.limit().rate_per_s < 3.5


def test_a_search_that_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigurationError):
        RateSearch(0.0)
    with pytest.raises(ConfigurationError):
        RateSearch(1.0, 1.5)

"""Percentiles, exact and counted."""

import math
import random

import pytest

from disagg.bench.percentiles import Sketch, percentile, summary


def test_percentiles_lie_between_ranks() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.5
    assert percentile([1.0, 2.0, 3.0, 4.0], 1.0) == 4.0
    assert percentile([5.0], 0.99) == 5.0
    assert math.isnan(percentile([], 0.5))


def test_a_summary_of_nothing_says_nothing() -> None:
    empty = summary([])
    assert empty.num == 0
    assert math.isnan(empty.p99)
    assert math.isnan(empty.most)
    assert math.isnan(Sketch().summary().mean)


def test_counted_percentiles_are_within_a_percent() -> None:
    rng = random.Random(0)
    values = [rng.lognormvariate(-4, 1.5) for _ in range(30_000)]
    sketch = Sketch()
    for value in values:
        sketch.add(value)
    ordered = sorted(values)
    for share in (0.01, 0.5, 0.9, 0.99, 0.999):
        assert sketch.percentile(share) == pytest.approx(percentile(ordered, share), rel=0.01)
    assert sketch.summary().mean == pytest.approx(summary(values).mean)
    assert sketch.summary().most == max(values)
    sketch.check_invariants()


def test_zeros_and_repeats_count() -> None:
    sketch = Sketch()
    sketch.add(0.0, 60)
    sketch.add(2.0, 40)
    assert sketch.percentile(0.5) == 0.0
    assert sketch.percentile(0.9) == pytest.approx(2.0, rel=0.006)
    sketch.check_invariants()

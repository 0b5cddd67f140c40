"""Least relative error, for a handful of values that must stay positive."""

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

STEPS = (1.3, 1.1, 1.03, 1.01)  # factors by which a value is tried larger and smaller, coarse to fine
GAIN = 1e-6  # less improvement than this ends a round


class Sample(NamedTuple):
    """Seconds that were measured and the function that should give them."""

    measured_s: float
    predict: Callable[[Sequence[float]], float]


class Fit(NamedTuple):
    """Values and what they leave: |predicted / measured - 1|."""

    values: tuple[float, ...]
    median: float
    ninth_decile: float
    num_samples: int


def fit(samples: Sequence[Sample], start: Sequence[float], limits: Sequence[float]) -> Fit:
    """Least mean relative error by moving one value or trading two; no value exceeds its limit."""

    def error(values: Sequence[float]) -> float:
        return statistics.fmean(abs(sample.predict(values) / sample.measured_s - 1) for sample in samples)

    values, best = list(start), error(start)
    for step in STEPS:
        improved = True
        while improved:
            improved = False
            for move in _moves(len(values), step):
                tried = [min(v * factor, limit) for v, factor, limit in zip(values, move, limits, strict=True)]
                if (found := error(tried)) < best - GAIN:
                    values, best, improved = tried, found, True
    left = sorted(abs(sample.predict(values) / sample.measured_s - 1) for sample in samples)
    return Fit(tuple(values), statistics.median(left), left[int(0.9 * (len(left) - 1))], len(left))


def _moves(count: int, step: float) -> list[list[float]]:
    """Factors: one value larger or smaller, or one larger and another smaller."""
    single = [
        [factor if at == index else 1.0 for at in range(count)] for index in range(count) for factor in (step, 1 / step)
    ]
    traded = [
        [step if at == up else 1 / step if at == down else 1.0 for at in range(count)]
        for up in range(count)
        for down in range(count)
        if up != down
    ]
    return single + traded

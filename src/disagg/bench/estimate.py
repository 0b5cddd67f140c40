"""A figure and how far it can be trusted: seeded bootstrap for percentiles, Wilson's interval for shares.

Gaps between tokens of one answer are alike, so whole requests are drawn again, never single gaps.
"""

import math
from collections.abc import Sequence

import msgspec
import numpy as np

CONFIDENCE_Z = 1.959964  # of a 95 % interval
NUM_RESAMPLES = 300
_BATCH = 50  # resamples at once, of few values
_MAX_WEIGHTS = 1 << 22  # at once, of very many: bounds memory


class Estimate(msgspec.Struct, frozen=True):
    """low and high: the 95 % confidence interval. NaN of nothing."""

    value: float
    low: float
    high: float


NOTHING = Estimate(math.nan, math.nan, math.nan)


def percentiles(groups: Sequence[Sequence[float]], shares: Sequence[float], seed: int) -> tuple[Estimate, ...]:
    """One per share (0 to 1) of all values together; the interval by drawing groups again, with replacement.

    Value and interval both use the smallest value that at least that share of all lies at or below.
    """
    values = np.array([value for group in groups for value in group], dtype=np.float64)
    if not values.size:
        return (NOTHING,) * len(shares)
    owner = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    order = np.argsort(values, kind="stable")
    values, owner = values[order], owner[order]
    points = _weighted(values, np.ones((1, values.size)), shares)[:, 0]
    rng = np.random.default_rng(seed)
    drawn = []
    batch = max(1, min(_BATCH, _MAX_WEIGHTS // values.size))
    for done in range(0, NUM_RESAMPLES, batch):
        size = min(batch, NUM_RESAMPLES - done)
        counts = rng.multinomial(len(groups), np.full(len(groups), 1 / len(groups)), size=size)
        drawn.append(_weighted(values, counts[:, owner].astype(np.float64), shares))
    lows, highs = np.nanquantile(np.concatenate(drawn, axis=1), (0.025, 0.975), axis=1)
    return tuple(Estimate(float(p), float(low), float(high)) for p, low, high in zip(points, lows, highs, strict=True))


def _weighted(values: np.ndarray, weights: np.ndarray, shares: Sequence[float]) -> np.ndarray:
    """[shares, resamples]: percentiles of ascending values under each row of weights."""
    sums = np.cumsum(weights, axis=1)
    found = np.empty((len(shares), weights.shape[0]))
    for column, row in enumerate(sums):
        if row[-1] <= 0:
            found[:, column] = np.nan
            continue
        # A shade less, so that rounding does not skip the value that is just enough.
        places = np.searchsorted(row, np.array(shares) * row[-1] * (1 - 1e-12), side="left")
        found[:, column] = values[np.minimum(places, values.size - 1)]
    return found


def mean(values: Sequence[float]) -> Estimate:
    """The interval by the normal approximation."""
    if not values:
        return NOTHING
    middle = math.fsum(values) / len(values)
    if len(values) < 2:
        return Estimate(middle, middle, middle)
    variance = math.fsum((value - middle) ** 2 for value in values) / (len(values) - 1)
    half = CONFIDENCE_Z * math.sqrt(variance / len(values))
    return Estimate(middle, middle - half, middle + half)


def share(num_true: int, num: int) -> Estimate:
    """num_true of num, by Wilson: sound for few and for shares near 0 and 1."""
    if num < 1:
        return NOTHING
    part, square = num_true / num, CONFIDENCE_Z**2
    middle = (part + square / (2 * num)) / (1 + square / num)
    half = CONFIDENCE_Z * math.sqrt(part * (1 - part) / num + square / (4 * num**2)) / (1 + square / num)
    return Estimate(part, max(0.0, middle - half), min(1.0, middle + half))

"""Percentiles: exact ones of a few numbers, and of very many by counting them in narrow buckets."""

import math
from collections.abc import Iterable, Sequence

import msgspec

from disagg.core.errors import InternalFault

GROWTH = 1.01  # a bucket's upper over its lower bound


def percentile(ordered: Sequence[float], share: float) -> float:
    """Of numbers in ascending order, between the two nearest ranks; share is 0 to 1. NaN of nothing."""
    if not ordered:
        return math.nan
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


class Summary(msgspec.Struct, frozen=True):
    """Of a set of seconds; NaN where there is none."""

    num: int
    mean: float
    p50: float
    p90: float
    p99: float
    most: float


def summary(values: Iterable[float]) -> Summary:
    """Of any numbers."""
    ordered = sorted(values)
    mean = math.fsum(ordered) / len(ordered) if ordered else math.nan
    p50, p90, p99 = (percentile(ordered, share) for share in (0.5, 0.9, 0.99))
    return Summary(len(ordered), mean, p50, p90, p99, ordered[-1] if ordered else math.nan)


class Sketch:
    """Counts of positive numbers in buckets that grow by 1 %: bounded, whatever is added. Zeros count apart."""

    def __init__(self) -> None:
        self.num = 0
        self.total = 0.0
        self.most = 0.0
        self._counts: dict[int, int] = {}
        self._num_zero = 0

    def add(self, value: float, count: int = 1) -> None:
        """The same value `count` times."""
        self.num += count
        self.total += value * count
        self.most = max(self.most, value)
        if value <= 0:
            self._num_zero += count
            return
        bucket = math.floor(math.log(value) / _LOG_GROWTH)
        self._counts[bucket] = self._counts.get(bucket, 0) + count

    def percentile(self, share: float) -> float:
        """Within a bucket's width of the exact one, 1 %; NaN of nothing."""
        if not self.num:
            return math.nan
        rank = share * (self.num - 1)
        seen = self._num_zero
        if rank < seen:
            return 0.0
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            if rank < seen:
                return min(self.most, math.exp((bucket + 0.5) * _LOG_GROWTH))
        return self.most

    def summary(self) -> Summary:
        mean = self.total / self.num if self.num else math.nan
        p50, p90, p99 = (self.percentile(share) for share in (0.5, 0.9, 0.99))
        return Summary(self.num, mean, p50, p90, p99, self.most if self.num else math.nan)

    def check_invariants(self) -> None:
        if sum(self._counts.values()) + self._num_zero != self.num:
            raise InternalFault(f"{self.num} numbers were added, the buckets hold another count")


_LOG_GROWTH = math.log(GROWTH)

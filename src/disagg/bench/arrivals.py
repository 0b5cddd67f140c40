"""When requests come. Open loop: a clock decides, whatever the system does; chance is a seeded generator."""

import math
import random
from collections.abc import Iterator
from typing import Protocol

import msgspec

from disagg.core.errors import ConfigurationError


class Arrivals(Protocol):
    """Times of arrival in seconds from the start, never falling, without end."""

    def times_s(self, rng: random.Random) -> Iterator[float]: ...


def _check_rate(rate_per_s: float) -> None:
    if not 0 < rate_per_s < math.inf:
        raise ConfigurationError(f"an arrival rate of {rate_per_s:g} requests/s: it must be above 0")


class EvenArrivals(msgspec.Struct, frozen=True):
    """One every 1 / rate_per_s seconds."""

    rate_per_s: float

    def times_s(self, rng: random.Random) -> Iterator[float]:
        _check_rate(self.rate_per_s)
        number = 0
        while True:
            yield number / self.rate_per_s
            number += 1


class PoissonArrivals(msgspec.Struct, frozen=True):
    """Independent arrivals: gaps are exponential."""

    rate_per_s: float

    def times_s(self, rng: random.Random) -> Iterator[float]:
        _check_rate(self.rate_per_s)
        now_s = 0.0
        while True:
            now_s += rng.expovariate(self.rate_per_s)
            yield now_s


class GammaArrivals(msgspec.Struct, frozen=True):
    """Gaps of a gamma distribution: cv (standard deviation / mean) above 1 is burstier than Poisson, below 1 calmer."""

    rate_per_s: float
    cv: float

    def times_s(self, rng: random.Random) -> Iterator[float]:
        _check_rate(self.rate_per_s)
        if not 0 < self.cv < math.inf:
            raise ConfigurationError(f"a coefficient of variation of {self.cv:g}: it must be above 0")
        shape = 1 / self.cv**2
        scale_s = 1 / (self.rate_per_s * shape)
        now_s = 0.0
        while True:
            now_s += rng.gammavariate(shape, scale_s)
            yield now_s

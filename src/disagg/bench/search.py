"""The highest rate at which a share of all requests attains the targets. Pure: says what to run, is told what came.

First the rate is doubled (or halved) until one rate holds and a higher one does not; then the gap is halved, on a
logarithmic scale, until it is narrow. A run that proves nothing either way is run once more, and both count together.
"""

import math

import msgspec

from disagg.bench import estimate
from disagg.core.errors import ConfigurationError


class Trial(msgspec.Struct, frozen=True):
    """All runs at one rate so far."""

    rate_per_s: float
    num_good: int
    num: int
    num_runs: int = 1

    @property
    def attainment(self) -> estimate.Estimate:
        return estimate.share(self.num_good, self.num)


class Limit(msgspec.Struct, frozen=True):
    """What was found. is_sure: the intervals of both neighbours lie on their sides of the target."""

    rate_per_s: float  # 0: not even the lowest rate tried holds
    first_too_high_per_s: float  # infinite: the highest rate tried holds
    is_sure: bool


class RateSearch:
    """while (rate := search.next_rate()) is not None: search.tell(rate, good, all)"""

    def __init__(self, first_per_s: float, target: float = 0.9, *, max_runs: int = 10, narrow: float = 1.1) -> None:
        """narrow: ends when the rate that does not hold is at most so many times the one that does."""
        if not 0 < first_per_s < math.inf or not 0 < target < 1 or max_runs < 1 or narrow <= 1:
            text = f"a search from {first_per_s:g}/s for {target:g} in {max_runs} runs to a factor of {narrow:g}"
            raise ConfigurationError(
                f"{text}: rate and runs must be above 0, the target between 0 and 1, the factor above 1"
            )
        self.trials: dict[float, Trial] = {}
        self._first = first_per_s
        self._target = target
        self._max_runs = max_runs
        self._narrow = narrow

    def next_rate(self) -> float | None:
        """None: found, or all runs used."""
        if sum(trial.num_runs for trial in self.trials.values()) >= self._max_runs:
            return None
        if not self.trials:
            return self._first
        doubtful = [t for t in self.trials.values() if not self._is_proven(t) and t.num_runs < 2]
        if doubtful:
            return doubtful[0].rate_per_s
        holds, fails = self._bounds()
        if holds is None:
            return (fails or self._first) / 2
        if fails is None:
            return holds * 2
        return None if fails / holds <= self._narrow else math.sqrt(holds * fails)

    def tell(self, rate_per_s: float, num_good: int, num: int) -> None:
        old = self.trials.get(rate_per_s)
        if old is not None:
            num_good, num = num_good + old.num_good, num + old.num
        self.trials[rate_per_s] = Trial(rate_per_s, num_good, num, 1 + (old.num_runs if old else 0))

    def limit(self) -> Limit:
        holds, fails = self._bounds()
        neighbours = [self.trials[rate] for rate in (holds, fails) if rate is not None]
        is_sure = len(neighbours) == 2 and all(map(self._is_proven, neighbours))
        return Limit(holds or 0.0, fails or math.inf, is_sure)

    def _bounds(self) -> tuple[float | None, float | None]:
        """The lowest rate that does not hold, and the highest below it that does."""
        fails = min((t.rate_per_s for t in self.trials.values() if not self._holds(t)), default=None)
        below = [t.rate_per_s for t in self.trials.values() if self._holds(t)]
        holds = max((rate for rate in below if fails is None or rate < fails), default=None)
        return holds, fails

    def _holds(self, trial: Trial) -> bool:
        return trial.num > 0 and trial.num_good >= self._target * trial.num

    def _is_proven(self, trial: Trial) -> bool:
        interval = trial.attainment
        return interval.low >= self._target or interval.high < self._target

    def check_invariants(self) -> None:
        for rate, trial in self.trials.items():
            assert trial.rate_per_s == rate
            assert 0 <= trial.num_good <= trial.num
        holds, fails = self._bounds()
        assert holds is None or fails is None or holds < fails

"""Surfaces through measured points: piecewise linear, with a stated answer outside of them."""

import bisect
import enum
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

from disagg.core.errors import ConfigurationError

Curve = Sequence[tuple[float, float]]


class Outside(enum.StrEnum):
    """What lies beyond the points that were measured."""

    EXTEND = "extend"  # along the outermost segment, never below 0
    CLAMP = "clamp"  # as at the outermost point
    REFUSE = "refuse"  # an error that names the limits


class Surface:
    """Curves over x at given levels; between two levels their curves are mixed. Values are 0 or more."""

    def __init__(self, points: Iterable[tuple[float, float, float]], what: str, outside: Outside) -> None:
        """points: (level, x, value); repeated ones count by their median. Raises ConfigurationError if empty."""
        cells: dict[tuple[float, float], list[float]] = defaultdict(list)
        for level, x, value in points:
            cells[level, x].append(value)
        if not cells:
            raise ConfigurationError(f"no measured {what}; a table needs at least one")
        self._what = what
        self._outside = outside
        self._levels = sorted({level for level, _ in cells})
        self._curves = [
            sorted((x, statistics.median(values)) for (at, x), values in cells.items() if at == level)
            for level in self._levels
        ]

    def at(self, x: float, level: float = 0.0) -> float:
        """Raises ConfigurationError outside of the points where that is refused."""
        if len(self._levels) == 1:
            return max(0.0, self._along(self._curves[0], x))
        index = min(max(bisect.bisect_right(self._levels, level) - 1, 0), len(self._levels) - 2)
        pair = [(self._levels[at], self._along(self._curves[at], x)) for at in (index, index + 1)]
        return max(0.0, self._along(pair, level))

    def _along(self, curve: Curve, x: float) -> float:
        if not curve[0][0] <= x <= curve[-1][0]:
            if self._outside is Outside.REFUSE:
                raise ConfigurationError(
                    f"{self._what} at {x:g} were not measured, only {curve[0][0]:g} to {curve[-1][0]:g}; measure "
                    "them or allow the table to be extended"
                )
            if self._outside is Outside.CLAMP:
                return curve[0][1] if x < curve[0][0] else curve[-1][1]
        if len(curve) == 1:
            return curve[0][1]
        index = min(max(bisect.bisect_right(curve, (x, float("inf"))) - 1, 0), len(curve) - 2)
        (left, low), (right, high) = curve[index], curve[index + 1]
        return low + (high - low) * (x - left) / (right - left)

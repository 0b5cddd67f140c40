"""Where values lie on a plot, and which of them are written at its edge."""

import math
from collections.abc import Iterable

import msgspec


class Axis(msgspec.Struct, frozen=True):
    """least, most: the ends; None for what the values need: from 0, or from the smallest on a logarithmic axis."""

    name: str
    is_log: bool = False
    least: float | None = None
    most: float | None = None


class Scale:
    """Values to places on the drawing."""

    def __init__(self, axis: Axis, values: Iterable[float], start: float, stop: float) -> None:
        """start, stop: places of the least and the most value. What is not finite, or not above 0 on a log, is out."""
        self.axis = axis
        self._start, self._stop = start, stop
        fit = [value for value in values if self.fits(value)]
        if axis.is_log:
            self.low = axis.least or min(fit, default=1.0)
            self.high = axis.most or max(fit, default=self.low)
            if self.high < 1.5 * self.low:
                self.low, self.high = self.low / 1.25, self.high * 1.25
            self.ticks = log_ticks(self.low, self.high)
        else:
            low = axis.least if axis.least is not None else min(0.0, *fit, 0.0)
            high = axis.most if axis.most is not None else max(fit, default=low)
            self.ticks = ticks(low, high)
            self.low, self.high = self.ticks[0], self.ticks[-1]

    def fits(self, value: float) -> bool:
        return math.isfinite(value) and (value > 0 or not self.axis.is_log)

    def place(self, value: float) -> float:
        """What lies beyond an end is drawn on it."""
        value = min(self.high, max(self.low, value))
        if self.axis.is_log:
            part = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return self._start + part * (self._stop - self._start)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from at or below `low` to at or above `high`, about `count` steps."""
    size = max(1.0, abs(low), abs(high))
    if high - low < 1e-9 * size:  # nothing a number of twelve digits could tell apart
        high = low + size
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten between two numbers above 0; fewer of a wide range, even steps of a narrow one."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(decades) <= 3 else (1, 3) if len(decades) <= 5 else (1,)
    found = [factor * 10.0**decade for decade in decades for factor in factors]
    found = [value for value in found if low * 0.999 <= value <= high * 1.001]
    return found if len(found) >= 2 else [value for value in ticks(low, high) if low <= value <= high]


def short(value: float) -> str:
    """As people write numbers: at most three digits that count, thousands as k, M, G; '-' for what is no number."""
    if not math.isfinite(value):
        return "-"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * (10 if letter == "k" else 1):
            return f"{value / size:.3g}{letter}"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"

"""Where values lie on a plot, and which of them are written at its edge."""

import math
from collections.abc import Iterable

import msgspec

NUM_TICKS = 6


class Axis(msgspec.Struct, frozen=True):
    """least, most: None for what the values need. unit is written behind the label."""

    label: str
    unit: str = ""
    is_log: bool = False
    least: float | None = None
    most: float | None = None

    @property
    def title(self) -> str:
        return f"{self.label} ({self.unit})" if self.unit else self.label


class Scale:
    """Values to pixels, linear or logarithmic."""

    def __init__(self, axis: Axis, values: Iterable[float], start: float, stop: float) -> None:
        """start, stop: pixels of the least and the most value. Values that are not finite are left out."""
        self.axis = axis
        self._start, self._stop = start, stop
        fit = [v for v in values if math.isfinite(v) and (v > 0 or not axis.is_log)]
        low = axis.least if axis.least is not None else min(fit, default=1.0 if axis.is_log else 0.0)
        high = axis.most if axis.most is not None else max(fit, default=low + 1)
        if axis.is_log:
            low = max(low, 1e-12)
            high = max(high, low * 1.0001)
            if high / low < 1.5:
                low, high = low / 1.25, high * 1.25
        elif high <= low:
            high = low + (abs(low) or 1.0)
        self.low, self.high = low, high

    def place(self, value: float) -> float:
        """Pixels; values beyond the ends lie on them."""
        value = min(self.high, max(self.low, value))
        if self.axis.is_log:
            part = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return self._start + part * (self._stop - self._start)

    def ticks(self) -> tuple[float, ...]:
        return log_ticks(self.low, self.high) if self.axis.is_log else even_ticks(self.low, self.high)


def even_ticks(low: float, high: float) -> tuple[float, ...]:
    """Round values within, 1, 2 or 5 times a power of ten apart."""
    raw = (high - low) / NUM_TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return tuple(number * step for number in range(first, last + 1))


def log_ticks(low: float, high: float) -> tuple[float, ...]:
    """1, 2 and 5 times powers of ten within; of a wide range powers only; of a narrow one even steps."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(decades) <= 3 else (1,) if len(decades) > 5 else (1, 3)
    found = tuple(f * 10.0**d for d in decades for f in factors if low * 0.999 <= f * 10.0**d <= high * 1.001)
    return found if len(found) >= 2 else even_ticks(low, high)


def short(value: float) -> str:
    """As people write numbers: at most three digits that count, thousands as k, M, G."""
    if not math.isfinite(value):
        return "-" if math.isnan(value) else "∞"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size * 0.9995:
            return f"{value / (1e3 if letter == 'k' else size):.3g}{letter}"
    if abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:.3g}"

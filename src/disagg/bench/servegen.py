"""ServeGen's clients as requests: how often each asked in every window of a day or more, and how long prompts were.

    chunk-N-trace.csv       window start (s), requests/s, CV of gaps, Gamma or Weibull, its shape and scale
    chunk-N-dataset.json    period start (s) -> lengths, each a histogram in a string: "{tokens: share, ...}"

The data are statistics, so requests are drawn. Gaps of a client in a window come from its distribution, stretched to
fill the window with as many requests as its rate says. The first is at a chance moment: windows begin for all clients
at once, and a burst would begin with every one. Lengths are drawn from the period's histograms, prompts and answers
independently. The clock begins with the first window in which anybody asks.
"""

import itertools
import math
import random
from bisect import bisect
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from disagg.bench.trace_files import BadLine, TraceRow
from disagg.core.errors import ConfigurationError

# Gaps of any scale: it follows from the window's rate.
_GAPS: dict[str, Callable[[random.Random, float], float]] = {
    "Gamma": lambda rng, shape: rng.gammavariate(shape, 1.0),
    "Weibull": lambda rng, shape: rng.weibullvariate(1.0, shape),
}
_TEXT = ("input_tokens", "output_tokens")
_WINDOW_S = 600.0  # of a trace with one window


class Window(msgspec.Struct, frozen=True):
    """What one client does from start_s on. A rate of 0: nothing."""

    start_s: float
    rate_per_s: float
    gaps: str  # key of _GAPS
    shape: float


class _Histogram:
    """Lengths and how often each is; draws by them."""

    def __init__(self, shares: dict[int, float]) -> None:
        self._lengths = list(shares)
        self._reached = list(itertools.accumulate(shares.values()))

    def draw(self, rng: random.Random) -> int:
        """1 or more."""
        place = bisect(self._reached, rng.random() * self._reached[-1])
        return max(1, self._lengths[min(place, len(self._lengths) - 1)])


class TraceClient:
    """One client's two files. Histograms are read when a window needs them: they are long."""

    def __init__(self, trace: Path, dataset: Path) -> None:
        """Raises ConfigurationError naming the file, and the line or period."""
        self.name = trace.name
        self.windows = _read_windows(trace)
        self._dataset = dataset
        self._periods = _read_periods(dataset)
        self._known: tuple[float, tuple[_Histogram, ...]] | None = None  # a period and its two histograms
        if any(window.rate_per_s for window in self.windows.values()) and not self._periods:
            raise ConfigurationError(f"{dataset} has no lengths, though {trace.name} has requests")

    def draw_times(self, window: Window, length_s: float, rng: random.Random) -> list[float]:
        """Of the requests of a window, in no order."""
        if not window.rate_per_s:
            return []
        wanted = window.rate_per_s * length_s
        number = int(wanted) + (rng.random() < wanted % 1.0)
        gaps = [_GAPS[window.gaps](rng, window.shape) for _ in range(number)]
        stretch, offset = length_s / (math.fsum(gaps) or 1.0), rng.random() * length_s
        return [window.start_s + (offset + at * stretch) % length_s for at in itertools.accumulate(gaps)]

    def draw_lengths(self, at_s: float, rng: random.Random) -> tuple[int, int]:
        """Tokens of a prompt and its answer: of the last period with lengths up to then, else of the first."""
        start_s = max((each for each in self._periods if each <= at_s), default=min(self._periods))
        if self._known is None or self._known[0] != start_s:
            self._known = (start_s, tuple(self._histogram(start_s, text) for text in self._periods[start_s]))
        prompts, answers = self._known[1]
        return prompts.draw(rng), answers.draw(rng)

    def _histogram(self, start_s: float, text: str) -> _Histogram:
        try:
            pairs = [each.split(":") for each in text.strip().strip("{}").split(",")]
            shares = {int(length): float(share) for length, share in pairs}
        except ValueError:
            raise ConfigurationError(f"{self._dataset}, {start_s:g}: no histogram: {text[:60]!r}") from None
        total = math.fsum(shares.values())
        if min(shares) < 0 or min(shares.values()) < 0 or not 0 < total < math.inf:
            text = f"lengths from {min(shares)}, shares from {min(shares.values()):g} with a sum of {total:g}"
            raise ConfigurationError(f"{self._dataset}, {start_s:g}: {text}; all must be 0 or more, the sum above 0")
        return _Histogram(shares)

    def check_invariants(self) -> None:
        assert all(start_s == window.start_s for start_s, window in self.windows.items())
        assert self._known is None or self._known[0] in self._periods


def read_clients(folder: Path) -> list[TraceClient]:
    """In order of their numbers. Raises ConfigurationError, also where one of a client's two files is missing."""
    traces = sorted(folder.glob("chunk-*-trace.csv"), key=lambda path: (len(path.name), path.name))
    datasets = {path.name.removesuffix("-dataset.json"): path for path in folder.glob("chunk-*-dataset.json")}
    if not traces and not datasets:
        raise ConfigurationError(f"{folder} has no chunk-*-trace.csv: name the folder of one of ServeGen's models")
    names = {path.name.removesuffix("-trace.csv") for path in traces}
    alone = sorted(names ^ datasets.keys())
    if alone:
        text = f"{len(alone)} clients have one file of two: {', '.join(alone[:5])}"
        raise ConfigurationError(f"{folder}: {text}; add their -trace.csv or -dataset.json, or remove them")
    return [TraceClient(path, datasets[path.name.removesuffix("-trace.csv")]) for path in traces]


def draw_requests(folder: Path, rng: random.Random) -> Iterator[TraceRow]:
    """Of all clients, in order of time, window by window. Raises ConfigurationError."""
    clients = read_clients(folder)
    starts = sorted({start_s for client in clients for start_s in client.windows})
    for client in clients:
        if len(client.windows) != len(starts):
            text = f"{client.name} has {len(client.windows)} windows, all clients together {len(starts)}"
            raise ConfigurationError(f"{folder}: {text}: each must have the windows of all")
    lengths = [later - one for one, later in itertools.pairwise(starts)]
    lengths.append(lengths[-1] if lengths else _WINDOW_S)
    begin_s: float | None = None
    for start_s, length_s in zip(starts, lengths, strict=True):
        due: list[tuple[float, int]] = []
        for number, client in enumerate(clients):
            times_s = client.draw_times(client.windows[start_s], length_s, rng)
            due += [(at_s, number) for at_s in times_s]
        if due and begin_s is None:
            begin_s = start_s
        for at_s, number in sorted(due):
            yield TraceRow(at_s - (begin_s or 0.0), *clients[number].draw_lengths(start_s, rng))


def _read_windows(path: Path) -> dict[float, Window]:
    """By their start, in order."""
    found: dict[float, Window] = {}
    last_s = -math.inf
    try:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            window = _window(number, line)
            if not last_s < window.start_s < math.inf:
                raise BadLine(number, f"its window at {window.start_s:g} s does not follow that at {last_s:g} s")
            last_s = window.start_s
            found[last_s] = window
    except BadLine as bad:
        raise ConfigurationError(f"{path}, line {bad.number}: {bad.what}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from None
    return found


def _window(number: int, line: str) -> Window:
    fields = line.split(",")
    if len(fields) != 6:
        raise BadLine(number, f"{len(fields)} fields; a window has 6: start, rate, CV, distribution, shape, scale")
    try:
        start_s, rate, shape = float(fields[0]), float(fields[1]), float(fields[4])
    except ValueError as error:
        raise BadLine(number, str(error)) from None
    gaps = fields[3].strip()
    if not gaps:
        return Window(start_s, 0.0, "", 0.0)
    if gaps not in _GAPS or not (0 <= rate < math.inf and 0 < shape < math.inf):
        text = f"{rate:g} requests/s, gaps {gaps} of shape {shape:g}"
        raise BadLine(number, f"{text}: a rate of 0 or more and {' or '.join(_GAPS)} of a shape above 0 are needed")
    return Window(start_s, rate, gaps, shape)


def _read_periods(path: Path) -> dict[float, tuple[str, str]]:
    """Start -> histograms of prompts and answers, as they are written; only periods that have both."""
    found: dict[float, tuple[str, str]] = {}
    try:
        periods = msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, str]])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from None
    for start, fields in periods.items():
        missing = [name for name in _TEXT if name not in fields]
        if missing or not start.isdecimal():
            there = ", ".join(fields) or "nothing"
            text = f"no {' and '.join(missing)}, there is {there}" if missing else "it is no number of seconds"
            raise ConfigurationError(f"{path}, {start[:20]!r}: {text}; only clients of text models can be asked for")
        prompts, answers = (fields[name] for name in _TEXT)
        if prompts.strip() != "{}" and answers.strip() != "{}":
            found[float(start)] = (prompts, answers)
    return found

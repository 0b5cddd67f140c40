"""What is asked, as a list that can be cut to a window and played at any rate."""

import functools
import itertools
import random
import statistics
from collections.abc import Iterator

import msgspec

from disagg.bench.arrivals import PoissonArrivals
from disagg.bench.workload import Lengths, OpenStream, RandomWork, Workload, WorkRequest, WorkStream
from disagg.core.errors import ConfigurationError

MAX_READ = 50_000  # requests of a trace that are looked at
DRAWN = 4_000  # requests drawn where a rate and lengths are given
NUM_SAMPLES = 48  # requests that stand for all in closed forms
SHARED_TIMES = 0.5  # distinct times per request up to which a trace's clock is taken for coarse


class Traffic(msgspec.Struct, frozen=True, dict=True):
    """Requests in order of due_s. rate_per_s is their mean; uncached[i] tokens of the i-th an endless cache lacks."""

    name: str
    requests: tuple[WorkRequest, ...]
    uncached: tuple[int, ...]
    rate_per_s: float

    @functools.cached_property  # of a long trace, asked for before every run
    def mean_prompt(self) -> float:
        return sum(request.num_prompt_tokens for request in self.requests) / len(self.requests)

    @functools.cached_property
    def mean_uncached(self) -> float:
        return sum(self.uncached) / len(self.uncached)

    @functools.cached_property
    def mean_output(self) -> float:
        return sum(request.num_output_tokens for request in self.requests) / len(self.requests)

    @functools.cached_property
    def gap_cv(self) -> float:
        """Standard deviation over mean of the gaps between arrivals: 1 for Poisson, more for bursts."""
        gaps = [later.due_s - one.due_s for one, later in itertools.pairwise(self.requests)]
        return statistics.pstdev(gaps) / statistics.fmean(gaps)

    @functools.cached_property
    def samples(self) -> tuple[tuple[int, int, int], ...]:
        """(prompt, uncached, answer) tokens of requests evenly spread over the order of what must be computed."""
        rows = sorted(
            (new, request.num_prompt_tokens, request.num_output_tokens)
            for new, request in zip(self.uncached, self.requests, strict=True)
        )
        step = len(rows) / min(NUM_SAMPLES, len(rows))
        picked = (rows[int((index + 0.5) * step)] for index in range(min(NUM_SAMPLES, len(rows))))
        return tuple((prompt, new, output) for new, prompt, output in picked)

    def window(self, num_requests: int, rate_per_s: float) -> "ListedWork":
        """num_requests in a row whose load is nearest to the whole's, their clock stretched to the rate."""
        requests = self.requests
        if num_requests >= len(requests):
            chosen = requests
        else:
            mean = sum(self.uncached) / max(1e-9, _span_s(requests))
            starts = range(0, len(requests) - num_requests + 1, max(1, num_requests // 4))
            begin = min(starts, key=lambda start: abs(self._load(start, num_requests) - mean))
            chosen = requests[begin : begin + num_requests]
        factor = _span_s(chosen) / len(chosen) * rate_per_s or 1.0
        return ListedWork(chosen, 1.0 / factor)

    def _load(self, start: int, num: int) -> float:
        span_s = _span_s(self.requests[start : start + num])
        return sum(self.uncached[start : start + num]) / max(1e-9, span_s)


class ListedWork(msgspec.Struct, frozen=True):
    """Requests as a workload, from 0 s on; gaps become `stretch` times as long."""

    requests: tuple[WorkRequest, ...]
    stretch: float

    def start(self, rng: random.Random) -> WorkStream:
        return OpenStream(self._requests())

    def _requests(self) -> Iterator[WorkRequest]:
        begin_s = self.requests[0].due_s
        for number, request in enumerate(self.requests):
            due_s = (request.due_s - begin_s) * self.stretch
            yield msgspec.structs.replace(request, number=number, due_s=due_s, model="")


def read_traffic(name: str, work: Workload, seed: int) -> Traffic:
    """Up to MAX_READ requests. Raises ConfigurationError for a bad row, by its line, and where there are too few.

    Where a clock was so coarse that most requests share their time with others, those of a tick are spread over it:
    played as written they would come at once, and all but the first wait, at any rate.
    """
    stream = work.start(random.Random(seed))
    requests: list[WorkRequest] = []
    while len(requests) < MAX_READ:
        request = stream.next_request()
        if request is None:
            break
        requests.append(request)
    if len(requests) < 2 or requests[-1].due_s <= requests[0].due_s:
        raise ConfigurationError(f"{name} has {len(requests)} requests at {_times(requests)}: a rate needs 2 or more")
    tick_s = _tick_s(requests)
    if tick_s:
        requests, name = _spread(requests, tick_s), f"{name} (requests of a tick of {tick_s:.3g} s spread over it)"
    rate_per_s = len(requests) / _span_s(tuple(requests))
    return Traffic(name, tuple(requests), tuple(_uncached(requests)), rate_per_s)


def drawn_traffic(rate_per_s: float, prompt: Lengths, output: Lengths, seed: int) -> Traffic:
    """Poisson arrivals of drawn lengths, nothing shared. Raises ConfigurationError."""
    work = RandomWork(num_requests=DRAWN, arrivals=PoissonArrivals(rate_per_s), prompt=prompt, output=output)
    name = f"{rate_per_s:g} requests/s of {prompt.mean:g} + {output.mean:g} tokens"
    return msgspec.structs.replace(read_traffic(name, work, seed), rate_per_s=rate_per_s)


def _times(requests: list[WorkRequest]) -> str:
    return f"{requests[0].due_s:g} s" if requests else "no time"


def _tick_s(requests: list[WorkRequest]) -> float:
    """Of the clock that the times were read from; 0 where most requests have a time of their own."""
    times_s = sorted({request.due_s for request in requests})
    if len(times_s) > SHARED_TIMES * len(requests):
        return 0.0
    return statistics.median(later_s - one_s for one_s, later_s in itertools.pairwise(times_s))


def _spread(requests: list[WorkRequest], tick_s: float) -> list[WorkRequest]:
    """Evenly, in their order, until the next tick."""
    spread: list[WorkRequest] = []
    for due_s, group in itertools.groupby(requests, lambda request: request.due_s):
        sharing = list(group)
        spread += (
            msgspec.structs.replace(request, due_s=due_s + place * tick_s / len(sharing))
            for place, request in enumerate(sharing)
        )
    return spread


def _span_s(requests: tuple[WorkRequest, ...]) -> float:
    """With the gap after the last, as long as the mean one."""
    between_s = requests[-1].due_s - requests[0].due_s
    return between_s * len(requests) / max(1, len(requests) - 1)


def _uncached(requests: list[WorkRequest]) -> Iterator[int]:
    """Of each prompt, what follows the longest chain of runs that was asked before; at least one token."""
    seen: set[int] = set()
    for request in requests:
        chain, num_cached, is_known = 0, 0, True
        for run in request.runs:
            chain = hash((chain, run.label, run.num_tokens))
            is_known = is_known and chain in seen
            num_cached += run.num_tokens if is_known else 0
            seen.add(chain)
        yield max(1, request.num_prompt_tokens - num_cached)

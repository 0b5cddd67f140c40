"""Closed forms: about how much a pool carries within the targets. They prune; the simulator decides.

Waiting is Sakasegawa's approximation for several servers. A mixed step carries as many prompt tokens as its streams'
requests bring in; a decode step carries streams alone.
"""

import functools
import math
import statistics
from collections.abc import Callable

import msgspec

from disagg.core.errors import ConfigurationError
from disagg.core.roles import Role
from disagg.planner.candidate import Candidate, PoolPlan, network_card
from disagg.planner.fleet import Cut, Steps
from disagg.planner.traffic import Traffic
from disagg.sim.hardware.step_model import StepShape
from disagg.sim.scenario import Slo

BUSY = 0.97  # most that a pool is planned to be busy
KV_SHARE = 0.95  # of KV that streams may hold: last blocks are not full
KV_SPREAD = 2.0  # standard deviations of what streams hold together that must fit as well
MOST_STREAMS = 512
BATCHED = 2048  # prompt tokens up to which short prompts are read together
LINK_SHARE = 0.8


class Target(msgspec.Struct, frozen=True):
    """Targets, and the share of requests that must be within both. Raises ConfigurationError for what cannot be one."""

    slo: Slo
    share: float = 0.9

    def __post_init__(self) -> None:
        slo, share = self.slo, self.share
        if not (0 < slo.ttft_s < math.inf and 0 < slo.tpot_s < math.inf and 0 < share < 1):
            text = f"targets of TTFT {slo.ttft_s:g} s, TPOT {slo.tpot_s:g} s for a share of {share:g}"
            raise ConfigurationError(f"{text}: times must be above 0 and finite, the share between 0 and 1")


class Estimate(msgspec.Struct, frozen=True):
    """Requests/s within the targets; which pool or link binds."""

    goodput_per_s: float
    bound_by: str


class Estimator:
    """For one traffic and target; remembers what cuts can do."""

    def __init__(self, steps: Steps, traffic: Traffic, target: Target, factor: float = 1.0) -> None:
        """factor: as if prompts were so many times as long."""
        self.steps = steps
        self.target = target
        self._samples = tuple(
            (max(1, round(factor * prompt)), max(1, round(factor * new)), output)
            for prompt, new, output in traffic.samples
        )
        num = len(self._samples)
        self.mean_prompt = sum(prompt for prompt, _, _ in self._samples) / num
        self.mean_uncached = sum(new for _, new, _ in self._samples) / num
        self.mean_output = sum(output for _, _, output in self._samples) / num
        tokens = [output * (prompt + output / 2) for prompt, _, output in self._samples]
        self.mean_context = sum(tokens) / sum(output for _, _, output in self._samples)
        totals = [prompt + output for prompt, _, output in self._samples]
        self._mean_total, self._spread = statistics.fmean(totals), statistics.pstdev(totals)
        self._longest = sorted(prompt + output for prompt, _, output in self._samples)[int(target.share * (num - 1))]
        self.streams_within = functools.cache(self._streams_within)
        self.decode_rate = functools.cache(self._decode_rate)
        self.prefill_rate = functools.cache(self._prefill_rate)
        self.mixed_rate = functools.cache(self._mixed_rate)

    def of(self, candidate: Candidate) -> Estimate:
        if candidate.is_mixed:
            rate = sum(self.mixed_rate(pool.cut, pool.mixed_chunk_tokens, pool.count) for pool in candidate.pools)
            return Estimate(rate, "mixed workers")
        prefill, decode = candidate.pool(Role.PREFILL), candidate.pool(Role.DECODE)
        parts = (
            (self.prefill_rate(prefill.cut, prefill.chunk_tokens, prefill.count), "prefill"),
            (decode.count * self.decode_rate(decode.cut), "decode"),
            (self._link_rate(candidate, prefill, decode), "link"),
        )
        return Estimate(*min(parts))

    def _streams_within(self, cut: Cut) -> int:
        """Most streams of a decode worker whose step is within TPOT and whose KV fits; 0 where one is too many."""
        kv_tokens = self.steps.kv_tokens(cut)
        if kv_tokens < self._longest:
            return 0
        return _most(
            min(MOST_STREAMS, self._room(kv_tokens)), lambda num: self._step_s(cut, 0, num) <= self.target.slo.tpot_s
        )

    def _room(self, kv_tokens: int) -> int:
        """Streams whose KV fits, unlike as they are: n of them hold n means and some deviations of their sum."""
        half = KV_SPREAD * self._spread / 2
        root = (-half + math.sqrt(half * half + self._mean_total * KV_SHARE * kv_tokens)) / self._mean_total
        return int(root * root)

    def _step_s(self, cut: Cut, prompt_tokens: float, num_streams: int) -> float:
        prompts = ((max(1, round(prompt_tokens)), round(self.mean_prompt / 2)),) if prompt_tokens else ()
        shape = StepShape(prompts, round(self.mean_context * num_streams), num_streams)
        return self.steps.of(cut).step_s(shape)

    def _decode_rate(self, cut: Cut) -> float:
        """Of one worker."""
        num = self.streams_within(cut)
        return num / (self.mean_output * self._step_s(cut, 0, num)) if num else 0.0

    def _prefill_rate(self, cut: Cut, chunk_tokens: int, count: int) -> float:
        if self.steps.kv_tokens(cut) < self._longest:
            return 0.0
        times_s = [self.prompt_s(cut, new, prompt - new, chunk_tokens) for prompt, new, _ in self._samples]
        return _queued_rate(times_s, count, self.target)

    def prompt_s(self, cut: Cut, new: int, cached: int, chunk_tokens: int) -> float:
        """Seconds of a worker that a prompt takes; short ones are read together."""
        model = self.steps.of(cut)
        together = max(1, min(8, BATCHED // new))
        if together > 1:
            return model.step_s(StepShape(((new, cached),) * together)) / together
        full, rest = divmod(new, chunk_tokens)
        seconds = model.step_s(StepShape(((rest, cached + new - rest),))) if rest else 0.0
        if full:  # the middle one stands for all: attention grows evenly
            middle = cached + (full - 1) * chunk_tokens // 2
            seconds += full * model.step_s(StepShape(((chunk_tokens, middle),)))
        return seconds

    def _mixed_rate(self, cut: Cut, chunk_tokens: int, count: int) -> float:
        kv_tokens = self.steps.kv_tokens(cut)
        if kv_tokens < self._longest:
            return 0.0
        per_stream = self.mean_uncached / self.mean_output  # prompt tokens a step must read for each stream
        room = self._room(kv_tokens)

        def is_within(num: int) -> bool:
            read = num * per_stream
            if read > BUSY * chunk_tokens or self._step_s(cut, read, num) > self.target.slo.tpot_s:
                return False
            chunk_s = self._step_s(cut, chunk_tokens, num)
            times_s = [new / chunk_tokens * chunk_s for _, new, _ in self._samples]
            rate = num / (self.mean_output * self._step_s(cut, read, num))
            return rate * count <= _queued_rate(times_s, count, self.target)

        num = _most(min(MOST_STREAMS, room), is_within)
        return count * num / (self.mean_output * self._step_s(cut, num * per_stream, num)) if num else 0.0

    def _link_rate(self, candidate: Candidate, prefill: PoolPlan, decode: PoolPlan) -> float:
        fleet = self.steps.fleet
        per_request = self.mean_prompt * self.steps.of(prefill.cut).kv_bytes_per_token
        pools = (prefill, decode)
        narrowest = min(
            pool.count * network_card(fleet, pool.cut, candidate.kv_wire).bandwidth_bytes_s for pool in pools
        )
        return LINK_SHARE * narrowest / per_request


def _most(limit: int, is_within: Callable[[int], bool]) -> int:
    """Largest number up to the limit that is within; 0 if 1 is not. What is within stays so below."""
    low, high = 0, limit + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_within(middle) else (low, middle)
    return low


def _queued_rate(times_s: list[float], count: int, target: Target) -> float:
    """Requests/s at which `count` servers keep the given share of requests within TTFT, waiting included."""
    ordered = sorted(times_s)
    mean_s = sum(ordered) / len(ordered)
    slack_s = target.slo.ttft_s - ordered[int(target.share * (len(ordered) - 1))]
    if slack_s <= 0:
        return 0.0
    varied = sum(each * each for each in ordered) / len(ordered) / mean_s**2 / 2  # Poisson arrivals
    power = math.sqrt(2 * (count + 1)) - 1
    low, high = 0.0, BUSY
    for _ in range(20):
        busy = (low + high) / 2
        wait_s = varied * busy**power / (count * (1 - busy)) * mean_s
        low, high = (busy, high) if wait_s <= slack_s else (low, busy)
    return low * count / mean_s

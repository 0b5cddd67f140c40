"""What serving on one machine adds to an engine's own steps: the worker's loop, the router, HTTP, busy neighbours.

All of it is fitted to times that a client saw of a server whose load was held steady (`ServedTimes`), never to traffic.
"""

import statistics
from collections.abc import Iterable, Sequence

import msgspec

from disagg.core.errors import ConfigurationError
from disagg.policy.step_time import StepCosts

NUM_HOPS = 4  # messages before a first token: start, question and answer of the reservation, the token's way back


class Contention(msgspec.Struct, frozen=True):
    """How many times as long a step takes beside one of another worker of its machine, by what the two compute."""

    prompts_beside_prompts: float = 1.0
    prompts_beside_streams: float = 1.0
    streams_beside_prompts: float = 1.0
    streams_beside_streams: float = 1.0

    def __post_init__(self) -> None:
        for name, value in msgspec.structs.asdict(self).items():
            if not 1.0 <= value < float("inf"):
                raise ConfigurationError(f"{name} is {value:g}: a neighbour makes no step shorter; give 1 or more")

    def slowdown(self, own: float, others: Iterable[float]) -> float:
        """own, others: the part of each step's time, 0 to 1, that goes to prompts. What several cost adds up."""
        return 1.0 + sum(self._beside(own, other) - 1.0 for other in others)

    def _beside(self, own: float, other: float) -> float:
        prompts = other * self.prompts_beside_prompts + (1 - other) * self.prompts_beside_streams
        streams = other * self.streams_beside_prompts + (1 - other) * self.streams_beside_streams
        return own * prompts + (1 - own) * streams


class ServedPrompt(msgspec.Struct, frozen=True):
    """TTFT of a prompt of so many tokens that nothing else ran beside."""

    num_tokens: int
    ttft_s: float


class ServedGap(msgspec.Struct, frozen=True):
    """Time from token to token of each of num_streams on one worker, at a mean context, while no other worker ran."""

    num_streams: int
    context: float  # tokens that each attends to
    gap_s: float


class ServedTimes(msgspec.Struct, frozen=True):
    """Medians of what a client saw. The beside ones: the same work while another worker of the machine was busy."""

    prompts: tuple[ServedPrompt, ...]
    gaps: tuple[ServedGap, ...]
    first_gap_s: float  # of a lone answer whose prompt was handed off
    prompt_tokens: int  # of the TTFTs below
    ttft_beside_prompts_s: float
    ttft_beside_streams_s: float
    num_streams: int  # of the gaps below, on one worker
    gap_beside_prompts_s: float
    gap_beside_streams_s: float


class LoneTimes(msgspec.Struct, frozen=True):
    """Medians of what a lone client sees: TTFT of prompts of prompt_tokens, gaps of one stream at a mean context."""

    prompt_tokens: int
    ttft_s: float
    context: float
    gap_s: float


class Speed(msgspec.Struct, frozen=True):
    """How many times as long things take as when they were profiled: reading prompts, and steps of streams."""

    prompts: float = 1.0
    streams: float = 1.0

    def mean_with(self, other: "Speed") -> "Speed":
        return Speed((self.prompts + other.prompts) / 2, (self.streams + other.streams) / 2)


class Serving(msgspec.Struct, frozen=True):
    """costs: steps as they are served, in place of the engine's own."""

    costs: StepCosts
    request_s: float = 0.0  # of each request, beside its steps and its messages: HTTP, its body, its first event
    handoff_s: float = 0.0  # what a hand-off adds to a first gap when nothing else moves
    contention: Contention = Contention()

    def speed_of(self, lone: LoneTimes, message_s: float) -> Speed:
        """Of a machine on which a lone client sees this. message_s: see Scenario."""
        costs = self.costs
        streams = lone.gap_s / (costs.base_s + costs.stream_s + costs.context_token_s * lone.context)
        reading_s = costs.prompt_token_s * lone.prompt_tokens + _pairs_s(costs, lone.prompt_tokens)
        rest_s = lone.ttft_s - self.request_s - NUM_HOPS * message_s - streams * costs.base_s
        return Speed(max(0.0, rest_s) / reading_s, streams)

    def at(self, speed: Speed) -> "Serving":
        """On a machine of that speed."""
        costs = StepCosts(
            base_s=speed.streams * self.costs.base_s,
            prompt_token_s=speed.prompts * self.costs.prompt_token_s,
            prompt_pair_s=speed.prompts * self.costs.prompt_pair_s,
            stream_s=speed.streams * self.costs.stream_s,
            context_token_s=speed.streams * self.costs.context_token_s,
        )
        return msgspec.structs.replace(self, costs=costs)


def fit_serving(engine: StepCosts, times: ServedTimes, message_s: float) -> Serving:
    """engine: costs of its steps alone, whose shares for pairs and contexts stay. message_s: see Scenario.

    Raises ConfigurationError where too little was measured.
    """
    if len({gap.num_streams for gap in times.gaps}) < 2 or len({each.num_tokens for each in times.prompts}) < 2:
        text = f"{len(times.prompts)} prompts and {len(times.gaps)} gaps were timed"
        raise ConfigurationError(f"{text}: a fit needs two lengths of prompts and two numbers of streams")
    base_s, stream_s = _line(
        [
            (gap.num_streams, gap.gap_s - engine.context_token_s * gap.num_streams * gap.context, gap.gap_s)
            for gap in times.gaps
        ]
    )
    fixed_s, prompt_token_s = _line(
        [(each.num_tokens, each.ttft_s - _pairs_s(engine, each.num_tokens), each.ttft_s) for each in times.prompts]
    )
    costs = msgspec.structs.replace(engine, base_s=base_s, stream_s=stream_s, prompt_token_s=prompt_token_s)
    return Serving(
        costs=costs,
        request_s=max(0.0, fixed_s - base_s - NUM_HOPS * message_s),
        handoff_s=max(0.0, times.first_gap_s - (base_s + stream_s)),
        contention=_contention(costs, times, fixed_s - base_s),
    )


def _contention(costs: StepCosts, times: ServedTimes, around_s: float) -> Contention:
    """around_s: of a TTFT, what no neighbour slows down."""
    step_s = costs.base_s + costs.prompt_token_s * times.prompt_tokens + _pairs_s(costs, times.prompt_tokens)
    alone_s = statistics.median([gap.gap_s for gap in times.gaps if gap.num_streams == times.num_streams])
    return Contention(
        prompts_beside_prompts=max(1.0, (times.ttft_beside_prompts_s - around_s) / step_s),
        prompts_beside_streams=max(1.0, (times.ttft_beside_streams_s - around_s) / step_s),
        streams_beside_prompts=max(1.0, times.gap_beside_prompts_s / alone_s),
        streams_beside_streams=max(1.0, times.gap_beside_streams_s / alone_s),
    )


def _pairs_s(costs: StepCosts, num_tokens: int) -> float:
    return costs.prompt_pair_s * num_tokens * (num_tokens + 1) / 2


def _line(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """(start, slope), both 0 or more, of (x, y, what an error is relative to) by least squares of relative errors."""
    weights = [1.0 / scale**2 for _, _, scale in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y, _) in zip(weights, points, strict=True)) / total
    square = sum(w * (x - mean_x) ** 2 for w, (x, _, _) in zip(weights, points, strict=True))
    slope = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y, _) in zip(weights, points, strict=True)) / square
    if slope < 0:
        return max(0.0, mean_y), 0.0
    start = mean_y - slope * mean_x
    if start < 0:
        through = sum(w * x * y for w, (x, y, _) in zip(weights, points, strict=True))
        return 0.0, through / sum(w * x * x for w, (x, _, _) in zip(weights, points, strict=True))
    return start, slope

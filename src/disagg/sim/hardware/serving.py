"""What serving on one machine adds to an engine's own steps: the worker's loop, the router, HTTP, busy neighbours.

All of it is fitted to times that a client and the server's own timelines saw of loads that were held steady
(`ServedTimes`), never to traffic. What a neighbour costs is seen in turns, within seconds: a machine that is shared
with others changes its speed by more than that from one minute to the next.
"""

import statistics
from collections.abc import Iterable, Sequence

import msgspec

from disagg.core.errors import ConfigurationError
from disagg.policy.step_time import StepCosts, chunk_context

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
    """A prompt of so many tokens that nothing else ran beside: its TTFT, and the step that read it."""

    num_tokens: int
    ttft_s: float
    step_s: float


class ServedGap(msgspec.Struct, frozen=True):
    """Time from token to token of each of num_streams on one worker, at a mean context, while no other worker ran."""

    num_streams: int
    context: float  # tokens that each attends to
    gap_s: float


class ServedTurns(msgspec.Struct, frozen=True):
    """The same work in one load: while another worker of the machine was idle, and while it was busy."""

    alone_s: float
    beside_s: float


class ServedTimes(msgspec.Struct, frozen=True):
    """Medians. The last four: TTFT of prompts and gaps of streams beside either, once for each load of the kind."""

    prompts: tuple[ServedPrompt, ...]
    gaps: tuple[ServedGap, ...]
    handoff_s: float  # of a lone answer's first gap, what is not the step
    prompts_beside_prompts: tuple[ServedTurns, ...]
    prompts_beside_streams: tuple[ServedTurns, ...]
    streams_beside_prompts: tuple[ServedTurns, ...]
    streams_beside_streams: tuple[ServedTurns, ...]


class LoneTimes(msgspec.Struct, frozen=True):
    """Medians of a lone client: steps that read prompts of prompt_tokens, gaps of one stream at a mean context."""

    prompt_tokens: int
    step_s: float
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
    prompt_step_s: float = 0.0  # what a step takes more, or less, than costs say because it reads prompts at all

    def step_of_prompt_s(self, num_tokens: int) -> float:
        """A step that reads one prompt and does nothing else."""
        return self.costs.base_s + self.prompt_step_s + self.costs.chunk_s(0, num_tokens)

    def speed_of(self, lone: LoneTimes) -> Speed:
        """Of a machine on which a lone client sees this."""
        costs = self.costs
        streams = lone.gap_s / (costs.base_s + costs.stream_s + costs.context_token_s * lone.context)
        return Speed(lone.step_s / self.step_of_prompt_s(lone.prompt_tokens), streams)

    def at(self, speed: Speed) -> "Serving":
        """On a machine of that speed."""
        costs = StepCosts(
            base_s=speed.streams * self.costs.base_s,
            prompt_token_s=speed.prompts * self.costs.prompt_token_s,
            prompt_pair_s=speed.prompts * self.costs.prompt_pair_s,
            stream_s=speed.streams * self.costs.stream_s,
            context_token_s=speed.streams * self.costs.context_token_s,
        )
        prompt_step_s = speed.prompts * (self.costs.base_s + self.prompt_step_s) - costs.base_s
        return msgspec.structs.replace(self, costs=costs, prompt_step_s=prompt_step_s)


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
        [
            (each.num_tokens, each.step_s - engine.prompt_pair_s * chunk_context(0, each.num_tokens), each.step_s)
            for each in times.prompts
        ]
    )
    around_s = max(0.0, statistics.median(each.ttft_s - each.step_s for each in times.prompts))
    return Serving(
        costs=msgspec.structs.replace(engine, base_s=base_s, stream_s=stream_s, prompt_token_s=prompt_token_s),
        request_s=max(0.0, around_s - NUM_HOPS * message_s),
        handoff_s=max(0.0, times.handoff_s),
        contention=Contention(
            prompts_beside_prompts=_slowdown(times.prompts_beside_prompts, around_s),
            prompts_beside_streams=_slowdown(times.prompts_beside_streams, around_s),
            streams_beside_prompts=_slowdown(times.streams_beside_prompts, 0.0),
            streams_beside_streams=_slowdown(times.streams_beside_streams, 0.0),
        ),
        prompt_step_s=fixed_s - base_s,
    )


def _slowdown(turns: Sequence[ServedTurns], around_s: float) -> float:
    """1 or more. around_s: of each time, what no neighbour slows down."""
    ratios = [(each.beside_s - around_s) / (each.alone_s - around_s) for each in turns if each.alone_s > around_s]
    return max(1.0, statistics.median(ratios)) if ratios else 1.0


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

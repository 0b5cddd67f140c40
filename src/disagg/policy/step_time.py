"""How long a step takes, learned from the steps that were run.

seconds = base + a x prompt tokens + b x (prompt tokens x what each attends to) + c x streams + d x their context

Recursive least squares with forgetting. Three things make it fit for steering a live worker: an observation counts by
its relative error, and by 1 / seconds^2, so that a step that was paused for long says almost nothing; coefficients
never fall below 0, so that predictions never fall when a step grows; and where the data are silent (a worker that has
not decoded for an hour) the last estimate stays.
"""

import math
from collections import deque

import msgspec

from disagg.core.errors import InternalFault

MIN_OBSERVED = 8  # steps before predictions are good for more than a rough idea
FORGETTING = 0.99  # weight of an observation, for each one after it: the last hundred or so count
INERTIA = 0.005  # in observations: what holds a coefficient where it is while the data say little of it
SWEEPS = 4  # of coordinate descent per observation; it starts from the last solution
MAX_RATIOS = 9  # observed / predicted, of the last steps: half of them must be off before the device has changed
MIN_RATIOS = 5
MAX_OFF = 1.5
STALE = 0.1  # what past observations still count once the device has changed


class StepShape(msgspec.Struct, frozen=True):
    """What a step computes, as far as its time depends on it."""

    num_prompt_tokens: int = 0
    prompt_context: int = 0  # pairs of a prompt token and a token it attends to (itself included)
    num_streams: int = 0
    stream_context: int = 0  # tokens that the streams attend to, summed

    def add_chunk(self, position: int, num_tokens: int) -> "StepShape":
        """This, and num_tokens of a prompt from `position` on."""
        return StepShape(
            self.num_prompt_tokens + num_tokens,
            self.prompt_context + chunk_context(position, num_tokens),
            self.num_streams,
            self.stream_context,
        )

    def add_context(self, num_tokens: int) -> "StepShape":
        """This, with streams that attend to so many tokens more."""
        context = self.stream_context + num_tokens
        return StepShape(self.num_prompt_tokens, self.prompt_context, self.num_streams, context)


def chunk_context(position: int, num_tokens: int) -> int:
    """Pairs of one of num_tokens tokens from `position` on and a token it attends to."""
    return num_tokens * position + num_tokens * (num_tokens + 1) // 2


class StepCosts(msgspec.Struct, frozen=True):
    """The coefficients, all in seconds and 0 or more. The defaults are a guess between a laptop and a large GPU."""

    base_s: float = 0.01
    prompt_token_s: float = 1e-4
    prompt_pair_s: float = 1e-8
    stream_s: float = 5e-4
    context_token_s: float = 1e-7

    def predict(self, shape: StepShape) -> float:
        """Seconds; 0 or more, and never less for a step that does more."""
        return (
            self.base_s
            + self.prompt_token_s * shape.num_prompt_tokens
            + self.prompt_pair_s * shape.prompt_context
            + self.stream_s * shape.num_streams
            + self.context_token_s * shape.stream_context
        )

    def chunk_s(self, position: int, num_tokens: int) -> float:
        """Seconds that a chunk adds to a step."""
        return self.prompt_token_s * num_tokens + self.prompt_pair_s * chunk_context(position, num_tokens)

    def tokens_within(self, seconds: float, position: int, max_tokens: int) -> int:
        """Most tokens of a prompt, from `position` on, that add at most this much to a step; 0 to max_tokens."""
        if seconds <= 0 or max_tokens <= 0:
            return 0
        slope = self.prompt_token_s + self.prompt_pair_s * (position + 0.5)
        divisor = slope + math.sqrt(slope * slope + 2 * self.prompt_pair_s * seconds)
        if divisor * max_tokens <= 2 * seconds:
            return max_tokens
        num_tokens = int(2 * seconds / divisor)
        return num_tokens if self.chunk_s(position, num_tokens) <= seconds else num_tokens - 1


class StepTimes:
    """Costs of one worker's steps, learned as they finish. Bounded: a few dozen numbers."""

    def __init__(self, known: StepCosts | None = None) -> None:
        """known: what steps cost as far as was seen before, good enough to steer by from the first one on."""
        self.costs = known or StepCosts()
        self.num_observed = MIN_OBSERVED if known else 0
        # What is much, for each coefficient; known ones may be 0.
        pairs = zip(*map(msgspec.structs.astuple, (self.costs, StepCosts())), strict=True)
        self._scales = [cost or guess for cost, guess in pairs]
        size = len(self._scales)
        self._gram = [[0.0] * size for _ in range(size)]
        self._moment = [0.0] * size
        self._ratios: deque[float] = deque(maxlen=MAX_RATIOS)

    @property
    def is_learned(self) -> bool:
        """Whether enough steps were seen to steer by."""
        return self.num_observed >= MIN_OBSERVED

    def predict(self, shape: StepShape) -> float:
        """Seconds; see StepCosts.predict."""
        return self.costs.predict(shape)

    def observe(self, shape: StepShape, seconds: float) -> None:
        """A step of this shape took this long. What no clock can have measured is ignored."""
        if not (0 < seconds < math.inf):
            return
        self.num_observed += 1
        self._ratios.append(seconds / max(self.costs.predict(shape), 1e-12))
        self._rescale_if_off()
        self._add(shape, seconds)
        self._solve()

    def check_invariants(self) -> None:
        costs = msgspec.structs.astuple(self.costs)
        if not all(0 <= cost < math.inf for cost in costs):
            raise InternalFault(f"step costs {costs} must be finite and 0 or more")

    def _rescale_if_off(self) -> None:
        """Half of the last steps far off the same way: another device than was known, or a throttled one."""
        if len(self._ratios) < MIN_RATIOS:
            return
        median = sorted(self._ratios)[len(self._ratios) // 2]
        if 1 / MAX_OFF <= median <= MAX_OFF:
            return
        self._ratios.clear()
        self.costs = StepCosts(*(median * cost for cost in msgspec.structs.astuple(self.costs)))
        self._scales = [median * scale for scale in self._scales]
        # As if all past steps had taken `median` times as long.
        self._gram = [[STALE / median**2 * value for value in row] for row in self._gram]
        self._moment = [STALE / median * value for value in self._moment]

    def _add(self, shape: StepShape, seconds: float) -> None:
        row = (1.0, *map(float, msgspec.structs.astuple(shape)))
        weight = 1.0 / max(seconds, self.costs.predict(shape)) ** 2
        first, second, third, fourth, fifth = row
        moment = self._moment
        for index, (a, b, c, d, e) in enumerate(self._gram):  # written out: it is done after every step
            weighted = weight * row[index]
            self._gram[index] = [
                FORGETTING * a + weighted * first,
                FORGETTING * b + weighted * second,
                FORGETTING * c + weighted * third,
                FORGETTING * d + weighted * fourth,
                FORGETTING * e + weighted * fifth,
            ]
            moment[index] = FORGETTING * moment[index] + weighted * seconds

    def _solve(self) -> None:
        """Least squares over costs of 0 or more, held near the last ones where the data say nothing."""
        last = msgspec.structs.astuple(self.costs)
        holds = [INERTIA / max(scale, old) ** 2 for scale, old in zip(self._scales, last, strict=True)]
        held = [hold * old for hold, old in zip(holds, last, strict=True)]
        (a0, b0, c0, d0, e0), (a1, b1, c1, d1, e1), (a2, b2, c2, d2, e2), *rest = self._gram
        (a3, b3, c3, d3, e3), (a4, b4, c4, d4, e4) = rest
        own0, own1, own2, own3, own4 = a0 + holds[0], b1 + holds[1], c2 + holds[2], d3 + holds[3], e4 + holds[4]
        m0, m1, m2, m3, m4 = self._moment
        h0, h1, h2, h3, h4 = held
        u, v, w, x, y = last
        for _ in range(SWEEPS):  # written out, since it is done after every step
            u = z if (z := (m0 - (a0 * u + b0 * v + c0 * w + d0 * x + e0 * y - a0 * u) + h0) / own0) > 0.0 else 0.0
            v = z if (z := (m1 - (a1 * u + b1 * v + c1 * w + d1 * x + e1 * y - b1 * v) + h1) / own1) > 0.0 else 0.0
            w = z if (z := (m2 - (a2 * u + b2 * v + c2 * w + d2 * x + e2 * y - c2 * w) + h2) / own2) > 0.0 else 0.0
            x = z if (z := (m3 - (a3 * u + b3 * v + c3 * w + d3 * x + e3 * y - d3 * x) + h3) / own3) > 0.0 else 0.0
            y = z if (z := (m4 - (a4 * u + b4 * v + c4 * w + d4 * x + e4 * y - e4 * y) + h4) / own4) > 0.0 else 0.0
        self.costs = StepCosts(u, v, w, x, y)

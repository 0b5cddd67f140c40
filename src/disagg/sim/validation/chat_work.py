"""Chats by the quantiles of their lengths, stretched to the published means, cut where a model's context ends."""

import functools
import random
from bisect import bisect_right
from collections.abc import Iterator
from itertools import pairwise

import msgspec

from disagg.bench.arrivals import Arrivals
from disagg.bench.workload import FIRST_LABEL, OpenStream, Run, WorkRequest, WorkStream
from disagg.core.errors import ConfigurationError

# Of 1593 ShareGPT chats that DistServe's own runs were made of (LLMServe/DistServe 20a1633, simdistserve/benchmarks/
# alignment, *.exp: prompt_len, output_len): every twentieth, then 99 and 100 %. Prompts and answers hardly correlate
# (-0.13) and are drawn apart.
SHARES = (*(n / 20 for n in range(20)), 0.99, 1.0)
# fmt: off
PROMPTS = (
    2, 25, 89, 166, 244, 316, 379, 454, 518, 603, 685,
    772, 858, 954, 1044, 1149, 1277, 1421, 1546, 1723, 1922, 2031,
)
ANSWERS = (
    1, 6, 9, 12, 15, 18, 22, 28, 36, 53, 78,
    115, 159, 212, 258, 304, 350, 407, 512, 648, 969, 1809,
)
# fmt: on
_SAMPLE = 10_000
_ROUNDS = 10
_TRIES = 10_000


class ChatWork(msgspec.Struct, frozen=True, kw_only=True):
    """Pairs beyond max_total are redrawn, and what is left has these means.

    Earlier requests have the higher priority: the systems that are compared serve in order of arrival.
    """

    num_requests: int
    arrivals: Arrivals
    mean_prompt: float
    mean_answer: float
    max_total: int

    def start(self, rng: random.Random) -> WorkStream:
        """Raises ConfigurationError for means that the cut leaves no room for."""
        return OpenStream(self._requests(rng))

    def _requests(self, rng: random.Random) -> Iterator[WorkRequest]:
        scales = uncut_means(self.mean_prompt, self.mean_answer, self.max_total)
        for number, due_s in zip(range(self.num_requests), self.arrivals.times_s(rng), strict=False):
            prompt, answer = draw_pair(rng, *scales, self.max_total)
            yield WorkRequest(number, due_s, (Run(FIRST_LABEL + number, prompt),), answer, priority=-number)


def draw_pair(rng: random.Random, prompt: float, answer: float, max_total: int) -> tuple[int, int]:
    """Tokens of prompt and answer, drawn with these means until both fit."""
    stretch = (prompt / mean_of(PROMPTS), answer / mean_of(ANSWERS))
    for _ in range(_TRIES):
        pair = (_draw(rng, PROMPTS, stretch[0]), _draw(rng, ANSWERS, stretch[1]))
        if sum(pair) < max_total:
            return pair
    raise ConfigurationError(f"prompts of {prompt:g} and answers of {answer:g} tokens hardly ever fit into {max_total}")


@functools.cache
def mean_of(quantiles: tuple[int, ...]) -> float:
    """Of numbers spread evenly between these quantiles at SHARES."""
    pieces = zip(pairwise(SHARES), pairwise(quantiles), strict=True)
    return sum((after - before) * (low + high) / 2 for (before, after), (low, high) in pieces)


def _draw(rng: random.Random, quantiles: tuple[int, ...], stretch: float) -> int:
    share = rng.random()
    place = bisect_right(SHARES, share) - 1
    low, high = quantiles[place : place + 2]
    part = (share - SHARES[place]) / (SHARES[place + 1] - SHARES[place])
    return max(1, round(stretch * (low + part * (high - low))))


@functools.cache
def uncut_means(prompt: float, answer: float, max_total: int) -> tuple[float, float]:
    """Means before the cut that leave these means after it; found by a fixed sample."""
    if prompt + answer >= max_total:
        raise ConfigurationError(f"prompts of {prompt:g} and answers of {answer:g} tokens do not fit into {max_total}")
    before = (prompt, answer)
    for _ in range(_ROUNDS):
        rng = random.Random(0)
        pairs = [draw_pair(rng, *before, max_total) for _ in range(_SAMPLE)]
        prompts, answers = zip(*pairs, strict=True)
        before = (before[0] * prompt * _SAMPLE / sum(prompts), before[1] * answer * _SAMPLE / sum(answers))
    return before

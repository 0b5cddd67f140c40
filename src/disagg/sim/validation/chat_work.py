"""Chats whose mean lengths are published and whose lengths are not: long-tailed, cut where a model's context ends."""

import functools
import random
from collections.abc import Iterator

import msgspec

from disagg.bench.arrivals import Arrivals
from disagg.bench.workload import FIRST_LABEL, OpenStream, Run, WorkRequest, WorkStream
from disagg.core.errors import ConfigurationError

# Standard deviation / mean of the ShareGPT chats of fewer than 2048 tokens that Sarathi-Serve publishes the lengths of
# (openchat_sharegpt4, Llama 2's tokenizer: sharegpt_8k_filtered_stats_llama2_tokenizer.csv); their means are others.
PROMPT_CV = 0.84
ANSWER_CV = 0.66
_SAMPLE = 20_000
_ROUNDS = 12
_TRIES = 10_000


class ChatWork(msgspec.Struct, frozen=True, kw_only=True):
    """Gamma lengths with these means and, before they are cut, those deviations; pairs beyond max_total are redrawn.

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
    for _ in range(_TRIES):
        pair = max(1, round(_gamma(rng, prompt, PROMPT_CV))), max(1, round(_gamma(rng, answer, ANSWER_CV)))
        if sum(pair) < max_total:
            return pair
    raise ConfigurationError(f"prompts of {prompt:g} and answers of {answer:g} tokens hardly ever fit into {max_total}")


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


def _gamma(rng: random.Random, mean: float, cv: float) -> float:
    return rng.gammavariate(1 / cv**2, mean * cv**2)

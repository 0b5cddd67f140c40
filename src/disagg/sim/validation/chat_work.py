"""Chats whose mean lengths are published and whose lengths are not: long-tailed, cut where a model's context ends."""

import functools
import random
from collections.abc import Iterator

import msgspec

from disagg.bench.arrivals import Arrivals
from disagg.bench.workload import FIRST_LABEL, OpenStream, Run, WorkRequest, WorkStream
from disagg.core.errors import ConfigurationError

# Shapes of gamma distributions. Of the ShareGPT chats whose lengths Sarathi-Serve publishes, those of fewer than 2048
# tokens (sharegpt_8k_filtered_stats_llama2_tokenizer.csv), logarithms of lengths deviate by 1.48 and 1.08. A shape of
# 1.2 gives the answers'; very short ones are what a stall shows in most. The prompts' would need 0.7, which the cut
# leaves no room for with prompts as long as those of the published experiments: 1 deviates by 1.2.
PROMPT_SHAPE = 1.0
ANSWER_SHAPE = 1.2
_SAMPLE = 10_000
_ROUNDS = 10
_TRIES = 10_000


class ChatWork(msgspec.Struct, frozen=True, kw_only=True):
    """Gamma lengths; pairs beyond max_total are redrawn, and what is left has these means.

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
        pair = (
            max(1, round(rng.gammavariate(PROMPT_SHAPE, prompt / PROMPT_SHAPE))),
            max(1, round(rng.gammavariate(ANSWER_SHAPE, answer / ANSWER_SHAPE))),
        )
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

"""Seeded bursts far above what a small cluster can do, in virtual time: all get an end, and then all is as before.

before   the same work in a closed loop: seconds, and those of one probe alone
burst    many times more than the pools hold, within a second; some clients leave; no retries
after    the closed loop and the probe again, with prompts that are not cached
"""

import os
import random
import statistics
from collections import Counter
from functools import partial

import msgspec
import pytest

from disagg.core.errors import Overloaded, Unavailable
from disagg.core.ids import RequestId, SequenceId
from disagg.core.request import SamplingParams
from disagg.core.roles import Role
from disagg.dispatch.dispatcher import Dispatcher
from disagg.dispatch.stream import GenerateRequest
from disagg.policy.recovery import RecoveryLimits
from disagg.telemetry.metrics import PREEMPTIONS, REJECTIONS
from disagg.testing.engine import expected_tokens
from disagg.testing.virtual import MODEL, VirtualCluster
from disagg.testing.virtual_time import Timing

NUM_BURSTS = int(os.environ.get("DISAGG_BURSTS", "3"))
NUM_CLIENTS, NUM_REQUESTS, BURST = 8, 40, 70
MAX_QUEUE_S = 1.0
MAX_OPEN, MAX_SHARE = 40, 8.0
TOLERANCE = 0.05  # simultaneous events may fall otherwise, by the last bit of the time: up to 4 % of so few requests
MIN_SHARE_DURING = 0.5


class Site:
    """One cluster and what its clients were told."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.cluster = VirtualCluster(seed, timing=Timing(jitter=1.0))
        config = msgspec.structs.replace(
            self.cluster.dispatcher.config,
            max_open_requests=MAX_OPEN,
            max_claimed_share=MAX_SHARE,
            recovery=RecoveryLimits(max_queue_s=MAX_QUEUE_S),
        )
        self.cluster.dispatcher = Dispatcher(config)
        self.cluster.start_worker("prefill-0", Role.PREFILL, num_blocks=self.random.choice([20, 40]))
        headroom = self.random.choice([0, 2, 4])
        self.cluster.start_worker("decode-0", Role.DECODE, num_blocks=30, answer_headroom=headroom)
        self.cluster.time.run(until=lambda: self.cluster.is_ready)
        self.retry_after_s: list[float] = []  # of those turned away at once
        self.told: Counter[str] = Counter()

    def request(self, num_prompt: int, max_tokens: int) -> GenerateRequest:
        prompt = tuple(self.random.randrange(1000) for _ in range(num_prompt))
        sampling = SamplingParams(max_tokens, temperature=1.0, seed=self.random.randrange(2**32))
        return GenerateRequest(MODEL, prompt, sampling)

    def try_submit(self, request: GenerateRequest) -> RequestId | None:
        try:
            return self.cluster.submit(request)
        except Overloaded as error:
            self.retry_after_s.append(error.retry_after_s)
            return None

    def closed_loop(self, lengths: list[tuple[int, int]]) -> float:
        """Tokens per second while so many clients ask for these, one after the other."""
        waiting, opened = list(lengths), set[RequestId]()
        start_s = self.cluster.time.now_s

        def is_done() -> bool:
            opened.difference_update([each for each in opened if self.cluster.answers[each].is_over])
            while waiting and len(opened) < NUM_CLIENTS:
                opened.add(self.cluster.submit(self.request(*waiting.pop(0))))
            return not opened

        self.cluster.time.run(until=is_done)
        return sum(max_tokens for _, max_tokens in lengths) / (self.cluster.time.now_s - start_s)

    def throughput(self, lengths: list[tuple[int, int]]) -> float:
        """Median of three loops: events that fall together now and then cost one loop a tenth."""
        return statistics.median(self.closed_loop(lengths) for _ in range(3))

    def probe(self) -> float:
        """Seconds that one answer takes alone."""
        start_s = self.cluster.time.now_s
        request_id = self.cluster.submit(self.request(30, 10))
        self.cluster.time.run(until=lambda: self.cluster.answers[request_id].is_over)
        assert self.cluster.answers[request_id].error is None
        return self.cluster.time.now_s - start_s

    def burst(self) -> float:
        """Everybody at once; tokens per second until the last has its end."""
        start_s, num_before = self.cluster.time.now_s, self.num_tokens()
        for _ in range(BURST):
            self.cluster.time.after(self.random.uniform(0, 1), self._one_of_the_burst)
        self.cluster.time.run_for(1.0)
        self.cluster.time.run(until=lambda: self.cluster.are_all_over)
        return (self.num_tokens() - num_before) / (self.cluster.time.now_s - start_s)

    def _one_of_the_burst(self) -> None:
        request_id = self.try_submit(self.request(*draw_lengths(self.random)))
        if request_id is not None and self.random.random() < 0.3:
            self.cluster.time.after(self.random.uniform(0, 2), partial(self._leave, request_id))

    def _leave(self, request_id: RequestId) -> None:
        if not self.cluster.answers[request_id].is_over:
            self.cluster.abort(request_id)
            self.told["left"] += 1

    def num_tokens(self) -> int:
        return sum(len(tokens) for answer in self.cluster.answers.values() for tokens in answer.tokens)

    def check_answers(self) -> None:
        """Whole and equal, or an explicit error with a time to come back; what came before it is right too."""
        layout = next(iter(self.cluster.workers.values())).card.layout
        for request_id, answer in self.cluster.answers.items():
            request, tokens = answer.request, answer.tokens[0]
            expected = expected_tokens(layout, SequenceId(request_id, 0), request.prompt_ids, request.sampling)
            if answer.error is None and not answer.is_aborted:
                assert tokens == expected
                self.told["answered"] += 1
                continue
            assert tokens == expected[: len(tokens)]
            if answer.error is not None:
                assert isinstance(answer.error, Unavailable)
                assert f"{MAX_QUEUE_S:g} s behind others (--max-queue-s)" in str(answer.error)
                assert 1.0 <= answer.error.retry_after_s <= 60.0
                assert not tokens
                self.told["queued too long"] += 1


def draw_lengths(rng: random.Random) -> tuple[int, int]:
    """(prompt tokens, answer tokens)"""
    return rng.randint(8, 40), rng.randint(4, 24)


@pytest.mark.parametrize("seed", range(NUM_BURSTS))
def test_after_a_burst_all_is_as_before(seed: int) -> None:
    site = Site(seed)
    lengths = [draw_lengths(site.random) for _ in range(NUM_REQUESTS)]
    probe_before_s, before = site.probe(), site.throughput(lengths)
    during = site.burst()
    probe_after_s, after = site.probe(), site.throughput(lengths)
    site.check_answers()
    preempted = sum(worker.scheduler.counters.get(PREEMPTIONS) for worker in site.cluster.workers.values())

    assert probe_after_s == pytest.approx(probe_before_s, rel=TOLERANCE)
    assert after > (1 - TOLERANCE) * before
    assert during > MIN_SHARE_DURING * before  # most of the work is for those who get an answer
    assert preempted > 0
    assert site.retry_after_s
    assert all(1.0 <= each <= 60.0 for each in site.retry_after_s)
    assert site.told["queued too long"] > 0
    assert site.told["answered"] > NUM_REQUESTS * 2 + 2  # all of both loops and probes, and some of the burst
    counters = site.cluster.dispatcher.counters
    assert counters.get(REJECTIONS, "queued_too_long") == site.told["queued too long"]
    turned_away = counters.get(REJECTIONS, "overloaded") + counters.get(REJECTIONS, "too_many_requests")
    assert turned_away == len(site.retry_after_s)
    site.cluster.check_nothing_left()

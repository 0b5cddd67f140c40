"""How fast a link is, of whatever kind: a connection of its own carries bytes that the receiver throws away."""

import time
from collections.abc import Callable
from itertools import pairwise

import msgspec

NUM_PINGS = 5
MIN_ROUND_TRIPS = 16  # a connection over a long way takes some of them to get as fast as its link
GROWTH = 4
FIRST_BYTES = 128 << 10
MIN_EXCHANGES = 5  # so that two neighbours are left when a process of either end had to wait for its turn in one
PATIENCE = 8  # budgets, for so many exchanges
LEAST_SHARE = 0.25  # of an exchange that is for its bytes: a latency that was badly measured must not hide them

Exchange = Callable[[int], None]


class Measured(msgspec.Struct, frozen=True):
    """One direction of one link, as one connection sees it."""

    bytes_per_s: float
    latency_s: float  # there and back, the least of some


class Exchanged(msgspec.Struct, frozen=True):
    """So many bytes, from the first to the answer."""

    num_bytes: int
    started_s: float
    ended_s: float

    @property
    def elapsed_s(self) -> float:
        return self.ended_s - self.started_s

    def rate(self, latency_s: float) -> float:
        return self.num_bytes / max(self.elapsed_s - latency_s, LEAST_SHARE * self.elapsed_s)


def measure(exchange: Exchange, max_bytes: int, budget_s: float) -> Measured:
    """exchange(n) moves n bytes and returns with the answer; raises PeerFault, which is passed on.

    Takes little more than budget_s, or some round trips, or a few exchanges where these are slow.
    """
    latency_s = min(_time(exchange, 0) for _ in range(NUM_PINGS))
    given_s = max(budget_s, MIN_ROUND_TRIPS * latency_s)
    num_bytes, left_s = FIRST_BYTES, given_s
    taken: list[Exchanged] = []
    while True:
        started_s = time.perf_counter()
        exchange(num_bytes)
        last = Exchanged(num_bytes, started_s, time.perf_counter())
        taken.append(last)
        left_s -= last.elapsed_s
        latency_s = min(latency_s, last.elapsed_s)
        is_sure = len(taken) >= MIN_EXCHANGES or left_s < (1 - PATIENCE) * given_s
        if left_s < last.elapsed_s and is_sure:
            return Measured(_best_rate(taken, latency_s), latency_s)
        if left_s > GROWTH * last.elapsed_s and GROWTH * num_bytes <= max_bytes:
            num_bytes *= GROWTH


def _best_rate(taken: list[Exchanged], latency_s: float) -> float:
    """Bytes per second of the best exchange: whatever else runs on the two machines can only slow one down.

    But a link that was idle lets some bytes through faster than it can go on (a token bucket): while a process waited
    for its turn, too. So each counts as no faster than it and the one before it together, and the first only alone.
    """
    alone = [each.rate(latency_s) for each in taken]
    both = [
        Exchanged(before.num_bytes + each.num_bytes, before.started_s, each.ended_s).rate(2 * latency_s)
        for before, each in pairwise(taken)
    ]
    return max(map(min, alone[1:], both), default=alone[0])


def _time(exchange: Exchange, num_bytes: int) -> float:
    """Seconds from the first byte to the answer."""
    started_s = time.perf_counter()
    exchange(num_bytes)
    return time.perf_counter() - started_s

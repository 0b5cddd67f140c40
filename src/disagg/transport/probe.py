"""How fast a link is, of whatever kind: a connection of its own carries bytes that the receiver throws away."""

import time
from collections.abc import Callable

import msgspec

NUM_PINGS = 3
MIN_ROUND_TRIPS = 16  # a connection over a long way takes some of them to get as fast as its link
GROWTH = 4
FIRST_BYTES = 128 << 10
MIN_EXCHANGES = 3  # one alone may be the one during which a process of either end had to wait for its turn
PATIENCE = 8  # budgets, for so many exchanges
LEAST_SHARE = 0.25  # of an exchange that is for its bytes: a latency that was badly measured must not hide them

Exchange = Callable[[int], None]


class Measured(msgspec.Struct, frozen=True):
    """One direction of one link, as one connection sees it."""

    bytes_per_s: float
    latency_s: float  # there and back, the least of some


def measure(exchange: Exchange, max_bytes: int, budget_s: float) -> Measured:
    """exchange(n) moves n bytes and returns with the answer; raises PeerFault, which is passed on.

    Takes little more than budget_s, or some round trips, or a few exchanges where these are slow.
    """
    latency_s = min(_time(exchange, 0) for _ in range(NUM_PINGS))
    given_s = max(budget_s, MIN_ROUND_TRIPS * latency_s)
    num_bytes, left_s = FIRST_BYTES, given_s
    taken: list[tuple[int, float]] = []
    while True:
        elapsed_s = _time(exchange, num_bytes)
        left_s -= elapsed_s
        latency_s = min(latency_s, elapsed_s)
        taken.append((num_bytes, elapsed_s))
        is_sure = len(taken) >= MIN_EXCHANGES or left_s < (1 - PATIENCE) * given_s
        if left_s < elapsed_s and is_sure:
            rates = [size / max(time_s - latency_s, LEAST_SHARE * time_s) for size, time_s in taken]
            # The best of them: whatever else runs on the two machines can only slow one down. But not the first, where
            # there are more: a link that was idle lets some bytes through faster than it can go on.
            return Measured(max(rates[1:] or rates), latency_s)
        if left_s > GROWTH * elapsed_s and GROWTH * num_bytes <= max_bytes:
            num_bytes *= GROWTH


def _time(exchange: Exchange, num_bytes: int) -> float:
    """Seconds from the first byte to the answer."""
    started_s = time.perf_counter()
    exchange(num_bytes)
    return time.perf_counter() - started_s

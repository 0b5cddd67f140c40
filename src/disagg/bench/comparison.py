"""Mixed against separate workers on the same load: who wins, from which prompt length on, and what limits. Pure.

break-even   the shortest prompts from which on, in every class of prompt lengths, answers on separate workers end no
             later in the median than on mixed ones; classes hold equal numbers of requests
limiting     the pool whose workers spend the most of their time in forward passes, if that is enough to queue behind
"""

import math
import statistics
from collections.abc import Sequence

import msgspec

from disagg.bench.figures import Figures
from disagg.bench.measure import LoadResult
from disagg.bench.record import RequestRecord

NUM_CLASSES = 6
MIN_PER_CLASS = 3  # requests of each side; fewer say nothing
BUSY_SHARE = 0.7  # at which queues grow quickly
TARGET_SHARE = 0.9  # of requests that must attain
SAME_SHARE = 0.05  # a difference below is none


class LengthClass(msgspec.Struct, frozen=True):
    """Prompts of at least `least` tokens, up to the next class. Median seconds; NaN where too few."""

    least: int
    num_mixed: int
    num_separate: int
    ttft_mixed_s: float
    ttft_separate_s: float
    latency_mixed_s: float
    latency_separate_s: float


class Verdict(msgspec.Struct, frozen=True):
    """winner: 'mixed', 'separate' or '' when this run shows no difference."""

    winner: str
    sentence: str
    break_even_tokens: int | None
    limiting_mixed: str
    limiting_separate: str


def length_classes(mixed: Sequence[RequestRecord], separate: Sequence[RequestRecord]) -> tuple[LengthClass, ...]:
    """Shortest first."""
    sides = [[record for record in side if record.is_whole and not record.is_warm_up] for side in (mixed, separate)]
    lengths = sorted(record.num_prompt_tokens for side in sides for record in side)
    if not lengths:
        return ()
    edges = sorted({lengths[number * len(lengths) // NUM_CLASSES] for number in range(NUM_CLASSES)})
    found = []
    for number, least in enumerate(edges):
        below = edges[number + 1] if number + 1 < len(edges) else math.inf
        in_class = [[record for record in side if least <= record.num_prompt_tokens < below] for side in sides]
        ttft = [_median([record.ttft_s for record in side]) for side in in_class]
        latency = [_median([record.latency_s for record in side]) for side in in_class]
        found.append(LengthClass(least, len(in_class[0]), len(in_class[1]), *ttft, *latency))
    return tuple(found)


def _median(values: list[float]) -> float:
    return statistics.median(values) if len(values) >= MIN_PER_CLASS else math.nan


def break_even_tokens(classes: Sequence[LengthClass]) -> int | None:
    """None: mixed is faster for the longest prompts too, or there is too little to say."""
    found: int | None = None
    for each in reversed(classes):
        if math.isnan(each.latency_mixed_s) or math.isnan(each.latency_separate_s):
            continue
        if each.latency_separate_s > each.latency_mixed_s:
            break
        found = each.least
    return found


def limiting_stage(result: LoadResult) -> str:
    """In words, with the share that says so."""
    busy = result.observation.busy_by_role()
    if not busy:
        return "unknown: the server says nothing of its workers"
    role, share = max(busy.items(), key=lambda item: item[1])
    others = ", ".join(f"{name} {100 * value:.0f} %" for name, value in busy.items() if name != role)
    beside = f"; {others}" if others else ""
    if share < BUSY_SHARE:
        return f"none: {role} workers computed {100 * share:.0f} % of the time{beside}"
    return f"{role} (computing {100 * share:.0f} % of the time{beside})"


def verdict(what: str, mixed: LoadResult, separate: LoadResult) -> Verdict:
    """One sentence that also says so when mixed workers win or nothing is shown."""
    ours, theirs = separate.figures, mixed.figures
    even = break_even_tokens(length_classes(mixed.records, separate.records))
    limits = limiting_stage(mixed), limiting_stage(separate)
    winner = _winner(theirs, ours)
    from_tokens = (
        f"answers end sooner on separate workers for prompts from {even} tokens on"
        if even is not None
        else "no prompt length was found from which on answers end sooner on separate workers"
    )
    attained = [f"{100 * f.attainment.value:.0f} % ({f.goodput_per_s:.2f}/s)" for f in (ours, theirs)]
    both = f"{attained[0]} of requests attain the targets on separate, {attained[1]} on mixed workers"
    limited = f"what limits separate workers: {limits[1]}"
    if winner == "separate":
        head = f"{what}: separate workers win"
    elif winner == "mixed":
        head = f"{what}: mixed workers win"
    else:
        head = f"{what}: no winner, the difference is within this run's uncertainty"
    ttft = _ratio(ours.ttft.p50.value, theirs.ttft.p50.value)
    itl = _ratio(ours.itl.p99.value, theirs.itl.p99.value)
    tails = f"TTFT p50 {ttft}, ITL p99 {itl}"
    return Verdict(winner, f"{head}: {both}; {tails} of mixed; {from_tokens}; {limited}.", even, *limits)


def _winner(mixed: Figures, separate: Figures) -> str:
    """By attainment if the intervals allow; if nearly all attain on both, by the latencies that users feel."""
    gap = separate.attainment.value - mixed.attainment.value
    noise = math.hypot(_half(separate), _half(mixed))
    if abs(gap) > noise:
        return "separate" if gap > 0 else "mixed"
    if min(separate.attainment.value, mixed.attainment.value) < TARGET_SHARE:
        return ""
    better = [
        _sign(a.p50.low, a.p50.high, b.p50.low, b.p50.high)
        for a, b in ((separate.ttft, mixed.ttft), (separate.tpot, mixed.tpot), (separate.latency, mixed.latency))
    ]
    # All that differ must differ the same way: a trade of one for the other is no win.
    if {*better} == {1, 0} or {*better} == {1}:
        return "separate"
    if {*better} == {-1, 0} or {*better} == {-1}:
        return "mixed"
    return ""


def _sign(low: float, high: float, other_low: float, other_high: float) -> int:
    """1: the first is surely lower; -1: surely higher."""
    if high < other_low * (1 - SAME_SHARE):
        return 1
    return -1 if low > other_high * (1 + SAME_SHARE) else 0


def _half(figures: Figures) -> float:
    return (figures.attainment.high - figures.attainment.low) / 2


def _ratio(ours: float, theirs: float) -> str:
    return f"{ours / theirs:.2f}x" if theirs > 0 and math.isfinite(ours) else "-"

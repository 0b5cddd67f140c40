"""Mixed against separate workers on the same load: who wins, from which prompt length on, and what limits. Pure.

break-even   the shortest prompts from which on, in every class of prompt lengths, answers on separate workers end no
             later in the median than on mixed ones; classes hold about equal numbers of requests
limiting     the pool whose workers spend the most of their time in forward passes, if that is enough to queue behind;
             else the hand-off, if KV that had not come is most of what answers waited for between token 1 and 2
"""

import math
import statistics
from collections.abc import Sequence

import msgspec

from disagg.bench.figures import Figures
from disagg.bench.measure import LoadResult
from disagg.bench.record import RequestRecord
from disagg.bench.stages import stage_shares
from disagg.report.axes import short
from disagg.telemetry.stages import Stage
from disagg.telemetry.timeline import Part

NUM_CLASSES = 6
MIN_PER_CLASS = 3  # requests of each side; fewer say nothing
BUSY_SHARE = 0.7  # at which queues grow quickly
VISIBLE_SHARE = 0.5  # of the first gap, in which KV had not come
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


class BreakEven(msgspec.Struct, frozen=True):
    """tokens: None where there is none, or nothing can be said."""

    tokens: int | None
    sentence: str


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
    num = max(1, min(NUM_CLASSES, len(lengths) // (4 * MIN_PER_CLASS)))
    edges = sorted({lengths[number * len(lengths) // num] for number in range(num)})
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


def break_even(classes: Sequence[LengthClass]) -> BreakEven:
    """From the longest class down, as far as separate workers are no slower."""
    known = [each for each in classes if not math.isnan(each.latency_mixed_s + each.latency_separate_s)]
    if not known:
        return BreakEven(None, "there are too few answers to say how prompt length matters")
    found: int | None = None
    for each in reversed(known):
        if each.latency_separate_s > each.latency_mixed_s:
            break
        found = each.least
    if found is None:
        longest = known[-1]
        mixed, separate = short(longest.latency_mixed_s), short(longest.latency_separate_s)
        text = (
            f"no break-even: even prompts from {longest.least} tokens on are answered sooner by mixed workers "
            f"({mixed} s in the median, {separate} s on separate ones)"
        )
    elif found == known[0].least:
        text = "answers end no later on separate workers at every prompt length tried"
    else:
        text = f"break-even at {found} prompt tokens: from there on answers end no later on separate workers"
    return BreakEven(found, text)


def limiting_stage(result: LoadResult) -> str:
    """In words, with the share that says so."""
    busy = result.observation.busy_by_role()
    if not busy:
        return "unknown: the server says nothing of its workers"
    role, share = max(busy.items(), key=lambda item: item[1])
    others = ", ".join(f"{name} {100 * value:.0f} %" for name, value in busy.items() if name != role)
    beside = f"; {others}" if others else ""
    if share >= BUSY_SHARE:
        return f"{role} (computing {100 * share:.0f} % of the time{beside}{_slowest(result)})"
    computed = f"{role} workers computed {100 * share:.0f} % of the time{beside}{_slowest(result)}"
    visible = _visible_share(result)
    if visible >= VISIBLE_SHARE:
        return f"hand-off ({100 * visible:.0f} % of the first gap is transfer; {computed})"
    return f"none: {computed}"


def _visible_share(result: LoadResult) -> float:
    """Share of the first gap in which KV was on its way; 0 of a server that keeps no timelines."""
    shares = stage_shares(result.observation.timelines, Part.FIRST_GAP)
    return next((each.share for each in shares if each.stage is Stage.TRANSFER), 0.0)


def _slowest(result: LoadResult) -> str:
    """The stage that most of TTFT goes to; "" of a server that keeps no timelines."""
    shares = stage_shares(result.observation.timelines, Part.TTFT)
    return f"; {100 * shares[0].share:.0f} % of TTFT is {shares[0].stage.value}" if shares else ""


def verdict(what: str, mixed: LoadResult, separate: LoadResult) -> Verdict:
    """One sentence that also says so when mixed workers win or nothing is shown."""
    ours, theirs = separate.figures, mixed.figures
    even = break_even(length_classes(mixed.records, separate.records))
    limits = limiting_stage(mixed), limiting_stage(separate)
    winner = _winner(theirs, ours)
    if winner:
        head = f"{winner} workers win"
    elif max(ours.attainment.value, theirs.attainment.value) < TARGET_SHARE:
        head = "no winner, and neither side carries this load"
    else:
        head = "no winner: what differs is within this run's uncertainty, or one target's gain is another's loss"
    attained = [f"{100 * f.attainment.value:.0f} % ({f.goodput_per_s:.2f}/s)" for f in (ours, theirs)]
    both = f"{attained[0]} of requests attain the targets on separate, {attained[1]} on mixed workers"
    ttft = _ratio(ours.ttft.p50.value, theirs.ttft.p50.value)
    itl = _ratio(ours.itl.p99.value, theirs.itl.p99.value)
    sentence = (
        f"{what}: {head}: {both}; separate has {ttft} the TTFT (p50) and {itl} the ITL (p99) of mixed; "
        f"{even.sentence}; what limits separate workers: {limits[1]}."
    )
    return Verdict(winner, sentence, even.tokens, *limits)


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
    return f"{ours / theirs:.2f} times" if theirs > 0 and math.isfinite(ours) else "-"

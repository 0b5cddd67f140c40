"""Figures as lines of text."""

import math
from collections.abc import Sequence

from disagg.bench.estimate import Estimate
from disagg.bench.figures import Figures, Spread
from disagg.bench.measure import LoadResult
from disagg.bench.stages import in_words, stage_shares
from disagg.telemetry.timeline import Part

SPREAD_HEADS = ("", "mean", "p50", "p90", "p99", "most")
MEASURES = ("TTFT", "first gap", "TPOT", "ITL", "end to end")
NOTHING = "-"


def spreads(figures: Figures) -> tuple[tuple[str, Spread], ...]:
    each = (figures.ttft, figures.first_gap, figures.tpot, figures.itl, figures.latency)
    return tuple(zip(MEASURES, each, strict=True))


def ms(estimate: Estimate) -> str:
    """Milliseconds and their 95 % interval; "-" of nothing."""
    if math.isnan(estimate.value):
        return NOTHING
    return f"{_ms(estimate.value)} [{_ms(estimate.low)}, {_ms(estimate.high)}]"


def _ms(seconds: float) -> str:
    value = 1e3 * seconds
    if math.isnan(value):
        return NOTHING
    return f"{value:.1f}" if abs(value) < 100 else f"{value:.0f}"


def spread_row(name: str, spread: Spread) -> tuple[str, ...]:
    return (name, ms(spread.mean), ms(spread.p50), ms(spread.p90), ms(spread.p99), _ms(spread.most))


def percent(estimate: Estimate) -> str:
    if math.isnan(estimate.value):
        return NOTHING
    return f"{100 * estimate.value:.1f} % [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"


def describe(result: LoadResult) -> list[str]:
    """All there is to say of one load, line by line."""
    f = result.figures
    lines = [f"{f.num_requests} requests counted, {f.num_whole} answered whole, over {f.duration_s:.1f} s"]
    if f.lapses:
        lines.append("failed: " + ", ".join(f"{kind} {count}" for kind, count in sorted(f.lapses.items())))
        first = next(record for record in result.records if record.lapse is not None and not record.is_warm_up)
        lines.append(f"  the first: request {first.number}, {first.detail}")
    if not f.num_whole:
        return lines  # nothing else was measured
    rows = [SPREAD_HEADS, *(spread_row(f"{name} ms", spread) for name, spread in spreads(f))]
    lines += table(rows)
    lines.append(
        f"throughput: {f.requests_per_s:.2f} requests/s, {f.output_tokens_per_s:.1f} output tokens/s, "
        f"{f.prompt_tokens_per_s:.1f} prompt tokens/s"
    )
    lines.append(
        f"attain TTFT <= {f.slo.ttft_s:g} s and TPOT <= {f.slo.tpot_s:g} s: {percent(f.attainment)}; "
        f"goodput {f.goodput_per_s:.2f}/s; late first token {f.num_late_first}, late tokens {f.num_late_tokens}"
    )
    if f.num_unseen_tokens:
        lines.append(f"{f.num_unseen_tokens} tokens came without an event of their own: some gaps hold several")
    lines += stage_lines(result)
    lines.append(
        f"this client sent {ms(f.send_lag.p50)} ms (p50), {ms(f.send_lag.p99)} ms (p99) late: part of all latencies"
    )
    return lines


def stage_lines(result: LoadResult) -> list[str]:
    """What the server says of its last requests; none of one that keeps no timelines."""
    timelines = result.observation.timelines
    parts = (("TTFT", Part.TTFT), ("first gap", Part.FIRST_GAP))
    found = [(name, stage_shares(timelines, part)) for name, part in parts]
    count = f"{len(timelines)} requests, as the server measured them"
    return [f"{name} by stage: {in_words(shares)} ({count})" for name, shares in found if shares]


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns lined up; the first to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if number == 0 else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]

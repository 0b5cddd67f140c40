"""One simulated scenario as a page and as a value for programs."""

import math

import msgspec

from disagg.bench.percentiles import Summary
from disagg.planner.estimate import Target
from disagg.report.page import Section, Table, page
from disagg.report.plots import Bar, Mark, Series, bar_plot, line_plot, share_below
from disagg.sim.outcome import Outcome, Report
from disagg.sim.records import FINISHED, RecordTable
from disagg.sim.scenario import Slo

NUM_SPANS = 60  # of time, in plots over time
ROLE_COLOURS = {"prefill": 0, "decode": 1, "mixed": 2}


def summary_rows(report: Report) -> list[tuple[str, ...]]:
    """Latencies as texts: name, mean, p50, p90, p99, most; milliseconds."""
    named = (
        ("TTFT", report.ttft_s),
        ("queue", report.queue_s),
        ("first gap", report.first_gap_s),
        ("TPOT", report.tpot_s),
        ("token gaps", report.itl_s),
    )
    return [(name, *_times(summary)) for name, summary in named]


def headline(report: Report) -> list[tuple[str, str]]:
    """Name and text of what counts most."""
    missed = ", ".join(f"{each.num_requests} {each.stage}" for each in report.missed_by) or "none"
    lost = f"{report.num_failed} failed, {report.num_turned_away} turned away"
    cached = report.num_cached_tokens / max(1, report.num_prompt_tokens)
    # Where all were turned away at once no time has passed.
    asked_per_s = report.num_requests / report.duration_s if report.duration_s else math.inf
    return [
        (
            "attainment",
            f"{report.attainment:.1%} (TTFT {report.ttft_attainment:.1%}, TPOT {report.tpot_attainment:.1%})",
        ),
        ("goodput", f"{report.goodput_per_s:.3g} requests/s of {asked_per_s:.3g}"),
        ("requests", f"{report.num_requests}: {report.num_finished} finished, {lost}"),
        ("tokens", f"{report.num_prompt_tokens} prompt ({cached:.1%} cached), {report.num_output_tokens} answer"),
        ("paths", ", ".join(f"{each.num_requests} {each.path}" for each in report.paths) or "none"),
        ("missed by", missed),
        ("limiting", report.limiting_stage.value),
        ("virtual time", f"{report.duration_s:.4g} s, {report.num_events} events, seed {report.seed}"),
    ]


def outcome_page(name: str, subtitle: str, outcome: Outcome, target: Target) -> str:
    """One self-contained HTML file."""
    report, columns, slo = outcome.report, outcome.records.columns, target.slo
    ttft = line_plot(
        "Time to first token",
        "seconds",
        "share of requests",
        [
            Series("TTFT", share_below(columns["ttft_s"])),
            Series("waiting for prefill", share_below(columns["queue_s"])),
        ],
        [Mark("target", slo.ttft_s)],
    )
    tpot = line_plot(
        "Time per output token",
        "milliseconds",
        "share of requests",
        [Series("TPOT", share_below([1e3 * each for each in columns["tpot_s"]]))],
        [Mark("target", 1e3 * slo.tpot_s)],
    )
    gap = line_plot(
        "First gap: hand-off, decode queue, first step",
        "milliseconds",
        "share of requests",
        [Series("first gap", share_below([1e3 * each for each in columns["first_gap_s"]]))],
    )
    busy = [
        Bar(use.name, use.busy_share, f"{use.busy_share:.0%}", ROLE_COLOURS[use.role.value]) for use in report.workers
    ]
    missed = [Bar(each.stage.value, each.num_requests, str(each.num_requests), 4) for each in report.missed_by]
    sections = (
        Section("In short", tables=(Table(("", ""), tuple(headline(report))),)),
        Section(
            "Latencies",
            "Milliseconds of virtual time.",
            tables=(Table(("", "mean", "p50", "p90", "p99", "most"), tuple(summary_rows(report))),),
            plots=(ttft, tpot, gap, _over_time(outcome, target)),
        ),
        Section(
            "Workers and misses",
            plots=(bar_plot("Time in steps", busy, 1.0), bar_plot("Requests that missed, by where", missed)),
        ),
    )
    return page(name, subtitle, sections)


def outcome_json(name: str, outcome: Outcome) -> bytes:
    """The report with its scenario's name; what is not a number is null."""
    return msgspec.json.format(msgspec.json.encode({"scenario": name, "report": outcome.report}), indent=2)


def by_time(records: RecordTable, slo: Slo) -> tuple[float, list[int], list[int]]:
    """Seconds of a span, requests that came in each, and those of them that were within the targets."""
    columns = records.columns
    begin_s, last_s = min(columns["arrived_s"]), max(columns["arrived_s"])
    span_s = (last_s - begin_s) / NUM_SPANS or 1.0
    asked, met = [0] * NUM_SPANS, [0] * NUM_SPANS
    names = ("arrived_s", "end", "ttft_s", "tpot_s")
    for arrived_s, end, ttft_s, tpot_s in zip(*(columns[each] for each in names), strict=True):
        place = min(NUM_SPANS - 1, int((arrived_s - begin_s) / span_s))  # the last one comes as the last span ends
        asked[place] += 1
        met[place] += end == FINISHED and ttft_s <= slo.ttft_s and tpot_s <= slo.tpot_s
    return span_s, asked, met


def _over_time(outcome: Outcome, target: Target) -> str:
    span_s, asked, met = by_time(outcome.records, target.slo)
    lines = [
        Series(title, tuple((span_s * (place + 0.5), count / span_s) for place, count in enumerate(counts)))
        for title, counts in (("asked", asked), ("within the targets", met))
    ]
    return line_plot("Requests by time of arrival", "seconds", "requests/s", lines)


def _times(summary: Summary) -> tuple[str, ...]:
    values = (summary.mean, summary.p50, summary.p90, summary.p99, summary.most)
    return tuple("-" if math.isnan(value) else f"{1e3 * value:.4g}" for value in values)

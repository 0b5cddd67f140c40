"""Results as sections of a page: latencies, attainment by rate, waterfalls of requests, stages, busy workers. Pure."""

import math
from collections.abc import Sequence

from disagg.bench.comparison import BreakEven, LengthClass
from disagg.bench.measure import LoadResult
from disagg.bench.record import RequestRecord
from disagg.bench.search import Trial
from disagg.bench.stages import StageShare, stage_shares
from disagg.bench.text_report import SPREAD_HEADS, percent, spread_row, spreads
from disagg.report.axes import Axis, short
from disagg.report.page import Section, Table, captioned
from disagg.report.plots import Mark, Row, Series, Span, line_plot, share_below, waterfall
from disagg.telemetry.stages import STAGE_PLACES, Place, Stage
from disagg.telemetry.timeline import Part, RequestTimeline

NUM_ROWS = 24  # of a waterfall
LEAST_SHARE = 0.005  # of a stage that is shown
SHARE = Axis("share of requests", least=0.0, most=1.0)
KINDS = ("until the first token", "until the second", "rest of the answer", "not yet sent by this client")
STAGE_KINDS = ("router", "queues", "prefill", "visible hand-off", "decode", "network")
QUEUES = (Stage.PREFILL_QUEUE, Stage.RESERVATION, Stage.DECODE_QUEUE)
LATENCY_NOTE = "Latencies count from the time a request was due, also when it could not be sent then (open loop)."
INTERVAL_NOTE = "In brackets: 95 % confidence, by drawing whole requests again (shares: Wilson)."


def summary_section(heading: str, results: Sequence[LoadResult], notes: Sequence[str] = ()) -> Section:
    """Rates, attainment and failures, a row per load."""
    heads: tuple[str, ...] = ("requests", "failed", "requests/s", "output tokens/s", "attain the targets", "goodput/s")
    rows = []
    has_labels = any(result.label for result in results)
    for result in results:
        f = result.figures
        numbers = (f"{f.requests_per_s:.2f}", f"{f.output_tokens_per_s:.1f}", percent(f.attainment))
        failed = ", ".join(f"{kind} {count}" for kind, count in sorted(f.lapses.items())) or "0"
        label = (result.label,) if has_labels else ()
        rows.append((*label, str(f.num_requests), failed, *numbers, f"{f.goodput_per_s:.2f}"))
    heads = ("", *heads) if has_labels else heads
    return Section(heading, " ".join(notes), (Table(heads, tuple(rows)),))


def latency_section(heading: str, results: Sequence[LoadResult]) -> Section:
    """A table and the curves of all loads together."""
    rows = [
        spread_row(f"{result.label} {name}".strip(), spread)
        for result in results
        for name, spread in spreads(result.figures)
    ]
    heads = ("milliseconds", *SPREAD_HEADS[1:])
    table = Table(heads, tuple(rows))
    return Section(heading, f"{LATENCY_NOTE} {INTERVAL_NOTE}", (table,), tuple(_curves(results)))


def _curves(results: Sequence[LoadResult]) -> list[str]:
    slo = results[0].figures.slo
    whole = [(r.label, [record for record in r.records if record.is_whole and not record.is_warm_up]) for r in results]
    chosen = (
        ("Time to first token", "TTFT, s", Mark("target", slo.ttft_s), lambda r: (r.ttft_s,)),
        ("Time per output token", "TPOT, ms", Mark("target", 1e3 * slo.tpot_s), lambda r: _ms(r.tpot_s)),
        ("Gaps between tokens", "ITL, ms", None, lambda r: tuple(1e3 * gap for gap in r.gaps_s)),
        ("First gap", "token 1 to token 2, ms", None, lambda r: _ms(r.first_gap_s)),
    )
    found = []
    for title, label, mark, values_of in chosen:
        values = [(name, [v for record in records for v in values_of(record)]) for name, records in whole]
        series = [Series(name, share_below(each), is_stepped=True) for name, each in values if each]
        if not series:
            continue
        share = Axis("share of gaps" if label.startswith("ITL") else "share of requests", least=0.0, most=1.0)
        found.append(line_plot(title, Axis(label, is_log=True), share, series, [mark] if mark else []))
    return found


def _ms(seconds: float | None) -> tuple[float, ...]:
    return () if seconds is None else (1e3 * seconds,)


def attainment_plot(curves: Sequence[tuple[str, Sequence[Trial]]], target: float) -> str:
    """(side, its trials): attainment at each rate with its interval."""
    series = []
    for name, trials in curves:
        ordered = sorted(trials, key=lambda trial: trial.rate_per_s)
        points = tuple((trial.rate_per_s, trial.attainment.value) for trial in ordered)
        intervals = tuple((trial.attainment.low, trial.attainment.high) for trial in ordered)
        series.append(Series(name, points, intervals, has_dots=True))
    mark = Mark(f"{100 * target:.0f} %", target, is_upright=False)
    svg = line_plot("Attainment by rate", "requests/s", SHARE, series, [mark])
    return captioned(svg, "Share of all requests that meet every target; failed ones do not.")


def trial_of(result: LoadResult) -> Trial:
    f = result.figures
    return Trial(result.rate_per_s, round(f.attainment.value * f.num_requests) if f.num_requests else 0, f.num_requests)


def busy_plot(result: LoadResult) -> str | None:
    """None of a server that says nothing of its workers."""
    busy = {worker: points for worker, points in result.observation.busy().items() if points}
    if not busy:
        return None
    title = f"Busy workers, {result.label}" if result.label else "Busy workers"
    series = [Series(worker, points) for worker, points in busy.items()]
    share = Axis("share of time computing", least=0.0, most=1.0)
    return captioned(
        line_plot(title, "seconds", share, series), "Seconds in forward passes per second, over some seconds."
    )


def waterfall_plot(result: LoadResult) -> str | None:
    """Evenly sampled requests in order; None when none was answered."""
    whole = [record for record in result.records if record.is_whole and not record.is_warm_up]
    if not whole:
        return None
    step = max(1, math.ceil(len(whole) / NUM_ROWS))
    sampled = whole[::step]
    title = f"Sampled requests, {result.label}" if result.label else "Sampled requests"
    rows = [_row(record) for record in sampled]
    caption = "A row per request, in order, each from when it was due; each light line is a token. Left: prompt tokens."
    return captioned(waterfall(title, "seconds", rows, KINDS), caption)


def _row(record: RequestRecord) -> Row:
    token_s = [at_s - record.due_s for at_s in record.token_s]
    sent_s = record.sent_s - record.due_s
    spans = [Span(0.0, sent_s, 3), Span(sent_s, token_s[0], 0)]
    if len(token_s) > 1:
        spans.append(Span(token_s[0], token_s[1], 1))
        spans.append(Span(token_s[1], token_s[-1], 2))
    return Row(f"{record.num_prompt_tokens}", tuple(spans), tuple(token_s))


def worker_section(results: Sequence[LoadResult]) -> Section | None:
    """What the server says of its workers; None when it says nothing."""
    plots = [plot for result in results if (plot := busy_plot(result)) is not None]
    if not plots:
        return None
    rows = []
    for result in results:
        waiting = result.observation.waiting_by_role()
        hidden = result.observation.moved.hidden_share
        for role, share in result.observation.busy_by_role().items():
            of_wire = f"{100 * hidden:.0f} %" if role == "prefill" and not math.isnan(hidden) else "-"
            name = role if result.label == role else f"{result.label} {role}".strip()
            rows.append((name, f"{100 * share:.0f} %", f"{waiting.get(role, 0):.2f}", of_wire))
    heads = ("workers", "computing", "waiting sequences", "hand-off bytes hidden")
    return Section("Workers", tables=(Table(heads, tuple(rows)),), plots=tuple(plots))


def request_section(results: Sequence[LoadResult]) -> Section:
    """As the client saw them, and what the server says of its own."""
    plots = [plot for result in results if (plot := waterfall_plot(result)) is not None]
    plots += [plot for result in results if (plot := stage_plot(result)) is not None]
    rows = tuple(row for result in results for row in _stage_rows(result))
    heads = ("stage", "of TTFT: mean, ms", "share", "of the first gap: mean, ms", "share")
    return Section("Requests", tables=(Table(heads, rows),) if rows else (), plots=tuple(plots))


def _stage_rows(result: LoadResult) -> list[tuple[str, ...]]:
    """A row for each stage that has some time of either part, in the order in which they come."""
    parts = (Part.TTFT, Part.FIRST_GAP)
    found = [{each.stage: each for each in stage_shares(result.observation.timelines, part)} for part in parts]
    shown = [stage for stage in Stage if any(part[stage].share >= LEAST_SHARE for part in found if stage in part)]
    names = {stage: f"{result.label} {stage.value.replace('_', ' ')}".strip() for stage in shown}
    return [(names[stage], *(text for part in found for text in _share_cells(part.get(stage)))) for stage in shown]


def _share_cells(found: StageShare | None) -> tuple[str, str]:
    return (f"{1e3 * found.mean_s:.1f}", f"{100 * found.share:.0f} %") if found is not None else ("", "")


def stage_plot(result: LoadResult) -> str | None:
    """Evenly sampled requests in order, split into stages; None of a server that keeps no timelines."""
    timelines = [each for each in result.observation.timelines if each.choices[0].ttft_s is not None]
    if not timelines:
        return None
    sampled = timelines[:: max(1, math.ceil(len(timelines) / NUM_ROWS))]
    title = f"Stages of requests, {result.label}" if result.label else "Stages of requests"
    rows = [_stage_row(each) for each in sampled]
    caption = (
        "As the server measured them, each row from when it was received; of the first answer. Left: prompt tokens."
    )
    return captioned(waterfall(title, "seconds", rows, STAGE_KINDS), caption)


def _stage_row(timeline: RequestTimeline) -> Row:
    spans = tuple(
        Span(each.start_s, each.start_s + each.seconds, _kind(each.stage)) for each in timeline.choices[0].stages
    )
    return Row(f"{timeline.num_prompt_tokens}", spans)


def _kind(stage: Stage) -> int:
    """Place in STAGE_KINDS."""
    if stage in QUEUES:
        return 1
    if stage is Stage.TRANSFER:
        return 3
    return {Place.ROUTER: 0, Place.PREFILL: 2, Place.DECODE: 4, Place.NETWORK: 5}[STAGE_PLACES[stage]]


def length_section(classes: Sequence[LengthClass], even: BreakEven) -> Section:
    """Mixed beside separate by prompt length."""
    text = even.sentence[0].upper() + even.sentence[1:] + "."
    heads = ("prompt tokens from", "requests", "TTFT mixed, s", "separate", "end to end mixed, s", "separate")
    rows = tuple(
        (
            str(each.least),
            f"{each.num_mixed} / {each.num_separate}",
            short(each.ttft_mixed_s),
            short(each.ttft_separate_s),
            short(each.latency_mixed_s),
            short(each.latency_separate_s),
        )
        for each in classes
    )
    points = [each for each in classes if not math.isnan(each.latency_mixed_s + each.latency_separate_s)]
    series = [
        Series("mixed", tuple((e.least, e.latency_mixed_s) for e in points), has_dots=True),
        Series("separate", tuple((e.least, e.latency_separate_s) for e in points), has_dots=True),
    ]
    title = "End to end by prompt length"
    svg = line_plot(title, "prompt tokens", "median end to end, s", series)
    plot = captioned(svg, "Median of each class of prompt lengths, at its shortest prompt.")
    return Section("Prompt lengths", text, (Table(heads, rows),), (plot,) if points else ())

"""What `disagg advise`, `plan` and `simulate` print: lines of text from answers."""

import math
from collections.abc import Sequence

from disagg.core.roles import Role
from disagg.planner.advise import WORTH, Advice, Verdict
from disagg.planner.candidate import Candidate
from disagg.planner.estimate import Target
from disagg.planner.fleet import Fleet, Gpus
from disagg.planner.measure import Trial
from disagg.planner.outcome_page import headline, summary_rows
from disagg.planner.plan import Plan, PlanRow, Probe
from disagg.planner.search import Searched
from disagg.sim.outcome import Report


def columns(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Left-aligned, two spaces apart."""
    table = [list(heads), *map(list, rows)]
    widths = [max(len(row[place]) for row in table) for place in range(len(heads))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]


def advice_lines(advice: Advice, fleet: Fleet, target: Target) -> list[str]:
    kinds = [("mixed", advice.mixed), ("disaggregated", advice.split)]
    at = {"mixed": advice.at_mixed, "disaggregated": advice.at_split}
    rows = []
    for name, trial in kinds:
        point = at[name]
        if trial is None or point is None:
            rows.append((name, "nothing carries anything", "0", "-", "-", "-"))
            continue
        seen = (f"{point.attainment:.1%}", f"{point.ttft_s:.3g} s", f"{1e3 * point.tpot_s:.3g} ms")
        rows.append((name, trial.candidate.name, f"{trial.goodput_per_s:.3g}", *seen))
    heads = ("", "best found", "goodput/s", "at the asked rate: attained", "TTFT", "TPOT")
    limits = [f"  {name}: {_limits(trial.candidate)}" for name, trial in kinds if trial is not None]
    return [
        *situation_lines(fleet, target),
        (
            f"traffic: {advice.traffic}, {advice.rate_per_s:.3g} requests/s, prompts {advice.mean_prompt:.0f} tokens "
            f"({advice.cached_share:.0%} could be cached), answers {advice.mean_output:.0f}"
        ),
        "",
        *cut_short_lines(advice.searched),
        f"advice: {advice.verdict.value}" + ("" if advice.is_enough else ", but the fleet is too small"),
        *(f"  - {reason}" for reason in advice.reasons),
        "",
        *columns(heads, rows),
        *limits,
        f"gain of the split on equal hardware: {_ratio(advice.gain)}",
        f"break-even rate: {_number(advice.break_even_rate_per_s, 'requests/s', 'none: mixed carries as much')}",
        f"break-even prompt ({WORTH} x): {_number(advice.break_even_prompt, 'tokens', 'none of the lengths below')}",
        "gain by mean prompt (closed forms, corrected by the runs above): "
        + ", ".join(f"{point.mean_prompt:.0f}: {_ratio(point.gain)}" for point in advice.by_length),
        f"rule of thumb (below 100 requests/s or 512 tokens: don't): {advice.thumb}",
        "the simulation: " + ("do" if advice.verdict is Verdict.DISAGGREGATED else "don't"),
        searched_line(advice.searched),
    ]


def plan_lines(plan: Plan, fleet: Fleet, target: Target, start: Sequence[str]) -> list[str]:
    """start: the command lines that start the best."""
    best = plan.best
    heads = ("", "workers", "P:D", "GPUs", "goodput/s", "per GPU", "$/1M requests", "TPOT", "limits")
    order = sorted(plan.rows, key=lambda row: (row is not best, row.is_short_look, -row.trial.goodput_per_s))
    enough = f"{plan.num_gpus_for_asked} GPUs so arranged carry {plan.asked_per_s:.3g} requests/s"
    return [
        *situation_lines(fleet, target),
        "",
        *cut_short_lines(plan.searched),
        f"plan: {best.candidate.name}",
        f"  {best.trial.goodput_per_s:.3g} requests/s within the targets on {best.candidate.num_gpus} GPUs; {enough}",
        f"  P:D ratio in GPUs {best.candidate.ratio}, {_limits(best.candidate)}",
        *_against_mixed(plan),
        "",
        *columns(heads, [_plan_row(plan, row) for row in order]),
        "  > the plan, * on the Pareto front (goodput, GPUs, TPOT), = mixed on the best split's GPUs, ~ a short look",
        "",
        f"at {plan.rate_per_s:.3g} requests/s:",
        *columns(
            ("", "rate/s", "attained", "TTFT", "TPOT"), [_probe(probe) for probe in (*plan.loads, *plan.one_less)]
        ),
        *_only_workers(best.candidate),
        "",
        "start:",
        *(f"  {line}" for line in start),
        searched_line(plan.searched),
    ]


def outcome_lines(name: str, report: Report) -> list[str]:
    workers = [(use.name, f"{use.busy_share:.1%}", str(use.num_steps), str(use.num_pushes)) for use in report.workers]
    return [
        name,
        *columns(("", ""), headline(report))[1:],
        "",
        *columns(("ms", "mean", "p50", "p90", "p99", "most"), summary_rows(report)),
        "",
        *columns(("worker", "in steps", "steps", "pushes"), workers),
    ]


def situation_lines(fleet: Fleet, target: Target) -> list[str]:
    gpus = ", ".join(f"{each.count} x {each.device}{_price(each)}" for each in fleet.gpus)
    budget = f", at most {fleet.budget_usd_per_hour:g} $/h" if fleet.budget_usd_per_hour else ""
    slo = f"TTFT {target.slo.ttft_s:g} s and TPOT {1e3 * target.slo.tpot_s:g} ms for {target.share:.0%} of requests"
    return [f"{fleet.model.name} in {fleet.weights} on {gpus}{budget}, {fleet.link} between workers", f"targets: {slo}"]


def _price(gpus: Gpus) -> str:
    """Prices move: how old a default is, is said."""
    dated = f" (as of {gpus.price_date})" if gpus.price_date else ""
    return f" at {gpus.usd_per_hour:g} $/h{dated}" if gpus.usd_per_hour else ""


def searched_line(searched: Searched) -> str:
    return f"looked at: {searched.num_candidates} candidates by closed form, {searched.num_runs} simulations"


def cut_short_lines(searched: Searched) -> list[str]:
    """Above everything else: half a search compares what was looked at unlike."""
    if not searched.is_cut_short:
        return []
    runs = f"after {searched.num_runs} simulations"
    return [f"THE TIME LIMIT ENDED THE SEARCH {runs}: what follows is a guess; allow more with --limit-s", ""]


def _limits(candidate: Candidate) -> str:
    parts = []
    for pool in candidate.pools:
        chunk = pool.mixed_chunk_tokens if candidate.is_mixed else pool.chunk_tokens
        if pool.role.value != "decode":
            parts.append(f"{pool.role} chunk {chunk}")
        if pool.role.value != "prefill":
            parts.append(f"{pool.role} batch {pool.max_running}")
    if not candidate.is_mixed:
        parts += [f"decode reads up to {candidate.local_prefill_tokens}", f"wire {candidate.kv_wire}"]
    return ", ".join(parts)


def _plan_row(plan: Plan, row: PlanRow) -> tuple[str, ...]:
    trial, candidate = row.trial, row.candidate
    said = ((">", row is plan.best), ("*", row.is_on_front), ("=", row is plan.equal), ("~", row.is_short_look))
    marks = "".join(mark if is_so else " " for mark, is_so in said)
    usd = "-" if math.isnan(row.usd_per_million) else f"{row.usd_per_million:.4g}"
    return (
        marks,
        candidate.name,
        candidate.ratio,
        str(candidate.num_gpus),
        f"{trial.goodput_per_s:.3g}",
        f"{row.goodput_per_gpu:.3g}",
        usd,
        f"{1e3 * _tpot_s(trial):.3g} ms",
        _limits(candidate),
    )


def _against_mixed(plan: Plan) -> list[str]:
    if plan.mixed is None or plan.split is None:
        return [f"  there is no {'mixed' if plan.mixed is None else 'split'} candidate that carries anything"]
    # The two use as many GPUs as pays for each: only what one GPU carries is on equal hardware.
    mixed, split = plan.mixed.goodput_per_gpu, plan.split.goodput_per_gpu
    gain = split / mixed if mixed else math.inf
    lines = [f"  split over mixed, the best of each: {_ratio(gain)} per GPU ({split:.3g} to {mixed:.3g} requests/s)"]
    if plan.equal is not None:
        one, other = plan.split.trial.goodput_per_s, plan.equal.trial.goodput_per_s
        gain = one / other if other else math.inf
        gpus = plan.split.candidate.num_gpus
        lines.append(f"  on equal hardware, {gpus} GPUs: {_ratio(gain)} ({one:.3g} to {other:.3g} requests/s, = below)")
    return lines


def _only_workers(candidate: Candidate) -> list[str]:
    """Those without whom there is no answer, whatever the rate."""
    writers = [pool for pool in candidate.pools if pool.role is not Role.PREFILL]
    alone = [pool for pool in writers if candidate.with_one_less(pool) is None]
    return [f"one {pool.role} worker ({pool.cut}) less: no answers, it is the only one" for pool in alone]


def _probe(probe: Probe) -> tuple[str, ...]:
    point = probe.point
    times = (f"{point.ttft_s:.3g} s", f"{1e3 * point.tpot_s:.3g} ms")
    return (probe.what, f"{point.rate_per_s:.3g}", f"{point.attainment:.1%}", *times)


def _tpot_s(trial: Trial) -> float:
    return trial.nearest(trial.goodput_per_s).tpot_s


def _ratio(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f} x"


def _number(value: float, unit: str, otherwise: str) -> str:
    return otherwise if math.isnan(value) else f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"

"""The work of `disagg bench compare`: two clusters of equal hardware on one machine, asked in turn.

Both are up all the time, only one is asked; which one goes first changes with every round. Each run has words of its
own (no prefix of an earlier one helps), the two sides of a round the same ones.
"""

import math
import sys
import zlib
from collections.abc import Sequence

import msgspec

from disagg import __version__
from disagg.bench.comparison import Verdict, break_even, length_classes, verdict
from disagg.bench.html_report import (
    attainment_plot,
    latency_section,
    length_section,
    request_section,
    summary_section,
    trial_of,
    worker_section,
)
from disagg.bench.json_report import CompareReport, ScenarioReport, load_report
from disagg.bench.measure import LoadPlan, LoadResult, Target, measure, merge
from disagg.bench.mix import Mix, load_mix
from disagg.bench.record import write_records
from disagg.bench.text_report import describe
from disagg.cli.bench_options import CompareOptions, ReportOptions
from disagg.cli.bench_progress import Progress
from disagg.cli.bench_run import READY_TIMEOUT_S, TARGET_SHARE, check_writable, write_page
from disagg.cli.machine import processor
from disagg.core.errors import ConfigurationError
from disagg.report.page import Section, page
from disagg.testing.processes import Serve

MIXED, SEPARATE = "mixed", "separate"
WARM_UP_REQUESTS = 2


class Judged(msgspec.Struct, frozen=True):
    """One mix: the results of each side at each factor, all rounds together."""

    name: str
    mix: Mix
    results: dict[str, tuple[LoadResult, ...]]  # by side, in the order of the factors
    verdict: Verdict


def run_compare(asked: CompareOptions, report: ReportOptions) -> None:
    """Prints, and writes what was asked for. Raises ConfigurationError."""
    check_writable(report.html, report.records)
    _check(asked)
    mixes = [(name, load_mix(name)) for name in asked.mixes]
    pools = {
        MIXED: ("--mixed", str(asked.prefill + asked.decode)),
        SEPARATE: ("--prefill", str(asked.prefill), "--decode", str(asked.decode)),
    }
    with (
        Serve((asked.model, *pools[MIXED], *asked.serve_flags), ready_timeout_s=READY_TIMEOUT_S) as mixed,
        Serve((asked.model, *pools[SEPARATE], *asked.serve_flags), ready_timeout_s=READY_TIMEOUT_S) as separate,
    ):
        urls = {MIXED: mixed.url, SEPARATE: separate.url}
        for url in urls.values():
            _warm_up(url, mixes[0][1], asked)
        judged = [_judge(name, mix, urls, asked) for name, mix in mixes]
    _show(judged, asked, report)


def _check(asked: CompareOptions) -> None:
    if min(asked.prefill, asked.decode) < 1:
        text = f"{asked.prefill} prefill and {asked.decode} decode workers"
        raise ConfigurationError(f"{text}: a comparison needs at least one of each")
    if not asked.rates or not all(0 < rate < math.inf for rate in asked.rates) or asked.rounds < 1:
        raise ConfigurationError(f"rates {asked.rates} in {asked.rounds} rounds: all must be above 0")
    if asked.requests < 0 or not asked.timeout_s > 0:
        text = f"--requests {asked.requests} and --timeout-s {asked.timeout_s:g}"
        raise ConfigurationError(f"{text}: requests must be 0 or more, the time above 0")


def _warm_up(url: str, mix: Mix, asked: CompareOptions) -> None:
    """Touches memory and code paths that the first request would pay for."""
    plan = LoadPlan(workload=mix.workload(1.0, WARM_UP_REQUESTS), slo=mix.slo, seed=asked.seed, prompt_seed=-1)
    measure(Target(url=url, timeout_s=asked.timeout_s), plan)


def _judge(name: str, mix: Mix, urls: dict[str, str], asked: CompareOptions) -> Judged:
    runs: dict[tuple[str, float], list[LoadResult]] = {}
    for number in range(asked.rounds):
        order = (MIXED, SEPARATE) if number % 2 == 0 else (SEPARATE, MIXED)
        for factor in asked.rates:
            seed = asked.seed + 100 * number
            for side in order:
                plan = LoadPlan(
                    workload=mix.workload(factor, asked.requests),
                    slo=mix.slo,
                    label=side,
                    rate_per_s=mix.rate_per_s * factor,
                    seed=seed,
                    prompt_seed=zlib.crc32(f"{name} {number} {factor:g}".encode()),
                )
                label = f"{name} {plan.rate_per_s:.3g}/s {side}, round {number + 1}"
                with Progress(label, asked.requests or mix.num_requests) as progress:
                    result = measure(Target(url=urls[side], timeout_s=asked.timeout_s), plan, progress.tell)
                runs.setdefault((side, factor), []).append(result)
                shown = f"attain {100 * result.figures.attainment.value:.0f} %"
                print(
                    f"disagg: {label}: {result.figures.num_whole} whole answers, {shown}", file=sys.stderr, flush=True
                )
    results = {side: tuple(merge(runs[side, factor], asked.seed) for factor in asked.rates) for side in urls}
    judged = verdict(name, results[MIXED][0], results[SEPARATE][0])
    return Judged(name, mix, results, judged)


def _show(judged: Sequence[Judged], asked: CompareOptions, report: ReportOptions) -> None:
    if report.as_json:
        told = CompareReport(asked=_heading(asked), scenarios=tuple(map(_told, judged)))
        print(msgspec.json.encode(told).decode())
    else:
        print(_heading(asked))
        for each in judged:
            for side, results in each.results.items():
                for result in results:
                    print(f"\n{each.name}, {result.rate_per_s:.3g} requests/s, {side}")
                    print("\n".join(describe(result)))
        for each in judged:
            print(f"\n{each.verdict.sentence}")
    if report.records is not None:
        every = [
            r for each in judged for results in each.results.values() for result in results for r in result.records
        ]
        write_records(report.records, every)
    if report.html is not None:
        write_page(report.html, _page(judged, asked))


def _heading(asked: CompareOptions) -> str:
    """What was compared, and on what."""
    separate = f"{asked.prefill} prefill + {asked.decode} decode"
    return (
        f"{asked.model}: {separate} workers beside {asked.prefill + asked.decode} mixed ones on the same machine, "
        f"{asked.rounds} rounds in turn, seed {asked.seed}; {processor()}; disagg {__version__}"
    )


def _told(judged: Judged) -> ScenarioReport:
    mixed, separate = (tuple(map(load_report, judged.results[side])) for side in (MIXED, SEPARATE))
    return ScenarioReport(scenario=judged.name, verdict=judged.verdict, mixed=mixed, separate=separate)


def _page(judged: Sequence[Judged], asked: CompareOptions) -> str:
    sections: list[Section] = []
    for each in judged:
        first = [results[0] for results in each.results.values()]
        sections += _sections(each, first)
    return page("Mixed or separate?", _heading(asked), sections, [each.verdict.sentence for each in judged])


def _sections(judged: Judged, first: Sequence[LoadResult]) -> list[Section]:
    name, slo = judged.name, judged.mix.slo
    rows = [
        msgspec.structs.replace(result, label=f"{side}, {result.rate_per_s:.3g}/s")
        for side, results in judged.results.items()
        for result in results
    ]
    targets = f"Targets: TTFT at most {slo.ttft_s:g} s and TPOT at most {slo.tpot_s:g} s; failed requests miss them."
    classes = length_classes(first[0].records, first[1].records)
    curves = [(side, [trial_of(result) for result in results]) for side, results in judged.results.items()]
    summary = summary_section(f"{name}: {judged.mix.about}", rows, (targets,))
    others = (length_section(classes, break_even(classes)), request_section(first), worker_section(first))
    return [
        msgspec.structs.replace(summary, plots=(attainment_plot(curves, TARGET_SHARE),)),
        latency_section(f"{name}: latency at {first[0].rate_per_s:.3g} requests/s", first),
        *(msgspec.structs.replace(each, title=f"{name}: {each.title.lower()}") for each in others if each is not None),
    ]

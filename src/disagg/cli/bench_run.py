"""The work of `disagg bench run`: one server, one load or a search for the rate it carries."""

import contextlib
import math
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec

from disagg import __version__
from disagg.bench.client import NEEDS_TEXT, Api
from disagg.bench.html_report import (
    attainment_plot,
    latency_section,
    request_section,
    summary_section,
    trial_of,
    worker_section,
)
from disagg.bench.json_report import RunReport, load_report
from disagg.bench.load import LoadLimits
from disagg.bench.measure import LoadPlan, LoadResult, Target, measure
from disagg.bench.mix import Clock, Mix, load_mix
from disagg.bench.prompts import plain_ids
from disagg.bench.record import write_records
from disagg.bench.search import Limit, RateSearch
from disagg.bench.slo import Slo
from disagg.bench.text_report import describe
from disagg.bench.traces import TraceWork
from disagg.bench.workload import ClosedWork, Lengths, PrefixPool, RandomWork, Workload
from disagg.cli.bench_flags import check_flags, is_url
from disagg.cli.bench_options import LoadOptions, ReportOptions
from disagg.cli.bench_progress import Progress
from disagg.core.errors import ConfigurationError
from disagg.report.page import Section, page
from disagg.testing.processes import Serve

TARGET_SHARE = 0.9
DEFAULT_REQUESTS = 100
READY_TIMEOUT_S = 300.0


def run_bench(asked: LoadOptions, report: ReportOptions) -> None:
    """Prints, and writes what was asked for. Raises ConfigurationError."""
    check_writable(report.html, report.records)
    plan = plan_of(asked)
    plan.workload.start(random.Random(plan.seed)).next_request()  # what cannot be asked is said before anybody is
    with _served(asked) as url:
        target = target_of(asked, url)
        results, limit = _search(target, plan, asked) if asked.search else ([_measured(target, plan)], None)
    _show(results, limit, asked, report)


def plan_of(asked: LoadOptions) -> LoadPlan:
    """Without touching a server. Raises ConfigurationError for what does not fit together."""
    check_flags(asked)
    plan = _trace_plan(asked) if asked.trace else _mix_plan(asked)
    num_requests = num_expected(plan.workload)
    if 0 < num_requests <= asked.warm_up:
        text = f"--warm-up {asked.warm_up} of {num_requests} requests leaves none that count"
        raise ConfigurationError(f"{text}: ask for more --requests")
    limits = LoadLimits(warm_up_requests=asked.warm_up, max_s=asked.max_s or math.inf, max_open=asked.max_open)
    return msgspec.structs.replace(plan, seed=asked.seed, prompt_seed=asked.seed, limits=limits)


def _trace_plan(asked: LoadOptions) -> LoadPlan:
    work = TraceWork(
        path=Path(asked.trace),
        format=asked.trace_format,
        rate_scale=asked.rate_scale,
        length_scale=asked.length_scale,
        max_prompt_tokens=asked.max_prompt_tokens,
        num_requests=asked.requests or DEFAULT_REQUESTS,
    )
    return LoadPlan(workload=work, slo=Slo(asked.ttft_s or Slo().ttft_s, asked.tpot_s or Slo().tpot_s))


def _mix_plan(asked: LoadOptions) -> LoadPlan:
    mix = mix_of(asked)
    if mix.turns is not None and asked.api == Api.IDS:
        raise ConfigurationError(NEEDS_TEXT)
    if mix.num_clients and asked.rate:
        text = f"--rate says nothing beside the scenario's closed loop of {mix.num_clients} clients"
        raise ConfigurationError(f"{text}: leave out one or the other")
    rate_per_s = asked.rate or mix.rate_per_s
    return LoadPlan(
        workload=mix.workload(rate_per_s / mix.rate_per_s, asked.requests),
        slo=Slo(asked.ttft_s or mix.slo.ttft_s, asked.tpot_s or mix.slo.tpot_s),
        rate_per_s=math.nan if mix.num_clients else rate_per_s,
    )


def mix_of(asked: LoadOptions) -> Mix:
    """The scenario named, or one of the flags."""
    name = asked.scenario if is_url(asked.target) else asked.target
    if name:
        mix = load_mix(name)
        return msgspec.structs.replace(
            mix, num_clients=asked.clients or mix.num_clients, think_s=asked.think_s or mix.think_s
        )
    if not asked.rate and not asked.clients:
        raise ConfigurationError("how fast? give --rate (open loop), --clients (closed loop), --trace or --scenario")
    try:
        clock = Clock(asked.arrivals)
    except ValueError:
        text = f"--arrivals {asked.arrivals!r} is not one of {', '.join(Clock)}"
        raise ConfigurationError(text) from None
    return Mix(
        rate_per_s=asked.rate or 1.0,
        num_requests=asked.requests or DEFAULT_REQUESTS,
        prompt=_lengths(asked.prompt_tokens, asked.spread, asked.max_prompt_tokens),
        output=_lengths(asked.output_tokens, asked.spread, 1 << 20),
        prefixes=PrefixPool(asked.prefixes, asked.prefix_tokens),
        arrivals=clock,
        cv=asked.cv,
        think_s=asked.think_s,
        num_clients=asked.clients,
    )


def _lengths(mean: int, spread: float, most: int) -> Lengths:
    return Lengths(mean, spread * mean, is_lognormal=spread > 0, most=most)


def target_of(asked: LoadOptions, url: str) -> Target:
    try:
        api = Api(asked.api)
    except ValueError:
        raise ConfigurationError(f"--api {asked.api!r} is not one of {', '.join(Api)}") from None
    ids = plain_ids(asked.tokenizer or asked.model or "smollm2") if api is Api.IDS else ()
    model = asked.model if is_url(asked.target) else ""
    return Target(
        url=url,
        model=model,
        api=api,
        api_key=asked.api_key,
        timeout_s=asked.timeout_s,
        ids=ids,
        ignore_eos=asked.ignore_eos,
    )


@contextlib.contextmanager
def _served(asked: LoadOptions) -> Iterator[str]:
    """The URL given, or that of a cluster started for the scenario."""
    if is_url(asked.target):
        yield asked.target
        return
    pools = (
        ["--mixed", str(asked.mixed)]
        if asked.mixed
        else ["--prefill", str(asked.prefill), "--decode", str(asked.decode)]
    )
    with Serve((asked.model or "smollm2", *pools), ready_timeout_s=READY_TIMEOUT_S) as server:
        yield server.url


def _measured(target: Target, plan: LoadPlan) -> LoadResult:
    with Progress(plan.label or target.url, num_expected(plan.workload)) as progress:
        return measure(target, plan, progress.tell)


def num_expected(workload: Workload) -> int:
    """Requests of a whole load; 0: that is not known before."""
    work = workload.work if isinstance(workload, ClosedWork) else workload
    return work.num_requests if isinstance(work, RandomWork | TraceWork) else 0


def _search(target: Target, plan: LoadPlan, asked: LoadOptions) -> tuple[list[LoadResult], Limit]:
    """Every run has words of its own; rates share a pattern of lengths and arrivals, a second run has another."""
    if asked.trace or math.isnan(plan.rate_per_s):
        raise ConfigurationError("--search changes the rate: give --rate or a --scenario, no --trace and no --clients")
    mix = mix_of(asked)
    results: list[LoadResult] = []
    search = RateSearch(plan.rate_per_s, TARGET_SHARE, max_runs=asked.search_runs)
    while (rate_per_s := search.next_rate()) is not None:
        tried = search.trials.get(rate_per_s)
        run = msgspec.structs.replace(
            plan,
            workload=mix.workload(rate_per_s / mix.rate_per_s, asked.requests),
            label=f"{rate_per_s:.3g}/s",
            rate_per_s=rate_per_s,
            seed=asked.seed + (tried.num_runs if tried is not None else 0),
            prompt_seed=asked.seed + 1000 * (1 + len(results)),
        )
        result = _measured(target, run)
        results.append(result)
        trial = trial_of(result)
        search.tell(rate_per_s, trial.num_good, trial.num)
    return results, search.limit()


def _show(results: list[LoadResult], limit: Limit | None, asked: LoadOptions, report: ReportOptions) -> None:
    sentence = limit_sentence(limit) if limit is not None else ""
    heading = f"{asked.target}: {load_in_words(asked)}"
    if report.as_json:
        told = RunReport(asked=heading, loads=tuple(map(load_report, results)), limit=limit)
        print(msgspec.json.encode(told).decode())
    else:
        print(heading)
        for result in results:
            print("\n".join([*([f"\n{result.label}"] if result.label else []), *describe(result)]))
        if sentence:
            print(f"\n{sentence}")
    if report.records is not None:
        write_records(report.records, (record for result in results for record in result.records))
    if report.html is not None:
        sections = _sections(results, limit)
        subtitle = f"{heading}; disagg {__version__}"
        write_page(report.html, page("disagg bench", subtitle, sections, [sentence] if sentence else []))
    if not any(result.figures.num_whole for result in results):
        raise SystemExit(1)


def _sections(results: list[LoadResult], limit: Limit | None) -> list[Section]:
    slo = results[0].figures.slo
    targets = f"Targets: TTFT at most {slo.ttft_s:g} s and TPOT at most {slo.tpot_s:g} s; failed requests miss them."
    summary = summary_section("Load", results, (targets,))
    if limit is not None:
        search = RateSearch(results[0].rate_per_s, TARGET_SHARE)
        for trial in map(trial_of, results):
            search.tell(trial.rate_per_s, trial.num_good, trial.num)
        plot = attainment_plot([("all runs", tuple(search.trials.values()))], TARGET_SHARE)
        summary = msgspec.structs.replace(summary, plots=(plot,))
    shown = (
        results
        if len(results) <= 3
        else [min(results, key=lambda r: abs(r.rate_per_s - (limit.rate_per_s if limit else 0)))]
    )
    sections = [summary, latency_section("Latency", shown), request_section(shown), worker_section(shown)]
    return [section for section in sections if section is not None]


def load_in_words(asked: LoadOptions) -> str:
    """How much, how fast, and by what chance."""
    name = asked.scenario if is_url(asked.target) else asked.target
    if asked.trace:
        scales = f"its clock at {asked.rate_scale:g} times, its lengths at {asked.length_scale:g} times"
        return f"{asked.trace_format} trace {Path(asked.trace).name}, {scales}, seed {asked.seed}"
    what = f"scenario {name}" if name else f"{asked.prompt_tokens} prompt and {asked.output_tokens} answer tokens"
    mix = mix_of(asked)
    clock = f"{asked.rate or mix.rate_per_s:g} requests/s ({mix.arrivals})"
    how = f"{mix.num_clients} clients, each asks when answered" if mix.num_clients else clock
    return f"{what}, {how}, seed {asked.seed}"


def limit_sentence(limit: Limit) -> str:
    share = f"{100 * TARGET_SHARE:.0f} %"
    if not limit.rate_per_s:
        return f"No rate tried attains {share}; the lowest was {limit.first_too_high_per_s:.3g} requests/s."
    upper = (
        f"{limit.first_too_high_per_s:.3g}/s does not"
        if math.isfinite(limit.first_too_high_per_s)
        else "no higher one was tried"
    )
    sure = "" if limit.is_sure else " More requests per run would make this surer."
    return f"{limit.rate_per_s:.3g} requests/s attain {share}, {upper}.{sure}"


def check_writable(*paths: Path | None) -> None:
    """Before an hour's work, not after it."""
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise ConfigurationError(f"{path.parent} is not a folder: make it first or name another file")


def write_page(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}; name another file") from None

"""`disagg advise`, `plan`, `simulate`: what may be asked, and how it is shown."""

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from disagg.bench.traces import READERS, TraceWork
from disagg.bench.workload import Lengths
from disagg.cli.planner_text import advice_lines, outcome_lines, plan_lines
from disagg.core.errors import ConfigurationError
from disagg.planner.advise import advise as find_advice
from disagg.planner.estimate import Target
from disagg.planner.fleet import Fleet, Gpus, make_gpus
from disagg.planner.outcome_page import outcome_json, outcome_page
from disagg.planner.plan import plan as find_plan
from disagg.planner.scenario_file import (
    fleet_of,
    load_model,
    read_scenario_file,
    scenario_of,
    target_of,
    traffic_of,
)
from disagg.planner.search import Effort, Objective, Search, Watch
from disagg.planner.traffic import Traffic, drawn_traffic, read_traffic
from disagg.sim.hardware.precision import Precision
from disagg.sim.scenario import Slo
from disagg.sim.simulate import simulate as run_simulation

HARDWARE, TRAFFIC, TARGETS, SEARCH = "Hardware", "Traffic", "Targets", "Search"
_EFFORT = Effort()
SPREAD = 0.5  # of lengths that are given as means: standard deviation over mean

Subject = Annotated[
    str, typer.Argument(metavar="MODEL|SCENARIO.toml", help="Name of the catalogue, a config.json, or a scenario.")
]
GpuOption = Annotated[
    list[str] | None,
    typer.Option(
        "--gpu",
        metavar="NAME[=COUNT][@USD]",
        help="Devices, such as h100=16 or h100=8@2.5 (dollars an hour); may be given again.",
        rich_help_panel=HARDWARE,
    ),
]
Budget = Annotated[
    float, typer.Option("--budget", help="Dollars an hour, instead of counts.", rich_help_panel=HARDWARE)
]
LinkOption = Annotated[str, typer.Option("--link", help="Between workers.", rich_help_panel=HARDWARE)]
WeightsWidth = Annotated[Precision, typer.Option("--weights", help="Of weights.", rich_help_panel=HARDWARE)]
KvWidth = Annotated[Precision, typer.Option("--kv", help="Of the KV cache.", rich_help_panel=HARDWARE)]
EngineName = Annotated[
    str, typer.Option("--engine", help="Whose overhead per step is assumed.", rich_help_panel=HARDWARE)
]
TraceFile = Annotated[Path | None, typer.Option("--trace", help="File of requests.", rich_help_panel=TRAFFIC)]
TraceFormat = Annotated[
    str, typer.Option("--trace-format", help=f"One of {', '.join(READERS)}.", rich_help_panel=TRAFFIC)
]
RateScale = Annotated[
    float, typer.Option("--rate-scale", help="2: the trace's requests twice as fast.", rich_help_panel=TRAFFIC)
]
Rate = Annotated[float, typer.Option("--rate", help="Requests per second, without a trace.", rich_help_panel=TRAFFIC)]
Prompt = Annotated[float, typer.Option("--prompt-tokens", help="Mean, without a trace.", rich_help_panel=TRAFFIC)]
Answer = Annotated[float, typer.Option("--output-tokens", help="Mean, without a trace.", rich_help_panel=TRAFFIC)]
Ttft = Annotated[float | None, typer.Option("--ttft-s", help="[default: 2]", rich_help_panel=TARGETS)]
Tpot = Annotated[float | None, typer.Option("--tpot-s", help="[default: 0.05]", rich_help_panel=TARGETS)]
Share = Annotated[
    float | None,
    typer.Option("--share", help="Of requests that must be within both. [default: 0.9]", rich_help_panel=TARGETS),
]
Seed = Annotated[int, typer.Option("--seed", help="Equal seeds, equal answers.", rich_help_panel=SEARCH)]
LimitS = Annotated[
    float,
    typer.Option("--limit-s", help="Seconds of computing after which no simulation begins.", rich_help_panel=SEARCH),
]
Requests = Annotated[int, typer.Option("--requests", help="Of one simulation, at most.", rich_help_panel=SEARCH)]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write the answer there, for programs.")]


class _Question(msgspec.Struct, frozen=True):
    """What advise and plan are asked."""

    model: str
    fleet: Fleet
    traffic: Traffic
    target: Target


def advise(
    subject: Subject,
    gpu: GpuOption = None,
    budget: Budget = 0.0,
    link: LinkOption = "IB-NDR",
    weights: WeightsWidth = Precision.BF16,
    kv: KvWidth = Precision.BF16,
    engine: EngineName = "vllm",
    trace: TraceFile = None,
    trace_format: TraceFormat = "",
    rate_scale: RateScale = 1.0,
    rate: Rate = 0.0,
    prompt_tokens: Prompt = 0.0,
    output_tokens: Answer = 0.0,
    ttft_s: Ttft = None,
    tpot_s: Tpot = None,
    share: Share = None,
    seed: Seed = 0,
    limit_s: LimitS = 100.0,
    requests: Requests = _EFFORT.num_requests,
    json: JsonFile = None,
) -> None:
    """Say whether splitting prefill and decode pays for this traffic on this hardware, and why."""
    asked = _question(
        subject, gpu, budget, link, (weights, kv), engine, (trace, trace_format, rate_scale),
        (rate, prompt_tokens, output_tokens), (ttft_s, tpot_s, share), seed,
    )  # fmt: skip
    search = Search(asked.fleet, asked.traffic, asked.target, effort=Effort(requests), seed=seed)
    with _watching(limit_s) as watch:
        advice = find_advice(search, watch)
    print("\n".join(advice_lines(advice, asked.fleet, asked.target)))
    _write(json, msgspec.json.encode(advice))


def plan(
    subject: Subject,
    gpu: GpuOption = None,
    budget: Budget = 0.0,
    objective: Annotated[
        Objective, typer.Option(help="What is made most of.", rich_help_panel=SEARCH)
    ] = Objective.PER_GPU,
    link: LinkOption = "IB-NDR",
    weights: WeightsWidth = Precision.BF16,
    kv: KvWidth = Precision.BF16,
    engine: EngineName = "vllm",
    trace: TraceFile = None,
    trace_format: TraceFormat = "",
    rate_scale: RateScale = 1.0,
    rate: Rate = 0.0,
    prompt_tokens: Prompt = 0.0,
    output_tokens: Answer = 0.0,
    ttft_s: Ttft = None,
    tpot_s: Tpot = None,
    share: Share = None,
    seed: Seed = 0,
    limit_s: LimitS = 100.0,
    requests: Requests = _EFFORT.num_requests,
    json: JsonFile = None,
) -> None:
    """Find roles, counts, partitions and limits of workers for this traffic, and how much they can take."""
    asked = _question(
        subject, gpu, budget, link, (weights, kv), engine, (trace, trace_format, rate_scale),
        (rate, prompt_tokens, output_tokens), (ttft_s, tpot_s, share), seed,
    )  # fmt: skip
    effort = Effort(requests)
    search = Search(asked.fleet, asked.traffic, asked.target, objective=objective, effort=effort, seed=seed)
    with _watching(limit_s) as watch:
        found = find_plan(search, watch)
    print("\n".join(plan_lines(found, asked.fleet, asked.target, asked.model)))
    _write(json, msgspec.json.encode(found))


def simulate(
    scenario: Annotated[Path, typer.Argument(metavar="SCENARIO.toml", help="Workers, traffic, targets, faults.")],
    seed: Annotated[int | None, typer.Option(help="Other than the file's.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Also write a page with plots there.")] = None,
    json: JsonFile = None,
) -> None:
    """Play one scenario in virtual time with the serving code, and report on it."""
    file = read_scenario_file(scenario)
    chosen, target = scenario_of(file), target_of(file)
    outcome = run_simulation(chosen, file.seed if seed is None else seed)
    print("\n".join(outcome_lines(file.name, outcome.report)))
    if html is not None:
        slo = f"TTFT {target.slo.ttft_s:g} s, TPOT {1e3 * target.slo.tpot_s:g} ms"
        subtitle = f"{file.model}, {len(chosen.workers)} workers; targets {slo}; seed {outcome.report.seed}"
        _write(html, outcome_page(file.name, subtitle, outcome, target).encode())
    _write(json, outcome_json(file.name, outcome))


def _question(
    subject: str,
    gpu: list[str] | None,
    budget: float,
    link: str,
    widths: tuple[Precision, Precision],
    engine: str,
    trace: tuple[Path | None, str, float],
    drawn: tuple[float, float, float],
    targets: tuple[float | None, float | None, float | None],
    seed: int,
) -> _Question:
    """Flags over what a scenario says. Raises ConfigurationError."""
    if subject.endswith(".toml"):
        file = read_scenario_file(Path(subject))
        fleet, target = fleet_of(file), target_of(file)
        model = file.model
        if gpu or budget:
            fleet = msgspec.structs.replace(fleet, gpus=_gpus(gpu, budget), budget_usd_per_hour=budget)
        traffic = traffic_of(file) if trace[0] is None and not drawn[0] else _traffic(trace, drawn, seed)
    else:
        model = subject
        fleet = Fleet(
            model=load_model(subject),
            gpus=_gpus(gpu, budget),
            budget_usd_per_hour=budget,
            engine=engine,
            weights=widths[0],
            kv=widths[1],
            link=link,
        )
        target, traffic = Target(Slo(2.0, 0.05), 0.9), _traffic(trace, drawn, seed)
    ttft_s, tpot_s, share = targets
    slo = Slo(target.slo.ttft_s if ttft_s is None else ttft_s, target.slo.tpot_s if tpot_s is None else tpot_s)
    share = target.share if share is None else share
    if not (slo.ttft_s > 0 and slo.tpot_s > 0 and 0 < share < 1):
        text = f"--ttft-s {slo.ttft_s:g}, --tpot-s {slo.tpot_s:g}, --share {share:g}"
        raise ConfigurationError(f"{text}: times must be above 0, the share between 0 and 1")
    return _Question(model, fleet, traffic, Target(slo, share))


def _gpus(texts: list[str] | None, budget: float) -> tuple[Gpus, ...]:
    """'h100=16@2.5' and the like. Raises ConfigurationError."""
    if not texts:
        raise ConfigurationError("no devices: give --gpu NAME=COUNT, or --gpu NAME and --budget")
    found: list[Gpus] = []
    for text in texts:
        rest, _, usd_text = text.partition("@")
        name, equals, count_text = rest.partition("=")
        try:
            usd, count = float(usd_text or 0), int(count_text) if equals else 0
        except ValueError:
            raise ConfigurationError(f"--gpu {text}: write NAME=COUNT or NAME=COUNT@USD, such as h100=16@2.5") from None
        if not equals:
            price = make_gpus(name, 1, usd).usd_per_hour
            if not budget or not price:
                raise ConfigurationError(f"--gpu {text}: give a count, or a --budget and a price, as in {name}@2.5")
            count = int(budget / price)
        found.append(make_gpus(name, count, usd))
    names = [each.device for each in found]
    if len(set(names)) != len(names):
        raise ConfigurationError(f"--gpu names {', '.join(names)}: each device once")
    return tuple(found)


def _traffic(trace: tuple[Path | None, str, float], drawn: tuple[float, float, float], seed: int) -> Traffic:
    path, trace_format, rate_scale = trace
    rate, prompt, output = drawn
    if path is not None:
        work = TraceWork(path=path, format=trace_format, rate_scale=rate_scale)
        return read_traffic(path.name, work, seed)
    if not (rate > 0 and prompt >= 1 and output >= 1):
        raise ConfigurationError(
            f"--rate {rate:g}, --prompt-tokens {prompt:g}, --output-tokens {output:g}: give all three, or --trace FILE"
        )
    asked, answered = (Lengths(mean, SPREAD * mean, is_lognormal=True) for mean in (prompt, output))
    return drawn_traffic(rate, asked, answered, seed)


@contextlib.contextmanager
def _watching(limit_s: float) -> Iterator[Watch]:
    """A bar on a terminal; silence elsewhere."""
    until_s = time.process_time() + limit_s  # of computing, so that a busy machine gives the same answer
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with bar:
        task = bar.add_task("candidates", total=None)

        def show(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what[:60])

        yield Watch(on_progress=show, is_over=lambda: time.process_time() >= until_s)


def _write(path: Path | None, content: bytes) -> None:
    if path is None:
        return
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}") from None

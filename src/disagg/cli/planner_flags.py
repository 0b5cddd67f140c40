"""What `disagg advise` and `plan` are asked, as flags over what a scenario says."""

from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer

from disagg.bench.traces import TRACE_FORMATS, TraceWork
from disagg.bench.workload import Lengths
from disagg.core.errors import ConfigurationError
from disagg.planner.estimate import Target
from disagg.planner.fleet import Fleet, Gpus, make_gpus
from disagg.planner.scenario_file import (
    ScenarioFile,
    check_plannable,
    fleet_of,
    load_model,
    model_path,
    read_scenario_file,
    target_of,
    traffic_of,
)
from disagg.planner.search import Effort
from disagg.planner.traffic import Traffic, drawn_traffic, read_traffic
from disagg.sim.hardware.precision import Precision
from disagg.sim.scenario import Slo

HARDWARE, TRAFFIC, TARGETS, SEARCH = "Hardware", "Traffic", "Targets", "Search"
SPREAD: Final = 0.5  # of lengths that are given as means: standard deviation over mean
DEFAULT_TARGET: Final = Target(Slo(2.0, 0.05), 0.9)


class Question(msgspec.Struct, frozen=True):
    """What is to be found out."""

    model: str  # a path, or a name of the catalogue
    fleet: Fleet
    traffic: Traffic
    target: Target
    seed: int


class QuestionFlags(msgspec.Struct, frozen=True, kw_only=True):
    """Not given: as the scenario says, else the default."""

    subject: Annotated[
        str, typer.Argument(metavar="MODEL|SCENARIO.toml", help="Name of the catalogue, a config.json, or a scenario.")
    ]
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=COUNT][@USD]",
            help="Devices, such as h100=16 or h100=8@2.5 (dollars an hour); may be given again.",
            rich_help_panel=HARDWARE,
        ),
    ] = None
    budget: Annotated[float, typer.Option(help="Dollars an hour, instead of counts.", rich_help_panel=HARDWARE)] = 0.0
    link: Annotated[str | None, typer.Option(help="Between workers. [default: IB-NDR]", rich_help_panel=HARDWARE)] = (
        None
    )
    weights: Annotated[Precision | None, typer.Option(help="Of weights. [default: bf16]", rich_help_panel=HARDWARE)] = (
        None
    )
    kv: Annotated[Precision | None, typer.Option(help="Of the KV cache. [default: bf16]", rich_help_panel=HARDWARE)] = (
        None
    )
    engine: Annotated[
        str | None,
        typer.Option(help="Whose overhead per step is assumed. [default: vllm]", rich_help_panel=HARDWARE),
    ] = None
    trace: Annotated[
        Path | None, typer.Option(help="File of requests; of ServeGen a folder.", rich_help_panel=TRAFFIC)
    ] = None
    trace_format: Annotated[str, typer.Option(help=f"One of {', '.join(TRACE_FORMATS)}.", rich_help_panel=TRAFFIC)] = ""
    rate_scale: Annotated[
        float | None,
        typer.Option(help="2: the trace's requests twice as fast. [default: 1]", rich_help_panel=TRAFFIC),
    ] = None
    rate: Annotated[float, typer.Option(help="Requests per second, without a trace.", rich_help_panel=TRAFFIC)] = 0.0
    prompt_tokens: Annotated[float, typer.Option(help="Mean, without a trace.", rich_help_panel=TRAFFIC)] = 0.0
    output_tokens: Annotated[float, typer.Option(help="Mean, without a trace.", rich_help_panel=TRAFFIC)] = 0.0
    ttft_s: Annotated[float | None, typer.Option(help="[default: 2]", rich_help_panel=TARGETS)] = None
    tpot_s: Annotated[float | None, typer.Option(help="[default: 0.05]", rich_help_panel=TARGETS)] = None
    share: Annotated[
        float | None,
        typer.Option(help="Of requests that must be within both. [default: 0.9]", rich_help_panel=TARGETS),
    ] = None
    seed: Annotated[
        int | None, typer.Option(help="Equal seeds, equal answers. [default: 0]", rich_help_panel=SEARCH)
    ] = None
    limit_s: Annotated[
        float,
        typer.Option(help="Seconds of computing after which the search ends.", rich_help_panel=SEARCH),
    ] = 100.0
    requests: Annotated[int, typer.Option(help="Of one simulation, at most.", rich_help_panel=SEARCH)] = (
        Effort().num_requests
    )

    def question(self) -> Question:
        """Raises ConfigurationError."""
        if not self.subject.endswith(".toml"):
            fleet = self._over(
                Fleet(model=load_model(self.subject), gpus=self._gpus(), budget_usd_per_hour=self.budget)
            )
            seed = self.seed or 0
            return Question(self.subject, fleet, self._traffic(seed), self._target(DEFAULT_TARGET), seed)
        file = read_scenario_file(Path(self.subject))
        check_plannable(file)
        file = msgspec.structs.replace(file, seed=file.seed if self.seed is None else self.seed)
        fleet, target = self._over(fleet_of(file)), target_of(file)
        if self.gpu or self.budget:
            fleet = msgspec.structs.replace(fleet, gpus=self._gpus(), budget_usd_per_hour=self.budget)
        return Question(model_path(file), fleet, self._traffic_over(file), self._target(target), file.seed)

    def _over(self, fleet: Fleet) -> Fleet:
        """With what was given instead of what it says."""
        given = {"link": self.link, "weights": self.weights, "kv": self.kv, "engine": self.engine}
        return msgspec.structs.replace(fleet, **{name: value for name, value in given.items() if value is not None})

    def _traffic_over(self, file: ScenarioFile) -> Traffic:
        """Its own, unless another is given."""
        if self.trace is not None or self.trace_format or self.rate or self.prompt_tokens or self.output_tokens:
            return self._traffic(file.seed)
        if self.rate_scale is None:
            return traffic_of(file)
        if not file.traffic.trace:
            raise ConfigurationError(f"--rate-scale {self.rate_scale:g}: {file.name} has no trace; give --rate")
        scaled = msgspec.structs.replace(file.traffic, rate_scale=self.rate_scale)
        return traffic_of(msgspec.structs.replace(file, traffic=scaled))

    def _target(self, said: Target) -> Target:
        slo = Slo(
            said.slo.ttft_s if self.ttft_s is None else self.ttft_s,
            said.slo.tpot_s if self.tpot_s is None else self.tpot_s,
        )
        return Target(slo, said.share if self.share is None else self.share)

    def _gpus(self) -> tuple[Gpus, ...]:
        if not self.gpu:
            raise ConfigurationError("no devices: give --gpu NAME=COUNT, or --gpu NAME and --budget")
        found = tuple(_parse_gpus(text, self.budget) for text in self.gpu)
        names = [each.device for each in found]
        if len(set(names)) != len(names):
            raise ConfigurationError(f"--gpu names {', '.join(names)}: each device once")
        return found

    def _traffic(self, seed: int) -> Traffic:
        if self.trace is not None:
            if self.rate or self.prompt_tokens or self.output_tokens:
                text = f"--trace {self.trace} has a rate and lengths of its own"
                raise ConfigurationError(f"{text}: leave out --rate, --prompt-tokens and --output-tokens")
            if not self.trace_format:
                raise ConfigurationError(
                    f"--trace {self.trace}: give --trace-format, one of {', '.join(TRACE_FORMATS)}"
                )
            scale = 1.0 if self.rate_scale is None else self.rate_scale
            work = TraceWork(path=self.trace, format=self.trace_format, rate_scale=scale)
            return read_traffic(self.trace.name, work, seed)
        if not (self.rate > 0 and self.prompt_tokens >= 1 and self.output_tokens >= 1):
            lengths = f"--prompt-tokens {self.prompt_tokens:g}, --output-tokens {self.output_tokens:g}"
            raise ConfigurationError(f"--rate {self.rate:g}, {lengths}: give all three, or --trace PATH")
        means = (self.prompt_tokens, self.output_tokens)
        asked, answered = (Lengths(mean, SPREAD * mean, is_lognormal=True) for mean in means)
        return drawn_traffic(self.rate, asked, answered, seed)


def _parse_gpus(text: str, budget: float) -> Gpus:
    """'h100=16@2.5' and the like. Raises ConfigurationError."""
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
        if count < 1:
            raise ConfigurationError(f"--gpu {text}: {budget:g} dollars an hour buy none at {price:g} each; allow more")
    return make_gpus(name, count, usd)

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
from disagg.planner.scenario_file import ScenarioFile, fleet_of, load_model, read_scenario_file, target_of, traffic_of
from disagg.planner.search import Effort
from disagg.planner.traffic import Traffic, drawn_traffic, read_traffic
from disagg.sim.hardware.precision import Precision
from disagg.sim.scenario import Slo

HARDWARE, TRAFFIC, TARGETS, SEARCH = "Hardware", "Traffic", "Targets", "Search"
SPREAD: Final = 0.5  # of lengths that are given as means: standard deviation over mean
DEFAULT_TARGET: Final = Target(Slo(2.0, 0.05), 0.9)


class Question(msgspec.Struct, frozen=True):
    """What is to be found out."""

    model: str
    fleet: Fleet
    traffic: Traffic
    target: Target


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
    link: Annotated[str, typer.Option(help="Between workers.", rich_help_panel=HARDWARE)] = "IB-NDR"
    weights: Annotated[Precision, typer.Option(help="Of weights.", rich_help_panel=HARDWARE)] = Precision.BF16
    kv: Annotated[Precision, typer.Option(help="Of the KV cache.", rich_help_panel=HARDWARE)] = Precision.BF16
    engine: Annotated[str, typer.Option(help="Whose overhead per step is assumed.", rich_help_panel=HARDWARE)] = "vllm"
    trace: Annotated[
        Path | None, typer.Option(help="File of requests; of ServeGen a folder.", rich_help_panel=TRAFFIC)
    ] = None
    trace_format: Annotated[str, typer.Option(help=f"One of {', '.join(TRACE_FORMATS)}.", rich_help_panel=TRAFFIC)] = ""
    rate_scale: Annotated[
        float, typer.Option(help="2: the trace's requests twice as fast.", rich_help_panel=TRAFFIC)
    ] = 1.0
    rate: Annotated[float, typer.Option(help="Requests per second, without a trace.", rich_help_panel=TRAFFIC)] = 0.0
    prompt_tokens: Annotated[float, typer.Option(help="Mean, without a trace.", rich_help_panel=TRAFFIC)] = 0.0
    output_tokens: Annotated[float, typer.Option(help="Mean, without a trace.", rich_help_panel=TRAFFIC)] = 0.0
    ttft_s: Annotated[float | None, typer.Option(help="[default: 2]", rich_help_panel=TARGETS)] = None
    tpot_s: Annotated[float | None, typer.Option(help="[default: 0.05]", rich_help_panel=TARGETS)] = None
    share: Annotated[
        float | None,
        typer.Option(help="Of requests that must be within both. [default: 0.9]", rich_help_panel=TARGETS),
    ] = None
    seed: Annotated[int, typer.Option(help="Equal seeds, equal answers.", rich_help_panel=SEARCH)] = 0
    limit_s: Annotated[
        float,
        typer.Option(help="Seconds of computing after which no simulation begins.", rich_help_panel=SEARCH),
    ] = 100.0
    requests: Annotated[int, typer.Option(help="Of one simulation, at most.", rich_help_panel=SEARCH)] = (
        Effort().num_requests
    )

    def question(self) -> Question:
        """Raises ConfigurationError."""
        if not self.subject.endswith(".toml"):
            return Question(self.subject, self._fleet(), self._traffic(), self._target(DEFAULT_TARGET))
        file = read_scenario_file(Path(self.subject))
        fleet, target = self._fleet_over(file), target_of(file)
        traffic = traffic_of(file) if self.trace is None and not self.rate else self._traffic()
        return Question(file.model, fleet, traffic, self._target(target))

    def _fleet(self) -> Fleet:
        return Fleet(
            model=load_model(self.subject),
            gpus=self._gpus(),
            budget_usd_per_hour=self.budget,
            engine=self.engine,
            weights=self.weights,
            kv=self.kv,
            link=self.link,
        )

    def _fleet_over(self, file: ScenarioFile) -> Fleet:
        fleet = fleet_of(file)
        if not self.gpu and not self.budget:
            return fleet
        return msgspec.structs.replace(fleet, gpus=self._gpus(), budget_usd_per_hour=self.budget)

    def _target(self, said: Target) -> Target:
        slo = Slo(
            said.slo.ttft_s if self.ttft_s is None else self.ttft_s,
            said.slo.tpot_s if self.tpot_s is None else self.tpot_s,
        )
        share = said.share if self.share is None else self.share
        if not (slo.ttft_s > 0 and slo.tpot_s > 0 and 0 < share < 1):
            text = f"--ttft-s {slo.ttft_s:g}, --tpot-s {slo.tpot_s:g}, --share {share:g}"
            raise ConfigurationError(f"{text}: times must be above 0, the share between 0 and 1")
        return Target(slo, share)

    def _gpus(self) -> tuple[Gpus, ...]:
        if not self.gpu:
            raise ConfigurationError("no devices: give --gpu NAME=COUNT, or --gpu NAME and --budget")
        found = tuple(_parse_gpus(text, self.budget) for text in self.gpu)
        names = [each.device for each in found]
        if len(set(names)) != len(names):
            raise ConfigurationError(f"--gpu names {', '.join(names)}: each device once")
        return found

    def _traffic(self) -> Traffic:
        if self.trace is not None:
            if not self.trace_format:
                raise ConfigurationError(
                    f"--trace {self.trace}: give --trace-format, one of {', '.join(TRACE_FORMATS)}"
                )
            work = TraceWork(path=self.trace, format=self.trace_format, rate_scale=self.rate_scale)
            return read_traffic(self.trace.name, work, self.seed)
        if not (self.rate > 0 and self.prompt_tokens >= 1 and self.output_tokens >= 1):
            lengths = f"--prompt-tokens {self.prompt_tokens:g}, --output-tokens {self.output_tokens:g}"
            raise ConfigurationError(f"--rate {self.rate:g}, {lengths}: give all three, or --trace PATH")
        means = (self.prompt_tokens, self.output_tokens)
        asked, answered = (Lengths(mean, SPREAD * mean, is_lognormal=True) for mean in means)
        return drawn_traffic(self.rate, asked, answered, self.seed)


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

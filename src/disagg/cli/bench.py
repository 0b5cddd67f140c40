"""`disagg bench`: what may be asked of it. A first word that is no command is a server or a scenario to load."""

import shlex
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from disagg.cli import launch
from disagg.cli.bench_options import (
    DEFAULT_MIXES,
    AsJson,
    CompareOptions,
    LoadOptions,
    PhasesOptions,
    ReportOptions,
    Requests,
    Seed,
    TimeoutS,
)
from disagg.cli.unfold import unfolded
from disagg.core.errors import ConfigurationError


class _BenchGroup(TyperGroup):
    """`disagg bench URL` is `disagg bench run URL`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            args = ["run", *args]
        return super().parse_args(ctx, args)


bench = typer.Typer(
    name="bench",
    cls=_BenchGroup,
    no_args_is_help=True,
    help="Load a server and measure it: `disagg bench URL`, `disagg bench chat`, `disagg bench compare smollm2`.",
)


@bench.command()
@unfolded
def run(asked: LoadOptions, report: ReportOptions) -> None:
    """Load one server. Open loop at --rate, closed loop with --clients, or a trace's own clock."""
    launch.run_bench(asked, report)


@bench.command()
@unfolded
def compare(
    report: ReportOptions,
    model: Annotated[str, typer.Argument(help="'smollm2', a GGUF file, or a Hugging Face directory.")] = "smollm2",
    prefill: Annotated[int, typer.Option(help="Workers of the separate side.")] = 1,
    decode: Annotated[int, typer.Option(help="The same. The other side has as many mixed ones as both.")] = 1,
    scenario: Annotated[list[str] | None, typer.Option(help="chat, rag, code or a .toml file; again for more.")] = None,
    rates: Annotated[str, typer.Option(help="Factors of the scenario's rate; the first one is judged.")] = "1,0.5,1.5",
    requests: Requests = 0,
    rounds: Annotated[int, typer.Option(help="Times each side is asked, in turn.")] = 2,
    seed: Seed = 7,
    timeout_s: TimeoutS = 300.0,
    serve_flags: Annotated[str, typer.Option(help="More flags of `disagg serve` for both, in one string.")] = "",
) -> None:
    """Separate workers beside as many mixed ones: same load, in turn; who wins, and what limits."""
    try:
        factors = tuple(float(text) for text in rates.split(","))
    except ValueError:
        raise ConfigurationError(f"--rates {rates!r}: give factors such as 1,0.5,1.5") from None
    asked = CompareOptions(
        model=model,
        prefill=prefill,
        decode=decode,
        mixes=tuple(scenario or DEFAULT_MIXES),
        rates=factors,
        requests=requests,
        rounds=rounds,
        seed=seed,
        timeout_s=timeout_s,
        serve_flags=tuple(shlex.split(serve_flags)),
    )
    launch.run_bench_compare(asked, report)


@bench.command()
@unfolded
def phases(asked: PhasesOptions, as_json: AsJson = False) -> None:
    """The two phases apart: time, tokens/s, arithmetic and bandwidth of each beside this machine's limits."""
    launch.run_bench_phases(asked, as_json=as_json)

"""`disagg bench`: what may be asked of it. A first word that is no command is a server or a scenario to load."""

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from disagg.cli import launch
from disagg.cli.bench_options import CompareOptions, LoadOptions, PhasesOptions, ReportOptions
from disagg.core.errors import ConfigurationError

SERVER, WORK, TIME, TARGETS, OUTPUT = "Server", "Work", "Arrivals", "Targets", "Output"


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

Seed = Annotated[int, typer.Option(help="Of times, lengths and words: equal seeds ask equal things.")]
TimeoutS = Annotated[float, typer.Option(help="Seconds after which an answer counts as failed.")]
Html = Annotated[Path | None, typer.Option("--report", help="Write one HTML page here.", rich_help_panel=OUTPUT)]
Records = Annotated[
    Path | None, typer.Option("--records", help="Write a JSON line per request here.", rich_help_panel=OUTPUT)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the figures as one JSON line.", rich_help_panel=OUTPUT)]
Requests = Annotated[int, typer.Option(help="How many; 0: the scenario's own, or 100.", rich_help_panel=WORK)]


@bench.command()
def run(
    target: Annotated[
        str,
        typer.Argument(
            metavar="URL|SCENARIO", help="An OpenAI-compatible server; or chat, rag, code, a .toml file: served here."
        ),
    ],
    scenario: Annotated[str, typer.Option(help="Ask a URL for this scenario.", rich_help_panel=WORK)] = "",
    model: Annotated[
        str, typer.Option(help="Default: the first that the server names; smollm2.", rich_help_panel=SERVER)
    ] = "",
    api: Annotated[str, typer.Option(help="chat, text or ids (token ids).", rich_help_panel=SERVER)] = "chat",
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="Sent as bearer.", rich_help_panel=SERVER)] = "",
    tokenizer: Annotated[
        str, typer.Option(help="Model whose vocabulary --api ids draws from. Default: --model.", rich_help_panel=SERVER)
    ] = "",
    prefill: Annotated[int, typer.Option(help="Workers of a scenario served here.", rich_help_panel=SERVER)] = 1,
    decode: Annotated[int, typer.Option(help="The same.", rich_help_panel=SERVER)] = 1,
    mixed: Annotated[int, typer.Option(help="The same, instead of the two.", rich_help_panel=SERVER)] = 0,
    trace: Annotated[str, typer.Option(help="A trace file, on its own clock.", rich_help_panel=WORK)] = "",
    trace_format: Annotated[str, typer.Option(help="mooncake, azure or burstgpt.", rich_help_panel=WORK)] = "mooncake",
    rate_scale: Annotated[float, typer.Option(help="2: the trace twice as fast.", rich_help_panel=WORK)] = 1.0,
    length_scale: Annotated[float, typer.Option(help="0.5: its lengths halved.", rich_help_panel=WORK)] = 1.0,
    requests: Requests = 0,
    prompt_tokens: Annotated[int, typer.Option(help="Mean length of prompts.", rich_help_panel=WORK)] = 256,
    output_tokens: Annotated[int, typer.Option(help="Mean length of answers.", rich_help_panel=WORK)] = 64,
    spread: Annotated[
        float, typer.Option(help="Standard deviation over mean of both (log-normal).", rich_help_panel=WORK)
    ] = 0.0,
    max_prompt_tokens: Annotated[int, typer.Option(help="Longer ones are cut.", rich_help_panel=WORK)] = 1 << 20,
    prefixes: Annotated[int, typer.Option(help="Shared beginnings of prompts.", rich_help_panel=WORK)] = 0,
    prefix_tokens: Annotated[int, typer.Option(help="Tokens of each.", rich_help_panel=WORK)] = 0,
    rate: Annotated[float, typer.Option(help="Requests per second, open loop.", rich_help_panel=TIME)] = 0.0,
    arrivals: Annotated[str, typer.Option(help="poisson, gamma or even.", rich_help_panel=TIME)] = "poisson",
    cv: Annotated[float, typer.Option(help="Of gamma: above 1 burstier than Poisson.", rich_help_panel=TIME)] = 1.0,
    clients: Annotated[
        int, typer.Option(help="Closed loop: so many clients, each asks when answered.", rich_help_panel=TIME)
    ] = 0,
    think_s: Annotated[float, typer.Option(help="Seconds a client waits before.", rich_help_panel=TIME)] = 0.0,
    warm_up: Annotated[int, typer.Option(help="First requests that do not count.", rich_help_panel=TIME)] = 0,
    max_s: Annotated[float, typer.Option(help="Send nothing later; 0: no end.", rich_help_panel=TIME)] = 0.0,
    max_open: Annotated[int, typer.Option(help="More at once are not sent and fail.", rich_help_panel=TIME)] = 2000,
    seed: Seed = 7,
    timeout_s: TimeoutS = 300.0,
    ttft_s: Annotated[float, typer.Option(help="Target; 0: the scenario's, or 2.", rich_help_panel=TARGETS)] = 0.0,
    tpot_s: Annotated[float, typer.Option(help="Target; 0: the scenario's, or 0.1.", rich_help_panel=TARGETS)] = 0.0,
    search: Annotated[
        bool, typer.Option("--search", help="Find the highest rate that attains 90 %.", rich_help_panel=TARGETS)
    ] = False,
    search_runs: Annotated[int, typer.Option(help="At most so many runs.", rich_help_panel=TARGETS)] = 8,
    report: Html = None,
    records: Records = None,
    as_json: AsJson = False,
) -> None:
    """Load one server. Open loop at --rate, closed loop with --clients, or a trace's own clock."""
    given = {key: value for key, value in locals().items() if key in LoadOptions.__struct_fields__}
    launch.run_bench(LoadOptions(**given), ReportOptions(report, records, as_json))


@bench.command()
def compare(
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
    report: Html = None,
    records: Records = None,
    as_json: AsJson = False,
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
        mixes=tuple(scenario or ("chat", "rag", "code")),
        rates=factors,
        requests=requests,
        rounds=rounds,
        seed=seed,
        timeout_s=timeout_s,
        serve_flags=tuple(shlex.split(serve_flags)),
    )
    launch.run_bench_compare(asked, ReportOptions(report, records, as_json))


@bench.command()
def phases(
    target: Annotated[str, typer.Argument(metavar="URL|MODEL", help="A server, or a model to serve here.")] = "smollm2",
    model: Annotated[str, typer.Option(help="Of a URL: where its weights are, for their geometry.")] = "smollm2",
    concurrent: Annotated[int, typer.Option(help="Requests at once.")] = 5,
    prompt_tokens: Annotated[int, typer.Option(help="Of each prompt.")] = 255,
    output_tokens: Annotated[int, typer.Option(help="Of each answer.")] = 256,
    rounds: Annotated[int, typer.Option(help="Times; medians count.")] = 3,
    weights: Annotated[str, typer.Option(help="fp32, fp16 or int8: how the server keeps them.")] = "fp32",
    measure_limits: Annotated[bool, typer.Option(help="Measure this machine first, on one thread.")] = True,
    seed: Seed = 7,
    timeout_s: TimeoutS = 300.0,
    as_json: AsJson = False,
) -> None:
    """The two phases apart: time, tokens/s, arithmetic and bandwidth of each beside this machine's limits."""
    given = {key: value for key, value in locals().items() if key in PhasesOptions.__struct_fields__}
    launch.run_bench_phases(PhasesOptions(**given), as_json=as_json)

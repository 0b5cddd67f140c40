"""What `disagg bench` was asked, between its command line and its work. Fields say how they are asked for."""

from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer

from disagg.bench.traces import TRACE_FORMATS
from disagg.core.formats import Weights

SERVER, WORK, TIME, TARGETS, OUTPUT = "Server", "Work", "Arrivals", "Targets", "Output"
DEFAULT_MIXES: Final = ("chat", "rag", "code")

Requests = Annotated[int, typer.Option(help="How many; 0: the scenario's own, or 100.", rich_help_panel=WORK)]
Seed = Annotated[int, typer.Option(help="Of times, lengths and words: equal seeds ask equal things.")]
TimeoutS = Annotated[float, typer.Option(help="Seconds after which an answer counts as failed.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the figures as one JSON line.", rich_help_panel=OUTPUT)]


class LoadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Flags of every load. Empty and 0: not given."""

    target: Annotated[
        str,
        typer.Argument(
            metavar="URL|SCENARIO", help="An OpenAI-compatible server; or chat, rag, code, a .toml file: served here."
        ),
    ]
    scenario: Annotated[str, typer.Option(help="Ask a URL for this scenario.", rich_help_panel=WORK)] = ""
    model: Annotated[
        str, typer.Option(help="Default: the first that the server names; smollm2.", rich_help_panel=SERVER)
    ] = ""
    api: Annotated[str, typer.Option(help="chat, text or ids (token ids).", rich_help_panel=SERVER)] = "chat"
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="Sent as bearer.", rich_help_panel=SERVER)] = ""
    tokenizer: Annotated[
        str, typer.Option(help="Model whose vocabulary --api ids draws from. Default: --model.", rich_help_panel=SERVER)
    ] = ""
    ignore_eos: Annotated[
        bool, typer.Option(help="Ask for answers of full length; some servers refuse that.", rich_help_panel=SERVER)
    ] = True
    prefill: Annotated[int, typer.Option(help="Workers of a scenario served here.", rich_help_panel=SERVER)] = 1
    decode: Annotated[int, typer.Option(help="The same.", rich_help_panel=SERVER)] = 1
    mixed: Annotated[int, typer.Option(help="The same, instead of the two.", rich_help_panel=SERVER)] = 0
    trace: Annotated[
        str, typer.Option(help="A trace on its own clock: a file, of ServeGen a folder.", rich_help_panel=WORK)
    ] = ""
    trace_format: Annotated[str, typer.Option(help=f"One of {', '.join(TRACE_FORMATS)}.", rich_help_panel=WORK)] = (
        "mooncake"
    )
    rate_scale: Annotated[float, typer.Option(help="2: the trace twice as fast.", rich_help_panel=WORK)] = 1.0
    length_scale: Annotated[float, typer.Option(help="0.5: its lengths halved.", rich_help_panel=WORK)] = 1.0
    requests: Requests = 0
    prompt_tokens: Annotated[int, typer.Option(help="Mean length of prompts.", rich_help_panel=WORK)] = 256
    output_tokens: Annotated[int, typer.Option(help="Mean length of answers.", rich_help_panel=WORK)] = 64
    spread: Annotated[
        float, typer.Option(help="Standard deviation over mean of both (log-normal).", rich_help_panel=WORK)
    ] = 0.0
    max_prompt_tokens: Annotated[int, typer.Option(help="Longer ones are cut.", rich_help_panel=WORK)] = 1 << 20
    prefixes: Annotated[int, typer.Option(help="Shared beginnings of prompts.", rich_help_panel=WORK)] = 0
    prefix_tokens: Annotated[int, typer.Option(help="Tokens of each.", rich_help_panel=WORK)] = 0
    rate: Annotated[float, typer.Option(help="Requests per second, open loop.", rich_help_panel=TIME)] = 0.0
    arrivals: Annotated[str, typer.Option(help="poisson, gamma or even.", rich_help_panel=TIME)] = "poisson"
    cv: Annotated[float, typer.Option(help="Of gamma: above 1 burstier than Poisson.", rich_help_panel=TIME)] = 1.0
    clients: Annotated[
        int, typer.Option(help="Closed loop: so many clients, each asks when answered.", rich_help_panel=TIME)
    ] = 0
    think_s: Annotated[float, typer.Option(help="Seconds a client waits before.", rich_help_panel=TIME)] = 0.0
    warm_up: Annotated[int, typer.Option(help="First requests that do not count.", rich_help_panel=TIME)] = 0
    max_s: Annotated[float, typer.Option(help="Send nothing later; 0: no end.", rich_help_panel=TIME)] = 0.0
    max_open: Annotated[int, typer.Option(help="More at once are not sent and fail.", rich_help_panel=TIME)] = 2000
    seed: Seed = 7
    timeout_s: TimeoutS = 300.0
    ttft_s: Annotated[float, typer.Option(help="Target; 0: the scenario's, or 2.", rich_help_panel=TARGETS)] = 0.0
    tpot_s: Annotated[float, typer.Option(help="Target; 0: the scenario's, or 0.1.", rich_help_panel=TARGETS)] = 0.0
    search: Annotated[
        bool, typer.Option("--search", help="Find the highest rate that attains 90 %.", rich_help_panel=TARGETS)
    ] = False
    search_runs: Annotated[int, typer.Option(help="At most so many runs.", rich_help_panel=TARGETS)] = 8


class ReportOptions(msgspec.Struct, frozen=True):
    """Where results go; None: nowhere but to the terminal."""

    html: Annotated[Path | None, typer.Option("--report", help="Write one HTML page here.", rich_help_panel=OUTPUT)] = (
        None
    )
    records: Annotated[
        Path | None, typer.Option("--records", help="Write a JSON line per request here.", rich_help_panel=OUTPUT)
    ] = None
    as_json: AsJson = False


class CompareOptions(msgspec.Struct, frozen=True, kw_only=True):
    """mixes: names or files. rates: factors of each mix's own rate, the first one for the verdict."""

    model: str
    prefill: int
    decode: int
    mixes: tuple[str, ...]
    rates: tuple[float, ...]
    requests: int
    rounds: int
    seed: int
    timeout_s: float
    serve_flags: tuple[str, ...]


class PhasesOptions(msgspec.Struct, frozen=True, kw_only=True):
    """target: a URL, or a model to be served by one prefill and one decode worker."""

    target: Annotated[str, typer.Argument(metavar="URL|MODEL", help="A server, or a model to serve here.")] = "smollm2"
    model: Annotated[str, typer.Option(help="Of a URL: where its weights are, for their geometry.")] = "smollm2"
    concurrent: Annotated[int, typer.Option(help="Requests at once.")] = 5
    prompt_tokens: Annotated[int, typer.Option(help="Of each prompt.")] = 255
    output_tokens: Annotated[int, typer.Option(help="Of each answer.")] = 256
    rounds: Annotated[int, typer.Option(help="Times; medians count.")] = 3
    weights: Annotated[Weights, typer.Option(help="How the server keeps them.")] = Weights.FP32
    measure_limits: Annotated[bool, typer.Option(help="Measure this machine first, on one thread.")] = True
    seed: Seed = 7
    timeout_s: TimeoutS = 300.0

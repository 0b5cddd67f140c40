"""Flags of routers, and the configuration they make. Names are those of the configuration's fields."""

from typing import Annotated, Final

import msgspec
import typer

from disagg.cli import options as opt
from disagg.cli.sizes import format_bytes, parse_bytes
from disagg.cli.unfold import same_named
from disagg.router.config import API_KEYS_VARIABLE, RouterConfig
from disagg.router.parser_names import ReasoningParser, ToolParser

# Where the flags' defaults come from.
DEFAULTS: Final = RouterConfig(models=(("-", "-"),))


class RouterFlags(msgspec.Struct, frozen=True, kw_only=True):
    """What the router of serve, or the one of router, is told."""

    host: Annotated[str, typer.Option(help="Address for HTTP.", rich_help_panel=opt.NETWORK)] = DEFAULTS.host
    port: Annotated[int, typer.Option(help="Port for HTTP; 0: any free one.", rich_help_panel=opt.NETWORK)] = (
        DEFAULTS.port
    )
    keys: opt.Keys = DEFAULTS.keys
    max_open_requests: Annotated[
        int, typer.Option(help="Requests in flight; one more gets HTTP 429.", rich_help_panel=opt.NETWORK)
    ] = DEFAULTS.max_open_requests
    max_queue_s: Annotated[
        float,
        typer.Option(help="Seconds a request may queue without a token; then HTTP 503.", rich_help_panel=opt.NETWORK),
    ] = DEFAULTS.max_queue_s
    max_body_bytes: Annotated[
        str, typer.Option(help="Largest request body, such as 8M.", rich_help_panel=opt.NETWORK)
    ] = format_bytes(DEFAULTS.max_body_bytes)
    max_json_depth: Annotated[
        int, typer.Option(help="Deepest nesting of a body's JSON.", rich_help_panel=opt.NETWORK)
    ] = DEFAULTS.max_json_depth
    header_timeout_s: Annotated[
        float, typer.Option(help="Seconds a client gets to send its headers.", rich_help_panel=opt.NETWORK)
    ] = DEFAULTS.header_timeout_s
    body_timeout_s: Annotated[
        float, typer.Option(help="Seconds a client gets to send its body.", rich_help_panel=opt.NETWORK)
    ] = DEFAULTS.body_timeout_s
    write_timeout_s: Annotated[
        float, typer.Option(help="Seconds a client gets to read what waits for it.", rich_help_panel=opt.NETWORK)
    ] = DEFAULTS.write_timeout_s
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar=API_KEYS_VARIABLE,
            show_envvar=True,
            help="A key that clients must send; may be given again. None and no file: nobody needs one.",
            rich_help_panel=opt.ACCESS,
        ),
    ] = None
    api_keys_file: Annotated[
        str, typer.Option(help="TOML file with keys and what each may do.", rich_help_panel=opt.ACCESS)
    ] = DEFAULTS.api_keys_file
    tls_cert: Annotated[
        str, typer.Option(help="PEM certificate: HTTPS instead of HTTP.", rich_help_panel=opt.ACCESS)
    ] = DEFAULTS.tls_cert
    tls_key: Annotated[str, typer.Option(help="PEM private key of --tls-cert.", rich_help_panel=opt.ACCESS)] = (
        DEFAULTS.tls_key
    )
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(help="Origin whose pages may ask, or '*'; may be given again.", rich_help_panel=opt.ACCESS),
    ] = None
    tool_parser: Annotated[
        ToolParser,
        typer.Option(help="How models write function calls; auto: by their chat templates.", rich_help_panel=opt.MODEL),
    ] = DEFAULTS.tool_parser
    reasoning_parser: Annotated[
        ReasoningParser,
        typer.Option(
            help="Whether <think>…</think> is taken out of answers; auto: by templates.", rich_help_panel=opt.MODEL
        ),
    ] = DEFAULTS.reasoning_parser
    local_prefill_tokens: Annotated[
        int,
        typer.Option(
            help="Prompts with at most this many uncached tokens are read by the decode worker; 0: never.",
            rich_help_panel=opt.HANDOFF,
        ),
    ] = DEFAULTS.local_prefill_tokens
    beat_interval_s: opt.BeatIntervalS = DEFAULTS.beat_interval_s
    decision_log: Annotated[
        str,
        typer.Option(
            metavar="PATH",
            help="Write every event and routing decision to this file, token ids included.",
            rich_help_panel=opt.LIFE,
            show_default=False,
        ),
    ] = DEFAULTS.decision_log
    keep_timelines: Annotated[
        int,
        typer.Option(help="Requests whose timelines are kept, for GET /timeline; 0: none.", rich_help_panel=opt.LIFE),
    ] = DEFAULTS.keep_timelines
    otel: Annotated[
        bool,
        typer.Option(
            "--otel",
            help="Export traces over OTLP; the OTEL_ variables say where. Needs disagg[otel].",
            rich_help_panel=opt.LIFE,
        ),
    ] = DEFAULTS.otel

    def config(
        self, *, models: tuple[tuple[str, str], ...], control_port: int, control_host: str = DEFAULTS.control_host
    ) -> RouterConfig:
        """models: (what clients call it, its path). Raises ConfigurationError."""
        given = same_named(self, RouterConfig) | {
            "models": models,
            "control_host": control_host,
            "control_port": control_port,
            "max_body_bytes": parse_bytes(self.max_body_bytes),
            "api_keys": tuple(self.api_key or ()),
            "cors_origins": tuple(self.cors_origin or ()),
        }
        return RouterConfig(**given)

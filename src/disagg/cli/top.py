"""`disagg top`: what may be asked of it."""

from typing import Annotated

import typer

from disagg.cli import launch
from disagg.core.errors import ConfigurationError

MIN_INTERVAL_S = 0.2


def top(
    url: Annotated[str, typer.Option(help="The router's HTTP address.")] = "http://127.0.0.1:8000",
    interval_s: Annotated[float, typer.Option(help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Two looks, print what they say, end.")] = False,
) -> None:
    """Watch a cluster: workers, queues, KV blocks, hand-offs, latencies, tokens/s. Ctrl-C ends it."""
    if not url.startswith(("http://", "https://")):
        raise ConfigurationError(f"{url!r} is no address of a router: write --url http://host:port")
    if not interval_s >= MIN_INTERVAL_S:
        raise ConfigurationError(f"--interval-s is {interval_s:g}: it must be at least {MIN_INTERVAL_S:g}")
    raise SystemExit(launch.run_top(url.rstrip("/"), interval_s, once=once))

"""`disagg drain`, `keys` and `doctor`: what is done to a cluster besides serving."""

from pathlib import Path
from typing import Annotated

import typer

from disagg.cli import launch
from disagg.cli import options as opt
from disagg.cli.notes import say
from disagg.cli.sizes import parse_address

ROUTER_ADDRESS = "127.0.0.1:8001"


def drain(
    worker_id: Annotated[str, typer.Argument(help="The worker's name, as in the live lines.")],
    router_address: opt.RouterAddress = ROUTER_ADDRESS,
    keys: opt.Keys = "",
) -> None:
    """Let one worker finish or give away its work, and end. Returns at once; nothing is lost."""
    launch.drain(worker_id, parse_address(router_address), keys)
    say(f"{worker_id} drains and then ends")


def keys(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where the authority and the keys go.")],
    host: Annotated[list[str] | None, typer.Option(help="Name or IP address of a machine; may be given again.")] = None,
    days: Annotated[int, typer.Option(help="Until the certificates expire.")] = 365,
) -> None:
    """Make an authority and, for each machine, keys that let its workers and router trust each other."""
    for line in launch.make_keys(directory, tuple(host or ("localhost",)), days):
        say(line)


def doctor(
    router_address: Annotated[
        str, typer.Option("--router-address", "--router", help="host:port of the router's control port.")
    ] = ROUTER_ADDRESS,
    keys: opt.Keys = "",
    json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Measure every link of a running cluster, look at every machine's limits, and say what to fix."""
    raise SystemExit(launch.run_doctor(parse_address(router_address), keys, as_json=json))

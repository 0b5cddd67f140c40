"""`disagg`: serve, worker, router, drain, keys, doctor, top, profile, bench, advise, plan, simulate, version.

Exit codes: 0 done, 1 failed, 2 cannot work as asked (one plain line says why), 130 cut short by a second Ctrl-C.
"""

import sys
from typing import Any

import typer
from typer.core import TyperGroup

from disagg import __version__
from disagg.channel.lifeline import watch_parent
from disagg.cli import launch
from disagg.cli.bench import bench
from disagg.cli.processes import router, serve, worker
from disagg.cli.profile import profile
from disagg.cli.top import top
from disagg.cli.upkeep import doctor, drain, keys
from disagg.core.errors import ConfigurationError, DisaggError


class _Commands(TyperGroup):
    """Loads those that plan when one is asked for, or the list of all: every worker starts by this file."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands:
            self.commands.update(launch.planning_commands())
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: Any) -> list[str]:
        self.commands.update(launch.planning_commands())
        return super().list_commands(ctx)


app = typer.Typer(
    name="disagg",
    cls=_Commands,
    help="Serve large language models with prefill and decode on separate workers.",
    epilog="Try: disagg serve smollm2 --prefill 1 --decode 1",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Entry point. Expected errors are one plain line on stderr; a traceback means a fault of ours."""
    lifeline = watch_parent()
    try:
        app()
    except ConfigurationError as error:
        print(f"disagg: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except DisaggError as error:
        print(f"disagg: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        if lifeline is not None:
            lifeline.close()


def version() -> None:
    """Print the version."""
    print(__version__)


app.command()(serve)
app.command()(worker)
app.command()(router)
app.command()(drain)
app.command()(top)
app.command()(profile)
app.add_typer(bench)
app.command()(keys)
app.command()(doctor)
app.command()(version)

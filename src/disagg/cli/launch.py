"""The one place where commands load heavy rooms: on first use, so that --help and typing errors answer at once."""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import typer
from typer.main import get_group

from disagg.cli.bench_options import CompareOptions, LoadOptions, PhasesOptions, ReportOptions
from disagg.cli.profile_options import ProfileOptions
from disagg.cluster.plan import LocalPlan
from disagg.core.errors import NotNative
from disagg.router.config import RouterConfig
from disagg.worker.config import WorkerConfig


def planning_commands() -> Mapping[str, Any]:
    """`advise`, `plan` and `simulate`."""
    from disagg.cli.planner import advise, plan, simulate

    app = typer.Typer(rich_markup_mode="rich")
    for command in (advise, plan, simulate):
        app.command()(command)
    return get_group(app).commands


def run_worker(config: WorkerConfig) -> int:
    """Blocking; the exit code."""
    from disagg.worker.process import run_worker as run

    return run(config)


def run_profile(config: WorkerConfig, asked: ProfileOptions) -> None:
    """Blocking. Raises ConfigurationError."""
    from disagg.cli.profile_run import run_profile as run

    run(config, asked)


def run_bench(asked: LoadOptions, report: ReportOptions) -> None:
    """Blocking. Raises ConfigurationError."""
    from disagg.cli.bench_run import run_bench as run

    run(asked, report)


def run_bench_compare(asked: CompareOptions, report: ReportOptions) -> None:
    """Blocking. Raises ConfigurationError."""
    from disagg.cli.bench_compare import run_compare as run

    run(asked, report)


def run_bench_phases(asked: PhasesOptions, *, as_json: bool) -> None:
    """Blocking. Raises ConfigurationError."""
    from disagg.cli.bench_phases import run_phases as run

    run(asked, as_json=as_json)


def run_router(config: RouterConfig) -> int:
    """Blocking; the exit code."""
    from disagg.router.process import run_router as run

    return run(config)


def run_serve(plan: LocalPlan, *, start_timeout_s: float, stop_timeout_s: float) -> int:
    """Blocking; the exit code."""
    from disagg.cli.serve import run_serve as run

    return run(plan, start_timeout_s=start_timeout_s, stop_timeout_s=stop_timeout_s)


def find_model(name_or_path: str, report: Callable[[str], None]) -> Path:
    """The model's path, fetched if need be, its description read. Raises ConfigurationError.

    Whether a model that is not native can run is for the workers to say.
    """
    from disagg.modelfiles.config import read_config
    from disagg.modelfiles.fetch import resolve_model

    path = resolve_model(name_or_path, report=report)
    with contextlib.suppress(NotNative):
        read_config(path)
    return path


def drain(worker_id: str, router_address: str, keys: str) -> None:
    """Ask a router to drain one of its workers. Raises ConfigurationError."""
    from disagg.cluster.drain import ask_drain

    ask_drain(worker_id, router_address, keys)


def make_keys(directory: Path, hosts: tuple[str, ...], days: int) -> tuple[str, ...]:
    """What was made, line by line. Raises ConfigurationError."""
    from disagg.cluster.authority import make_keys as make

    return make(directory, hosts, days)


def run_doctor(router_address: str, keys: str, *, as_json: bool) -> int:
    """Blocking; the exit code."""
    from disagg.cli.doctor import run_doctor as run

    return run(router_address, keys, as_json=as_json)


def run_top(url: str, interval_s: float, *, once: bool) -> int:
    """Blocking; the exit code. Raises ConfigurationError when there is nobody to look at and it is for once."""
    from disagg.cli.top_run import run_top as run

    return run(url, interval_s, once=once)

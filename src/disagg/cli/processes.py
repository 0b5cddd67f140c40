"""`disagg serve`, `worker`, `router`: what may be asked of them."""

import os
from typing import Annotated

import msgspec
import typer

from disagg.cli import launch, router_flags, worker_flags
from disagg.cli import options as opt
from disagg.cli.notes import say
from disagg.cli.router_flags import RouterFlags
from disagg.cli.sizes import parse_address, parse_cores, parse_models
from disagg.cli.unfold import unfolded
from disagg.cli.worker_flags import WorkerFlags
from disagg.cluster.plan import PREFILL_NICENESS, PoolSizes, check_pool_sizes, check_ports, plan_local
from disagg.core.formats import Weights
from disagg.core.roles import Role
from disagg.policy.restart import DEFAULT_RESTART_POLICY, RestartPolicy


@unfolded
def serve(
    model: opt.ModelArgument,
    worker: WorkerFlags,
    router: RouterFlags,
    prefill: Annotated[int, typer.Option(help="Workers that read prompts.", rich_help_panel=opt.POOLS)] = 0,
    decode: Annotated[int, typer.Option(help="Workers that write answers.", rich_help_panel=opt.POOLS)] = 0,
    mixed: Annotated[int, typer.Option(help="Workers that do both.", rich_help_panel=opt.POOLS)] = 0,
    prefill_weights: Annotated[
        Weights | None, typer.Option(help="Of prefill workers, if other than --weights.", rich_help_panel=opt.POOLS)
    ] = None,
    decode_weights: Annotated[
        Weights | None, typer.Option(help="Of decode workers, if other than --weights.", rich_help_panel=opt.POOLS)
    ] = None,
    prefill_niceness: Annotated[
        int,
        typer.Option(help="How far prefill workers let all others go first, 0 to 19.", rich_help_panel=opt.POOLS),
    ] = PREFILL_NICENESS,
    control_port: opt.ControlPort = 0,
    max_crashes: Annotated[
        int, typer.Option(help="Crashes of one process within 5 minutes that are too many.", rich_help_panel=opt.LIFE)
    ] = DEFAULT_RESTART_POLICY.max_crashes,
    max_restart_delay_s: Annotated[
        float, typer.Option(help="Most seconds before a crashed process is started again.", rich_help_panel=opt.LIFE)
    ] = DEFAULT_RESTART_POLICY.max_delay_s,
    start_timeout_s: Annotated[
        float, typer.Option(help="Seconds within which all must be ready.", rich_help_panel=opt.LIFE)
    ] = 300.0,
    stop_timeout_s: Annotated[
        float, typer.Option(help="Seconds a process gets to end before it is killed.", rich_help_panel=opt.LIFE)
    ] = 10.0,
) -> None:
    """Start a router and its workers on this machine, and keep them alive until Ctrl-C."""
    sizes = PoolSizes(prefill, decode, mixed)
    check_pool_sizes(sizes)
    name, path = worker.name_of(model), str(launch.find_model(model, report=say))
    router_config = router.config(models=((name, path),), control_port=control_port)
    template = worker.config(model=path, served_name=name, role=Role.MIXED, worker_id="-", router_address="")
    by_role = {Role.PREFILL: prefill_weights or worker.weights, Role.DECODE: decode_weights or worker.weights}
    plan = plan_local(router_config, template, sizes, weights=by_role, prefill_niceness=prefill_niceness)
    plan = msgspec.structs.replace(
        plan, restart=RestartPolicy(max_delay_s=max_restart_delay_s, max_crashes=max_crashes)
    )
    check_ports(router_config)
    raise SystemExit(launch.run_serve(plan, start_timeout_s=start_timeout_s, stop_timeout_s=stop_timeout_s))


@unfolded
def worker(
    model: opt.ModelArgument,
    flags: WorkerFlags,
    role: Annotated[Role, typer.Option(help="What this worker is for.", rich_help_panel=opt.POOLS)] = Role.MIXED,
    worker_id: Annotated[
        str, typer.Option(help="Its name, unique at its router. Default: made here.", rich_help_panel=opt.POOLS)
    ] = "",
    cores: Annotated[
        str, typer.Option(help="Pin to these cores, such as 0,2,4-7. Empty: free.", rich_help_panel=opt.POOLS)
    ] = "",
    niceness: Annotated[
        int, typer.Option(help="How far its processor time goes to others first, 0 to 19.", rich_help_panel=opt.POOLS)
    ] = worker_flags.DEFAULTS.niceness,
    router_address: opt.RouterAddress = worker_flags.DEFAULTS.router_address,
    host: Annotated[
        str, typer.Option(help="Address where peers reach this worker.", rich_help_panel=opt.NETWORK)
    ] = worker_flags.DEFAULTS.host,
    metrics_host: Annotated[
        str,
        typer.Option(help="Address of this worker's own /metrics; it asks nobody who he is.", rich_help_panel=opt.LIFE),
    ] = worker_flags.DEFAULTS.metrics_host,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            help="Port of this worker's own /metrics; 0: any free one. Default: none, the router shows all workers'.",
            rich_help_panel=opt.LIFE,
            show_default=False,
        ),
    ] = worker_flags.DEFAULTS.metrics_port,
) -> None:
    """Run one worker and register it at a router."""
    config = flags.config(
        model=str(launch.find_model(model, report=say)),
        served_name=flags.name_of(model),
        role=role,
        worker_id=worker_id or f"{role.value}-{os.uname().nodename}-{os.getpid()}",
        router_address=parse_address(router_address),
        host=host,
        cores=parse_cores(cores),
        niceness=niceness,
        metrics_host=metrics_host,
        metrics_port=metrics_port,
    )
    raise SystemExit(launch.run_worker(config))


@unfolded
def router(
    flags: RouterFlags,
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PATH", help="A model to serve; may be given again.", rich_help_panel=opt.MODEL),
    ] = None,
    control_host: Annotated[
        str, typer.Option(help="Address where workers register.", rich_help_panel=opt.NETWORK)
    ] = router_flags.DEFAULTS.control_host,
    control_port: opt.ControlPort = router_flags.DEFAULTS.control_port,
) -> None:
    """Run the router: HTTP in front, workers register behind."""
    named = parse_models(model or [])
    models = tuple((name, str(launch.find_model(path, report=say))) for name, path in named)
    config = flags.config(models=models, control_host=control_host, control_port=control_port)
    raise SystemExit(launch.run_router(config))

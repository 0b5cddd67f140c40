"""`disagg`: serve, worker, router, drain, keys, doctor, top, profile, bench, advise, plan, simulate, version.

Exit codes: 0 done, 1 failed, 2 cannot work as asked (one plain line says why), 130 cut short by a second Ctrl-C.
"""

import os
import sys
from typing import Annotated, Any

import msgspec
import typer
from typer.core import TyperGroup

from disagg import __version__
from disagg.channel.lifeline import watch_parent
from disagg.cli import launch
from disagg.cli import options as opt
from disagg.cli.bench import bench
from disagg.cli.notes import say
from disagg.cli.profile import profile
from disagg.cli.sizes import format_bytes, parse_address, parse_bytes, parse_cores, parse_models
from disagg.cli.tending import ROUTER_ADDRESS, doctor, drain, keys
from disagg.cli.top import top
from disagg.cluster.plan import PREFILL_NICENESS, PoolSizes, check_pool_sizes, check_ports, plan_local
from disagg.core.errors import ConfigurationError, DisaggError
from disagg.core.formats import Weights
from disagg.core.roles import Role
from disagg.modelfiles.fetch import served_name as default_served_name
from disagg.policy.restart import DEFAULT_RESTART_POLICY, RestartPolicy
from disagg.router.config import RouterConfig
from disagg.worker.config import WorkerConfig

# Where the flags' defaults come from.
_WORKER = WorkerConfig(model="-", served_name="-", role=Role.MIXED, worker_id="-", router_address=ROUTER_ADDRESS)
_ROUTER = RouterConfig(models=(("-", "-"),))
_KV_MEMORY = format_bytes(_WORKER.kv_memory_bytes)
_MIN_PUSH = format_bytes(_WORKER.min_push_bytes)
_MAX_BODY = format_bytes(_ROUTER.max_body_bytes)


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


@app.command()
def serve(
    model: opt.ModelArgument,
    prefill: Annotated[int, typer.Option(help="Workers that read prompts.", rich_help_panel=opt.POOLS)] = 0,
    decode: Annotated[int, typer.Option(help="Workers that write answers.", rich_help_panel=opt.POOLS)] = 0,
    mixed: Annotated[int, typer.Option(help="Workers that do both.", rich_help_panel=opt.POOLS)] = 0,
    device: opt.Device = _WORKER.device,
    num_threads: opt.NumThreads = _WORKER.num_threads,
    served_name: opt.ServedName = "",
    max_context: opt.MaxContext = _WORKER.max_context,
    numerics: opt.NumericsOption = _WORKER.numerics,
    weights: opt.WeightsOption = _WORKER.weights,
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
    kernels: opt.KernelsOption = _WORKER.kernels,
    host: opt.Host = _ROUTER.host,
    port: opt.Port = _ROUTER.port,
    control_port: opt.ControlPort = 0,
    keys: opt.Keys = "",
    max_open_requests: opt.MaxOpenRequests = _ROUTER.max_open_requests,
    max_queue_s: opt.MaxQueueS = _ROUTER.max_queue_s,
    max_body_bytes: opt.MaxBodyBytes = _MAX_BODY,
    max_json_depth: opt.MaxJsonDepth = _ROUTER.max_json_depth,
    header_timeout_s: opt.HeaderTimeoutS = _ROUTER.header_timeout_s,
    body_timeout_s: opt.BodyTimeoutS = _ROUTER.body_timeout_s,
    write_timeout_s: opt.WriteTimeoutS = _ROUTER.write_timeout_s,
    api_key: opt.ApiKey = None,
    api_keys_file: opt.ApiKeysFile = _ROUTER.api_keys_file,
    tls_cert: opt.TlsCert = _ROUTER.tls_cert,
    tls_key: opt.TlsKey = _ROUTER.tls_key,
    cors_origin: opt.CorsOrigin = None,
    decision_log: opt.DecisionLogFile = _ROUTER.decision_log,
    keep_timelines: opt.KeepTimelines = _ROUTER.keep_timelines,
    otel: opt.Otel = _ROUTER.otel,
    tool_parser: opt.ToolParserOption = _ROUTER.tool_parser,
    reasoning_parser: opt.ReasoningParserOption = _ROUTER.reasoning_parser,
    kv_memory: opt.KvMemory = _KV_MEMORY,
    kv_dtype: opt.KvDtypeOption = _WORKER.kv_dtype,
    num_blocks: opt.NumBlocks = _WORKER.num_blocks,
    block_size: opt.BlockSize = _WORKER.block_size,
    chunk_tokens: opt.ChunkTokens = _WORKER.chunk_tokens,
    mixed_chunk_tokens: opt.MixedChunkTokens = _WORKER.mixed_chunk_tokens,
    itl_target_s: opt.ItlTargetS = _WORKER.itl_target_s,
    max_running: opt.MaxRunning = _WORKER.max_running,
    local_prefill_tokens: opt.LocalPrefillTokens = _ROUTER.local_prefill_tokens,
    handoff: opt.Handoff = _WORKER.handoff,
    partial_start: opt.PartialStartOption = _WORKER.partial_start,
    first_token: opt.FirstTokenOption = _WORKER.first_token,
    min_push_bytes: opt.MinPushBytes = _MIN_PUSH,
    transport: opt.TransportOption = _WORKER.transport,
    data_connections: opt.DataConnections = _WORKER.data_connections,
    probe_s: opt.ProbeS = _WORKER.probe_s,
    link_gbits: opt.LinkGbits = _WORKER.link_gbits,
    kv_wire: opt.KvWireOption = _WORKER.kv_wire,
    lease_s: opt.LeaseS = _WORKER.lease_s,
    progress_timeout_s: opt.ProgressTimeoutS = _WORKER.progress_timeout_s,
    drain_timeout_s: opt.DrainTimeoutS = _WORKER.drain_timeout_s,
    beat_interval_s: opt.BeatIntervalS = _WORKER.beat_interval_s,
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
    name = served_name or default_served_name(model)
    path = str(launch.find_model(model, report=say))
    router_config = RouterConfig(
        models=((name, path),),
        host=host,
        port=port,
        control_port=control_port,
        keys=keys,
        local_prefill_tokens=local_prefill_tokens,
        max_open_requests=max_open_requests,
        max_queue_s=max_queue_s,
        beat_interval_s=beat_interval_s,
        max_body_bytes=parse_bytes(max_body_bytes),
        max_json_depth=max_json_depth,
        header_timeout_s=header_timeout_s,
        body_timeout_s=body_timeout_s,
        write_timeout_s=write_timeout_s,
        api_keys=tuple(api_key or ()),
        api_keys_file=api_keys_file,
        tls_cert=tls_cert,
        tls_key=tls_key,
        cors_origins=tuple(cors_origin or ()),
        decision_log=decision_log,
        keep_timelines=keep_timelines,
        otel=otel,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
    )
    template = WorkerConfig(
        model=path,
        served_name=name,
        role=Role.MIXED,
        worker_id="-",
        router_address="",
        keys=keys,
        device=device,
        num_threads=num_threads,
        block_size=block_size,
        kv_memory_bytes=parse_bytes(kv_memory),
        num_blocks=num_blocks,
        max_context=max_context,
        chunk_tokens=chunk_tokens,
        mixed_chunk_tokens=mixed_chunk_tokens,
        itl_target_s=itl_target_s,
        max_running=max_running,
        handoff=handoff,
        partial_start=partial_start,
        first_token=first_token,
        min_push_bytes=parse_bytes(min_push_bytes),
        transport=transport,
        data_connections=data_connections,
        probe_s=probe_s,
        link_gbits=link_gbits,
        kv_wire=kv_wire,
        lease_s=lease_s,
        progress_timeout_s=progress_timeout_s,
        drain_timeout_s=drain_timeout_s,
        beat_interval_s=beat_interval_s,
        numerics=numerics,
        weights=weights,
        kv_dtype=kv_dtype,
        kernels=kernels,
    )
    by_role = {Role.PREFILL: prefill_weights or weights, Role.DECODE: decode_weights or weights}
    plan = plan_local(router_config, template, sizes, weights=by_role, prefill_niceness=prefill_niceness)
    plan = msgspec.structs.replace(
        plan, restart=RestartPolicy(max_delay_s=max_restart_delay_s, max_crashes=max_crashes)
    )
    check_ports(router_config)
    raise SystemExit(launch.run_serve(plan, start_timeout_s=start_timeout_s, stop_timeout_s=stop_timeout_s))


@app.command()
def worker(
    model: opt.ModelArgument,
    role: Annotated[Role, typer.Option(help="What this worker is for.", rich_help_panel=opt.POOLS)] = Role.MIXED,
    worker_id: Annotated[
        str, typer.Option(help="Its name, unique at its router. Default: made here.", rich_help_panel=opt.POOLS)
    ] = "",
    router_address: opt.RouterAddress = _WORKER.router_address,
    host: Annotated[
        str, typer.Option(help="Address where peers reach this worker.", rich_help_panel=opt.NETWORK)
    ] = _WORKER.host,
    keys: opt.Keys = "",
    device: opt.Device = _WORKER.device,
    cores: opt.Cores = "",
    niceness: opt.Niceness = _WORKER.niceness,
    num_threads: opt.NumThreads = _WORKER.num_threads,
    served_name: opt.ServedName = "",
    max_context: opt.MaxContext = _WORKER.max_context,
    numerics: opt.NumericsOption = _WORKER.numerics,
    weights: opt.WeightsOption = _WORKER.weights,
    kernels: opt.KernelsOption = _WORKER.kernels,
    kv_memory: opt.KvMemory = _KV_MEMORY,
    kv_dtype: opt.KvDtypeOption = _WORKER.kv_dtype,
    num_blocks: opt.NumBlocks = _WORKER.num_blocks,
    block_size: opt.BlockSize = _WORKER.block_size,
    chunk_tokens: opt.ChunkTokens = _WORKER.chunk_tokens,
    mixed_chunk_tokens: opt.MixedChunkTokens = _WORKER.mixed_chunk_tokens,
    itl_target_s: opt.ItlTargetS = _WORKER.itl_target_s,
    max_running: opt.MaxRunning = _WORKER.max_running,
    handoff: opt.Handoff = _WORKER.handoff,
    partial_start: opt.PartialStartOption = _WORKER.partial_start,
    first_token: opt.FirstTokenOption = _WORKER.first_token,
    min_push_bytes: opt.MinPushBytes = _MIN_PUSH,
    transport: opt.TransportOption = _WORKER.transport,
    data_connections: opt.DataConnections = _WORKER.data_connections,
    probe_s: opt.ProbeS = _WORKER.probe_s,
    link_gbits: opt.LinkGbits = _WORKER.link_gbits,
    kv_wire: opt.KvWireOption = _WORKER.kv_wire,
    lease_s: opt.LeaseS = _WORKER.lease_s,
    progress_timeout_s: opt.ProgressTimeoutS = _WORKER.progress_timeout_s,
    drain_timeout_s: opt.DrainTimeoutS = _WORKER.drain_timeout_s,
    beat_interval_s: opt.BeatIntervalS = _WORKER.beat_interval_s,
    metrics_host: opt.MetricsHost = _WORKER.metrics_host,
    metrics_port: opt.MetricsPort = _WORKER.metrics_port,
) -> None:
    """Run one worker and register it at a router."""
    config = WorkerConfig(
        model=str(launch.find_model(model, report=say)),
        served_name=served_name or default_served_name(model),
        role=role,
        worker_id=worker_id or f"{role.value}-{os.uname().nodename}-{os.getpid()}",
        router_address=parse_address(router_address),
        host=host,
        keys=keys,
        device=device,
        cores=parse_cores(cores),
        niceness=niceness,
        num_threads=num_threads,
        block_size=block_size,
        kv_memory_bytes=parse_bytes(kv_memory),
        num_blocks=num_blocks,
        max_context=max_context,
        chunk_tokens=chunk_tokens,
        mixed_chunk_tokens=mixed_chunk_tokens,
        itl_target_s=itl_target_s,
        max_running=max_running,
        handoff=handoff,
        partial_start=partial_start,
        first_token=first_token,
        min_push_bytes=parse_bytes(min_push_bytes),
        transport=transport,
        data_connections=data_connections,
        probe_s=probe_s,
        link_gbits=link_gbits,
        kv_wire=kv_wire,
        lease_s=lease_s,
        progress_timeout_s=progress_timeout_s,
        drain_timeout_s=drain_timeout_s,
        beat_interval_s=beat_interval_s,
        numerics=numerics,
        weights=weights,
        kv_dtype=kv_dtype,
        kernels=kernels,
        metrics_host=metrics_host,
        metrics_port=metrics_port,
    )
    raise SystemExit(launch.run_worker(config))


@app.command()
def router(
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PATH", help="A model to serve; may be given again.", rich_help_panel=opt.MODEL),
    ] = None,
    host: opt.Host = _ROUTER.host,
    port: opt.Port = _ROUTER.port,
    control_host: opt.ControlHost = _ROUTER.control_host,
    control_port: opt.ControlPort = _ROUTER.control_port,
    keys: opt.Keys = "",
    max_open_requests: opt.MaxOpenRequests = _ROUTER.max_open_requests,
    max_queue_s: opt.MaxQueueS = _ROUTER.max_queue_s,
    max_body_bytes: opt.MaxBodyBytes = _MAX_BODY,
    max_json_depth: opt.MaxJsonDepth = _ROUTER.max_json_depth,
    header_timeout_s: opt.HeaderTimeoutS = _ROUTER.header_timeout_s,
    body_timeout_s: opt.BodyTimeoutS = _ROUTER.body_timeout_s,
    write_timeout_s: opt.WriteTimeoutS = _ROUTER.write_timeout_s,
    api_key: opt.ApiKey = None,
    api_keys_file: opt.ApiKeysFile = _ROUTER.api_keys_file,
    tls_cert: opt.TlsCert = _ROUTER.tls_cert,
    tls_key: opt.TlsKey = _ROUTER.tls_key,
    cors_origin: opt.CorsOrigin = None,
    tool_parser: opt.ToolParserOption = _ROUTER.tool_parser,
    reasoning_parser: opt.ReasoningParserOption = _ROUTER.reasoning_parser,
    local_prefill_tokens: opt.LocalPrefillTokens = _ROUTER.local_prefill_tokens,
    beat_interval_s: opt.BeatIntervalS = _ROUTER.beat_interval_s,
    decision_log: opt.DecisionLogFile = _ROUTER.decision_log,
    keep_timelines: opt.KeepTimelines = _ROUTER.keep_timelines,
    otel: opt.Otel = _ROUTER.otel,
) -> None:
    """Run the router: HTTP in front, workers register behind."""
    named = parse_models(model or [])
    config = RouterConfig(
        models=tuple((name, str(launch.find_model(path, report=say))) for name, path in named),
        host=host,
        port=port,
        control_host=control_host,
        control_port=control_port,
        keys=keys,
        local_prefill_tokens=local_prefill_tokens,
        max_open_requests=max_open_requests,
        max_queue_s=max_queue_s,
        beat_interval_s=beat_interval_s,
        max_body_bytes=parse_bytes(max_body_bytes),
        max_json_depth=max_json_depth,
        header_timeout_s=header_timeout_s,
        body_timeout_s=body_timeout_s,
        write_timeout_s=write_timeout_s,
        api_keys=tuple(api_key or ()),
        api_keys_file=api_keys_file,
        tls_cert=tls_cert,
        tls_key=tls_key,
        cors_origins=tuple(cors_origin or ()),
        decision_log=decision_log,
        keep_timelines=keep_timelines,
        otel=otel,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
    )
    raise SystemExit(launch.run_router(config))


app.command()(drain)
app.command()(top)
app.command()(profile)
app.add_typer(bench)
app.command()(keys)
app.command()(doctor)


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)

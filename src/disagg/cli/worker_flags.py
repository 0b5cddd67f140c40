"""Flags of workers, and the configurations they make. Names are those of the configuration's fields."""

from typing import Annotated, Final

import msgspec
import typer

from disagg.cli import options as opt
from disagg.cli.sizes import format_bytes, parse_bytes
from disagg.cli.unfold import same_named
from disagg.core.endpoints import TransportChoice
from disagg.core.formats import Kernels, KvDtype, KvWire, Weights
from disagg.core.roles import FirstToken, HandoffMode, Numerics, PartialStart, Role
from disagg.modelfiles.fetch import served_name as default_served_name
from disagg.worker.config import WorkerConfig

# Where the flags' defaults come from.
DEFAULTS: Final = WorkerConfig(
    model="-", served_name="-", role=Role.MIXED, worker_id="-", router_address="127.0.0.1:8001"
)


class EngineFlags(msgspec.Struct, frozen=True, kw_only=True):
    """What a model is computed with: of serve, worker and profile."""

    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.", rich_help_panel=opt.POOLS)] = DEFAULTS.device
    num_threads: Annotated[
        int | None,
        typer.Option(
            help="Threads for arithmetic, per worker. Default: its share of the cores.", rich_help_panel=opt.POOLS
        ),
    ] = DEFAULTS.num_threads
    weights: Annotated[Weights, typer.Option(help="How weights are stored.", rich_help_panel=opt.POOLS)] = (
        DEFAULTS.weights
    )
    kernels: Annotated[
        Kernels,
        typer.Option(
            help="Whose code computes; auto: native where it can be had. "
            "portable: the bits of every x86-64 CPU, for exact numerics between CPUs with AMX and without.",
            rich_help_panel=opt.POOLS,
        ),
    ] = DEFAULTS.kernels
    kv_memory: Annotated[
        str, typer.Option(help="KV cache per worker, such as 512M or 2G.", rich_help_panel=opt.MEMORY)
    ] = format_bytes(DEFAULTS.kv_memory_bytes)
    kv_dtype: Annotated[KvDtype, typer.Option(help="Numbers of the KV cache.", rich_help_panel=opt.MEMORY)] = (
        DEFAULTS.kv_dtype
    )
    num_blocks: Annotated[
        int | None, typer.Option(help="KV blocks per worker; overrides --kv-memory.", rich_help_panel=opt.MEMORY)
    ] = DEFAULTS.num_blocks
    block_size: Annotated[int, typer.Option(help="Tokens per KV block.", rich_help_panel=opt.MEMORY)] = (
        DEFAULTS.block_size
    )

    def config(
        self,
        *,
        model: str,
        served_name: str,
        role: Role,
        worker_id: str,
        router_address: str,
        host: str = DEFAULTS.host,
        cores: tuple[int, ...] = DEFAULTS.cores,
        niceness: int = DEFAULTS.niceness,
        metrics_host: str = DEFAULTS.metrics_host,
        metrics_port: int | None = DEFAULTS.metrics_port,
    ) -> WorkerConfig:
        """One worker as these flags say, in all else as by default. Raises ConfigurationError."""
        given = same_named(self, WorkerConfig) | self._sizes()
        given |= {"model": model, "served_name": served_name, "role": role, "worker_id": worker_id}
        given |= {"router_address": router_address, "host": host, "cores": cores, "niceness": niceness}
        return WorkerConfig(**given | {"metrics_host": metrics_host, "metrics_port": metrics_port})

    def _sizes(self) -> dict[str, int]:
        return {"kv_memory_bytes": parse_bytes(self.kv_memory)}


class WorkerFlags(EngineFlags, frozen=True, kw_only=True):
    """What every worker of serve, or the one of worker, is told."""

    served_name: Annotated[
        str, typer.Option(help="What clients call the model. Default: made from MODEL.", rich_help_panel=opt.MODEL)
    ] = ""
    max_context: Annotated[
        int | None,
        typer.Option(
            help="Longest prompt plus answer, tokens. Default: what the model allows.", rich_help_panel=opt.MODEL
        ),
    ] = DEFAULTS.max_context
    numerics: Annotated[
        Numerics, typer.Option(help="exact: a moved sequence goes on bit by bit the same.", rich_help_panel=opt.MODEL)
    ] = DEFAULTS.numerics
    chunk_tokens: Annotated[int, typer.Option(help="Most prompt tokens per step.", rich_help_panel=opt.STEPS)] = (
        DEFAULTS.chunk_tokens
    )
    mixed_chunk_tokens: Annotated[
        int,
        typer.Option(
            help="Prompt tokens per step beside running answers, while step times are not known or have no target.",
            rich_help_panel=opt.STEPS,
        ),
    ] = DEFAULTS.mixed_chunk_tokens
    itl_target_s: Annotated[
        float,
        typer.Option(
            help="Prompts beside running answers fill steps up to this many predicted seconds; 0: no target.",
            rich_help_panel=opt.STEPS,
        ),
    ] = DEFAULTS.itl_target_s
    max_running: Annotated[int, typer.Option(help="Sequences in one step.", rich_help_panel=opt.STEPS)] = (
        DEFAULTS.max_running
    )
    handoff: Annotated[
        HandoffMode,
        typer.Option(
            help="layerwise: KV is sent while it is computed; sync: after the prompt.", rich_help_panel=opt.HANDOFF
        ),
    ] = DEFAULTS.handoff
    partial_start: Annotated[
        PartialStart,
        typer.Option(
            help="auto: over slow links a first step begins, alone, with the layers that are here; off: when all are.",
            rich_help_panel=opt.HANDOFF,
        ),
    ] = DEFAULTS.partial_start
    first_token: Annotated[
        FirstToken,
        typer.Option(
            help="Of an answer that is handed over. at-once: told by the prefill worker. "
            "steady: by the decode worker when the step for the second begins, so that no gap is longer than a step.",
            rich_help_panel=opt.HANDOFF,
        ),
    ] = DEFAULTS.first_token
    min_push_bytes: Annotated[
        str, typer.Option(help="Smallest push of KV, such as 256K.", rich_help_panel=opt.HANDOFF)
    ] = format_bytes(DEFAULTS.min_push_bytes)
    transport: Annotated[
        TransportChoice,
        typer.Option(
            help="auto: shared memory between neighbours, else TCP; tcp: always.", rich_help_panel=opt.HANDOFF
        ),
    ] = DEFAULTS.transport
    data_connections: Annotated[
        int, typer.Option(help="TCP connections from a worker to each peer.", rich_help_panel=opt.HANDOFF)
    ] = DEFAULTS.data_connections
    probe_s: Annotated[
        float,
        typer.Option(
            help="Seconds spent on measuring each link when two workers meet; 0: none.", rich_help_panel=opt.HANDOFF
        ),
    ] = DEFAULTS.probe_s
    link_gbits: Annotated[
        float,
        typer.Option(
            help="What a link should give, Gbit/s; 0: what the network card says.", rich_help_panel=opt.HANDOFF
        ),
    ] = DEFAULTS.link_gbits
    kv_wire: Annotated[
        KvWire,
        typer.Option(
            help="KV between workers: native as it is stored; int8 in fewer bytes, with --numerics bounded.",
            rich_help_panel=opt.HANDOFF,
        ),
    ] = DEFAULTS.kv_wire
    lease_s: Annotated[
        float, typer.Option(help="Seconds KV is kept for a peer that is not heard of.", rich_help_panel=opt.HANDOFF)
    ] = DEFAULTS.lease_s
    progress_timeout_s: Annotated[
        float,
        typer.Option(
            help="Seconds without a finished layer after which a worker ends itself.", rich_help_panel=opt.LIFE
        ),
    ] = DEFAULTS.progress_timeout_s
    drain_timeout_s: Annotated[
        float, typer.Option(help="Seconds for what runs, once a worker is told to end.", rich_help_panel=opt.LIFE)
    ] = DEFAULTS.drain_timeout_s
    beat_interval_s: opt.BeatIntervalS = DEFAULTS.beat_interval_s
    keys: opt.Keys = DEFAULTS.keys

    def name_of(self, model: str) -> str:
        return self.served_name or default_served_name(model)

    def _sizes(self) -> dict[str, int]:
        return super()._sizes() | {"min_push_bytes": parse_bytes(self.min_push_bytes)}

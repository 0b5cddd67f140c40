"""`disagg profile`: what may be asked of it."""

from pathlib import Path
from typing import Annotated

import typer

from disagg.cli import launch
from disagg.cli import options as opt
from disagg.cli.notes import say
from disagg.cli.profile_options import ProfileOptions
from disagg.cli.sizes import format_bytes, parse_bytes
from disagg.core.errors import ConfigurationError
from disagg.core.roles import Role
from disagg.modelfiles.fetch import served_name as default_served_name
from disagg.worker.config import WorkerConfig

_WORKER = WorkerConfig(model="-", served_name="-", role=Role.MIXED, worker_id="-", router_address="-")
_KV_MEMORY = format_bytes(_WORKER.kv_memory_bytes)


def profile(
    model: opt.ModelArgument,
    out: Annotated[Path, typer.Option(help="Where the profile goes, as JSON.")] = Path("profile.json"),
    hardware: Annotated[str, typer.Option(help="What to call this hardware. Default: the processor or --device.")] = "",
    repeats: Annotated[int, typer.Option(help="Steps of each shape that count; their median is taken.")] = 7,
    max_prompt: Annotated[int, typer.Option(help="Most prompt tokens of one step.")] = 1024,
    max_streams: Annotated[int, typer.Option(help="Most streams of one step.")] = 32,
    limit_s: Annotated[float, typer.Option(help="Seconds after which no round of all shapes is begun.")] = 120.0,
    served_rounds: Annotated[
        int, typer.Option(help="Also serve it by two workers and time so many rounds of steady loads; 0: only steps.")
    ] = 0,
    device: opt.Device = _WORKER.device,
    num_threads: opt.NumThreads = _WORKER.num_threads,
    weights: opt.WeightsOption = _WORKER.weights,
    kernels: opt.KernelsOption = _WORKER.kernels,
    kv_memory: opt.KvMemory = _KV_MEMORY,
    kv_dtype: opt.KvDtypeOption = _WORKER.kv_dtype,
    num_blocks: opt.NumBlocks = _WORKER.num_blocks,
    block_size: opt.BlockSize = _WORKER.block_size,
) -> None:
    """Time steps of a model here, fit costs to them, and write both to a file.

    With --served-rounds also what serving adds: the worker loop, router and HTTP, a busy neighbour on this machine.
    """
    name = default_served_name(model)
    config = WorkerConfig(
        model=str(launch.find_model(model, report=say)),
        served_name=name,
        role=Role.MIXED,
        worker_id="profile",
        router_address="-",
        device=device,
        num_threads=num_threads,
        weights=weights,
        kernels=kernels,
        kv_memory_bytes=parse_bytes(kv_memory),
        kv_dtype=kv_dtype,
        num_blocks=num_blocks,
        block_size=block_size,
    )
    if not out.parent.is_dir():
        raise ConfigurationError(f"{out.parent} is not a folder: make it first or give another --out")
    asked = ProfileOptions(out, hardware, repeats, max_prompt, max_streams, limit_s, served_rounds)
    launch.run_profile(config, asked)

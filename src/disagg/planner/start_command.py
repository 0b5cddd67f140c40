"""A plan as the command lines that start it: a router, then each worker with the limits it was planned with."""

import shlex
from itertools import count
from pathlib import Path

import msgspec

from disagg.cluster.command_line import router_arguments, worker_arguments
from disagg.core.formats import KvDtype, KvWire, Weights
from disagg.core.roles import Numerics, Role
from disagg.planner.candidate import Candidate, PoolPlan
from disagg.planner.fleet import Fleet, Steps
from disagg.router.config import RouterConfig
from disagg.sim.hardware.precision import Precision
from disagg.worker.config import WorkerConfig

ROUTER_ADDRESS = "127.0.0.1:8001"
# What workers can keep; whatever else was planned starts with 16 bits, and a note says so.
WEIGHTS = {
    Precision.FP32: Weights.FP32,
    Precision.BF16: Weights.FP16,
    Precision.FP16: Weights.FP16,
    Precision.INT8: Weights.INT8,
}
KV = {Precision.FP32: KvDtype.FLOAT32, Precision.BF16: KvDtype.FLOAT16, Precision.FP16: KvDtype.FLOAT16}


def start_command(candidate: Candidate, steps: Steps, model: str) -> list[str]:
    """Shell lines, then notes. model: the folder of its weights, its config.json, or a name of the catalogue."""
    path = Path(model).parent if model.endswith(".json") else Path(model)
    name = path.absolute().name
    router = RouterConfig(models=((name, str(path)),), local_prefill_tokens=candidate.local_prefill_tokens)
    lines = [_shell_line(router_arguments(router))]
    numbers = {role: count() for role in Role}
    first_device = 0
    for pool in candidate.pools:
        template = _template(candidate, pool, steps, str(path), name)
        for _ in range(pool.count):
            worker_id = f"{pool.role}-{next(numbers[pool.role])}"
            device = f"cuda:{first_device % steps.fleet.gpus_per_node}"
            config = msgspec.structs.replace(template, worker_id=worker_id, device=device)
            lines.append(f"{_shell_line(worker_arguments(config))}  # {pool.cut}")
            first_device += pool.cut.num_gpus
    return [*lines, *(f"({note})" for note in _notes(candidate, steps.fleet, path))]


def _template(candidate: Candidate, pool: PoolPlan, steps: Steps, path: str, name: str) -> WorkerConfig:
    """A worker of this pool, not named yet."""
    fleet = steps.fleet
    # What several devices hold together, or narrower numbers than workers have, is no limit of one worker.
    is_as_planned = pool.cut.num_gpus == 1 and _has_formats(fleet)
    return WorkerConfig(
        model=path,
        served_name=name,
        role=pool.role,
        worker_id="-",
        router_address=ROUTER_ADDRESS,
        block_size=fleet.block_size,
        num_blocks=steps.kv_tokens(pool.cut) // fleet.block_size if is_as_planned else None,
        chunk_tokens=pool.chunk_tokens,
        mixed_chunk_tokens=pool.mixed_chunk_tokens,
        itl_target_s=0.0,  # planned with chunks of one size, not with such as follow a target
        max_running=pool.max_running,
        weights=WEIGHTS.get(fleet.weights, Weights.FP16),
        kv_dtype=KV.get(fleet.kv, KvDtype.FLOAT16),
        kv_wire=candidate.kv_wire,
        numerics=Numerics.EXACT if candidate.kv_wire is KvWire.NATIVE else Numerics.BOUNDED,
    )


def _has_formats(fleet: Fleet) -> bool:
    return fleet.weights in WEIGHTS and fleet.kv in KV


def _notes(candidate: Candidate, fleet: Fleet, path: Path) -> list[str]:
    """What the lines cannot say."""
    notes = []
    if not path.exists():
        notes.append(f"{path} stands for the folder of its weights")
    if any(pool.cut.num_gpus > 1 for pool in candidate.pools):
        notes.append("a worker of this project runs on one device: TP and PP above are what the plan was computed for")
    if candidate.num_gpus > fleet.gpus_per_node:
        more = f"{candidate.num_gpus} devices are more than the {fleet.gpus_per_node} of a node"
        notes.append(f"{more}: workers elsewhere need --router, --host and --keys as well")
    if not _has_formats(fleet):
        planned = f"planned with {fleet.weights} weights and {fleet.kv} KV"
        notes.append(f"{planned}, which workers of this project do not have: these keep what they have instead")
    return notes


def _shell_line(arguments: tuple[str, ...]) -> str:
    return shlex.join(("disagg", *arguments))

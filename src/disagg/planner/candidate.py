"""One way to use a fleet: pools of workers and the limits they run with. Frozen values."""

import math

import msgspec

from disagg.core.formats import KvWire
from disagg.core.roles import Role
from disagg.planner.fleet import Cut, Fleet, Steps
from disagg.sim.hardware import catalogue
from disagg.sim.scenario import Link, WorkerSpec

SCALE_BYTES = 4  # of a head of a token on the int8 wire
PER_WORKER_KINDS = ("tcp", "wan")  # links that a worker has one of; of others each device has its own


class PoolPlan(msgspec.Struct, frozen=True, order=True):
    """Equal workers. chunk_tokens: of a step with prompts alone; mixed_chunk_tokens: beside streams."""

    role: Role
    count: int
    cut: Cut
    chunk_tokens: int
    mixed_chunk_tokens: int = 512
    max_running: int = 256

    @property
    def num_gpus(self) -> int:
        return self.count * self.cut.num_gpus


class Candidate(msgspec.Struct, frozen=True, order=True):
    """One mixed pool, or a prefill and a decode pool."""

    pools: tuple[PoolPlan, ...]
    local_prefill_tokens: int = 0
    kv_wire: KvWire = KvWire.NATIVE

    @property
    def is_mixed(self) -> bool:
        return self.pools[0].role is Role.MIXED

    @property
    def num_gpus(self) -> int:
        return sum(pool.num_gpus for pool in self.pools)

    @property
    def name(self) -> str:
        return " + ".join(f"{pool.count} {pool.role} ({pool.cut})" for pool in self.pools)

    @property
    def ratio(self) -> str:
        """Prefill to decode, in devices; "-" for mixed."""
        if self.is_mixed:
            return "-"
        prefill, decode = (pool.num_gpus for pool in self.pools)
        divisor = math.gcd(prefill, decode)
        return f"{prefill // divisor}:{decode // divisor}"

    def pool(self, role: Role) -> PoolPlan:
        return next(pool for pool in self.pools if pool.role is role)

    def usd_per_hour(self, fleet: Fleet) -> float:
        """0 where a price is not known."""
        prices = [fleet.of(pool.cut.device).usd_per_hour * pool.num_gpus for pool in self.pools]
        return sum(prices) if all(prices) else 0.0

    def with_one_less(self, role: Role) -> "Candidate | None":
        """None where the last worker of that role would go."""
        pools = tuple(
            msgspec.structs.replace(pool, count=pool.count - 1) if pool.role is role else pool for pool in self.pools
        )
        return msgspec.structs.replace(self, pools=pools) if all(pool.count for pool in pools) else None


def worker_specs(candidate: Candidate, steps: Steps, max_context: int) -> tuple[WorkerSpec, ...]:
    """As the simulator takes them."""
    fleet = steps.fleet
    specs: list[WorkerSpec] = []
    for pool in candidate.pools:
        for index in range(pool.count):
            specs.append(
                WorkerSpec(
                    name=f"{pool.role}-{index}",
                    role=pool.role,
                    steps=steps.of(pool.cut),
                    num_blocks=steps.kv_tokens(pool.cut) // fleet.block_size,
                    block_size=fleet.block_size,
                    max_context=max_context,
                    chunk_tokens=pool.chunk_tokens,
                    mixed_chunk_tokens=pool.mixed_chunk_tokens,
                    max_running=pool.max_running,
                    nic=network_card(fleet, pool.cut, candidate.kv_wire),
                )
            )
    return tuple(specs)


def network_card(fleet: Fleet, cut: Cut, wire: KvWire) -> Link:
    """What a worker sends KV through; a narrower wire counts as a faster card."""
    link = catalogue.link(fleet.link)
    cards = 1 if link.kind in PER_WORKER_KINDS else cut.num_gpus
    return Link(link.bytes_s * cards * wire_gain(fleet, wire), link.latency_s)


def wire_gain(fleet: Fleet, wire: KvWire) -> float:
    """Bytes as kept over bytes on the wire, 1 or more."""
    if wire is KvWire.NATIVE:
        return 1.0
    attention = fleet.model.attention
    width = attention.kv_elements if attention.is_latent else attention.head_dim
    return max(1.0, fleet.kv.bytes_each / (1 + SCALE_BYTES / width))


def start_command(candidate: Candidate, model: str, served_as: str = "") -> list[str]:
    """Shell lines that start it: a router, then each worker."""
    name = served_as or model.rsplit("/", 1)[-1]
    lines = [f"disagg router --model {name}={model} --local-prefill-tokens {candidate.local_prefill_tokens}"]
    for pool in candidate.pools:
        flags = [
            f"--role {pool.role}",
            "--device cuda",
            f"--chunk-tokens {pool.chunk_tokens}",
            f"--mixed-chunk-tokens {pool.mixed_chunk_tokens}",
            f"--max-running {pool.max_running}",
        ]
        if candidate.kv_wire is not KvWire.NATIVE:
            flags.append(f"--kv-wire {candidate.kv_wire}")
        note = f"  # {pool.count} times, each on {pool.cut}"
        lines.append(f"disagg worker {model} {' '.join(flags)}{note}")
    return lines

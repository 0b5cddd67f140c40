"""One way to use a fleet: pools of workers and the limits they run with. Frozen values."""

import math
from itertools import count

import msgspec

from disagg.core.formats import KvWire
from disagg.core.roles import Role
from disagg.planner.fleet import Cut, Fleet, Steps
from disagg.sim.hardware import catalogue
from disagg.sim.scenario import Link, WorkerSpec

SCALE_BYTES = 4  # of a head of a token on the int8 wire
PER_WORKER_KINDS = ("tcp", "wan")  # links that a worker has one of; of others each device has its own, or its share


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
    """Mixed pools, one of each kind of device that is used, or a prefill and a decode pool."""

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
    def usage(self) -> dict[str, int]:
        """Devices of each kind."""
        used: dict[str, int] = {}
        for pool in self.pools:
            used[pool.cut.device] = used.get(pool.cut.device, 0) + pool.num_gpus
        return used

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

    def with_one_less(self, lessened: PoolPlan) -> "Candidate | None":
        """None where the last worker of a phase would go; a mixed pool goes with its last one while others stay."""
        fewer = [
            msgspec.structs.replace(pool, count=pool.count - 1) if pool == lessened else pool for pool in self.pools
        ]
        left = tuple(pool for pool in fewer if pool.count)
        is_whole = len(left) == len(fewer) or (self.is_mixed and bool(left))
        return msgspec.structs.replace(self, pools=left) if is_whole else None


def worker_specs(candidate: Candidate, steps: Steps, max_context: int) -> tuple[WorkerSpec, ...]:
    """As the simulator takes them."""
    fleet = steps.fleet
    numbers = {role: count() for role in Role}
    specs: list[WorkerSpec] = []
    for pool in candidate.pools:
        for _ in range(pool.count):
            specs.append(
                WorkerSpec(
                    name=f"{pool.role}-{next(numbers[pool.role])}",
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
    cards = 1.0 if link.kind in PER_WORKER_KINDS else cut.num_gpus / link.num_devices
    return Link(link.bytes_s * cards * wire_gain(fleet, wire), link.latency_s)


def wire_gain(fleet: Fleet, wire: KvWire) -> float:
    """Bytes as kept over bytes on the wire, 1 or more."""
    if wire is KvWire.NATIVE:
        return 1.0
    attention = fleet.model.attention
    width = attention.kv_elements if attention.is_latent else attention.head_dim
    return max(1.0, fleet.kv.bytes_each / (1 + SCALE_BYTES / width))

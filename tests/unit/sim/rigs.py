"""Small described hardware for tests: step times that can be added up by hand."""

import msgspec

from disagg.bench.arrivals import PoissonArrivals
from disagg.bench.workload import Lengths, PrefixPool, RandomWork, Workload
from disagg.core.roles import Role
from disagg.sim.hardware.step_model import StepShape
from disagg.sim.scenario import Fidelity, Link, Scenario, WorkerSpec


class LinearSteps(msgspec.Struct, frozen=True):
    """Seconds = base + a per prompt token + b per stream."""

    name: str = "linear"
    num_layers: int = 8
    kv_bytes_per_token: int = 32_768
    base_s: float = 0.005
    prompt_token_s: float = 1e-4
    stream_s: float = 5e-4

    def step_s(self, shape: StepShape) -> float:
        return self.base_s + self.prompt_token_s * shape.num_prompt_tokens + self.stream_s * shape.num_decode

    def max_kv_tokens(self, block_size: int) -> int:
        return 4096


def worker(name: str, role: Role, **more: object) -> WorkerSpec:
    fields = {"name": name, "role": role, "steps": LinearSteps(), "max_context": 4096, "min_push_bytes": 1 << 20}
    return WorkerSpec(**(fields | more))  # type: ignore[arg-type]


def pools(num_prefill: int, num_decode: int, **more: object) -> tuple[WorkerSpec, ...]:
    prefill = (worker(f"prefill-{index}", Role.PREFILL, **more) for index in range(num_prefill))
    return (*prefill, *(worker(f"decode-{index}", Role.DECODE, **more) for index in range(num_decode)))


def work(num_requests: int = 40, rate_per_s: float = 8.0, **more: object) -> RandomWork:
    fields = {
        "num_requests": num_requests,
        "arrivals": PoissonArrivals(rate_per_s),
        "prompt": Lengths(300, 150, is_lognormal=True, most=1500),
        "output": Lengths(20, 15),
        "prefixes": PrefixPool(3, 96, 0.4),
    }
    return RandomWork(**(fields | more))  # type: ignore[arg-type]


def scenario(
    workers: tuple[WorkerSpec, ...], asked: Workload, fidelity: Fidelity = Fidelity.SMALL, **more: object
) -> Scenario:
    fields = {"workers": workers, "work": asked, "fidelity": fidelity, "local_prefill_tokens": 64}
    return Scenario(**(fields | more))  # type: ignore[arg-type]


SLOW = Link(bandwidth_bytes_s=2e8, latency_s=1e-3)

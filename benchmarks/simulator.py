"""How fast the simulator runs: a trace through a hundred workers, one core.

    python benchmarks/simulator.py TRACE --format azure

Prints what was simulated, where, and how many requests a second of one core; ends with one JSON line. Other simulators
of disaggregated serving are not run beside it: they take their step times from tables of other hardware and models, so
the same scenario cannot be given to them.
"""

import argparse
import os
import resource
import sys
import time
from pathlib import Path

import msgspec

from disagg.bench.traces import TRACE_FORMATS, TraceWork
from disagg.core.errors import ConfigurationError
from disagg.core.roles import Role
from disagg.sim.hardware.step_model import StepShape
from disagg.sim.scenario import Fidelity, Scenario, Slo, WorkerSpec
from disagg.sim.simulate import simulate
from harness import commit, hardware


class PlainSteps(msgspec.Struct, frozen=True):
    """Step times of about a 70B model on four large GPUs: the simulator's own speed hardly depends on them."""

    name: str = "70B on four GPUs, linear"
    num_layers: int = 80
    kv_bytes_per_token: int = 327_680

    def step_s(self, shape: StepShape) -> float:
        prompts = 7e-5 * shape.num_prompt_tokens + 1e-9 * shape.prompt_pairs
        return 0.02 + prompts + 1e-4 * shape.num_decode + 2e-8 * shape.decode_contexts_sum

    def max_kv_tokens(self, block_size: int) -> int:
        return 400_000 // block_size * block_size


class Result(msgspec.Struct, frozen=True):
    """The JSON line."""

    benchmark: str
    trace: str
    num_requests: int
    num_workers: int
    rate_per_s: float
    block_size: int
    seed: int
    requests_per_cpu_s: float
    requests_per_s: float
    cpu_s: float
    wall_s: float
    virtual_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_events: int
    peak_memory_mib: int
    attainment: float
    decisions_digest: str
    hardware: str
    commit: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--format", choices=sorted(TRACE_FORMATS), required=True)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--prefill", type=int, default=70)
    parser.add_argument("--decode", type=int, default=30)
    parser.add_argument("--rate-scale", type=float, default=100.0, help="times the trace's own rate")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    roles = [(Role.PREFILL, options.prefill), (Role.DECODE, options.decode)]
    workers = tuple(
        WorkerSpec(name=f"{role.value}-{index}", role=role, steps=PlainSteps(), block_size=options.block_size)
        for role, count in roles
        for index in range(count)
    )
    work = TraceWork(
        path=options.trace, format=options.format, num_requests=options.requests, rate_scale=options.rate_scale
    )
    scenario = Scenario(workers=workers, work=work, fidelity=Fidelity.LARGE, slo=Slo(2.0, 0.1))
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    try:
        report = simulate(scenario, options.seed).report
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        return 2
    wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    result = Result(
        benchmark="simulator",
        trace=options.trace.name,
        num_requests=report.num_requests,
        num_workers=len(workers),
        rate_per_s=round(report.num_requests / report.duration_s, 1),
        block_size=options.block_size,
        seed=options.seed,
        requests_per_cpu_s=round(report.num_requests / cpu_s, 1),
        requests_per_s=round(report.num_requests / wall_s, 1),
        cpu_s=round(cpu_s, 1),
        wall_s=round(wall_s, 1),
        virtual_s=round(report.duration_s, 1),
        num_prompt_tokens=report.num_prompt_tokens,
        num_output_tokens=report.num_output_tokens,
        num_events=report.num_events,
        peak_memory_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        attainment=round(report.attainment, 4),
        decisions_digest=report.decisions_digest,
        hardware=f"{hardware()}, load {os.getloadavg()[0]:.1f}",
        commit=commit(),
    )
    print(f"{result.num_requests} requests of {result.trace}, {result.num_workers} workers, {result.hardware}")
    print(f"{result.cpu_s} s of one core ({result.wall_s} s on the wall), {result.peak_memory_mib} MiB at most:")
    print(f"{result.requests_per_cpu_s} requests simulated per second of one core")
    print(msgspec.json.encode(result).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""How fast the simulator runs: a trace through a hundred workers, one core.

    python benchmarks/simulator.py TRACE --format azure [--requests 100000]
    python benchmarks/simulator.py TRACE --format azure --distserve CHECKOUT [--requests 2000]

The first prints what was simulated, where, and how many requests a second of one core. The second plays the same rows
in the simulator of a checkout of DistServe as well (in an environment of its own, made when it is missing; skipped with
the reason where it cannot be had): workers of one A100 with OPT-13B, both by the step times that DistServe publishes,
each with its own policies. Both end with one JSON line. Vidur knows no split workers; its step times and those of
splitwise-sim are tables of other models.
"""

import argparse
import os
import random
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from disagg.bench.percentiles import summary
from disagg.bench.traces import READERS, TraceWork
from disagg.core.errors import ConfigurationError
from disagg.core.roles import Role
from disagg.sim.hardware.published import published_model
from disagg.sim.hardware.step_model import StepModel, StepShape
from disagg.sim.scenario import Fidelity, Scenario, Slo, WorkerSpec
from disagg.sim.simulate import simulate
from harness import commit, hardware
from peers.environments import Unavailable
from peers.simulators import Played, Row, play_distserve

ALONE = {"requests": 100_000, "prefill": 70, "decode": 30, "rate_scale": 100.0}
BESIDE = {"requests": 2_000, "prefill": 40, "decode": 60, "rate_scale": 30.0}


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


class Side(msgspec.Struct, frozen=True):
    """One simulator's part of the JSON line of both; seconds of the simulated cluster."""

    name: str
    requests_per_cpu_s: float
    cpu_s: float
    peak_memory_mib: int
    ttft_p50_s: float
    ttft_p90_s: float
    tpot_p50_s: float
    tpot_p90_s: float


def scenario_of(options: argparse.Namespace, steps: StepModel) -> Scenario:
    roles = [(Role.PREFILL, options.prefill), (Role.DECODE, options.decode)]
    workers = tuple(
        WorkerSpec(name=f"{role.value}-{index}", role=role, steps=steps, block_size=options.block_size)
        for role, count in roles
        for index in range(count)
    )
    work = TraceWork(
        path=options.trace, format=options.format, num_requests=options.requests, rate_scale=options.rate_scale
    )
    return Scenario(workers=workers, work=work, fidelity=Fidelity.LARGE, slo=Slo(2.0, 0.1))


def peak_memory_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def where() -> str:
    return f"{hardware()}, load {os.getloadavg()[0]:.1f}"


# ---- ours


def play_alone(options: argparse.Namespace) -> Result:
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    report = simulate(scenario_of(options, PlainSteps()), options.seed).report
    wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    return Result(
        benchmark="simulator",
        trace=options.trace.name,
        num_requests=report.num_requests,
        num_workers=options.prefill + options.decode,
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
        peak_memory_mib=peak_memory_mib(),
        attainment=round(report.attainment, 4),
        decisions_digest=report.decisions_digest,
        hardware=where(),
        commit=commit(),
    )


def show_alone(result: Result) -> None:
    print(f"{result.num_requests} requests of {result.trace}, {result.num_workers} workers, {result.hardware}")
    print(f"{result.cpu_s} s of one core ({result.wall_s} s on the wall), {result.peak_memory_mib} MiB at most:")
    print(f"{result.requests_per_cpu_s} requests simulated per second of one core")
    print(msgspec.json.encode(result).decode())


# ---- both


def rows_of(scenario: Scenario, seed: int) -> Iterator[Row]:
    """What is asked, as plain numbers."""
    stream = scenario.work.start(random.Random(seed))
    while (request := stream.next_request()) is not None:
        yield request.due_s, request.num_prompt_tokens, request.num_output_tokens


def play_ours(scenario: Scenario, seed: int) -> Played:
    began_s = time.process_time()
    outcome = simulate(scenario, seed)
    cpu_s = time.process_time() - began_s
    columns = outcome.records.columns
    return Played(cpu_s, peak_memory_mib(), tuple(columns["ttft_s"]), tuple(columns["tpot_s"]))


def side_of(name: str, played: Played) -> Side:
    ttft, tpot = summary(played.ttft_s), summary(played.tpot_s)
    rate = round(len(played.ttft_s) / played.cpu_s, 1)
    return Side(name, rate, round(played.cpu_s, 2), played.peak_memory_mib, ttft.p50, ttft.p90, tpot.p50, tpot.p90)


def show_beside(options: argparse.Namespace) -> None:
    scenario = scenario_of(options, published_model("OPT-13B"))
    rows = list(rows_of(scenario, options.seed))
    print(
        f"{len(rows)} requests of {options.trace.name} at {len(rows) / rows[-1][0]:.1f}/s, {options.prefill} prefill "
        f"and {options.decode} decode workers, OPT-13B on an A100 each, {where()}"
    )
    sides = [side_of("disagg", play_ours(scenario, options.seed))]
    skipped = ""
    try:
        theirs = play_distserve(options.distserve, rows, options.prefill, options.decode)
        sides.append(side_of("DistServe's", theirs))
    except Unavailable as error:
        skipped = str(error)
        print(f"DistServe's is left out: {error}")
    for side in sides:
        print(
            f"{side.name:12}{side.requests_per_cpu_s:9.1f} requests/s of one core, {side.peak_memory_mib} MiB; "
            f"TTFT p50 {1e3 * side.ttft_p50_s:.0f} p90 {1e3 * side.ttft_p90_s:.0f} ms, "
            f"TPOT p50 {1e3 * side.tpot_p50_s:.1f} p90 {1e3 * side.tpot_p90_s:.1f} ms"
        )
    line = {
        "benchmark": "simulator beside DistServe's",
        "trace": options.trace.name,
        "num_requests": len(rows),
        "num_prefill": options.prefill,
        "num_decode": options.decode,
        "seed": options.seed,
        "sides": sides,
        "ratio": sides[0].requests_per_cpu_s / sides[1].requests_per_cpu_s if len(sides) > 1 else None,
        "skipped": skipped,
        "hardware": where(),
        "commit": commit(),
    }
    print(msgspec.json.encode(line).decode())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--format", choices=sorted(READERS), required=True)
    parser.add_argument("--distserve", type=Path, metavar="CHECKOUT", help="play the same in DistServe's simulator")
    parser.add_argument("--requests", type=int, help="100000; beside DistServe's 2000")
    parser.add_argument("--prefill", type=int, help="workers: 70; beside DistServe's 40")
    parser.add_argument("--decode", type=int, help="workers: 30; beside DistServe's 60")
    parser.add_argument("--rate-scale", type=float, help="times the trace's own rate: 100; beside DistServe's 30")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name, value in (BESIDE if options.distserve else ALONE).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    try:
        if options.distserve:
            show_beside(options)
        else:
            show_alone(play_alone(options))
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

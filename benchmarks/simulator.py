"""How fast the simulator runs: a trace through a hundred workers, one core.

    python benchmarks/simulator.py TRACE --format azure [--requests 100000]
    python benchmarks/simulator.py TRACE --format azure --distserve CHECKOUT [--requests 2000]
    python benchmarks/simulator.py TRACE --format azure --vidur CHECKOUT [--requests 2000]

The first prints what was simulated, where, and how many requests a second of one core. The others play the same rows
in the simulator of a checkout of DistServe or Vidur as well (in an environment of its own, made when it is missing;
skipped with the reason where it cannot be had), by equal step times, each with its own policies:

    DistServe   40 prefill and 60 decode workers of one A100 with OPT-13B, by the fit that DistServe publishes
    Vidur       100 mixed workers, by the formula of the first (Vidur knows no split workers)

All end with one JSON line.
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
from disagg.bench.traces import TRACE_FORMATS, TraceWork
from disagg.core.errors import ConfigurationError
from disagg.core.roles import Role
from disagg.sim.hardware.published import published_model
from disagg.sim.hardware.step_model import StepModel, StepShape
from disagg.sim.scenario import Fidelity, Scenario, Slo, WorkerSpec
from disagg.sim.simulate import simulate
from harness import commit, hardware
from peers.environments import Unavailable
from peers.simulators import DISTSERVE, VIDUR, Played, Row, SimulatorPeer, play

MIXED_CHUNK, MAX_RUNNING = 512, 256


class PlainSteps(msgspec.Struct, frozen=True):
    """Step times of about a 70B model on four large GPUs: the simulator's own speed hardly depends on them."""

    name: str = "70B on four GPUs, linear"
    num_layers: int = 80
    kv_bytes_per_token: int = 327_680
    base_s: float = 0.02
    prompt_token_s: float = 7e-5
    prompt_pair_s: float = 1e-9
    stream_s: float = 1e-4
    context_token_s: float = 2e-8
    kv_tokens: int = 400_000

    def step_s(self, shape: StepShape) -> float:
        prompts = self.prompt_token_s * shape.num_prompt_tokens + self.prompt_pair_s * shape.prompt_pairs
        streams = self.stream_s * shape.num_decode + self.context_token_s * shape.decode_contexts_sum
        return self.base_s + prompts + streams

    def max_kv_tokens(self, block_size: int) -> int:
        return self.kv_tokens // block_size * block_size


class Setting(msgspec.Struct, frozen=True):
    """Workers by role, and how many times its own rate the trace is played at: what they carry."""

    workers: tuple[tuple[Role, int], ...]
    rate_scale: float
    num_requests: int
    steps: StepModel


ALONE = Setting(((Role.PREFILL, 70), (Role.DECODE, 30)), 100.0, 100_000, PlainSteps())


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
    """One simulator's part of the JSON line of two; seconds of the simulated cluster."""

    name: str
    requests_per_cpu_s: float
    cpu_s: float
    peak_memory_mib: int
    ttft_p50_s: float
    ttft_p90_s: float
    tpot_p50_s: float
    tpot_p90_s: float


def scenario_of(options: argparse.Namespace, setting: Setting) -> Scenario:
    workers = tuple(
        WorkerSpec(
            name=f"{role.value}-{index}",
            role=role,
            steps=setting.steps,
            block_size=options.block_size,
            chunk_tokens=MIXED_CHUNK if role is Role.MIXED else 2048,
            mixed_chunk_tokens=MIXED_CHUNK,
            max_running=MAX_RUNNING,
        )
        for role, count in setting.workers
        for index in range(count)
    )
    work = TraceWork(
        path=options.trace,
        format=options.format,
        num_requests=options.requests or setting.num_requests,
        rate_scale=options.rate_scale or setting.rate_scale,
    )
    return Scenario(workers=workers, work=work, fidelity=Fidelity.LARGE, slo=Slo(2.0, 0.1))


def peak_memory_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def where() -> str:
    return f"{hardware()}, load {os.getloadavg()[0]:.1f}"


# ---- ours


def show_alone(options: argparse.Namespace) -> None:
    scenario = scenario_of(options, ALONE)
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    report = simulate(scenario, options.seed).report
    wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    result = Result(
        benchmark="simulator",
        trace=options.trace.name,
        num_requests=report.num_requests,
        num_workers=len(scenario.workers),
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
    print(f"{result.num_requests} requests of {result.trace}, {result.num_workers} workers, {result.hardware}")
    print(f"{result.cpu_s} s of one core ({result.wall_s} s on the wall), {result.peak_memory_mib} MiB at most:")
    print(f"{result.requests_per_cpu_s} requests simulated per second of one core")
    print(msgspec.json.encode(result).decode())


# ---- beside others


def distserve_setting() -> Setting:
    return Setting(((Role.PREFILL, 40), (Role.DECODE, 60)), 30.0, 2_000, published_model("OPT-13B"))


VIDUR_SETTING = Setting(((Role.MIXED, 100),), 70.0, 2_000, PlainSteps())


def vidur_costs(block_size: int) -> bytes:
    steps = PlainSteps()
    names = ("base_s", "prompt_token_s", "prompt_pair_s", "stream_s", "context_token_s")
    limits = {"chunk_tokens": MIXED_CHUNK, "block_size": block_size, "max_running": MAX_RUNNING}
    num_blocks = steps.kv_tokens // block_size
    return msgspec.json.encode({name: getattr(steps, name) for name in names} | limits | {"num_blocks": num_blocks})


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


def show_beside(options: argparse.Namespace, peer: SimulatorPeer, checkout: Path) -> None:
    setting = distserve_setting() if peer is DISTSERVE else VIDUR_SETTING
    scenario = scenario_of(options, setting)
    rows = list(rows_of(scenario, options.seed))
    counts = [str(count) for _, count in setting.workers]
    pools = " + ".join(f"{count} {role.value}" for role, count in setting.workers)
    rate_per_s = len(rows) / rows[-1][0]
    print(f"{len(rows)} requests of {options.trace.name}, {rate_per_s:.1f}/s, {pools}, {setting.steps.name}")
    sides, skipped = [side_of("disagg", play_ours(scenario, options.seed))], ""
    try:
        if peer is DISTSERVE:
            theirs = play(peer, checkout, rows, counts)
        else:
            files = {"costs.json": vidur_costs(options.block_size)}
            theirs = play(peer, checkout, rows, ("costs.json", *counts), files)
        sides.append(side_of(peer.name, theirs))
    except Unavailable as error:
        skipped = str(error)
        print(f"{peer.name} is left out: {error}")
    for side in sides:
        print(
            f"{side.name:12}{side.requests_per_cpu_s:9.1f} requests/s of one core, {side.peak_memory_mib} MiB; "
            f"TTFT p50 {1e3 * side.ttft_p50_s:.0f} p90 {1e3 * side.ttft_p90_s:.0f} ms, "
            f"TPOT p50 {1e3 * side.tpot_p50_s:.1f} p90 {1e3 * side.tpot_p90_s:.1f} ms"
        )
    line = {
        "benchmark": f"simulator beside {peer.name}",
        "trace": options.trace.name,
        "num_requests": len(rows),
        "workers": pools,
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
    parser.add_argument("--format", choices=sorted(TRACE_FORMATS), required=True)
    parser.add_argument("--distserve", type=Path, metavar="CHECKOUT", help="play the same in DistServe's simulator")
    parser.add_argument("--vidur", type=Path, metavar="CHECKOUT", help="play the same in Vidur")
    parser.add_argument("--requests", type=int, help="100000; beside others 2000")
    parser.add_argument("--rate-scale", type=float, help="times the trace's own rate: 100; beside others 30 and 70")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chosen = [(peer, path) for peer, path in ((DISTSERVE, options.distserve), (VIDUR, options.vidur)) if path]
    try:
        for peer, checkout in chosen:
            show_beside(options, peer, checkout)
        if not chosen:
            show_alone(options)
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Does `disagg bench` measure what was? Against a server that answers after known delays.

    python benchmarks/bench_accuracy.py [--quick] [--rounds 3]

accuracy   50 requests/s, open loop: TTFT, first gap, TPOT, ITL and end to end against the delays the server was told
overhead   200 streams at once: the client's CPU per event and per second, and how much later tokens seem than they were

The server runs in a process of its own; its timers are right to some microseconds on a quiet machine. Medians of the
rounds' medians; each includes the way through the kernel both ways, which is no error of the client's.
"""

import argparse
import contextlib
import re
import statistics
import sys
import time
from collections.abc import Iterator

import msgspec

from disagg.bench.arrivals import PoissonArrivals
from disagg.bench.client import Api
from disagg.bench.load import LoadLimits
from disagg.bench.measure import LoadPlan, LoadResult, Target, measure
from disagg.bench.slo import Slo
from disagg.bench.workload import ClosedWork, Lengths, RandomWork
from disagg.testing.processes import MarkedProcess
from harness import cpu_use, foreign_share, heading, options, report_json, verdict, warn_of_others

RATE_PER_S, NUM_STREAMS = 50.0, 200
TTFT_S, GAP_S, OUTPUT_TOKENS = 0.4, 0.04, 20
MAX_ERROR = 0.01


class Round(msgspec.Struct, frozen=True):
    """Shares by which medians are off, and the client's own use of the CPU."""

    ttft: float
    first_gap: float
    tpot: float
    itl: float
    latency: float
    cpu_share: float  # of one core
    cpu_us_per_event: float
    events_per_s: float


@contextlib.contextmanager
def fake_server() -> Iterator[str]:
    arguments = ("--ttft-s", str(TTFT_S), "--gap-s", str(GAP_S))
    with MarkedProcess(arguments, program=(sys.executable, "-m", "disagg.testing.openai_server")) as process:
        found = re.search(r"http://\S+", process.wait_line("is ready at", 30.0))
        assert found is not None
        yield found[0]


def work(num_requests: int) -> RandomWork:
    return RandomWork(
        num_requests=num_requests,
        arrivals=PoissonArrivals(RATE_PER_S),
        prompt=Lengths(64),
        output=Lengths(OUTPUT_TOKENS),
    )


def load(url: str, is_streams: bool, num_requests: int, seed: int) -> Round:
    asked = ClosedWork(work(num_requests), NUM_STREAMS) if is_streams else work(num_requests)
    warm_up = NUM_STREAMS if is_streams else 10
    plan = LoadPlan(workload=asked, slo=Slo(), seed=seed, limits=LoadLimits(warm_up_requests=warm_up))
    cpu_s, start_s = time.process_time(), time.perf_counter()
    result: LoadResult = measure(Target(url=url, model="fake", api=Api.TEXT), plan)
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - start_s
    f = result.figures
    if f.lapses:
        raise SystemExit(f"requests failed: {f.lapses}")
    events = sum(len(record.token_s) for record in result.records)
    return Round(
        f.ttft.p50.value / TTFT_S - 1,
        f.first_gap.p50.value / GAP_S - 1,
        f.tpot.p50.value / GAP_S - 1,
        f.itl.p50.value / GAP_S - 1,
        f.latency.p50.value / (TTFT_S + (OUTPUT_TOKENS - 1) * GAP_S) - 1,
        cpu_s / wall_s,
        1e6 * cpu_s / events,
        events / wall_s,
    )


def median(rounds: list[Round]) -> Round:
    return Round(*(statistics.median(getattr(each, name) for each in rounds) for name in Round.__struct_fields__))


def show(args: argparse.Namespace, accuracy: Round, overhead: Round, foreign: float) -> None:
    for name in ("ttft", "first_gap", "tpot", "itl", "latency"):
        what = f"{name} at {RATE_PER_S:g} requests/s, measured / told"
        print(verdict(what, 1 + abs(getattr(accuracy, name)), 1 + MAX_ERROR, foreign))
    use = f"this client uses {100 * overhead.cpu_share:.0f} % of a core, {overhead.cpu_us_per_event:.0f} us a token"
    off = f"TTFT {100 * overhead.ttft:+.2f} %, TPOT {100 * overhead.tpot:+.2f} %"
    print(f"{NUM_STREAMS} streams, {overhead.events_per_s:.0f} tokens/s: {use}; {off}")
    warn_of_others(foreign)
    report_json("bench_accuracy", args, {"accuracy": accuracy, "overhead": overhead, "foreign_share": foreign})


def main() -> None:
    args = options(__doc__, rounds=3).parse_args()
    if args.quick:
        args.rounds = 1
    print(heading(args), f"TTFT {TTFT_S:g} s, gap {GAP_S:g} s, {OUTPUT_TOKENS} tokens")
    num_requests = 150 if args.quick else 500
    accuracy, overhead = [], []
    use = cpu_use()
    with fake_server() as url:
        for number in range(args.rounds):
            accuracy.append(load(url, False, num_requests, args.seed + number))
            overhead.append(load(url, True, 3 * NUM_STREAMS, args.seed + number))
    show(args, median(accuracy), median(overhead), foreign_share(use, cpu_use()))


if __name__ == "__main__":
    main()

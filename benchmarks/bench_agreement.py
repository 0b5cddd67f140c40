"""Does `disagg bench` agree with another load tool? Both against the same server with known delays, in turn.

    python benchmarks/bench_agreement.py [--quick] [--rounds 3]

The other tool is xpyd-bench, in a virtual environment of its own (made when it is missing; skipped with the reason
where it cannot be had). Both are closed loops of eight clients that ask for as many tokens: at random times, throughput
would depend on each tool's dice. Compared are medians of TTFT, TPOT, gaps and end to end, and output tokens/s; each is
the median over the rounds.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path

from bench_accuracy import GAP_S, TTFT_S, fake_server
from disagg.bench.arrivals import EvenArrivals
from disagg.bench.client import Api
from disagg.bench.measure import LoadPlan, Target, measure
from disagg.bench.slo import Slo
from disagg.bench.workload import ClosedWork, Lengths, RandomWork
from harness import cpu_use, foreign_share, heading, options, report_json, verdict, warn_of_others
from peers.environments import Environment, Unavailable, python_of

XPYD_BENCH = Environment("xpyd-bench", ("xpyd-bench==0.3.0",))
NUM_CLIENTS, OUTPUT_TOKENS, PROMPT_TOKENS = 8, 24, 64
MAX_DIFFERENCE = 0.05
TIMEOUT_S = 120.0
# Our name -> what other tools call it.
MEASURES = {
    "ttft_p50_ms": ("median_ttft_ms", "p50_ttft_ms"),
    "tpot_p50_ms": ("median_tpot_ms", "p50_tpot_ms"),
    "itl_p50_ms": ("median_itl_ms", "p50_itl_ms"),
    "latency_p50_ms": ("median_e2el_ms", "p50_e2el_ms", "p50_e2e_latency_ms", "median_e2e_ms"),
    "output_tokens_per_s": ("output_throughput", "output_tokens_per_s", "output_token_throughput"),
}


def ours(url: str, num_requests: int, seed: int) -> dict[str, float]:
    work = RandomWork(
        num_requests=num_requests,
        arrivals=EvenArrivals(1.0),
        prompt=Lengths(PROMPT_TOKENS),
        output=Lengths(OUTPUT_TOKENS),
    )
    plan = LoadPlan(workload=ClosedWork(work, NUM_CLIENTS), slo=Slo(), seed=seed)
    f = measure(Target(url=url, model="fake", api=Api.TEXT), plan).figures
    spreads = {"ttft": f.ttft, "tpot": f.tpot, "itl": f.itl, "latency": f.latency}
    found = {f"{name}_p50_ms": 1e3 * spread.p50.value for name, spread in spreads.items()}
    return {**found, "output_tokens_per_s": f.output_tokens_per_s}


def theirs(python: Path, url: str, num_requests: int, seed: int) -> dict[str, float]:
    """Raises SystemExit with its words when it fails."""
    with tempfile.TemporaryDirectory(prefix="disagg-bench-") as folder:
        command = [
            *(str(python.parent / "xpyd-bench"), "--base-url", url, "--model", "fake"),
            *("--endpoint", "/v1/completions", "--dataset-name", "random", "--num-prompts", str(num_requests)),
            *(
                "--max-concurrency",
                str(NUM_CLIENTS),
                "--input-len",
                str(PROMPT_TOKENS),
                "--output-len",
                str(OUTPUT_TOKENS),
            ),
            *("--seed", str(seed), "--stream", "--no-live", "--save-result", "--result-dir", folder),
        ]
        environment = {**os.environ, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, cwd=folder, env=environment
        )
        files = sorted(Path(folder).rglob("*.json"))
        if done.returncode or not files:
            raise SystemExit(f"xpyd-bench failed ({done.returncode}): {(done.stdout + done.stderr)[-1500:]}")
        result = json.loads(files[-1].read_text())
    return {name: _first(result, keys) for name, keys in MEASURES.items()}


def _first(result: dict[str, object], keys: tuple[str, ...]) -> float:
    flat = dict(result)
    for value in result.values():
        if isinstance(value, dict):
            flat |= value
    for key in keys:
        if isinstance(value := flat.get(key), int | float):
            return float(value)
    raise SystemExit(f"xpyd-bench's result has none of {keys}: {sorted(flat)}")


def show(args: argparse.Namespace, mine: list[dict[str, float]], other: list[dict[str, float]], foreign: float) -> None:
    figures: dict[str, object] = {}
    for name in MEASURES:
        a, b = (statistics.median(each[name] for each in side) for side in (mine, other))
        print(f"{name}: disagg {a:.2f}, xpyd-bench {b:.2f}")
        print("  " + verdict("larger / smaller", max(a, b) / min(a, b), 1 + MAX_DIFFERENCE, foreign))
        figures[name] = {"disagg": a, "xpyd_bench": b, "ratio": a / b}
    warn_of_others(foreign)
    report_json("bench_agreement", args, {"measures": figures, "foreign_share": foreign})


def main() -> None:
    args = options(__doc__, rounds=3).parse_args()
    if args.quick:
        args.rounds = 1
    print(heading(args), f"TTFT {TTFT_S:g} s, gap {GAP_S:g} s")
    try:
        python = python_of(XPYD_BENCH)
    except Unavailable as error:
        print(f"SKIPPED: {error}")
        report_json("bench_agreement", args, {"skipped": str(error)})
        return
    num_requests = 64 if args.quick else 160
    mine, other = [], []
    use = cpu_use()
    with fake_server() as url:
        for number in range(args.rounds):
            mine.append(ours(url, num_requests, args.seed + number))
            other.append(theirs(python, url, num_requests, args.seed + number))
    show(args, mine, other, foreign_share(use, cpu_use()))


if __name__ == "__main__":
    main()

"""How long from the command to the first token, with everything in the page cache?

  engine    one process that imports the engine, loads the model and computes one token
  mixed     `disagg serve --mixed 1` until a client has the first token of its first request
  split     `disagg serve --prefill 1 --decode 1`, likewise, with the prompt handed off

Each scenario runs once unmeasured; then they take turns.

usage: python benchmarks/startup.py [--rounds N] [--json PATH]
"""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable

import httpx

import harness
from disagg.testing.processes import Serve

NAME = "smollm2"
PROMPT = list(range(1000, 1032))

ENGINE = """
import time
from disagg.core.ids import BlockId, Incarnation, RequestId, SequenceId, StepId
from disagg.core.request import SamplingParams
from disagg.core.roles import Role
from disagg.modelfiles.fetch import resolve_model
from disagg.scheduler.engine import StepPlan, StepRow
from disagg.worker.config import WorkerConfig
from disagg.worker.engines import load_engine

names = {"model": "smollm2", "served_name": "smollm2", "worker_id": "worker", "router_address": ""}
config = WorkerConfig(role=Role.MIXED, **names)
engine = load_engine(config, resolve_model("smollm2")).engine
sequence_id = SequenceId(RequestId(Incarnation(1), 0), 0)
blocks = tuple(BlockId(block) for block in range(4))
row = StepRow(sequence_id, tuple(range(1000, 1032)), 0, blocks, SamplingParams(max_tokens=1, temperature=0.0))
assert engine.run_step(StepPlan(StepId(0), (row,)), lambda num_layers: None).tokens
print(time.monotonic())  # the same clock in all processes of a machine
"""


def engine() -> float:
    started_s = time.monotonic()
    run = subprocess.run((sys.executable, "-c", ENGINE), check=True, timeout=120.0, stdout=subprocess.PIPE)
    return float(run.stdout) - started_s


def served(*pools: str) -> float:
    started_s = time.perf_counter()
    with Serve((NAME, *pools)) as server:
        body = {"model": NAME, "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=60.0, trust_env=False).raise_for_status()
        return time.perf_counter() - started_s


SCENARIOS: dict[str, Callable[[], float]] = {
    "engine": engine,
    "mixed": lambda: served("--mixed", "1"),
    "split": lambda: served("--prefill", "1", "--decode", "1", "--local-prefill-tokens", "0"),
}


def main() -> None:
    args = harness.options(__doc__, rounds=7).parse_args()
    rounds = 1 if args.quick else args.rounds
    print(harness.heading(args))
    for run in SCENARIOS.values():
        run()
    before = harness.cpu_use()
    time.sleep(1.0)  # nothing of ours runs: who else does?
    harness.warn_of_others(harness.foreign_share(before, harness.cpu_use()))
    seconds: dict[str, list[float]] = {name: [] for name in SCENARIOS}
    for _ in range(rounds):
        for name, run in SCENARIOS.items():
            seconds[name].append(run())
    medians = {name: harness.percentile(values, 50) for name, values in seconds.items()}
    for name, median_s in medians.items():
        print(f"{name:8} {median_s:6.2f} s to the first token (of {[round(value, 2) for value in seconds[name]]})")
    print(f"mixed / engine {medians['mixed'] / medians['engine']:.2f}")
    harness.report_json("startup", args, {"seconds": {name: round(value, 3) for name, value in medians.items()}})


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()

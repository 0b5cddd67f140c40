"""What a step costs besides its arithmetic, and whether ten thousand requests leave it as it was.

usage: python benchmarks/step_overhead.py [--quick]

A tiny model on one thread behind a real scheduler, no process and no socket around it. Time in the kernels and in
torch's operations is taken off: they are wrapped and timed. What is left is planning, tensors of the step, results.
  steady    16 and 128 streams that only decode
  traffic   10,000 requests of mixed lengths, 32 at once: step overhead and memory by tenths of the run
"""

import cProfile
import pstats
import random
import resource
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import harness
from disagg.core.ids import Incarnation, RequestId, SequenceId, WorkerId
from disagg.core.request import SamplingParams, SequenceSpec
from disagg.core.roles import Numerics, Role, Task
from disagg.engine.linears import TorchLinear
from disagg.engine.native.library import NativeLibrary
from disagg.engine.runner import TorchEngine
from disagg.policy.batching import StepBudget
from disagg.protocol.messages import StartSequence
from disagg.scheduler import events
from disagg.scheduler.actions import Action, RunStep, SendToRouter
from disagg.scheduler.config import SchedulerConfig
from disagg.scheduler.scheduler import Scheduler
from disagg.testing.model_files import VOCAB_SIZE, write_tiny_llama

LIMITS_MS = {16: 1.0, 128: 2.0}
NUM_BLOCKS, BLOCK = 4096, 16
ARITHMETIC = (
    (NativeLibrary, ("product", "product_int8", "add_norm", "gate", "rotate_store", "attend")),
    (TorchLinear, ("__call__",)),
)


class Stopwatch:
    """Seconds inside the wrapped methods, by part: the method, or what part_of makes of it and its arguments."""

    def __init__(self, part_of: Callable[[str, tuple[Any, ...]], str] = lambda method, arguments: method) -> None:
        self.parts: defaultdict[str, float] = defaultdict(float)
        self._part_of = part_of
        for owner, names in ARITHMETIC:
            for name in names:
                setattr(owner, name, self._timed(getattr(owner, name)))

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            start_s = time.perf_counter()
            try:
                return method(*args, **options)
            finally:
                self.parts[self._part_of(method.__name__, args)] += time.perf_counter() - start_s

        return timed


class Bench:
    """One scheduler, one engine, and the loop between them."""

    def __init__(self, path: Path, max_running: int, watch: Stopwatch) -> None:
        self._engine = TorchEngine(path, num_blocks=NUM_BLOCKS, block_size=BLOCK, num_threads=1)
        self._watch = watch
        self._scheduler = Scheduler(
            SchedulerConfig(
                worker_id=WorkerId("w"),
                incarnation=Incarnation(1),
                role=Role.MIXED,
                model_digest="d",
                numerics=Numerics.EXACT,
                layout=self._engine.layout,
                num_blocks=NUM_BLOCKS,
                max_context=self._engine.config.max_context,
                vocab_size=VOCAB_SIZE,
                budget=StepBudget(512, 128, max_running, itl_target_s=0.0),
            )
        )
        self._number = 0
        self.num_open = 0
        self._plan: RunStep | None = None
        self.overhead_s: list[float] = []
        self.num_streams: list[int] = []

    def start(self, prompt: tuple[int, ...], max_tokens: int) -> None:
        self._number += 1
        self.num_open += 1
        spec = SequenceSpec(
            SequenceId(RequestId(Incarnation(0), self._number), 0), prompt, SamplingParams(max_tokens, temperature=0.0)
        )
        self._take(
            self._scheduler.handle(events.RouterMessageReceived(StartSequence(spec, Task.WHOLE, 1)), time.monotonic())
        )

    def step(self) -> None:
        """One turn of a worker's loop: run the planned step, hand its result in, get the next plan."""
        assert self._plan is not None, "nothing to do"
        plan, self._plan = self._plan.plan, None
        start_s, before_s = time.perf_counter(), self._watch.seconds
        result = self._engine.run_step(plan, lambda layers: None)
        seconds = time.perf_counter() - start_s
        self._take(self._scheduler.handle(events.StepFinished(result, seconds), time.monotonic()))
        spent_s = time.perf_counter() - start_s
        self.overhead_s.append(spent_s - (self._watch.seconds - before_s))
        self.num_streams.append(len(plan.rows))

    def _take(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, RunStep):
                self._plan = action
            elif isinstance(action, SendToRouter):
                ended = getattr(action.message, "ended", ())
                self.num_open -= len(ended)

    @property
    def is_busy(self) -> bool:
        return self._plan is not None

    @property
    def num_sequences(self) -> int:
        state = self._scheduler.snapshot()
        return state.num_waiting + state.num_running


def prompt_of(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(3, VOCAB_SIZE - 100) for _ in range(length))


def steady(path: Path, num_streams: int, num_steps: int, watch: Stopwatch, rng: random.Random) -> float:
    """Median milliseconds a step besides its arithmetic."""
    bench = Bench(path, num_streams, watch)
    for _ in range(num_streams):
        bench.start(prompt_of(rng, 20), 200 + num_steps)
    while bench.num_streams[-1:] != [num_streams]:
        bench.step()
    for _ in range(20):
        bench.step()
    bench.overhead_s.clear()
    for _ in range(num_steps):
        bench.step()
    return 1e3 * statistics.median(bench.overhead_s)


def traffic(path: Path, num_requests: int, watch: Stopwatch, rng: random.Random) -> list[tuple[float, float]]:
    """(median overhead in ms, resident MiB) by tenths of the run."""
    bench = Bench(path, 32, watch)
    tenths: list[tuple[float, float]] = []
    for tenth in range(10):
        bench.overhead_s.clear()
        left = num_requests // 10
        while left or bench.num_sequences:
            while left and bench.num_sequences < 48:
                bench.start(prompt_of(rng, rng.randint(1, 120)), rng.randint(1, 24))
                left -= 1
            if not bench.is_busy:
                break
            bench.step()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        tenths.append((1e3 * statistics.median(bench.overhead_s), pages * resource.getpagesize() / 2**20))
        print(
            f"  after {(tenth + 1) * num_requests // 10:6} requests: {tenths[-1][0]:6.3f} ms, {tenths[-1][1]:7.1f} MiB"
        )
    return tenths


def main() -> None:
    args = harness.options(__doc__, rounds=1).parse_args()
    print(harness.heading(args))
    watch, rng = Stopwatch(), random.Random(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        path = write_tiny_llama(Path(folder) / "tiny")
        steps = 60 if args.quick else 300
        figures = {size: steady(path, size, steps, watch, rng) for size in LIMITS_MS}
        for size, value in figures.items():
            print(f"{size:4} streams: {value:.3f} ms a step besides arithmetic (target {LIMITS_MS[size]:g})")
        profiler = cProfile.Profile()
        profiler.enable()
        steady(path, 128, 60, watch, rng)
        profiler.disable()
        pstats.Stats(profiler, stream=sys.stdout).sort_stats("tottime").print_stats(14)
        tenths = traffic(path, 1000 if args.quick else 10_000, watch, rng)
    ratio = tenths[-1][0] / tenths[1][0]
    growth = tenths[-1][1] - tenths[1][1]
    print(f"step overhead, last tenth over second: {ratio:.2f}; memory: {growth:+.1f} MiB")
    result = {f"overhead_ms_{size}": round(value, 3) for size, value in figures.items()}
    harness.report_json(
        "step_overhead", args, {**result, "flat_ratio": round(ratio, 3), "growth_mib": round(growth, 1)}
    )


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()

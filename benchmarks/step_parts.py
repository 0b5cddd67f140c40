"""Where the milliseconds of a step go, part by part, and how fast each part reads memory.

usage: python benchmarks/step_parts.py [--weights fp32] [--threads 1] [--kernels auto] [--rounds 12] [--quick]

A model's engine in this process, driven by plans: a prompt of 512 tokens, and decode steps of some rows behind some
context. The kernels are wrapped and timed (wall clock). `rest` is what they leave of the step: planning and tensors of
the step, the calls themselves, sampling. Medians over `rounds` steps, so parts need not add up.

GB/s   bytes of weights, or of keys and values, that a part of a decode step reads, over its time
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

import harness
from disagg.core.formats import Kernels, KvDtype, Weights
from disagg.core.ids import BlockId, Incarnation, RequestId, SequenceId, StepId
from disagg.core.request import SamplingParams
from disagg.engine.runner import TorchEngine
from disagg.modelfiles.fetch import resolve_model
from disagg.scheduler.engine import StepPlan, StepRow
from step_overhead import Stopwatch

BLOCK = 16
PROMPT_TOKENS = 512
CELLS = ((1, 256), (4, 256), (16, 256), (1, 1024), (4, 1024), (16, 1024))  # rows, tokens before each
SPARE_TOKENS = 64  # a step writes one; warm-up and rounds together at most so many
GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0)
WEIGHT_BYTES = {Weights.FP32: 4.0, Weights.FP16: 2.0, Weights.INT8: 1.0625}  # with the scale of 64
KV_DTYPES = {Weights.FP32: KvDtype.FLOAT32, Weights.FP16: KvDtype.FLOAT16, Weights.INT8: KvDtype.FLOAT16}
PRODUCT = "product"


class Cell(NamedTuple):
    """Rows of a step, the tokens of each, and how many lie before them."""

    num_rows: int
    num_tokens: int
    context: int

    @property
    def name(self) -> str:
        if self.num_tokens > 1:
            return f"prompt of {self.num_tokens} tokens"
        return f"{self.num_rows} rows behind {self.context} tokens"


def part_name(method: str, arguments: tuple[Any, ...]) -> str:
    """A product by its shape; arguments[0] is whose method it is."""
    if method == "product":
        return f"{PRODUCT} {arguments[1].shape[1]} x {arguments[4]}"
    if method == "product_int8":
        return f"{PRODUCT} {arguments[1].shape[1]} x {arguments[2].num_outputs}"
    return method


class Steps:
    """One engine and the times of its steps."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._watch = Stopwatch(part_name)
        self._weights = Weights(args.weights)
        most_rows, most_tokens = max(rows for rows, _ in CELLS), max(context for _, context in CELLS) + SPARE_TOKENS
        self._row_blocks = -(-most_tokens // BLOCK)
        self._engine = TorchEngine(
            resolve_model(args.model),
            num_blocks=most_rows * self._row_blocks,
            block_size=BLOCK,
            num_threads=args.threads,
            weights=self._weights,
            kv_dtype=KV_DTYPES[self._weights],
            kernels=Kernels(args.kernels),
        )
        self._engine.arena.tensor.normal_()  # what it holds changes no time
        self._num_steps = 0

    @property
    def arithmetic(self) -> str:
        return self._engine.arithmetic

    def time(self, cell: Cell, rounds: int) -> dict[str, float]:
        """Median milliseconds by part, the whole step as `step`."""
        self._step(cell, 0)
        found: list[dict[str, float]] = []
        for number in range(rounds):
            self._watch.parts.clear()
            start_s = time.perf_counter()
            self._step(cell, number + 1 if cell.num_tokens == 1 else 0)
            step_s = time.perf_counter() - start_s
            parts = {**self._watch.parts, "rest": step_s - self._watch.seconds, "step": step_s}
            found.append({name: 1e3 * seconds for name, seconds in parts.items()})
        return {name: statistics.median(each[name] for each in found) for name in found[0]}

    def _step(self, cell: Cell, shift: int) -> None:
        self._num_steps += 1
        rows = tuple(self._row(row, cell, cell.context + shift) for row in range(cell.num_rows))
        self._engine.run_step(StepPlan(StepId(self._num_steps), rows), lambda num_layers: None)

    def _row(self, row: int, cell: Cell, position: int) -> StepRow:
        return StepRow(
            sequence_id=SequenceId(RequestId(Incarnation(1), 1), row),
            token_ids=tuple(range(100, 100 + cell.num_tokens)),
            position=position,
            block_table=tuple(map(BlockId, range(row * self._row_blocks, (row + 1) * self._row_blocks))),
            sampling=GREEDY,
        )

    def bytes_read(self, part: str, cell: Cell) -> float:
        """By a decode step, of weights or of keys and values; 0 for other parts."""
        config, layout = self._engine.config, self._engine.layout
        if part == "attend":
            return 2.0 * layout.num_layers * layout.token_bytes * cell.num_rows * (cell.context + 1)
        if not part.startswith(PRODUCT):
            return 0.0
        num_inputs, num_outputs = map(int, part.removeprefix(PRODUCT).split(" x "))
        times = 1 if num_outputs == config.vocab_size else layout.num_layers
        return WEIGHT_BYTES[self._weights] * num_inputs * num_outputs * times


def show(steps: Steps, cell: Cell, times_ms: dict[str, float]) -> None:
    print(f"\n{cell.name}: {times_ms['step']:.2f} ms")
    for part in sorted(times_ms, key=lambda name: -times_ms[name]):
        if part == "step":
            continue
        num_bytes = steps.bytes_read(part, cell) if cell.num_tokens == 1 else 0.0
        speed = f"{num_bytes / times_ms[part] / 1e6:8.1f} GB/s" if num_bytes else ""
        print(f"  {part:22}{times_ms[part]:9.3f} ms {100 * times_ms[part] / times_ms['step']:5.1f} %{speed}")


def cells(is_quick: bool) -> Sequence[Cell]:
    decode = [Cell(rows, 1, context) for rows, context in CELLS]
    return decode[:1] if is_quick else [Cell(1, PROMPT_TOKENS, 0), *decode]


def main() -> None:
    parser = harness.options(__doc__, rounds=12)
    parser.add_argument("--weights", choices=[each.value for each in Weights], default=Weights.FP32.value)
    parser.add_argument("--kernels", choices=[each.value for each in Kernels], default=Kernels.AUTO.value)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if not 0 < args.rounds < SPARE_TOKENS:
        parser.error(f"--rounds {args.rounds}: 1 to {SPARE_TOKENS - 1}")
    print(harness.heading(args), f"{args.threads} threads")
    steps = Steps(args)
    print(steps.arithmetic)
    figures: dict[str, dict[str, float]] = {}
    before = harness.cpu_use()
    for cell in cells(args.quick):
        figures[cell.name] = steps.time(cell, 2 if args.quick else args.rounds)
        show(steps, cell, figures[cell.name])
    harness.warn_of_others(harness.foreign_share(before, harness.cpu_use()))
    rounded = {cell: {part: round(ms, 4) for part, ms in times_ms.items()} for cell, times_ms in figures.items()}
    options = {"weights": args.weights, "threads": args.threads, "arithmetic": steps.arithmetic}
    harness.report_json("step_parts", args, {**options, "ms": rounded})


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()

"""Driving an engine step by step in tests: sequences with their own block tables."""

from pathlib import Path

from disagg.core.formats import Kernels, KvDtype, Weights
from disagg.core.ids import BlockId, Incarnation, RequestId, SequenceId, StepId
from disagg.core.request import EmittedToken, SamplingParams
from disagg.engine.runner import TorchEngine
from disagg.scheduler.engine import StepPlan, StepRow

GREEDY = SamplingParams(max_tokens=64, temperature=0.0)


def make_engine(
    path: Path,
    *,
    num_blocks: int = 120,
    block_size: int = 16,
    kernels: Kernels = Kernels.AUTO,
    weights: Weights = Weights.FP32,
    kv_dtype: KvDtype = KvDtype.FLOAT32,
) -> TorchEngine:
    """An engine on one thread: tests share the machine."""
    return TorchEngine(
        path,
        num_blocks=num_blocks,
        block_size=block_size,
        num_threads=1,
        kernels=kernels,
        weights=weights,
        kv_dtype=kv_dtype,
    )


def sequence_id(number: int, choice: int = 0) -> SequenceId:
    return SequenceId(RequestId(Incarnation(1), number), choice)


def make_row(
    number: int,
    token_ids: list[int],
    position: int,
    blocks: list[int],
    sampling: SamplingParams | None = GREEDY,
    output_position: int = 0,
) -> StepRow:
    return StepRow(
        sequence_id(number),
        tuple(token_ids),
        position,
        tuple(BlockId(block) for block in blocks),
        sampling,
        output_position,
    )


def run(engine: TorchEngine, *rows: StepRow) -> tuple[EmittedToken, ...]:
    """One step, no layer reports."""
    return engine.run_step(StepPlan(StepId(0), rows), lambda _: None).tokens


def generate(
    engine: TorchEngine,
    prompt: list[int],
    blocks: list[int],
    num_tokens: int,
    *,
    chunk: int = 1 << 30,
    sampling: SamplingParams = GREEDY,
) -> list[int]:
    """Prefill in chunks, then decode one by one, alone in the batch."""
    out: list[int] = []
    for start in range(0, len(prompt), chunk):
        part = prompt[start : start + chunk]
        is_last = start + len(part) == len(prompt)
        out = [token.token_id for token in run(engine, make_row(0, part, start, blocks, sampling if is_last else None))]
    while len(out) < num_tokens:
        row = make_row(0, out[-1:], len(prompt) + len(out) - 1, blocks, sampling, len(out))
        out += [token.token_id for token in run(engine, row)]
    return out

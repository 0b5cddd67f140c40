"""The work of `disagg profile`: time steps of a model on this machine, fit costs, write both."""

import contextlib
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from disagg.cli.machine import processor
from disagg.cli.notes import say
from disagg.cli.profile_options import ProfileOptions
from disagg.cli.profile_served import NUM_WORKERS, measure_served
from disagg.cluster.cores import split_cores
from disagg.sim.hardware.fitted import Profile, ProfileCell
from disagg.sim.hardware.serving import Serving, fit_serving
from disagg.sim.hardware.step_model import StepShape
from disagg.sim.hardware.sweep import SweepLimits, cells_of, fit_costs, measure, sweep_shapes
from disagg.sim.scenario import MESSAGE_S
from disagg.worker.config import WorkerConfig
from disagg.worker.engines import load_engine


def run_profile(config: WorkerConfig, asked: ProfileOptions) -> None:
    """Loads the engine in this process, without a worker around it. Raises ConfigurationError."""
    with _on_a_share(config, is_served=asked.served_rounds > 0) as own:
        result = _time_engine(own, asked)
    if asked.served_rounds:
        times = measure_served(config, rounds=asked.served_rounds, say=say)
        serving = fit_serving(result.costs, times, MESSAGE_S)
        result = msgspec.structs.replace(result, serving=serving)
    asked.out.write_bytes(result.encode())
    print("\n".join(report(result)))
    say(f"written to {asked.out}")


def _time_engine(config: WorkerConfig, asked: ProfileOptions) -> Profile:
    loaded = load_engine(config, Path(config.model))
    engine, layout = loaded.engine, loaded.engine.layout
    kv_tokens = engine.num_blocks * layout.block_size
    limits = SweepLimits(loaded.pool.max_context, kv_tokens, asked.max_prompt, asked.max_streams)
    shapes = sweep_shapes(limits)
    say(f"{len(shapes)} shapes, {asked.repeats} times each and once to warm up")
    measured = measure(
        engine,
        shapes,
        repeats=asked.repeats,
        limit_s=asked.limit_s,
        clock=time.perf_counter,
        on_round=lambda done: say(f"round {done} of {asked.repeats + 1} done"),
    )
    costs = fit_costs(measured)
    return Profile(
        model=config.served_name,
        hardware=asked.hardware or (processor() if config.device in ("auto", "cpu") else config.device),
        weights=loaded.pool.arithmetic,
        kv_dtype=layout.dtype,
        num_layers=layout.num_layers,
        kv_bytes_per_token=2 * layout.num_layers * layout.token_bytes,
        kv_tokens=kv_tokens,
        costs=costs,
        cells=cells_of(measured, costs),
    )


@contextlib.contextmanager
def _on_a_share(config: WorkerConfig, *, is_served: bool) -> Iterator[WorkerConfig]:
    """The cores and threads that each of two workers gets, when such are to be served too."""
    if not is_served or config.num_threads is not None or config.device not in ("auto", "cpu"):
        yield config
        return
    share, usable = split_cores(NUM_WORKERS)[0], os.sched_getaffinity(0)
    os.sched_setaffinity(0, share.cores or usable)
    try:
        yield msgspec.structs.replace(config, num_threads=share.num_threads)
    finally:
        os.sched_setaffinity(0, usable)


def report(result: Profile) -> list[str]:
    """Every cell and the fit, as text."""
    costs = result.costs
    errors = [abs(cell.error) for cell in result.cells]
    return [
        f"{result.model} {result.weights} on {result.hardware}",
        f"{'step':44}  {'measured ms':>11}  {'fitted ms':>11}  {'error':>7}",
        *(_row(cell) for cell in result.cells),
        (
            f"fit: {1e3 * costs.base_s:.3g} ms a step, {1e6 * costs.prompt_token_s:.3g} us a prompt token, "
            f"{1e9 * costs.prompt_pair_s:.3g} ns a pair, {1e6 * costs.stream_s:.3g} us a stream, "
            f"{1e9 * costs.context_token_s:.3g} ns a token of context"
        ),
        f"error: median {statistics.median(errors):.1%}, worst {max(errors):.1%} over {len(errors)} shapes",
        *(_serving_lines(result.serving) if result.serving is not None else ()),
    ]


def _serving_lines(serving: Serving) -> list[str]:
    costs, beside = serving.costs, serving.contention
    return [
        (
            f"served: {1e3 * costs.base_s:.3g} ms a step, {1e6 * costs.prompt_token_s:.3g} us a prompt token, "
            f"{1e6 * costs.stream_s:.3g} us a stream; {1e3 * serving.request_s:.3g} ms a request, "
            f"{1e3 * serving.handoff_s:.3g} ms a hand-off, {1e3 * serving.prompt_step_s:+.3g} ms a step with prompts"
        ),
        (
            f"beside a busy neighbour: prompts {beside.prompts_beside_prompts:.2f} times as long by prompts, "
            f"{beside.prompts_beside_streams:.2f} by streams; streams {beside.streams_beside_prompts:.2f} by prompts, "
            f"{beside.streams_beside_streams:.2f} by streams"
        ),
    ]


def describe(shape: StepShape) -> str:
    parts = [f"prompt {new}" + (f" after {cached}" if cached else "") for new, cached in shape.prefill]
    if shape.num_decode:
        parts.append(f"{shape.num_decode} streams at {shape.decode_contexts_sum // shape.num_decode}")
    return ", ".join(parts)


def _row(cell: ProfileCell) -> str:
    measured, fitted = 1e3 * cell.measured_s, 1e3 * cell.fitted_s
    return f"{describe(cell.shape):44}  {measured:11.2f}  {fitted:11.2f}  {cell.error:+7.1%}"

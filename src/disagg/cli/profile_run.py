"""The work of `disagg profile`: time steps of a model on this machine, fit costs, write both."""

import statistics
import time
from pathlib import Path

from disagg.cli.profile_options import ProfileOptions, say
from disagg.sim.hardware.fitted import Profile, ProfileCell
from disagg.sim.hardware.step_model import StepShape
from disagg.sim.hardware.sweep import SweepLimits, cells_of, fit_costs, measure, sweep_shapes
from disagg.worker.config import WorkerConfig
from disagg.worker.engines import load_engine


def run_profile(config: WorkerConfig, asked: ProfileOptions) -> None:
    """Loads the engine in this process, without a worker around it. Raises ConfigurationError."""
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
    result = Profile(
        model=config.served_name,
        hardware=asked.hardware or (_processor() if config.device in ("auto", "cpu") else config.device),
        weights=loaded.pool.arithmetic,
        kv_dtype=layout.dtype,
        num_layers=layout.num_layers,
        kv_bytes_per_token=2 * layout.num_layers * layout.token_bytes,
        kv_tokens=kv_tokens,
        costs=costs,
        cells=cells_of(measured, costs),
    )
    asked.out.write_bytes(result.encode())
    print("\n".join(report(result)))
    say(f"written to {asked.out}")


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
    ]


def describe(shape: StepShape) -> str:
    parts = [f"prompt {new}" + (f" after {cached}" if cached else "") for new, cached in shape.prefill]
    if shape.num_decode:
        parts.append(f"{shape.num_decode} streams at {shape.decode_contexts_sum // shape.num_decode}")
    return ", ".join(parts)


def _row(cell: ProfileCell) -> str:
    measured, fitted = 1e3 * cell.measured_s, 1e3 * cell.fitted_s
    return f"{describe(cell.shape):44}  {measured:11.2f}  {fitted:11.2f}  {cell.error:+7.1%}"


def _processor() -> str:
    """As the kernel names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "cpu"
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} cores of {names[0]}" if names else "cpu"

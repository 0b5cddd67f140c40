"""Fits the shares of efficiency.toml to measured operator tables: `python -m disagg.sim.validation.calibrate`.

Shares come from operator tables only (multiplications, attention, element-wise work, all-reduces); what engines add
(engines.toml) from the calibrating half of whole steps and closed loops, never from the half that is judged.
Prints each fitted value with the median and the 90th percentile of what it leaves unexplained.
"""

import sys
from collections.abc import Callable, Sequence

from disagg.sim.hardware import catalogue
from disagg.sim.hardware.catalogue import Accelerator
from disagg.sim.hardware.efficiency import bent
from disagg.sim.hardware.model_shape import ModelShape
from disagg.sim.hardware.precision import Precision
from disagg.sim.hardware.roofline import ACTIVATION_PASSES, HIDDEN_PASSES, ROTATION_PASSES
from disagg.sim.validation.data_folder import absent_reason, read_rows
from disagg.sim.validation.engine_fits import ENGINE_LIMITS, ENGINE_START, silicon_samples, splitwise_samples
from disagg.sim.validation.fitting import Fit, Sample, fit
from disagg.sim.validation.foreign_tables import SILICON, SPLITWISE

LINEAR = "vidur/derived_linear_ops_summary.csv"
GEMM = "aiconfigurator/derived_gemm_efficiency.csv"
PROMPTS = "aiconfigurator/derived_prefill_attention_mfu_32q.csv"
STREAMS = "aiconfigurator/derived_decode_attention_mbu_8q1kv.csv"
REDUCE = "vidur/data/profiling/network/{}_dgx/all_reduce.csv"
DEVICES = {"a100": "a100", "a40": "a40", "h100": "h100"}  # what Vidur calls a device


def layer_samples(vidur_name: str) -> list[Sample]:
    """Multiplications of one layer. Values: share of arithmetic, extra rows, share of bandwidth, seconds each."""
    device = catalogue.accelerator(DEVICES[vidur_name])
    samples = []
    for row in _of_known_models(vidur_name):
        shape, tp, tokens = catalogue.model_shape(row["model"]), int(row["tp"]), int(row["num_tokens"])
        sizes = [
            matrix.size / tp
            for matrix in (
                *shape.attention.matrices(shape.hidden_size),
                *shape.feed_forward(shape.intermediate_size),
            )
        ]
        samples.append(
            Sample(float(row["linear_ms"]) / 1e3, _products(device, sizes, tokens, Precision.BF16)),
        )
    return samples


def gemm_samples(system: str, dtype: Precision) -> list[Sample]:
    """Single multiplications; values as in layer_samples."""
    device = catalogue.accelerator(system)
    return [
        Sample(
            float(row["latency_ms"]) / 1e3,
            _products(device, [float(row["n"]) * float(row["k"])], int(row["m"]), dtype),
        )
        for row in read_rows(GEMM)
        if row["system"] == system and row["dtype"] == {"bf16": "bfloat16"}.get(dtype.value, dtype.value)
    ]


def elementwise_samples(vidur_name: str) -> list[Sample]:
    """What one layer does beside multiplying and attending. Values: share of bandwidth, seconds per layer."""
    device = catalogue.accelerator(DEVICES[vidur_name])
    samples = []
    for row in _of_known_models(vidur_name):
        shape, tp, tokens = catalogue.model_shape(row["model"]), int(row["tp"]), int(row["num_tokens"])
        moved = tokens * _touched_bytes(shape, tp) / device.memory_bytes_s
        samples.append(Sample(float(row["other_ms"]) / 1e3, lambda v, moved=moved: moved / v[0] + v[1]))  # type: ignore[misc]
    return samples


def prompt_samples(system: str) -> list[Sample]:
    """Attention of one prompt of 32 heads of 128. Values: share of arithmetic, tokens beside, seconds."""
    flops = catalogue.accelerator(system.split()[0]).flops_s(Precision.BF16)
    samples = []
    for row in read_rows(PROMPTS):
        if row["system"] == system:
            tokens = int(row["isl"])
            pairs, pair_s = tokens * (tokens + 1) / 2, 4 * 32 * 128 / flops

            def predict(v: Sequence[float], pairs: float = pairs, pair_s: float = pair_s, n: int = tokens) -> float:
                return pair_s * (pairs + n * v[1]) / v[0] + v[2]

            samples.append(Sample(float(row["latency_ms"]) / 1e3, predict))
    return samples


def stream_samples(system: str) -> list[Sample]:
    """Attention of streams, 8 query heads on one KV head of 128, 16 bits. Values: share of bandwidth, seconds."""
    bandwidth = catalogue.accelerator(system.split()[0]).memory_bytes_s
    samples = []
    for row in read_rows(STREAMS):
        if row["system"] == system and row["kv"] == "bfloat16":
            read_s = int(row["bs"]) * int(row["ctx"]) * 2 * 128 * 2 / bandwidth
            samples.append(Sample(float(row["latency_ms"]) / 1e3, lambda v, read_s=read_s: read_s / v[0] + v[1]))  # type: ignore[misc]
    return samples


def reduce_samples(vidur_name: str, num_ranks: int = 8) -> list[Sample]:
    """All-reduces inside a node, 256 KiB and larger. Values: share of the link's promise, seconds."""
    link = catalogue.link(catalogue.accelerator(DEVICES[vidur_name]).link)
    samples = []
    for row in read_rows(REDUCE.format(vidur_name)):
        size = int(row["size"])
        if int(row["num_workers"]) == num_ranks == int(row["devices_per_node"]) and size >= 256 * 1024:
            moved_s = 2 * (num_ranks - 1) / num_ranks * size / (link.gb_s * catalogue.GB)
            measured = float(row["time_stats.all_reduce.median"]) / 1e3
            samples.append(Sample(measured, lambda v, moved_s=moved_s: moved_s / v[0] + v[1]))  # type: ignore[misc]
    return samples


def _products(
    device: Accelerator, sizes: Sequence[float], tokens: int, weights: Precision
) -> Callable[[Sequence[float]], float]:
    flops, bandwidth, width = device.flops_s(weights), device.memory_bytes_s, weights.bytes_each

    def predict(values: Sequence[float]) -> float:
        share, rows, stream, each_s = values
        return sum(
            bent(2 * size * (tokens + rows) / (flops * share), size * width / (bandwidth * stream)) + each_s
            for size in sizes
        )

    return predict


def _touched_bytes(shape: ModelShape, tp: int) -> float:
    rotated = shape.attention.num_heads * shape.attention.head_dim + shape.attention.kv_elements
    cut = ROTATION_PASSES * rotated + ACTIVATION_PASSES * shape.intermediate_size
    return 2 * (HIDDEN_PASSES * shape.hidden_size + cut / tp)


def _of_known_models(vidur_name: str) -> list[dict[str, str]]:
    known = {alias for model in catalogue.models() for alias in model.aliases}
    return [row for row in read_rows(LINEAR) if row["device"] == vidur_name and row["model"] in known]


def _report(what: str, found: Fit) -> None:
    values = ", ".join(f"{value:.4g}" for value in found.values)
    text = f"median {found.median:6.1%}, 9 of 10 within {found.ninth_decile:6.1%}, {found.num_samples} samples"
    print(f"{what:34} [{values}]  {text}")


def main() -> int:
    """Exit code 2 where the tables are absent."""
    for file in (LINEAR, GEMM, PROMPTS, STREAMS, REDUCE.format("a100"), SILICON, SPLITWISE):
        if (reason := absent_reason(file)) is not None:
            print(reason, file=sys.stderr)
            return 2
    start, limits = (0.75, 20.0, 0.8, 2e-6), (0.99, 300.0, 0.99, 1e-4)
    for name in DEVICES:
        _report(f"matmul {name} (layers)", fit(layer_samples(name), start, limits))
        _report(f"elementwise {name}", fit(elementwise_samples(name), (0.6, 1e-5), (0.99, 1e-3)))
    for system, dtype in (
        ("a100_sxm", Precision.BF16), ("h100_sxm", Precision.BF16), ("h100_sxm", Precision.FP8),
        ("h100_sxm", Precision.FP8_BLOCK), ("h200_sxm", Precision.BF16), ("h200_sxm", Precision.FP8),
        ("h200_sxm", Precision.FP8_BLOCK), ("l40s", Precision.BF16),
        ("b200_sxm", Precision.BF16), ("b200_sxm", Precision.FP8),
    ):  # fmt: skip
        _report(f"matmul {system} {dtype} (single)", fit(gemm_samples(system, dtype), start, limits))
    for system in ("a100_sxm vllm/0.14.0", "h100_sxm vllm/0.19.0", "h200_sxm vllm/0.24.0", "l40s vllm/0.22.0",
                   "b200_sxm vllm/0.19.0"):  # fmt: skip
        _report(f"prompts {system}", fit(prompt_samples(system), (0.6, 400.0, 5e-6), (0.99, 5000.0, 1e-3)))
        if not system.startswith("l40s"):
            _report(f"streams {system}", fit(stream_samples(system), (0.8, 1e-5), (0.99, 1e-3)))
    for name in ("a100", "h100"):
        _report(f"all-reduce {name}", fit(reduce_samples(name), (0.7, 1e-5), (0.99, 1e-3)))
    _report("engine vllm-2023", fit(splitwise_samples(), ENGINE_START, ENGINE_LIMITS))
    for backend in ("vllm", "trtllm"):
        _report(f"engine {backend}", fit(silicon_samples(backend), ENGINE_START[:3], ENGINE_LIMITS[:3]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

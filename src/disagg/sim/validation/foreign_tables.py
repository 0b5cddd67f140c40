"""Tables of other projects, read from the data folder."""

import statistics
from collections import defaultdict
from typing import NamedTuple

from disagg.core.errors import ConfigurationError
from disagg.sim.hardware import catalogue
from disagg.sim.hardware.measured import MeasuredCard, MeasuredPoint, MeasuredTable
from disagg.sim.hardware.precision import Precision
from disagg.sim.hardware.roofline import RooflineModel
from disagg.sim.validation.data_folder import read_rows

SPLITWISE = "splitwise-sim/perf_model.csv"
SILICON = "extracted/silicon_llama3.1-70b-fp8_h200_agg.csv"
SILICON_DENSE = "extracted/silicon_dense_8b_32b_hopper_agg.csv"
SILICON_APART = "extracted/silicon_disagg_hopper_full_config.csv"
SILICON_MODELS = {
    "meta-llama/Llama-3.1-70B": "Llama-3.1-70B",
    "meta-llama/Llama-3.1-8B-Instruct": "Llama-3.1-8B",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "Llama-3.1-8B",
    "Qwen/Qwen3-32B": "Qwen3-32B",
}
SPLITWISE_MODELS = {"llama2-70b": "Llama-2-70B", "bloom-176b": "BLOOM-176B"}
QUEUEING_TTFT_S = 5.0  # beyond it, KV ran out and requests waited: nothing about steps


class SplitwiseGroup(NamedTuple):
    """Model, device and tp of splitwise-sim's table."""

    model: str
    hardware: str
    tp: int


class SplitwisePoint(NamedTuple):
    """Medians over repeats. order: n-th point of its group, in order of its key."""

    group: SplitwiseGroup
    order: int
    prompt: int
    batch: int
    answer: int
    prompt_s: float
    token_s: float


class SiliconGroup(NamedTuple):
    """One mixed worker under one kind of load."""

    backend: str
    model: str
    device: str
    weights: Precision
    tp: int
    prompt: int
    answer: int

    def worker(self, kv: Precision | None = None) -> RooflineModel:
        """TensorRT-LLM's FP8 checkpoints keep KV in FP8; the others keep it in 16 bits unless told, as by `kv`."""
        is_narrow = self.backend == "trtllm" and self.weights is not Precision.BF16
        return RooflineModel(
            catalogue.model_shape(self.model),
            catalogue.accelerator(self.device),
            tp=self.tp,
            weights=self.weights,
            kv=kv or (Precision.FP8 if is_narrow else Precision.BF16),
            # SGLang's own cost is in no calibrating set.
            overhead=catalogue.engine("trtllm" if self.backend == "trtllm" else "vllm"),
        )

    @property
    def is_in_waves(self) -> bool:
        """SGLang reads prompts first and alone, so answers of equal length begin and end together.

        In the runs of Qwen3-32B they did: TTFT is half of what all the loop's prompts take. In those of Llama-3.1-8B it
        is far less.
        """
        return self.backend == "sglang" and self.model == "Qwen3-32B"


class SiliconPoint(NamedTuple):
    """A closed-loop run. order: n-th concurrency of its group."""

    group: SiliconGroup
    concurrency: int
    order: int
    ttft_s: float
    tpot_s: float


class ApartPoint(NamedTuple):
    """A closed loop over prefill and decode workers, seen from one decode worker or, of spread attention, one rank."""

    is_spread: bool  # each rank attends to its own sequences; else all share each of them
    num_ranks: int
    prompt: int
    answer: int
    places: float
    ttft_s: float
    tpot_s: float


def splitwise_points() -> list[SplitwisePoint]:
    """Without the rows that were computed instead of measured and those that memory cut short."""
    cells: dict[tuple[SplitwiseGroup, int, int, int], list[tuple[float, float]]] = defaultdict(list)
    for row in read_rows(SPLITWISE):
        group = SplitwiseGroup(row["model"], row["hardware"], int(row["tensor_parallel"]))
        batch = int(row["batch_size"])
        if group.hardware.endswith("-pcap") or (group.model, group.tp, batch) == ("llama2-70b", 2, 64):
            continue
        key = (group, int(row["prompt_size"]), batch, int(row["token_size"]))
        cells[key].append((float(row["prompt_time"]) / 1e3, float(row["token_time"]) / 1e3))
    seen: dict[SplitwiseGroup, int] = defaultdict(int)
    points = []
    for key in sorted(cells):
        group, prompt, batch, answer = key
        prompt_s, token_s = (statistics.median(column) for column in zip(*cells[key], strict=True))
        points.append(SplitwisePoint(group, seen[group], prompt, batch, answer, prompt_s, token_s))
        seen[group] += 1
    return points


def splitwise_table(group: SplitwiseGroup) -> MeasuredTable:
    """As splitwise-sim reads its own file: every row counts, by prompt x batch, whatever the phase."""
    points = []
    for row in read_rows(SPLITWISE):
        if (row["model"], row["hardware"], int(row["tensor_parallel"])) == group:
            tokens = int(row["prompt_size"]) * int(row["batch_size"])
            points.append(MeasuredPoint(float(row["prompt_time"]) / 1e3, prompt_tokens=tokens))
            points.append(MeasuredPoint(float(row["token_time"]) / 1e3, num_streams=tokens))
    if not points:
        raise ConfigurationError(f"{SPLITWISE} has no rows of {group}")
    return MeasuredTable(_card(group), points)


def table_of(group: SplitwiseGroup, points: list[SplitwisePoint]) -> MeasuredTable:
    """From some of the points, prompts by their tokens and streams by their number and context."""
    measured = [MeasuredPoint(p.prompt_s, prompt_tokens=p.prompt * p.batch) for p in points if p.answer == 128]
    # Contexts matter less than the noise of this table: all streams lie on one curve.
    measured += [MeasuredPoint(p.token_s, num_streams=p.batch) for p in points]
    return MeasuredTable(_card(group), measured)


def silicon_points(file: str = SILICON) -> list[SiliconPoint]:
    """Those whose requests did not wait for KV room."""
    groups: dict[SiliconGroup, list[tuple[int, float, float]]] = defaultdict(list)
    for row in read_rows(file):
        ttft_s, tpot_s = float(row["silicon_ttft_ms"]) / 1e3, float(row["silicon_tpot_ms"]) / 1e3
        if ttft_s <= QUEUEING_TTFT_S and float(row["pp_size"] or 1) == 1:
            group = SiliconGroup(
                row["backend"],
                SILICON_MODELS[row["model_path"]],
                row["system"],
                Precision(row["gemm_quant_mode"] or Precision.BF16),
                int(float(row["tp_size"])),
                int(row["isl"]),
                int(row["osl"]),
            )
            groups[group].append((int(float(row["batch_size"])), ttft_s, tpot_s))
    return [
        SiliconPoint(group, concurrency, index, ttft_s, tpot_s)
        for group, runs in groups.items()
        for index, (concurrency, ttft_s, tpot_s) in enumerate(sorted(runs))
    ]


def apart_points() -> list[ApartPoint]:
    """DeepSeek-R1 in TensorRT-LLM on H200, decode workers of eight devices, over which experts are spread."""
    points = []
    for row in read_rows(SILICON_APART):
        if (row["backend"], row["system"], row["model_path"]) == ("trtllm", "h200_sxm", "deepseek-ai/DeepSeek-V3"):
            tp, spread = (int(float(row[f"decode_{name}_size"])) for name in ("tp", "attention_dp"))
            ranks = float(row["decode_num_workers"]) * spread
            points.append(
                ApartPoint(
                    is_spread=spread > 1,
                    num_ranks=tp * spread,
                    prompt=int(row["isl"]),
                    answer=int(row["osl"]),
                    places=float(row["silicon_concurrency"]) / ranks,
                    ttft_s=float(row["silicon_ttft_ms"]) / 1e3,
                    tpot_s=float(row["silicon_tpot_ms"]) / 1e3,
                )
            )
    return points


def _card(group: SplitwiseGroup) -> MeasuredCard:
    shape = catalogue.model_shape(SPLITWISE_MODELS[group.model])
    return MeasuredCard(
        name=f"{shape.name} on {group.hardware} TP{group.tp} (splitwise-sim's table)",
        kv_bytes_per_token=shape.kv_bytes_per_token(Precision.FP16),
        num_layers=shape.num_layers,
        kv_tokens=0,
    )

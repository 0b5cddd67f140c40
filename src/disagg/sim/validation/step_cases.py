"""Cases that step models and links answer alone. Every runner gives its metrics in the units of cases.toml."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable

from disagg.sim.hardware import catalogue
from disagg.sim.hardware.precision import Precision
from disagg.sim.hardware.published import published_model
from disagg.sim.hardware.roofline import ExpertParallel, RooflineModel
from disagg.sim.hardware.step_model import StepModel, StepShape
from disagg.sim.validation.closed_form import closed_loop_tpot_s, decode_tpot_s, wave_tpot_s
from disagg.sim.validation.foreign_tables import (
    SILICON_DENSE,
    SPLITWISE_MODELS,
    ApartPoint,
    SiliconPoint,
    SplitwiseGroup,
    SplitwisePoint,
    apart_points,
    silicon_points,
    splitwise_points,
    splitwise_table,
    table_of,
)

Values = dict[str, list[float]]  # metric -> ours
DS_WORKERS = (("OPT-13B", 1), ("OPT-13B", 2), ("OPT-13B", 4), ("OPT-66B", 2), ("OPT-66B", 4), ("OPT-66B", 8))
MS = 1e3
SGLANG_CHUNK = 8192  # tokens of prompts that SGLang reads at a time on devices of 60 to 160 GB, unless told


def prompt_s(model: StepModel, tokens: int, batch: int = 1) -> float:
    return model.step_s(StepShape(prefill=((tokens, 0),) * batch))


def stream_s(model: StepModel, streams: int, context: int) -> float:
    return model.step_s(StepShape(decode_contexts_sum=streams * context, num_decode=streams))


def published_coefficients() -> Values:
    """DS-COEF: our evaluation of the fits, against values computed from the file."""
    values: Values = {}
    for model, tp in (("OPT-13B", 1), ("OPT-13B", 2), ("OPT-66B", 4)):
        worker = published_model(model, tp=tp)
        values[f"prefill {model} TP{tp}"] = [MS * prompt_s(worker, tokens) for tokens in (512, 1024, 2048)]
    for model, tp in (("OPT-13B", 1), ("OPT-66B", 2), ("OPT-66B", 4)):
        worker = published_model(model, tp=tp)
        values[f"decode {model} TP{tp} context 512"] = [MS * stream_s(worker, n, 512) for n in (1, 16, 64, 128)]
    return values


def rooflines_of_opt() -> Values:
    """DS-ROOF: a roofline that knows operator tables only, against the fits of whole steps."""
    device, engine = catalogue.accelerator("A100-SXM-80G"), catalogue.engine("eager")
    values: Values = {}
    for model, tp in DS_WORKERS:
        worker = RooflineModel(catalogue.model_shape(model), device, tp=tp, overhead=engine)
        values[f"prefill {model} TP{tp}"] = [MS * prompt_s(worker, tokens) for tokens in (512, 1024, 2048)]
        values[f"decode {model} TP{tp} context 512"] = [MS * stream_s(worker, n, 512) for n in (1, 16, 64, 128)]
    return values


def splitwise_example() -> Values:
    """SW-GOLD: one DGX-H100, and prompts there with tokens on a DGX-A100 over 200 GiB/s."""
    requests = ((4096, 32), (2048, 8), (2048, 16))
    h100 = splitwise_table(SplitwiseGroup("bloom-176b", "h100-80gb", 8))
    a100 = splitwise_table(SplitwiseGroup("bloom-176b", "a100-80gb", 8))
    first = [prompt_s(h100, prompt) for prompt, _ in requests]
    moved = [prompt * h100.kv_bytes_per_token / (200 * 2**30) for prompt, _ in requests]
    answers = [answer - 1 for _, answer in requests]
    alone, apart = stream_s(h100, 1, 0), stream_s(a100, 1, 0)
    return {
        "TTFT, one machine": first,
        "response, one machine": [ttft + n * alone for ttft, n in zip(first, answers, strict=True)],
        "KV transfer": moved,
        "response, two machines": [
            ttft + wire + n * apart for ttft, wire, n in zip(first, moved, answers, strict=True)
        ],
    }


def splitwise_phases() -> Values:
    """SW-PERF: mean absolute relative errors in percent, of a table and a roofline that know every other point."""
    points = splitwise_points()
    errors: dict[str, list[float]] = defaultdict(list)
    for group in sorted({point.group for point in points}):
        ours = [point for point in points if point.group == group]
        held = [point for point in ours if point.order % 2 == 0]
        for name, model, judged in (
            ("table {}, all points", table_of(group, ours), ours),
            ("table {}, held-back points", table_of(group, [p for p in ours if p.order % 2 == 1]), held),
            ("roofline {}, held-back points", splitwise_roofline(group), held),
        ):
            prompts, tokens = phase_errors(model, judged)
            errors[name.format("prompt")] += prompts
            errors[name.format("token")] += tokens
    return {name: [100 * statistics.fmean(left)] for name, left in errors.items()}


def splitwise_roofline(group: SplitwiseGroup) -> RooflineModel:
    return RooflineModel(
        catalogue.model_shape(SPLITWISE_MODELS[group.model]),
        catalogue.accelerator(group.hardware),
        tp=group.tp,
        overhead=catalogue.engine("vllm-2023"),
    )


def phase_errors(model: StepModel, points: Iterable[SplitwisePoint]) -> tuple[list[float], list[float]]:
    """|predicted / measured - 1| of prompts (where the answer was short) and of tokens."""
    prompts, tokens = [], []
    for point in points:
        if point.answer == 128:
            prompts.append(abs(prompt_s(model, point.prompt, point.batch) / point.prompt_s - 1))
        context = point.prompt + point.answer // 2
        tokens.append(abs(stream_s(model, point.batch, context) / point.token_s - 1))
    return prompts, tokens


def llama_on_h200() -> Values:
    """AIC-L70: mean |error| of TPOT in percent over the concurrencies that calibrated nothing."""
    held = [point for point in silicon_points() if point.order % 2 == 1]
    return {
        f"TPOT {backend}, held-back points": [
            mean_tpot_error(point for point in held if point.group.backend == backend)
        ]
        for backend in ("trtllm", "vllm")
    }


def dense_on_hopper() -> Values:
    """AIC-DENSE: the same for other models, devices and widths; nothing was fitted to any of them."""
    points = silicon_points(SILICON_DENSE)
    labels = {point: f"TPOT {g.backend} {g.model} {g.weights}" for point in points for g in (point.group,)}
    return {
        label: [mean_tpot_error(point for point in points if labels[point] == label)]
        for label in sorted(set(labels.values()))
    }


def mean_tpot_error(points: Iterable[SiliconPoint]) -> float:
    """Percent."""
    errors = []
    for group, concurrency, _, _, tpot_s in points:
        loop = (group.worker(), group.prompt, group.answer, concurrency)
        ours = wave_tpot_s(*loop, SGLANG_CHUNK) if group.is_in_waves else closed_loop_tpot_s(*loop)
        errors.append(abs(ours / tpot_s - 1))
    return 100 * statistics.fmean(errors)


def deepseek_apart() -> Values:
    """AIC-DSR1-PD: decode workers of eight H200 in closed loops; prefill is as long away as was measured."""
    errors: dict[str, list[float]] = {"TPOT, attention shared": [], "TPOT, attention spread": []}
    for point in apart_points():
        ours = decode_tpot_s(_decode_rank(point), point.prompt, point.answer, point.places, point.ttft_s)
        kind = "TPOT, attention spread" if point.is_spread else "TPOT, attention shared"
        errors[kind].append(abs(ours / point.tpot_s - 1))
    return {name: [100 * statistics.fmean(each)] for name, each in errors.items()}


def _decode_rank(point: ApartPoint) -> RooflineModel:
    """TensorRT-LLM exchanges after computing, and keeps KV of FP8 checkpoints in FP8."""
    spread = ExpertParallel(point.num_ranks, catalogue.link("NVLink4"), is_overlapped=False)
    return RooflineModel(
        catalogue.model_shape("DeepSeek-V3"),
        catalogue.accelerator("H200-SXM"),
        tp=1 if point.is_spread else point.num_ranks,
        weights=Precision.FP8_BLOCK,
        kv=Precision.FP8,
        overhead=catalogue.engine("trtllm"),
        experts=spread if point.is_spread else None,
    )


def yi_on_a100() -> Values:
    """SA-YI34: two A100 PCIe joined by NVLink, in an engine made from the vLLM of 2023."""
    model = RooflineModel(
        catalogue.model_shape("Yi-34B"),
        catalogue.accelerator("A100-PCIe-80G"),
        tp=2,
        overhead=catalogue.engine("vllm-2023"),
    )
    return {
        "prefill": [MS * prompt_s(model, tokens) for tokens in (512, 1024, 2048, 4096, 8192, 16384)],
        "decode context 1020": [MS * stream_s(model, n, 1020) for n in (1, 2, 4, 8, 16, 32, 64, 128)],
        "prefill in chunks of 512": [MS * _chunked_s(model, n, 512) for n in (2048, 4096, 8192, 16384)],
        "prefill in chunks of 2048": [MS * _chunked_s(model, n, 2048) for n in (2048, 4096, 8192, 16384)],
    }


def qwen_on_h20() -> Values:
    """MC-235B: one prompt at a time from eight H20-3e to eight others over four 400 Gb/s ports."""
    shape, link = catalogue.model_shape("Qwen3-235B-A22B"), catalogue.link("RoCE-4x400G")
    model = RooflineModel(shape, catalogue.accelerator("H20-3e"), tp=8, overhead=catalogue.engine("vllm"))
    # Ranks beyond the KV heads hold copies, and each sends its own.
    moved = {n: n * model.kv_bytes_per_token * model.kv_copies for n in (128, 1024, 2048, 4096, 8192, 16384, 32768)}
    ttft = {n: prompt_s(model, n) + link.transfer_s(moved[n]) + stream_s(model, 1, n) for n in moved}
    long = (2048, 4096, 8192, 16384, 32768)
    return {
        "KV moved": [moved[n] / catalogue.GB for n in (1024, *long)],
        "KV transfer": [MS * link.transfer_s(moved[n]) for n in (1024, 2048)],
        "KV transfer, long": [MS * link.transfer_s(moved[n]) for n in (4096, 8192, 16384, 32768)],
        "TTFT": [MS * ttft[n] for n in long],
        "TTFT, short": [MS * ttft[n] for n in (128, 1024)],
    }


def deepseek_decode() -> Values:
    """SG-96H100-D: 72 ranks, 256 streams each, FP8 weights, low-latency exchange over InfiniBand."""
    model = _spread("DeepSeek-V3", "H100-SXM", ranks=72, redundant=32)
    step = stream_s(model, 256, 2000)
    return {"step": [MS * step], "answer tokens per device": [256 / step]}


def deepseek_prefill() -> Values:
    """SG-96H100-P: 32 ranks, 16384 prompt tokens each."""
    model = _spread("DeepSeek-V3", "H100-SXM", ranks=32, redundant=32, nodes=4)
    rates = [16384 / prompt_s(model, tokens, 16384 // tokens) for tokens in (1024, 2048, 4096)]
    return {"prompt tokens per device": rates}


def kimi_decode() -> Values:
    """SG-K2: 96 ranks of H200, 480 streams each, prompts of 2000 and answers of 100."""
    model = _spread("Kimi-K2", "H200-SXM", ranks=96, redundant=96)
    return {"step": [MS * stream_s(model, 480, 2050)]}


def deepseek_long_context() -> Values:
    """SG-MTP: 16 ranks of H200 with two streams of 64 k tokens each, without speculation."""
    model = _spread("DeepSeek-V3", "H200-SXM", ranks=16, redundant=0)
    return {"step": [MS * stream_s(model, 2, 65536 + 2048)]}


def _spread(name: str, device: str, *, ranks: int, redundant: int, nodes: int = 0) -> RooflineModel:
    spread = ExpertParallel(ranks, catalogue.link("IB-NDR"), num_redundant=redundant, num_nodes=nodes)
    return RooflineModel(
        catalogue.model_shape(name),
        catalogue.accelerator(device),
        weights=Precision.FP8_BLOCK,
        overhead=catalogue.engine("vllm"),
        experts=spread,
    )


def _chunked_s(model: StepModel, tokens: int, chunk: int) -> float:
    return sum(
        model.step_s(StepShape(prefill=((min(chunk, tokens - done), done),))) for done in range(0, tokens, chunk)
    )


RUNNERS: dict[str, Callable[[], Values]] = {
    "DS-COEF": published_coefficients,
    "DS-ROOF": rooflines_of_opt,
    "SW-GOLD": splitwise_example,
    "SW-PERF": splitwise_phases,
    "AIC-L70": llama_on_h200,
    "AIC-DENSE": dense_on_hopper,
    "AIC-DSR1-PD": deepseek_apart,
    "SA-YI34": yi_on_a100,
    "MC-235B": qwen_on_h20,
    "SG-96H100-D": deepseek_decode,
    "SG-96H100-P": deepseek_prefill,
    "SG-K2": kimi_decode,
    "SG-MTP": deepseek_long_context,
}

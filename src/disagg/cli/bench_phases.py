"""The work of `disagg bench phases`: the same requests at once, and the two phases of their answers apart.

prefill   from sending until the last of them has its first token
decode    from then until the first of them has its last token: all streams write
floor     what the phase would take at this machine's measured arithmetic or bandwidth, whichever is slower
"""

import contextlib
import json
import random
import subprocess
import sys
from collections.abc import Iterator

import msgspec

from disagg.bench.arrivals import EvenArrivals
from disagg.bench.client import Api
from disagg.bench.load import LoadLimits
from disagg.bench.measure import LoadPlan, Target, measure
from disagg.bench.prompts import plain_ids
from disagg.bench.record import RequestRecord
from disagg.bench.slo import Slo
from disagg.bench.text_report import table
from disagg.bench.workload import ClosedWork, Lengths, RandomWork
from disagg.cli.bench_options import PhasesOptions
from disagg.cli.bench_run import READY_TIMEOUT_S
from disagg.core.errors import ConfigurationError
from disagg.modelfiles.config import read_config
from disagg.modelfiles.fetch import resolve_model
from disagg.sim.hardware.model_shape import ModelShape
from disagg.sim.hardware.precision import Precision
from disagg.testing.processes import Serve

LIMITS_TIMEOUT_S = 180.0
KV = Precision.FP32  # of workers unless told otherwise


class Limits(msgspec.Struct, frozen=True):
    """Of this machine, on one thread: a worker has a core."""

    read_gb_s: float
    gemm_gflop_s: float
    bf16_gflop_s: float


class Phase(msgspec.Struct, frozen=True):
    """What one phase did and took."""

    name: str
    seconds: float
    num_tokens: int
    flops: float
    read_bytes: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def intensity(self) -> float:
        """Operations for each byte read."""
        return self.flops / self.read_bytes

    def floor_s(self, limits: Limits) -> float:
        return max(self.flops / limits.gemm_gflop_s, self.read_bytes / limits.read_gb_s) / 1e9

    def bound(self, limits: Limits) -> str:
        arithmetic, bandwidth = self.flops / limits.gemm_gflop_s, self.read_bytes / limits.read_gb_s
        return "arithmetic" if arithmetic > bandwidth else "bandwidth"


def run_phases(asked: PhasesOptions, *, as_json: bool) -> None:
    """Prints. Raises ConfigurationError."""
    if min(asked.concurrent, asked.prompt_tokens, asked.rounds) < 1 or asked.output_tokens < 2:
        raise ConfigurationError(
            "--concurrent, --prompt-tokens and --rounds must be 1 or more, --output-tokens 2 or more"
        )
    shape = shape_of(asked)
    limits = measure_limits() if asked.measure_limits else None
    with _server(asked) as url:
        model = asked.model if asked.target.startswith("http") else asked.target
        target = Target(url=url, api=Api.IDS, timeout_s=asked.timeout_s, ids=plain_ids(model))
        _round(target, asked, -1)
        rounds = [phases_of(_round(target, asked, number), shape, asked) for number in range(asked.rounds)]
    middle = [_median([each[index] for each in rounds]) for index in range(2)]
    if as_json:
        print(msgspec.json.encode({"limits": limits, "phases": middle, "rounds": rounds}).decode())
        return
    print("\n".join(describe(middle, limits, asked)))


def shape_of(asked: PhasesOptions) -> ModelShape:
    """The geometry of what is served."""
    config = read_config(resolve_model(asked.model if asked.target.startswith("http") else asked.target, report=print))
    entries: dict[str, object] = {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "model_type": "llama",
    }
    return ModelShape.from_config(entries, asked.target)


def measure_limits() -> Limits:
    """In a process of its own: the arithmetic is the engine's library's."""
    command = [sys.executable, "-m", "disagg.engine.limits", "1"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMITS_TIMEOUT_S, check=True)
        return Limits(**json.loads(done.stdout))
    except (subprocess.SubprocessError, ValueError) as error:
        raise ConfigurationError(
            f"this machine's limits were not measured ({error}): leave them out with --no-measure-limits"
        ) from None


def phases_of(records: list[RequestRecord], shape: ModelShape, asked: PhasesOptions) -> tuple[Phase, Phase]:
    """Prefill and decode of one round. Raises ConfigurationError when a request failed or they did not overlap."""
    failed = [record for record in records if not record.is_whole]
    if failed:
        raise ConfigurationError(f"request {failed[0].number} failed ({failed[0].lapse}: {failed[0].detail})")
    begin_s = min(record.sent_s for record in records)
    split_s = max(record.token_s[0] for record in records)
    end_s = min(record.token_s[-1] for record in records)
    if end_s <= split_s:
        raise ConfigurationError("the first answer ended before the last one began: ask for more --output-tokens")
    weights = Precision(asked.weights)
    num_prompts, length = len(records), asked.prompt_tokens
    weight_bytes = float(shape.weight_bytes(weights))
    prefill = Phase(
        "prefill",
        split_s - begin_s,
        num_prompts * length,
        num_prompts * shape.prefill_flops(length),
        num_prompts * weight_bytes,
    )
    written = [sum(split_s < at_s <= end_s for at_s in record.token_s) for record in records]
    steps = max(written)
    first = [sum(at_s <= split_s for at_s in record.token_s) for record in records]
    contexts = [length + before + count / 2 for before, count in zip(first, written, strict=True)]
    pairs = sum(context * count for context, count in zip(contexts, written, strict=True))
    attended = shape.num_layers * shape.attention.cached_pair_flops * pairs
    decode = Phase(
        "decode",
        end_s - split_s,
        sum(written),
        2.0 * sum(written) * (shape.matrix_parameters + shape.vocab_size * shape.hidden_size) + attended,
        steps * weight_bytes + pairs * shape.kv_bytes_per_token(KV),
    )
    return prefill, decode


def describe(phases: list[Phase], limits: Limits | None, asked: PhasesOptions) -> list[str]:
    """A table of both phases, and what bounds them."""
    ask = f"{asked.concurrent} at once, {asked.prompt_tokens} tokens in, {asked.output_tokens} out"
    heads = ("", "seconds", "tokens/s", "GFLOP/s", "GB/s read", "FLOP/byte")
    rows: list[tuple[str, ...]] = [heads]
    for each in phases:
        gflops, gbytes = each.flops / each.seconds / 1e9, each.read_bytes / each.seconds / 1e9
        figures = (f"{each.seconds:.2f}", f"{each.tokens_per_s:.0f}", f"{gflops:.1f}", f"{gbytes:.2f}")
        rows.append((each.name, *figures, f"{each.intensity:.1f}"))
    if limits is None:
        return [ask, *table(rows)]
    machine = ("machine", "", "", f"{limits.gemm_gflop_s:.1f}", f"{limits.read_gb_s:.2f}")
    rows.append((*machine, f"{limits.gemm_gflop_s / limits.read_gb_s:.1f}"))
    shares = [100 * each.floor_s(limits) / each.seconds for each in phases]
    sentences = [
        f"{each.name}: bound by {each.bound(limits)}, {share:.0f} % of what one thread here allows in float32"
        for each, share in zip(phases, shares, strict=True)
    ]
    return [ask, *table(rows), *sentences]


def _round(target: Target, asked: PhasesOptions, number: int) -> list[RequestRecord]:
    work = RandomWork(
        num_requests=asked.concurrent,
        arrivals=EvenArrivals(1.0),
        prompt=Lengths(asked.prompt_tokens),
        output=Lengths(asked.output_tokens),
    )
    plan = LoadPlan(
        workload=ClosedWork(work, asked.concurrent),
        slo=Slo(),
        seed=asked.seed,
        prompt_seed=random.Random(f"{asked.seed}/{number}").getrandbits(32),
        limits=LoadLimits(),
    )
    return list(measure(target, plan).records)


def _median(phases: list[Phase]) -> Phase:
    """The round whose time is in the middle."""
    return sorted(phases, key=lambda phase: phase.seconds)[len(phases) // 2]


@contextlib.contextmanager
def _server(asked: PhasesOptions) -> Iterator[str]:
    if asked.target.startswith("http"):
        yield asked.target
        return
    # Every prompt is handed off: a decode worker that also read would blur what is measured.
    pools = ("--prefill", "1", "--decode", "1", "--local-prefill-tokens", "0", "--weights", asked.weights)
    with Serve((asked.target, *pools), ready_timeout_s=READY_TIMEOUT_S) as server:
        yield server.url

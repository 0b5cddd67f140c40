"""What is reached of a device's promises: shares of its peak rates and fixed times, fitted to operator tables."""

import msgspec

from disagg.sim.hardware.precision import Precision

# Two limits that both bind (arithmetic and memory) add up partly: the larger counts, the smaller shows near the bend.
BEND = 4.0


class Efficiency(msgspec.Struct, frozen=True):
    """Of one family of devices. Shares are of the maker's rate, 0 to 1; times are seconds."""

    name: str
    matmul: dict[Precision, float]  # share of the arithmetic that large multiplications reach
    matmul_rows: float  # rows that a multiplication pays beside its own: the last tile is never full
    stream: float  # share of the memory bandwidth at which weights are read
    matmul_s: dict[Precision, float]  # of each multiplication
    elementwise: float  # share of the memory bandwidth of norms, activations, rotations, additions
    elementwise_s: float  # of each layer
    prefill_attention: float  # share of the arithmetic over long prompts
    prefill_attention_tokens: float  # tokens that each token attends to beside its own: why short prompts are slow
    decode_attention: float  # share of the memory bandwidth at which KV is read
    attention_s: float  # of each layer
    all_reduce: float  # share of the link's promise
    all_reduce_s: float  # of each all-reduce
    source: str
    expert: float = 1.0  # of `matmul`, where rows are spread over experts

    def matmul_share(self, precision: Precision) -> float:
        return self.matmul.get(precision, self.matmul[Precision.BF16])

    def matmul_fixed_s(self, precision: Precision) -> float:
        return self.matmul_s.get(precision, self.matmul_s[Precision.BF16])


class EngineOverhead(msgspec.Struct, frozen=True):
    """What an engine adds to its kernels, per step of one worker; seconds."""

    name: str
    step_s: float
    row_s: float = 0.0  # per stream or prompt of the step
    prompt_token_s: float = 0.0
    collective_s: float = 0.0  # per all-reduce, beside the kernel's own: libraries that are called without a graph
    source: str = ""


NO_OVERHEAD = EngineOverhead("none", 0.0)


def bent(left: float, right: float) -> float:
    """Seconds of work with two limits of which the larger binds."""
    larger, smaller = (left, right) if left >= right else (right, left)
    if larger <= 0.0:
        return 0.0
    return float(larger * (1.0 + (smaller / larger) ** BEND) ** (1.0 / BEND))

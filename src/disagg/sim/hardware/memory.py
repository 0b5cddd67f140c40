"""What fits beside the weights."""

from typing import Protocol

import msgspec

from disagg.core.errors import ConfigurationError
from disagg.sim.hardware.catalogue import GB, Accelerator
from disagg.sim.hardware.model_shape import ModelShape
from disagg.sim.hardware.precision import Precision


class MemoryBudget(msgspec.Struct, frozen=True):
    """What of a device's memory weights and KV may take."""

    share: float = 0.9
    workspace_bytes: float = 1e9  # activations, graphs, communication buffers


class Partition(Protocol):
    """A model cut over devices."""

    model: ModelShape
    device: Accelerator
    tp: int
    pp: int
    weights: Precision
    budget: MemoryBudget

    @property
    def kv_bytes_per_token(self) -> int: ...

    @property
    def kv_copies(self) -> float: ...

    def weight_bytes_per_rank(self) -> float: ...


def max_kv_tokens(cut: Partition, block_size: int) -> int:
    """Tokens of whole blocks. Raises ConfigurationError, with the missing gigabytes, where not even one block fits."""
    if block_size < 1:
        raise ConfigurationError(f"block_size={block_size} must be at least 1 token")
    usable = cut.device.memory_bytes * cut.budget.share - cut.budget.workspace_bytes
    weights = cut.weight_bytes_per_rank()
    per_token = cut.kv_bytes_per_token * cut.kv_copies / (cut.tp * cut.pp)
    missing = weights + block_size * per_token - usable
    if missing > 0:
        raise ConfigurationError(
            f"{cut.model.name} in {cut.weights} takes {weights / GB:.1f} GB of weights on each of {cut.tp * cut.pp} x "
            f"{cut.device.name}, where {usable / GB:.1f} GB can be used: {missing / GB:.1f} GB too much on each; use "
            "more devices (tp, pp), larger ones or narrower weights"
        )
    return int((usable - weights) / per_token) // block_size * block_size

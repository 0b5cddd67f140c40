"""How long a step takes on hardware that is not here: one interface, several ways to know.

Every implementation answers for one worker, that is, for all its ranks together.
"""

from typing import Protocol

import msgspec


class StepShape(msgspec.Struct, frozen=True):
    """What one step computes."""

    prefill: tuple[tuple[int, int], ...] = ()  # per prompt: (tokens computed now, tokens already in the cache)
    decode_contexts_sum: int = 0  # tokens that the decoding streams attend to, summed
    num_decode: int = 0  # streams that get one token each

    @property
    def num_prompt_tokens(self) -> int:
        return sum(new for new, _ in self.prefill)

    @property
    def num_tokens(self) -> int:
        """Rows of every matrix multiplication of the step."""
        return self.num_prompt_tokens + self.num_decode

    @property
    def prompt_pairs(self) -> int:
        """Pairs of a prompt token and a token it attends to, itself included."""
        return sum(new * cached + new * (new + 1) // 2 for new, cached in self.prefill)


class StepModel(Protocol):
    """Step times of one worker."""

    @property
    def name(self) -> str:
        """Model, device and partition, for reports."""
        ...

    @property
    def kv_bytes_per_token(self) -> int:
        """Of all layers and heads, as a hand-off moves them (each once)."""
        ...

    @property
    def num_layers(self) -> int: ...

    def max_kv_tokens(self, block_size: int) -> int:
        """Tokens of whole blocks that fit beside the weights. Raises ConfigurationError if the weights do not fit."""
        ...

    def step_s(self, shape: StepShape) -> float:
        """Seconds; 0 for an empty shape, never less for a step that does more."""
        ...

"""What a layer does besides its products and attention, in two versions: torch's operations, and the native kernels.

Every operation treats rows independently, bit for bit.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from disagg.engine.arena import KvArena
from disagg.engine.native.library import NativeLibrary
from disagg.modelfiles.config import ModelConfig


class HeadNorms(NamedTuple):
    """Weights [head_dim] of the norms of each query and key head; None for models without them."""

    query: Tensor | None = None
    key: Tensor | None = None


class Operations(Protocol):
    """M rows, one per token of the step."""

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """x [M, width] += delta, in place; then x over its root mean square, times weight."""

    def gate(self, x: Tensor) -> Tensor:
        """silu(gate) * up for x = [gate | up], [M, 2 * width] -> [M, width]."""

    def rotate_store(self, layer: int, qkv: Tensor, positions: Tensor, slots: Tensor, norms: HeadNorms) -> Tensor:
        """Keys (rotated) and values of qkv [M, (heads + 2 * kv heads) * head_dim] go to their slots of the arena.

        Gives the rotated queries [M, num_heads, head_dim]; qkv may be overwritten.
        """


class TorchOperations:
    """Plain torch, on any device."""

    def __init__(self, config: ModelConfig, arena: KvArena, rotary: tuple[Tensor, Tensor]) -> None:
        self._config = config
        self._arena = arena
        self._cos, self._sin = rotary

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        if delta is not None:
            x.add_(delta)
        return functional.rms_norm(x, x.shape[-1:], weight, self._config.rms_norm_eps)

    def gate(self, x: Tensor) -> Tensor:
        """Written out because torch's silu rounds an element differently at the end of a thread's share."""
        gate, up = x.chunk(2, dim=-1)
        denominator = gate.neg().exp_().add_(1.0)
        return torch.div(gate, denominator, out=denominator).mul_(up)

    def rotate_store(self, layer: int, qkv: Tensor, positions: Tensor, slots: Tensor, norms: HeadNorms) -> Tensor:
        num_heads, num_kv_heads, head_dim = self._config.num_heads, self._config.num_kv_heads, self._config.head_dim
        cos, sin = self._cos[positions, None], self._sin[positions, None]
        heads = qkv.view(len(qkv), -1, head_dim)
        queries = self._normed(heads[:, :num_heads], norms.query)
        keys = self._normed(heads[:, num_heads:-num_kv_heads], norms.key)
        self._arena.store(layer, slots, rotate(keys, cos, sin), heads[:, -num_kv_heads:])
        return rotate(queries, cos, sin)

    def _normed(self, heads: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return heads
        return functional.rms_norm(heads, heads.shape[-1:], weight, self._config.rms_norm_eps)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (d, d + head_dim/2) of heads [M, H, head_dim] by angles given as cos, sin [M, 1, head_dim]."""
    half = heads.shape[-1] // 2
    turned = heads * cos
    turned[..., :half] -= heads[..., half:] * sin[..., :half]
    turned[..., half:] += heads[..., :half] * sin[..., half:]
    return turned


class NativeOperations:
    """The native kernels. head_dim is a multiple of 16."""

    def __init__(
        self, library: NativeLibrary, config: ModelConfig, arena: KvArena, rotary: tuple[Tensor, Tensor]
    ) -> None:
        self._library = library
        self._arena = arena
        self._rotary = rotary
        self._head_counts = (config.num_heads, config.num_kv_heads)
        self._head_dim = config.head_dim
        self._eps = config.rms_norm_eps

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        return self._library.add_norm(x, delta, weight, self._eps)

    def gate(self, x: Tensor) -> Tensor:
        return self._library.gate(x)

    def rotate_store(self, layer: int, qkv: Tensor, positions: Tensor, slots: Tensor, norms: HeadNorms) -> Tensor:
        cache = self._arena.by_slot(layer)
        self._library.rotate_store(qkv, self._head_counts, self._rotary, positions, slots, norms, self._eps, cache)
        return qkv.view(len(qkv), -1, self._head_dim)[:, : self._head_counts[0]]

"""A model as far as time and memory depend on it: matrices, heads, experts, bytes of KV.

Read from any Hugging Face config.json of a decoder whose layers attend: dense, grouped-query, mixture of experts,
latent attention, sliding windows.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from disagg.core.errors import ConfigurationError
from disagg.sim.hardware.model_config import HfConfig, parse_config
from disagg.sim.hardware.precision import Precision

ACTIVATION_BYTES = 2  # of hidden states, embeddings, norms and routers, which stay in 16 bits


class Matrix(NamedTuple):
    """A weight of [inputs, outputs]."""

    inputs: int
    outputs: int

    @property
    def size(self) -> int:
        return self.inputs * self.outputs


class Attention(msgspec.Struct, frozen=True):
    """Heads of one layer. Dimensions count elements."""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # of a query and a key, the rotated part included
    value_dim: int
    rotated_dim: int = 0  # latent attention: the part of a key that all heads share
    query_rank: int = 0  # latent attention: of the compressed query, 0 where it is not compressed
    kv_rank: int = 0  # latent attention: what is kept of a token; 0: keys and values are kept

    @property
    def is_latent(self) -> bool:
        return self.kv_rank > 0

    @property
    def kv_elements(self) -> int:
        """Kept of one token by one layer."""
        if self.is_latent:
            return self.kv_rank + self.rotated_dim
        return self.num_kv_heads * (self.head_dim + self.value_dim)

    def matrices(self, hidden_size: int) -> tuple[Matrix, ...]:
        """In the order in which they are applied."""
        queries = self.num_heads * self.head_dim
        output = Matrix(self.num_heads * self.value_dim, hidden_size)
        if not self.is_latent:
            return (Matrix(hidden_size, queries + self.kv_elements), output)
        down = Matrix(hidden_size, self.query_rank + self.kv_elements)
        up = Matrix(self.kv_rank, self.num_heads * (self.head_dim - self.rotated_dim + self.value_dim))
        if not self.query_rank:
            return (Matrix(hidden_size, queries + self.kv_elements), up, output)
        return (down, Matrix(self.query_rank, queries), up, output)

    @property
    def pair_flops(self) -> int:
        """Of one query token and one token it attends to, keys and values at full width (prefill)."""
        return 2 * self.num_heads * (self.head_dim + self.value_dim)

    @property
    def cached_pair_flops(self) -> int:
        """The same against what is kept (decode): latent attention works on the compressed form."""
        if self.is_latent:
            return 2 * self.num_heads * (2 * self.kv_rank + self.rotated_dim)
        return self.pair_flops


class Experts(msgspec.Struct, frozen=True):
    """Routed feed-forward parts of one layer."""

    num_experts: int
    num_per_token: int
    intermediate_size: int
    shared_size: int = 0  # intermediate size of what every token passes beside the routed ones

    def touched(self, num_tokens: float) -> float:
        """Experts that at least one of the tokens goes to, in expectation, if all are equally popular."""
        if num_tokens <= 0:
            return 0.0
        return self.num_experts * (1.0 - math.pow(1.0 - self.num_per_token / self.num_experts, num_tokens))


class ModelShape(msgspec.Struct, frozen=True):
    """Geometry of a decoder; sizes count elements."""

    name: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    attention: Attention
    intermediate_size: int  # of the dense layers
    num_matrices: int = 3  # of a feed-forward part: 3 gated, 2 plain
    experts: Experts | None = None
    num_dense_layers: int = 0  # layers of a mixture of experts that have none
    tie_embeddings: bool = False
    sliding_window: int | None = None  # tokens
    num_windowed_layers: int = 0
    num_positions: int = 0  # learned position embeddings
    num_biases: int = 0  # elements of all biases of one layer
    norm_elements: int = 0  # of one layer
    max_context: int = 0

    @classmethod
    def from_config(cls, source: Path | Mapping[str, object], name: str = "") -> "ModelShape":
        """From a config.json, the directory it lies in, or its content. Raises ConfigurationError."""
        if not isinstance(source, Path):
            return _shape(parse_config(source, name or "the model"), name or str(source.get("model_type", "model")))
        path = source / "config.json" if source.is_dir() else source
        try:
            content = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{path} is not a readable config.json: {error}") from error
        if not isinstance(content, dict):
            raise ConfigurationError(f"{path} is not the config.json of a model: it holds no object")
        return _shape(parse_config(content, str(path)), name or path.parent.name)

    @property
    def num_moe_layers(self) -> int:
        return self.num_layers - self.num_dense_layers if self.experts is not None else 0

    def feed_forward(self, intermediate_size: int) -> tuple[Matrix, Matrix]:
        """The matrices of a feed-forward part, the first ones as one."""
        widened = (self.num_matrices - 1) * intermediate_size
        return Matrix(self.hidden_size, widened), Matrix(intermediate_size, self.hidden_size)

    @property
    def attention_parameters(self) -> int:
        """Of one layer's matrices."""
        return sum(matrix.size for matrix in self.attention.matrices(self.hidden_size))

    @property
    def expert_parameters(self) -> int:
        """Of one expert of one layer."""
        return self._feed_forward_parameters(self.experts.intermediate_size) if self.experts is not None else 0

    @property
    def matrix_parameters(self) -> int:
        """Of everything that quantisation reaches: the layers' matrices without routers."""
        dense = (self.num_layers - self.num_moe_layers) * self._feed_forward_parameters(self.intermediate_size)
        routed = 0
        if self.experts is not None:
            shared = self._feed_forward_parameters(self.experts.shared_size)
            routed = self.num_moe_layers * (self.experts.num_experts * self.expert_parameters + shared)
        return self.num_layers * self.attention_parameters + dense + routed

    @property
    def embedding_parameters(self) -> int:
        """Vocabulary in and, where it is another matrix, out; learned positions."""
        copies = 1 if self.tie_embeddings else 2
        return copies * self.vocab_size * self.hidden_size + self.num_positions * self.hidden_size

    @property
    def num_parameters(self) -> int:
        routers = self.num_moe_layers * self.hidden_size * (self.experts.num_experts if self.experts else 0)
        small = self.num_layers * (self.num_biases + self.norm_elements) + self.hidden_size
        return self.matrix_parameters + self.embedding_parameters + routers + small

    @property
    def active_parameters(self) -> int:
        """Those that one token passes, embeddings included."""
        if self.experts is None:
            return self.num_parameters
        idle = self.experts.num_experts - self.experts.num_per_token
        return self.num_parameters - self.num_moe_layers * idle * self.expert_parameters

    def weight_bytes(self, precision: Precision) -> int:
        """All weights; embeddings, norms and routers stay in 16 bits."""
        kept = self.num_parameters - self.matrix_parameters
        return round(self.matrix_parameters * precision.bytes_each + kept * max(ACTIVATION_BYTES, precision.bytes_each))

    def kv_bytes_per_token(self, precision: Precision) -> int:
        """Of all layers, each head once. Windowed layers count in full: their blocks are not given back."""
        return round(self.num_layers * self.attention.kv_elements * precision.bytes_each)

    def prompt_pairs(self, new: int, cached: int) -> float:
        """Pairs of a new token and one it attends to, mean over the layers; windows cut what a token sees."""
        full = new * cached + new * (new + 1) // 2
        if self.sliding_window is None or not self.num_windowed_layers:
            return float(full)
        share = self.num_windowed_layers / self.num_layers
        return (1 - share) * full + share * _windowed_pairs(new, cached, self.sliding_window)

    def stream_pairs(self, contexts_sum: int, num_streams: int) -> float:
        """The same for streams, which add one token each."""
        if self.sliding_window is None or not self.num_windowed_layers:
            return float(contexts_sum)
        share = self.num_windowed_layers / self.num_layers
        return (1 - share) * contexts_sum + share * min(contexts_sum, num_streams * self.sliding_window)

    def prefill_flops(self, new: int, cached: int = 0) -> float:
        """Of one prompt: two per weight that a token passes, attention, and one row of the vocabulary."""
        attended = self.num_layers * self.attention.pair_flops * self.prompt_pairs(new, cached)
        return 2.0 * new * self._passed_per_token + attended + 2.0 * self.vocab_size * self.hidden_size

    def decode_bytes(self, contexts_sum: int, num_streams: int, weights: Precision, kv: Precision) -> float:
        """Read from memory by one step of num_streams streams: the weights they pass, the vocabulary, their KV."""
        read = float(self.matrix_parameters)
        if self.experts is not None:
            untouched = self.experts.num_experts - self.experts.touched(num_streams)
            read -= self.num_moe_layers * untouched * self.expert_parameters
        vocabulary = self.vocab_size * self.hidden_size * ACTIVATION_BYTES
        kept = self.stream_pairs(contexts_sum, num_streams) * self.kv_bytes_per_token(kv)
        return read * weights.bytes_each + vocabulary + kept

    @property
    def _passed_per_token(self) -> int:
        """Matrix parameters of the layers that one token passes."""
        if self.experts is None:
            return self.matrix_parameters
        idle = self.experts.num_experts - self.experts.num_per_token
        return self.matrix_parameters - self.num_moe_layers * idle * self.expert_parameters

    def _feed_forward_parameters(self, intermediate_size: int) -> int:
        return self.num_matrices * self.hidden_size * intermediate_size


def _windowed_pairs(new: int, cached: int, window: int) -> int:
    """Sum over the new tokens of min(tokens up to and with itself, window)."""
    growing = min(new, max(0, window - cached))  # those that still see everything
    return growing * cached + growing * (growing + 1) // 2 + (new - growing) * window


def _shape(raw: HfConfig, name: str) -> ModelShape:
    attention = _attention(raw)
    experts = None
    if raw.num_experts:
        shared = raw.shared_expert_intermediate_size or raw.n_shared_experts * raw.expert_size
        experts = Experts(raw.num_experts, raw.num_per_token, raw.expert_size, shared)
    plain = raw.is_plain
    projections = raw.num_attention_heads * attention.head_dim + attention.kv_elements
    biases = projections if raw.has_qkv_bias else 0
    if plain:
        biases += 2 * raw.hidden_size + raw.feed_forward_size
    heads_normed = 2 * attention.head_dim if raw.model_type in ("qwen3", "qwen3_moe") else 0
    latents_normed = attention.query_rank + attention.kv_rank
    return ModelShape(
        name=name,
        hidden_size=raw.hidden_size,
        num_layers=raw.num_hidden_layers,
        vocab_size=raw.vocab_size,
        attention=attention,
        intermediate_size=raw.feed_forward_size,
        num_matrices=2 if plain else 3,
        experts=experts,
        num_dense_layers=len(raw.dense_layers) if experts is not None else 0,
        tie_embeddings=raw.ties_embeddings,
        sliding_window=raw.sliding_window if raw.num_windowed_layers else None,
        num_windowed_layers=raw.num_windowed_layers,
        num_positions=raw.max_position_embeddings + 2 if raw.model_type == "opt" else 0,
        num_biases=biases,
        norm_elements=(4 if plain else 2) * raw.hidden_size + heads_normed + latents_normed,
        max_context=raw.max_position_embeddings,
    )


def _attention(raw: HfConfig) -> Attention:
    if raw.kv_lora_rank:
        return Attention(
            num_heads=raw.num_attention_heads,
            num_kv_heads=raw.num_attention_heads,
            head_dim=raw.qk_nope_head_dim + raw.qk_rope_head_dim,
            value_dim=raw.v_head_dim,
            rotated_dim=raw.qk_rope_head_dim,
            query_rank=raw.q_lora_rank or 0,
            kv_rank=raw.kv_lora_rank,
        )
    head_dim = raw.head_dim or raw.hidden_size // raw.num_attention_heads
    return Attention(
        num_heads=raw.num_attention_heads,
        num_kv_heads=raw.num_key_value_heads or raw.num_attention_heads,
        head_dim=head_dim,
        value_dim=head_dim,
    )

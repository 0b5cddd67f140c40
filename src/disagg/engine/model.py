"""The Llama family (Llama, Mistral without a sliding window, Qwen2), one forward pass over the rows of a step.

    tokens [M] -> embedding [M, hidden]
    each layer:  norm -> q, k, v -> rotate q and k by position -> store k and v -> attention -> add
                 norm -> gate, up -> silu(gate) * up -> down -> add
    last:        norm -> vocabulary scores, of the rows that sample only

M counts the tokens of all sequences of the step: prefill chunks and single decode tokens side by side. Every operation
treats rows independently, bit for bit.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from disagg.engine.arena import KvArena
from disagg.engine.attention import AttentionBackend, AttentionPlan
from disagg.engine.invariance import RowRule
from disagg.engine.linears import Linear, linear_factory
from disagg.engine.rotary import rotary_tables
from disagg.engine.weights import WeightTable
from disagg.modelfiles.config import ModelConfig

LayerDone = Callable[[int], None]  # called with a layer's index once its keys and values are stored


class StepTensors(NamedTuple):
    """A step on the device."""

    tokens: Tensor  # [M] token ids
    positions: Tensor  # [M]
    slots: Tensor  # [M] where each token's KV goes
    sampled: Tensor  # [S] rows whose vocabulary scores are wanted
    attention: AttentionPlan


class Layer(NamedTuple):
    """Weights of one layer."""

    attention_norm: Tensor  # [hidden]
    qkv: Linear  # hidden -> (num_heads + 2 * num_kv_heads) * head_dim
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear  # hidden -> 2 * intermediate
    down: Linear


class Llama:
    """The weights and how a step flows through them."""

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightTable,
        arena: KvArena,
        attention: AttentionBackend,
        linear_kind: str = "float32",
    ) -> None:
        self._config = config
        self._arena = arena
        self._attention = attention
        self._device = arena.tensor.device
        self._make_linear = linear_factory(linear_kind)
        self._rules: dict[tuple[int, int], RowRule | None] = {}
        hidden, vocab = config.hidden_size, config.vocab_size
        self._embedding = weights.take("model.embed_tokens.weight", vocab, hidden).to(self._device).contiguous()
        self._layers = [self._load_layer(weights, index) for index in range(config.num_layers)]
        self._norm = weights.take("model.norm.weight", hidden).to(self._device)
        head = self._embedding if config.tie_embeddings else weights.take("lm_head.weight", vocab, hidden)
        self._head = self._linear(head, None)
        self._cos, self._sin = rotary_tables(config, self._device)

    def _load_layer(self, weights: WeightTable, index: int) -> Layer:
        c = self._config
        prefix = f"model.layers.{index}."
        q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        sizes = {"q": q_size, "k": kv_size, "v": kv_size}
        qkv = [weights.take(f"{prefix}self_attn.{n}_proj.weight", size, c.hidden_size) for n, size in sizes.items()]
        bias = None
        if c.qkv_bias:
            bias = torch.cat([weights.take(f"{prefix}self_attn.{n}_proj.bias", size) for n, size in sizes.items()])
        gate_up = [
            weights.take(f"{prefix}mlp.{name}_proj.weight", c.intermediate_size, c.hidden_size)
            for name in ("gate", "up")
        ]
        output = weights.take(f"{prefix}self_attn.o_proj.weight", c.hidden_size, q_size)
        down = weights.take(f"{prefix}mlp.down_proj.weight", c.hidden_size, c.intermediate_size)
        return Layer(
            attention_norm=weights.take(f"{prefix}input_layernorm.weight", c.hidden_size).to(self._device),
            qkv=self._linear(torch.cat(qkv), bias),
            output=self._linear(output, None),
            mlp_norm=weights.take(f"{prefix}post_attention_layernorm.weight", c.hidden_size).to(self._device),
            gate_up=self._linear(torch.cat(gate_up), None),
            down=self._linear(down, None),
        )

    def _linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Layers share their shapes, so what one learned about row-invariance serves the others."""
        shape = (weight.shape[0], weight.shape[1])
        weight = weight.to(self._device)
        linear = self._make_linear(weight, None if bias is None else bias.to(self._device), self._rules.get(shape))
        self._rules.setdefault(shape, getattr(linear, "rule", None))
        return linear

    def forward(self, step: StepTensors, layer_done: LayerDone | None) -> Tensor:
        """Vocabulary scores [S, vocab_size] of the sampled rows; keys and values of all rows are stored."""
        eps = self._config.rms_norm_eps
        cos, sin = self._cos[step.positions, None], self._sin[step.positions, None]
        x = functional.embedding(step.tokens, self._embedding)
        for index, layer in enumerate(self._layers):
            normed = functional.rms_norm(x, x.shape[-1:], layer.attention_norm, eps)
            queries, keys, values = self._project(layer, normed, cos, sin)
            self._arena.store(index, step.slots, keys, values)
            if layer_done is not None:
                layer_done(index)
            x = x + layer.output(self._attention.attend(index, queries, step.attention))
            normed = functional.rms_norm(x, x.shape[-1:], layer.mlp_norm, eps)
            x = x + layer.down(gated(layer.gate_up(normed)))
        sampled = x.index_select(0, step.sampled)
        return self._head(functional.rms_norm(sampled, sampled.shape[-1:], self._norm, eps))

    def _project(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [M, num_heads, head_dim], rotated keys and values [M, num_kv_heads, head_dim]."""
        c = self._config
        heads = layer.qkv(x).view(len(x), -1, c.head_dim)
        rotated = rotate(heads[:, : c.num_heads + c.num_kv_heads], cos, sin)
        return rotated[:, : c.num_heads], rotated[:, c.num_heads :], heads[:, -c.num_kv_heads :]


def gated(x: Tensor) -> Tensor:
    """silu(gate) * up for x = [gate | up], [M, 2 * I] -> [M, I].

    Written out because torch's silu rounds an element differently at the end of a thread's share, which depends on M.
    """
    gate, up = x.chunk(2, dim=-1)
    denominator = gate.neg().exp_().add_(1.0)
    return torch.div(gate, denominator, out=denominator).mul_(up)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (d, d + head_dim/2) of heads [M, H, head_dim] by angles given as cos, sin [M, 1, head_dim]."""
    half = heads.shape[-1] // 2
    turned = heads * cos
    turned[..., :half] -= heads[..., half:] * sin[..., :half]
    turned[..., half:] += heads[..., :half] * sin[..., half:]
    return turned

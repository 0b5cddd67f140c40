"""The Llama family (Llama, Mistral without a sliding window, Qwen2), one forward pass over the rows of a step.

    tokens [M] -> embedding [M, hidden]
    each layer:  add, norm -> q, k, v -> rotate q and k by position, store k and v -> attention -> output
                 add, norm -> gate, up -> silu(gate) * up -> down
    last:        add, norm -> vocabulary scores, of the rows that sample only

M counts the tokens of all sequences of the step: prefill chunks and single decode tokens side by side. Every operation
treats rows independently, bit for bit.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from disagg.engine.attention import AttentionBackend
from disagg.engine.linears import Linear, LinearMaker
from disagg.engine.operations import HeadNorms, Operations
from disagg.engine.weights import WeightTable
from disagg.modelfiles.config import ModelConfig

LayerDone = Callable[[int], None]  # called with a layer's index once its keys and values are stored


class StepTensors(NamedTuple):
    """A step on the device."""

    tokens: Tensor  # [M] token ids
    positions: Tensor  # [M]
    slots: Tensor  # [M] where each token's KV goes
    sampled: Tensor  # [S] rows whose vocabulary scores are wanted
    attention: object  # the attention back end's own plan


class Layer(NamedTuple):
    """Weights of one layer."""

    attention_norm: Tensor  # [hidden]
    head_norms: HeadNorms
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
        linears: LinearMaker,
        operations: Operations,
        attention: AttentionBackend,
        device: torch.device,
    ) -> None:
        self._config = config
        self._linears = linears
        self._operations = operations
        self._attention = attention
        self._device = device
        hidden, vocab = config.hidden_size, config.vocab_size
        self._embedding = weights.take("model.embed_tokens.weight", vocab, hidden).to(device).contiguous()
        self._layers = [self._load_layer(weights, index) for index in range(config.num_layers)]
        self._norm = weights.take("model.norm.weight", hidden).to(device)
        head = self._embedding if config.tie_embeddings else weights.take("lm_head.weight", vocab, hidden).to(device)
        self._head = linears.make(head)

    def _load_layer(self, weights: WeightTable, index: int) -> Layer:
        c = self._config
        prefix = f"model.layers.{index}."
        q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        sizes = {"q": q_size, "k": kv_size, "v": kv_size}

        def take(name: str, *shape: int) -> Tensor:
            return weights.take(f"{prefix}{name}", *shape).to(self._device)

        qkv = [take(f"self_attn.{name}_proj.weight", size, c.hidden_size) for name, size in sizes.items()]
        bias = None
        if c.qkv_bias:
            bias = torch.cat([take(f"self_attn.{name}_proj.bias", size) for name, size in sizes.items()])
        norms = HeadNorms()
        if c.has_qk_norm:
            norms = HeadNorms(*(take(f"self_attn.{name}_norm.weight", c.head_dim) for name in ("q", "k")))
        gate_up = [take(f"mlp.{name}_proj.weight", c.intermediate_size, c.hidden_size) for name in ("gate", "up")]
        return Layer(
            attention_norm=take("input_layernorm.weight", c.hidden_size),
            head_norms=norms,
            qkv=self._linears.make(torch.cat(qkv), bias),
            output=self._linears.make(take("self_attn.o_proj.weight", c.hidden_size, q_size)),
            mlp_norm=take("post_attention_layernorm.weight", c.hidden_size),
            gate_up=self._linears.make(torch.cat(gate_up)),
            down=self._linears.make(take("mlp.down_proj.weight", c.hidden_size, c.intermediate_size)),
        )

    def forward(self, step: StepTensors, layer_done: LayerDone | None) -> Tensor:
        """Vocabulary scores [S, vocab_size] of the sampled rows; keys and values of all rows are stored."""
        operations = self._operations
        x = functional.embedding(step.tokens, self._embedding)
        delta: Tensor | None = None
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(operations.add_norm(x, delta, layer.attention_norm))
            queries = operations.rotate_store(index, qkv, step.positions, step.slots, layer.head_norms)
            if layer_done is not None:
                layer_done(index)
            attended = self._attention.attend(index, queries, step.attention)
            if index == len(self._layers) - 1:  # nothing but the scores is wanted from here on
                x, attended = x.index_select(0, step.sampled), attended.index_select(0, step.sampled)
            delta = layer.output(attended)
            delta = layer.down(operations.gate(layer.gate_up(operations.add_norm(x, delta, layer.mlp_norm))))
        return self._head(operations.add_norm(x, delta, self._norm))


def rotary_tables(config: ModelConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [max_context, head_dim] of every position's angles.

    Angles are float32 products, as in the reference implementation; their cosines are taken in float64 by numpy so that
    the number of torch threads cannot change a bit.
    """
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequencies = np.power(config.rope_theta, -exponents.astype(np.float64)).astype(np.float32)
    factors = np.array(config.rope_factors or 1.0, np.float32)
    positions = np.arange(config.max_context, dtype=np.float32)
    angles = np.multiply.outer(positions, frequencies / factors).astype(np.float64)
    twice = np.concatenate([angles, angles], axis=1)
    cos, sin = np.cos(twice).astype(np.float32), np.sin(twice).astype(np.float32)
    return torch.from_numpy(cos).to(device), torch.from_numpy(sin).to(device)

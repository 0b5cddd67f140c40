"""The Llama family (Llama, SmolLM2, Mistral, Qwen2, Qwen3), one forward pass over the rows of a step.

    tokens [M] -> embedding [M, hidden]
    each layer:  add, norm -> q, k, v -> rotate q and k by position, store k and v -> attention -> output
                 add, norm -> gate, up -> silu(gate) * up -> down
    last:        add, norm -> vocabulary scores, of the rows that sample only

M counts the tokens of all sequences of the step: prefill chunks and single decode tokens side by side. Every operation
treats rows independently, bit for bit.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from disagg.core.errors import InternalFault
from disagg.engine.attention import AttentionBackend
from disagg.engine.linears import Linear, LinearMaker
from disagg.engine.operations import HeadNorms, Operations
from disagg.engine.step import LayerDone, StepTensors
from disagg.engine.weights import StoredMatrix, WeightTable
from disagg.modelfiles.config import ModelConfig


class Layer(NamedTuple):
    """Weights of one layer."""

    attention_norm: Tensor  # [hidden]
    head_norms: HeadNorms
    qkv: Linear  # hidden -> (num_heads + 2 * num_kv_heads) * head_dim
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear  # hidden -> 2 * intermediate
    down: Linear


class Rows(NamedTuple):
    """The rows of a step between two layers. What the last one adds is kept apart: the next one adds it."""

    x: Tensor  # [M, hidden], float32
    delta: Tensor | None  # the same shape; None before the first layer

    def packed(self) -> bytes:
        """All of it as bytes, after a layer at least."""
        assert self.delta is not None
        return torch.stack((self.x, self.delta)).cpu().numpy().tobytes()


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
        self._weights = weights
        self._linears = linears
        self._operations = operations
        self._attention = attention
        self._device = device
        hidden, vocab = config.hidden_size, config.vocab_size
        embedding = self._matrix(["model.embed_tokens.weight"], [(vocab, hidden)])
        self._embedding = linears.table(embedding)
        self._layers = [self._load_layer(index) for index in range(config.num_layers)]
        self._norm = weights.take("model.norm.weight", hidden).to(device)
        head = embedding if config.tie_embeddings else self._matrix(["lm_head.weight"], [(vocab, hidden)])
        self._head = linears.make(head, is_head=True)
        weights.check_all_taken(config.num_layers)
        self.is_row_invariant = linears.is_row_invariant and attention.is_row_invariant

    def _matrix(self, names: Sequence[str], shapes: Sequence[tuple[int, int]]) -> StoredMatrix:
        """Matrices below each other."""
        return self._weights.matrix(names, shapes, self._device)

    def _load_layer(self, index: int) -> Layer:
        c = self._config
        prefix = f"model.layers.{index}."
        q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        projections, sizes = [f"{prefix}self_attn.{name}_proj" for name in "qkv"], [q_size, kv_size, kv_size]

        def take(name: str, size: int) -> Tensor:
            return self._weights.take(prefix + name, size).to(self._device)

        def linear(names: Sequence[str], outputs: Sequence[int], inputs: int, bias: Tensor | None = None) -> Linear:
            shapes = [(count, inputs) for count in outputs]
            return self._linears.make(self._matrix([f"{name}.weight" for name in names], shapes), bias)

        bias = None
        if c.qkv_bias:
            names, shapes = [f"{name}.bias" for name in projections], [(size,) for size in sizes]
            bias = self._weights.take_joined(names, shapes).to(self._device)
        norms = HeadNorms()
        if c.has_qk_norm:
            norms = HeadNorms(*(take(f"self_attn.{name}_norm.weight", c.head_dim) for name in "qk"))
        wide = c.intermediate_size
        return Layer(
            attention_norm=take("input_layernorm.weight", c.hidden_size),
            head_norms=norms,
            qkv=linear(projections, sizes, c.hidden_size, bias),
            output=linear([f"{prefix}self_attn.o_proj"], [c.hidden_size], q_size),
            mlp_norm=take("post_attention_layernorm.weight", c.hidden_size),
            gate_up=linear([f"{prefix}mlp.gate_proj", f"{prefix}mlp.up_proj"], [wide, wide], c.hidden_size),
            down=linear([f"{prefix}mlp.down_proj"], [c.hidden_size], wide),
        )

    def forward(self, step: StepTensors, layer_done: LayerDone | None) -> Tensor:
        """Vocabulary scores [S, vocab_size] of the sampled rows; keys and values of all rows are stored."""
        layers = range(len(self._layers))
        return self.scores(self.run_layers(step, self.embed(step), layers, layer_done))

    def embed(self, step: StepTensors) -> Rows:
        """What the first layer begins with."""
        return Rows(self._embedding(step.tokens), None)

    def restore(self, packed: bytes, num_rows: int) -> Rows:
        """What Rows.packed() gave. Raises InternalFault for bytes of another number of rows."""
        shape = (2, num_rows, self._config.hidden_size)
        if len(packed) != 4 * math.prod(shape):
            raise InternalFault(f"{len(packed)} bytes of rows between two layers, {shape} numbers take 4 each")
        x, delta = torch.frombuffer(bytearray(packed), dtype=torch.float32).view(shape).to(self._device)
        return Rows(x, delta)

    def run_layers(self, step: StepTensors, rows: Rows, layers: range, layer_done: LayerDone | None) -> Rows:
        """These layers, one after the other; `rows` may be overwritten. The last one gives the sampled rows only."""
        operations = self._operations
        x, delta = rows
        for index in layers:
            layer = self._layers[index]
            qkv = layer.qkv(operations.add_norm(x, delta, layer.attention_norm))
            queries = operations.rotate_store(index, qkv, step.positions, step.slots, layer.head_norms)
            if layer_done is not None:
                layer_done(index)
            attended = self._attention.attend(index, queries, step.attention)
            if index == len(self._layers) - 1:  # nothing but the scores is wanted from here on
                x, attended = x.index_select(0, step.sampled), attended.index_select(0, step.sampled)
            delta = layer.output(attended)
            delta = layer.down(operations.gate(layer.gate_up(operations.add_norm(x, delta, layer.mlp_norm))))
        return Rows(x, delta)

    def scores(self, rows: Rows) -> Tensor:
        """Vocabulary scores of what the last layer gave."""
        return self._head(self._operations.add_norm(rows.x, rows.delta, self._norm))

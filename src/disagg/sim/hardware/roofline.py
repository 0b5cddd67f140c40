"""Step times from a model's shape and a device's rates.

A layer is its multiplications (arithmetic or the reading of weights, whichever binds), attention (arithmetic over
prompts, KV reads over streams), element-wise work and the all-reduces of tensor parallelism; a step is its layers, one
row of vocabulary for each sequence, and what the engine itself costs.
"""

import functools
from typing import NamedTuple

import msgspec

from disagg.core.errors import ConfigurationError
from disagg.sim.hardware import catalogue
from disagg.sim.hardware.catalogue import Accelerator, Link
from disagg.sim.hardware.efficiency import NO_OVERHEAD, Efficiency, EngineOverhead, bent
from disagg.sim.hardware.memory import MemoryBudget, max_kv_tokens
from disagg.sim.hardware.model_shape import ACTIVATION_BYTES, Matrix, ModelShape
from disagg.sim.hardware.precision import Precision
from disagg.sim.hardware.step_model import StepShape

# Reads and writes of one row's hidden state in a layer: two norms, two additions.
HIDDEN_PASSES = 10
# Of queries and keys while they are rotated, and of the feed-forward part's activation.
ROTATION_PASSES = 4
ACTIVATION_PASSES = 3
# Of latent queries and outputs: written by one multiplication, copied together, read by the next.
WIDENED_PASSES = 4
REMEMBERED = 1 << 14  # row counts whose times are kept


class ExpertParallel(msgspec.Struct, frozen=True):
    """Experts spread over ranks that each attend to their own sequences; a step is then one rank's."""

    num_ranks: int
    link: Link  # what one rank sends through
    num_redundant: int = 0  # copies of popular experts
    num_nodes: int = 0  # a token goes to each node once and is spread inside of it; 0: to each of its experts
    is_overlapped: bool = True  # two halves of the batch may take turns: one computes, the other is on the wire
    dispatch: Precision = Precision.FP8  # of hidden states on the way to experts; back they are 16 bits wide

    def exchange_s(self, num_tokens: float, num_per_token: int, hidden_size: int) -> float:
        """To the experts and back, once, for one rank's tokens."""
        places = self.num_nodes or self.num_ranks
        copies = min(num_per_token, places) * (places - 1) / places
        moved = num_tokens * copies * hidden_size * (self.dispatch.bytes_each + ACTIVATION_BYTES)
        return 2 * self.link.latency_s + moved / self.link.bytes_s


class _Product(NamedTuple):
    """Seconds of a multiplication by one matrix."""

    row_s: float
    stream_s: float
    fixed_s: float

    def seconds(self, rows: float, eff: Efficiency) -> float:
        return bent((rows + eff.matmul_rows) * self.row_s, self.stream_s) + self.fixed_s


class RooflineModel:
    """One worker: `tp` devices share each layer, `pp` groups of them share the layers."""

    def __init__(
        self,
        model: ModelShape,
        device: Accelerator,
        *,
        tp: int = 1,
        pp: int = 1,
        efficiency: Efficiency | None = None,
        weights: Precision = Precision.BF16,
        kv: Precision = Precision.BF16,
        overhead: EngineOverhead = NO_OVERHEAD,
        experts: ExpertParallel | None = None,
        link: Link | None = None,
        budget: MemoryBudget | None = None,
    ) -> None:
        """Raises ConfigurationError where the model cannot be cut so."""
        _refuse_cuts(model, tp, pp, experts)
        self.model = model
        self.device = device
        self.tp = tp
        self.pp = pp
        self.efficiency = efficiency or catalogue.efficiency(device.efficiency)
        self.weights = weights
        self.kv = kv
        self.overhead = overhead
        self.experts = experts
        self.link = link or catalogue.link(device.link)
        self.budget = budget or MemoryBudget()
        self._prepare()
        # A simulation asks for the same few thousand row counts again and again.
        self._mixing_s = functools.lru_cache(REMEMBERED)(self._mixing_rows_s)
        self._dense_s = functools.lru_cache(REMEMBERED)(self._dense_rows_s)
        self._experts_s = functools.lru_cache(REMEMBERED)(self._expert_rows_s)
        self._ends_s = functools.lru_cache(REMEMBERED)(self._vocabulary_s)

    @property
    def name(self) -> str:
        spread = f" EP{self.experts.num_ranks}" if self.experts is not None else ""
        return f"{self.model.name} {self.weights} on {self.device.name} TP{self.tp} PP{self.pp}{spread}"

    @property
    def kv_bytes_per_token(self) -> int:
        return self.model.kv_bytes_per_token(self.kv)

    @property
    def num_layers(self) -> int:
        return self.model.num_layers

    @property
    def kv_copies(self) -> float:
        """How often each byte of KV is kept: ranks beyond the KV heads hold copies."""
        heads = 1 if self.model.attention.is_latent else self.model.attention.num_kv_heads
        return max(1.0, self.tp / heads)

    def max_kv_tokens(self, block_size: int) -> int:
        """See StepModel. Counts one rank; of expert parallelism, one rank's sequences."""
        return max_kv_tokens(self, block_size)

    def weight_bytes_per_rank(self) -> float:
        """Of the fullest rank."""
        model = self.model
        whole = model.weight_bytes(self.weights)
        if self.experts is None or model.experts is None:
            return whole / (self.tp * self.pp)
        routed = model.num_moe_layers * model.experts.num_experts * model.expert_parameters * self.weights.bytes_each
        held = (model.experts.num_experts + self.experts.num_redundant) / model.experts.num_experts
        return (whole - routed) / self.tp + routed * held / self.experts.num_ranks

    def step_s(self, shape: StepShape) -> float:
        """See StepModel. With pipeline stages, streams go round in as many batches as there are stages; prompts are
        cut into micro-batches as is fastest and pay for filling the pipeline."""
        whole = _Part.whole(shape, self.model)
        if not whole.rows:
            return 0.0
        if self.pp == 1:
            return self._stage_s(whole)
        if not shape.prefill:
            return self.pp * self._stage_s(whole.share(min(self.pp, shape.num_decode)))
        counts = (1, self.pp, 2 * self.pp, 4 * self.pp)
        return min((count + self.pp - 1) * self._stage_s(whole.share(count)) for count in counts)

    def _stage_s(self, part: "_Part") -> float:
        """Seconds of one stage for one micro-batch."""
        seconds = self._num_dense_layers * self._dense_layer_s(part) if self._num_dense_layers else 0.0
        if self._num_moe_layers:
            seconds += self._num_moe_layers * self._moe_layer_s(part)
        seconds += self._ends_s(part.sequences)
        if self.pp > 1:
            row_bytes = self.model.hidden_size * ACTIVATION_BYTES
            seconds = (seconds + (self.pp - 1) * self.link.transfer_s(part.rows * row_bytes)) / self.pp
        over = self.overhead
        engine = over.step_s + over.row_s * part.sequences + over.prompt_token_s * part.prompt_tokens
        return seconds + engine

    def _dense_layer_s(self, part: "_Part") -> float:
        return self._attending_s(part) + self._mixing_s(part.rows) + self._dense_s(part.rows)

    def _moe_layer_s(self, part: "_Part") -> float:
        """With the exchange of expert parallelism, after the computing or behind that of the batch's other half."""
        experts, spread = self.model.experts, self.experts
        if experts is None:
            return 0.0
        computing = self._computing_s(part)
        if spread is None:
            return computing
        hidden, per_token = self.model.hidden_size, experts.num_per_token
        serial = computing + spread.exchange_s(part.rows, per_token, hidden)
        if not spread.is_overlapped:
            return serial
        half = part.share(2)
        return min(serial, 2 * max(self._computing_s(half), spread.exchange_s(half.rows, per_token, hidden)))

    def _computing_s(self, part: "_Part") -> float:
        """One layer with experts, without their exchange."""
        return self._attending_s(part) + self._mixing_s(part.rows) + self._experts_s(part.rows)

    def _attending_s(self, part: "_Part") -> float:
        """What depends on what tokens attend to."""
        eff = self.efficiency
        seconds = 0.0
        if part.prompt_tokens:
            seconds += self._prompt_pair_s * (part.prompt_pairs + eff.prefill_attention_tokens * part.prompt_tokens)
            # Cached tokens are read once for all the tokens of a prompt.
            seconds += self._stream_pair_s * part.cached_tokens + eff.attention_s
        if part.streams:
            seconds += max(self._stream_pair_s, self._stream_flop_s) * part.stream_pairs
            seconds += self._widened_row_s * part.streams + eff.attention_s
        return seconds

    def _mixing_rows_s(self, rows: float) -> float:
        """What is around attention, whatever is attended to: multiplications, element-wise work, all-reduces."""
        seconds = sum(product.seconds(rows, self.efficiency) for product in self._attention_products)
        seconds += self._elementwise_row_s * rows + self.efficiency.elementwise_s
        return seconds + 2 * self._all_reduce_s(rows)

    def _dense_rows_s(self, rows: float) -> float:
        return sum(product.seconds(rows, self.efficiency) for product in self._dense_products)

    def _vocabulary_s(self, rows: float) -> float:
        return self._vocabulary.seconds(rows, self.efficiency)

    def _expert_rows_s(self, rows: float) -> float:
        """The feed-forward part of a layer with experts, of one rank."""
        experts, spread, eff = self.model.experts, self.experts, self.efficiency
        if experts is None:
            return 0.0
        seconds = sum(product.seconds(rows, eff) for product in self._shared_products)
        touched = experts.touched(rows * (spread.num_ranks if spread else 1))
        if spread is not None:
            touched *= (1 + spread.num_redundant / experts.num_experts) / spread.num_ranks
        routed_rows = rows * experts.num_per_token + eff.matmul_rows * touched
        for product in self._expert_products:
            seconds += bent(routed_rows * product.row_s / eff.expert, touched * product.stream_s) + product.fixed_s
        return seconds

    def _all_reduce_s(self, rows: float) -> float:
        if self.tp == 1:
            return 0.0
        moved = 2 * (self.tp - 1) / self.tp * rows * self.model.hidden_size * ACTIVATION_BYTES
        fixed = self.efficiency.all_reduce_s + self.overhead.collective_s
        return fixed + moved / (self.link.gb_s * catalogue.GB * self.efficiency.all_reduce)

    def _prepare(self) -> None:
        """Rates that no step changes."""
        model, eff, device = self.model, self.efficiency, self.device
        self._num_moe_layers = model.num_moe_layers
        self._num_dense_layers = model.num_layers - model.num_moe_layers
        attention = model.attention
        half = device.flops_s(Precision.BF16)
        memory = device.memory_bytes_s
        self._attention_products = self._products(attention.matrices(model.hidden_size), self.weights)
        self._dense_products = self._products(model.feed_forward(model.intermediate_size), self.weights)
        experts = model.experts
        shared = model.feed_forward(experts.shared_size) if experts is not None and experts.shared_size else ()
        self._shared_products = self._products(shared, self.weights)
        routed = model.feed_forward(experts.intermediate_size) if experts is not None else ()
        self._expert_products = self._products(routed, self.weights)
        self._vocabulary = self._products((Matrix(model.hidden_size, model.vocab_size),), Precision.BF16)[0]
        self._prompt_pair_s = attention.pair_flops / self.tp / (half * eff.prefill_attention)
        kept = attention.kv_elements * self.kv.bytes_each * self.kv_copies / self.tp
        self._stream_pair_s = kept / (memory * eff.decode_attention)
        self._stream_flop_s = attention.cached_pair_flops / self.tp / (half * eff.matmul_share(Precision.BF16))
        # Latent attention turns queries and outputs into the compressed form and back.
        widened = attention.num_heads * (2 * attention.kv_rank + attention.rotated_dim) if attention.is_latent else 0
        row = WIDENED_PASSES * widened / self.tp * ACTIVATION_BYTES
        self._widened_row_s = row / (memory * eff.elementwise)
        rotated = attention.num_heads * attention.head_dim + attention.kv_elements
        cut = ROTATION_PASSES * rotated + ACTIVATION_PASSES * self._activated
        per_row = HIDDEN_PASSES * model.hidden_size + cut / self.tp
        self._elementwise_row_s = per_row * ACTIVATION_BYTES / (memory * eff.elementwise)

    @property
    def _activated(self) -> int:
        """Elements of the widened state of one row."""
        experts = self.model.experts
        if experts is None:
            return self.model.intermediate_size
        return experts.num_per_token * experts.intermediate_size + experts.shared_size

    def _products(self, matrices: tuple[Matrix, ...], weights: Precision) -> tuple[_Product, ...]:
        rate = self.device.flops_s(weights) * self.efficiency.matmul_share(weights)
        stream = self.device.memory_bytes_s * self.efficiency.stream
        sizes = [matrix.size / self.tp for matrix in matrices]
        fixed = self.efficiency.matmul_fixed_s(weights)
        return tuple(_Product(2 * size / rate, size * weights.bytes_each / stream, fixed) for size in sizes)


class _Part(NamedTuple):
    """A step or a micro-batch of it, as far as layers care."""

    rows: float
    sequences: float
    prompt_tokens: float
    prompt_pairs: float
    cached_tokens: float
    streams: float
    stream_pairs: float

    @classmethod
    def whole(cls, shape: StepShape, model: ModelShape) -> "_Part":
        num_prompt_tokens = shape.num_prompt_tokens
        return cls(
            rows=num_prompt_tokens + shape.num_decode,
            sequences=len(shape.prefill) + shape.num_decode,
            prompt_tokens=num_prompt_tokens,
            prompt_pairs=sum(model.prompt_pairs(new, cached) for new, cached in shape.prefill),
            cached_tokens=sum(cached for _, cached in shape.prefill),
            streams=shape.num_decode,
            stream_pairs=model.stream_pairs(shape.decode_contexts_sum, shape.num_decode),
        )

    def share(self, count: int) -> "_Part":
        """One of `count` equal micro-batches."""
        return _Part(*(value / count for value in self))


def _refuse_cuts(model: ModelShape, tp: int, pp: int, experts: ExpertParallel | None) -> None:
    if tp < 1 or pp < 1:
        raise ConfigurationError(f"tp={tp} and pp={pp} must be at least 1")
    if model.attention.num_heads % tp:
        raise ConfigurationError(f"{model.attention.num_heads} heads of {model.name} do not divide over tp={tp}")
    if pp > model.num_layers:
        raise ConfigurationError(f"pp={pp} is more than the {model.num_layers} layers of {model.name}")
    if experts is not None and (model.experts is None or experts.num_ranks < 1 or pp > 1):
        raise ConfigurationError(
            f"experts of {model.name} cannot be spread over {experts.num_ranks} ranks with pp={pp}: it needs a "
            "mixture of experts, at least one rank and pp=1"
        )

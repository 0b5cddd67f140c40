"""The engine: runs planned steps of one model on one device.

run_step: check the plan -> put its rows in order -> one forward pass for all of them, masks of grammars beside it ->
sample -> tokens in plan order.
"""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from disagg.core.errors import ConfigurationError, InternalFault
from disagg.core.formats import Kernels, KvDtype, Weights
from disagg.core.grammar import GrammarSpec
from disagg.core.ids import HandoffId
from disagg.core.request import EmittedToken
from disagg.core.spans import KvLayout
from disagg.engine.arena import KvArena
from disagg.engine.attention import AttentionBackend, RowSpan, TiledAttention
from disagg.engine.device import torch_arithmetic
from disagg.engine.generic import GenericDecoder, describe_model
from disagg.engine.grammar import GrammarMasks, StartGrammar, no_grammars
from disagg.engine.linears import LinearMaker
from disagg.engine.model import Llama
from disagg.engine.native.library import choose_library
from disagg.engine.native_attention import NativeAttention
from disagg.engine.operations import NativeOperations, Operations, TorchOperations
from disagg.engine.penalties import Tally, TallyTable
from disagg.engine.rotary import rotary_tables
from disagg.engine.sampler import Sample, SampleRequest, sample, token_logprobs
from disagg.engine.step import LayerDone, StepTensors, make_step
from disagg.engine.tables import BlockTables
from disagg.engine.weights import load_weights
from disagg.kvcache.memory import Memory
from disagg.modelfiles.config import ModelConfig
from disagg.scheduler.engine import OnLayers, RowScores, StepPlan, StepResult, StepRow

NATIVE_HEAD_DIM = 16  # the native kernels take multiples of it


class _Placed(NamedTuple):
    """A row of the plan and where its tokens lie in the step."""

    row: StepRow
    span: RowSpan


class TorchEngine:
    """A model with its KV arena. Implements `disagg.scheduler.engine.Engine`.

    num_threads is torch's, for the whole process (None: leave it). kernels: `native`, `torch`, or `auto`, which takes
    the native ones where they can be had. start_grammar knows the model's vocabulary. Raises
    ModelLoadError for a path that is not a model it can run, ConfigurationError for a device or a size that cannot
    work.
    """

    def __init__(
        self,
        model_path: Path,
        *,
        num_blocks: int,
        block_size: int,
        device: str = "cpu",
        num_threads: int | None = None,
        weights: Weights = Weights.FP32,
        kv_dtype: KvDtype = KvDtype.FLOAT32,
        kernels: Kernels = Kernels.AUTO,
        start_grammar: StartGrammar = no_grammars,
    ) -> None:
        if block_size < 1:
            raise ConfigurationError(f"block_size={block_size}: a block holds at least 1 token")
        if num_threads is not None:
            if num_threads < 1:
                raise ConfigurationError(f"num_threads={num_threads} must be at least 1")
            torch.set_num_threads(num_threads)
        self.device = _checked_device(device)
        self.config: ModelConfig = describe_model(model_path)
        self._library = choose_library(kernels, self.device)
        self._arena = KvArena(self.config.kv_layout(block_size, kv_dtype.value), num_blocks, device=device)
        self._tables = BlockTables(num_blocks)
        self._tallies = TallyTable()
        self._grammars = GrammarMasks(start_grammar, self.config.vocab_size)
        with torch.inference_mode():
            self._attention, self.operations = self._backends()
            self._model = self._load(model_path, weights)
        self.arithmetic = f"{weights.value}, {self._kernels_name(weights)}"

    @property
    def is_row_invariant(self) -> bool:
        """Whether a row's result is independent of its batch, bit for bit: what exact numerics need."""
        return self._model.is_row_invariant

    @property
    def runs_layers_apart(self) -> bool:
        """Whether a plan may be of some layers only."""
        return isinstance(self._model, Llama)

    def _kernels_name(self, weights: Weights) -> str:
        """Workers of one name give the same bits."""
        torch_name = torch_arithmetic(self.device)
        if self._library is None or not isinstance(self._model, Llama):
            return torch_name
        products = "native" if weights is Weights.INT8 else self._library.arithmetic
        is_all = isinstance(self._attention, NativeAttention)
        return products if is_all else f"{products}, attention by {torch_name}"

    def _load(self, path: Path, weights: Weights) -> Llama | GenericDecoder:
        if self.config.is_native:
            linears, table = LinearMaker(weights, self._library), load_weights(path, self.config)
            return Llama(self.config, table, linears, self.operations, self._attention, self.device)
        if weights is not Weights.FP32:
            text = f"{self.config.architecture} is not native here: it runs with its own fp32 products"
            raise ConfigurationError(f"{text}; leave --weights {weights.value} out")
        return GenericDecoder(self.config, path, self._arena, self._tables, self._attention)

    def _backends(self) -> tuple[AttentionBackend, Operations]:
        none = torch.empty(0), torch.empty(0)  # the library turns by itself
        rotary = rotary_tables(self.config, self.device) if self.config.is_native else none
        library, is_fitting = self._library, self.config.head_dim % NATIVE_HEAD_DIM == 0
        if library is not None and is_fitting and self.layout.dtype in [dtype.value for dtype in KvDtype]:
            library.set_num_threads(torch.get_num_threads())
            return (
                NativeAttention(library, self._arena, self._tables),
                NativeOperations(library, self.config, self._arena, rotary),
            )
        return (
            TiledAttention(self._arena, self._tables, self.config.num_heads),
            TorchOperations(self.config, self._arena, rotary),
        )

    @property
    def layout(self) -> KvLayout:
        return self._arena.layout

    @property
    def num_blocks(self) -> int:
        return self._arena.num_blocks

    @property
    def memory(self) -> Memory:
        return self._arena

    @property
    def arena(self) -> KvArena:
        return self._arena

    @torch.inference_mode()
    def run_step(self, plan: StepPlan, on_layers: OnLayers) -> StepResult:
        """One forward pass and its samples. Raises InternalFault, before computing, for a plan that cannot be run."""
        if not plan.rows:
            return StepResult(plan.step_id, ())
        if self._library is not None:
            self._library.set_num_threads(torch.get_num_threads())
        placed = self._place(plan)
        sampling = [item for item in placed if item.row.sampling is not None]
        scoring = [item for item in placed if item.row.scoring is not None and item.row.scoring.following_ids]
        requests = self._requests(sampling)
        masks = self._grammars.start([item.row for item in sampling])
        tensors = self._tensors(placed, sampling, scoring)
        logits = self._forward(plan, tensors, self._layer_done(on_layers, plan=plan))
        if isinstance(logits, bytes):
            return StepResult(plan.step_id, (), carried=logits)
        sampled, scored = logits[: len(sampling)], logits[len(sampling) :]
        requests, failures = masks.apply(sampled, requests)
        tokens = _tokens(plan, sampling, sample(sampled, requests))
        if failures:
            tokens = tuple(token for token in tokens if token.sequence_id not in failures)
        return StepResult(plan.step_id, tokens, scores=_scores(scoring, scored), failures=tuple(failures.items()))

    def _forward(self, plan: StepPlan, tensors: StepTensors, layer_done: LayerDone) -> Tensor | bytes:
        """Vocabulary scores; or, of a part that is not the last, what the next one begins with."""
        if plan.layers is None:
            return self._model.forward(tensors, layer_done)
        layers, num_layers = range(plan.layers.start, plan.layers.stop), self.config.num_layers
        if not isinstance(self._model, Llama) or not 0 <= layers.start < layers.stop <= num_layers:
            text = f"step {plan.step_id} is of {plan.layers} of {num_layers}, which {self.config.architecture}"
            raise InternalFault(f"{text} cannot run apart; run whole steps (--partial-start off)")
        rows = (
            self._model.embed(tensors) if layers.start == 0 else self._model.restore(plan.carried, len(tensors.tokens))
        )
        rows = self._model.run_layers(tensors, rows, layers, layer_done)
        return self._model.scores(rows) if layers.stop == num_layers else rows.packed()

    def prepare_grammar(self, attempt_id: HandoffId, grammar: GrammarSpec, emitted_ids: tuple[int, ...]) -> None:
        """See `disagg.scheduler.engine.Engine`."""
        self._grammars.table.prepare(attempt_id, grammar, emitted_ids)

    def _layer_done(self, on_layers: OnLayers, *, plan: StepPlan) -> LayerDone:
        def layer_done(layer: int) -> None:
            is_read = plan.is_reported(layer + 1, self.config.num_layers)
            if is_read and self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()  # readers use other streams
            on_layers(layer + 1)

        return layer_done

    def _place(self, plan: StepPlan) -> list[_Placed]:
        """Rows as the attention likes them: single tokens first, shortest first."""
        if len({row.sequence_id for row in plan.rows}) < len(plan.rows):
            raise InternalFault(f"step {plan.step_id} has two rows of one sequence; one needs the other's KV")
        self._tables.begin_step()
        place, block_size, limit = self._tables.place, self.layout.block_size, self.config.max_context
        placed: list[_Placed] = []
        start = 0
        for row in sorted(plan.rows, key=lambda row: (len(row.token_ids) > 1, row.position)):
            num_tokens, position = len(row.token_ids), row.position
            end = position + num_tokens
            if num_tokens < 1 or position < 0 or end > limit or end > len(row.block_table) * block_size:
                self._refuse(row)
            placed.append(_Placed(row, RowSpan(start, num_tokens, position, place(row.sequence_id, row.block_table))))
            start += num_tokens
        return placed

    def _refuse(self, row: StepRow) -> NoReturn:
        """Say what is wrong with a row that does not fit."""
        name, length = row.sequence_id, row.position + len(row.token_ids)
        if not row.token_ids or row.position < 0:
            raise InternalFault(f"row of {name} has {len(row.token_ids)} tokens at position {row.position}")
        if length > self.config.max_context:
            raise InternalFault(f"row of {name} ends at {length} tokens, the context is {self.config.max_context}")
        needed = -(-length // self.layout.block_size)
        raise InternalFault(f"row of {name} has {len(row.block_table)} blocks, {length} tokens need {needed}")

    def _refuse_tokens(self, placed: Sequence[_Placed]) -> NoReturn:
        last = self.config.vocab_size - 1
        for row in (item.row for item in placed):
            if min(row.token_ids) < 0 or max(row.token_ids) > last:
                ids = f"token ids {min(row.token_ids)} to {max(row.token_ids)}"
                raise InternalFault(f"row of {row.sequence_id} has {ids}, the vocabulary has 0 to {last}")
        raise InternalFault("no row has a token outside of the vocabulary")

    def _tensors(
        self, placed: Sequence[_Placed], sampling: Sequence[_Placed], scoring: Sequence[_Placed]
    ) -> StepTensors:
        tokens = np.fromiter(chain.from_iterable(item.row.token_ids for item in placed), np.int64)
        if tokens.min() < 0 or tokens.max() >= self.config.vocab_size:
            self._refuse_tokens(placed)
        spans, sampled = [span for _, span in placed], [span for _, span in sampling]
        scored = [(span.start, span.start + len(_following(row))) for row, span in scoring]
        block_size = self.layout.block_size
        return make_step(tokens, spans, sampled, self._tables, block_size, self._attention, self.device, scored)

    def _requests(self, sampling: Sequence[_Placed]) -> list[SampleRequest]:
        requests = [
            SampleRequest(row.sampling, row.sequence_id.choice, row.output_position, self._tally(row))
            for row, _ in sampling
            if row.sampling is not None
        ]
        self._tallies.forget(len(requests))
        return requests

    def _tally(self, row: StepRow) -> Tally | None:
        if row.sampling is None or not row.sampling.has_penalty:
            return None
        if row.history is not None and len(row.history.answer_ids) == row.output_position:
            return self._tallies.tally(row.sequence_id, row.history)
        known = "no history" if row.history is None else f"a history of {len(row.history.answer_ids)}"
        text = f"row of {row.sequence_id} has a penalty on the {row.output_position} tokens of its answer"
        raise InternalFault(f"{text} and {known}; give all of them")

    def check_invariants(self) -> None:
        """The arena agrees with its layout, and the layout with the model."""
        self._tallies.check_invariants()
        self._grammars.check_invariants()
        self._arena.check_invariants()
        self._tables.check_invariants()
        if self.layout != self.config.kv_layout(self.layout.block_size, self.layout.dtype):
            raise InternalFault(f"the arena's layout {self.layout} is not the model's")


def _tokens(plan: StepPlan, sampling: Sequence[_Placed], samples: Sequence[Sample]) -> tuple[EmittedToken, ...]:
    """In the order of the plan."""
    drawn = zip(sampling, samples, strict=True)
    by_sequence = {
        row.sequence_id: EmittedToken(row.sequence_id, row.output_position, result.token_id, result.logprobs)
        for (row, _), result in drawn
    }
    return tuple(by_sequence[row.sequence_id] for row in plan.rows if row.sampling is not None)


def _following(row: StepRow) -> tuple[int, ...]:
    following = row.scoring.following_ids if row.scoring is not None else ()
    if len(following) > len(row.token_ids):
        raise InternalFault(f"row of {row.sequence_id} has {len(following)} scores of {len(row.token_ids)} tokens")
    return following


def _scores(scoring: Sequence[_Placed], logits: Tensor) -> tuple[RowScores, ...]:
    """logits [S, vocab_size] of the rows' tokens one after the other."""
    found: list[RowScores] = []
    start = 0
    for row, _ in scoring:
        assert row.scoring is not None  # that is how they were chosen
        following = row.scoring.following_ids
        logprobs = token_logprobs(logits[start : start + len(following)], following, row.scoring.num_top)
        found.append(RowScores(row.sequence_id, logprobs))
        start += len(following)
    return tuple(found)


def _checked_device(device: str) -> torch.device:
    try:
        checked = torch.device(device)
    except RuntimeError as error:
        raise ConfigurationError(f"device {device!r} is unknown; use cpu or cuda") from error
    if checked.type not in ("cpu", "cuda"):
        raise ConfigurationError(f"device {device!r} is not supported; use cpu or cuda")
    if checked.type == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(f"device {device!r} is not here (no CUDA device is visible); use cpu")
    return checked

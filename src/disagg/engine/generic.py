"""Decoders that are not native: the `transformers` library computes them, attention and KV are ours.

The library lets the attention of a model be replaced by a registered function. Ours stores keys and values in the arena
and asks the engine's attention back end, which knows the sequences of the step. So all rows of a step pass through the
model as one long row with its own position ids, and nothing but attention may look from one token at another.

That last sentence is not believed but measured: after loading, a short prompt is read in two steps beside another one,
and the scores must be those of the library's own attention. What the config says and this cannot do is refused by name
before that.

Rows may depend in their last bits on the batch they are in: the library's products know no row rule.
"""

import importlib
import inspect
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from disagg.core.errors import ConfigurationError, InternalFault, ModelLoadError, NotNative
from disagg.core.ids import BlockId, Incarnation, RequestId, SequenceId
from disagg.engine.arena import TORCH_DTYPES, KvArena
from disagg.engine.attention import AttentionBackend, RowSpan
from disagg.engine.step import LayerDone, StepTensors, make_step
from disagg.engine.tables import BlockTables
from disagg.modelfiles.config import ModelConfig, read_config

LIBRARY: Final = "transformers"
EXTRA: Final = "pip install 'disagg[transformers]'"
ATTENTION: Final = "disagg_arena"  # the name under which the library knows our attention
# Rotary kinds whose angles change with the longest sequence of a batch once it is past the original context.
BATCH_DEPENDENT_ROPE: Final = ("dynamic", "longrope")
PLAIN_LAYERS: Final = ("full_attention", "sliding_attention", "chunked_attention")
# Options of an attention call that change nothing here.
IGNORED_OPTIONS: Final = frozenset(
    {"scaling", "dropout", "position_ids", "cache_position", "position_embeddings", "use_cache", "output_attentions"}
    | {"output_hidden_states", "output_router_logits", "return_dict", "cache"}
)
PROBE_TOKENS: Final = (7, 4)  # of the two prompts by which a model is checked
PROBE_TOLERANCE: Final = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 5e-2}  # of the largest score


def describe_model(path: Path) -> ModelConfig:
    """The geometry of any model that this engine can run, native or not.

    Raises ModelLoadError; for a model that only the library could run and the library missing, with the way out.
    """
    try:
        return read_config(path)
    except NotNative as reason:
        library = _library(reason)
        try:
            return _describe(path, library)
        except ModelLoadError as error:
            raise ModelLoadError(f"{reason}; {error}") from error


def _library(reason: NotNative | None = None) -> Any:
    """The library, imported at first use: it takes seconds."""
    try:
        return importlib.import_module(LIBRARY)
    except ImportError as error:
        what = str(reason) if reason else f"{LIBRARY} is not installed"
        raise ModelLoadError(f"{what}; models that are not native need {LIBRARY}: {EXTRA}") from error


def _describe(path: Path, library: Any) -> ModelConfig:
    config = _library_config(path, library)
    refusal = _refusal(config, library)
    if refusal is not None:
        raise ModelLoadError(f"{path} has {refusal}, which is not supported; choose another model")
    num_heads = int(config.num_attention_heads)
    window = _window(config)
    return ModelConfig(
        architecture=str(config.architectures[0]),
        vocab_size=int(config.vocab_size),
        hidden_size=int(config.hidden_size),
        intermediate_size=0,
        num_layers=int(config.num_hidden_layers),
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(config, num_heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // num_heads),
        max_context=_max_context(config, window, path),
        rms_norm_eps=0.0,
        rope_theta=0.0,
        tie_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        qkv_bias=False,
        sliding_window=window,
        is_native=False,
    )


def _library_config(path: Path, library: Any) -> Any:
    try:
        return library.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # each of the library's configurations has errors of its own
        raise ModelLoadError(
            f"{LIBRARY} {library.__version__} cannot read {path / 'config.json'}: {_first_line(error)}"
        ) from error


def _refusal(config: Any, library: Any) -> str | None:
    """What the model has that the arena cannot hold or the attention cannot do."""
    names = library.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    architecture = (getattr(config, "architectures", None) or ["none"])[0]
    if getattr(config, "is_encoder_decoder", False):
        return f"an encoder beside its decoder ({architecture})"
    if config.get_text_config() is not config:
        return f"more than text as its input ({architecture})"
    if names.get(config.model_type) != architecture:
        return f"the architecture {architecture!r}, no decoder that {LIBRARY} {library.__version__} knows"
    if getattr(config, "kv_lora_rank", None):
        return "a latent KV cache (kv_lora_rank)"
    if getattr(config, "attn_logit_softcapping", None):
        return f"soft-capped attention scores (attn_logit_softcapping={config.attn_logit_softcapping})"
    if getattr(config, "use_bidirectional_attention", False):
        return "bidirectional attention (use_bidirectional_attention)"
    others = sorted(set(getattr(config, "layer_types", None) or ()) - set(PLAIN_LAYERS))
    return f"layers of kind {others[0]!r}" if others else None


def _num_kv_heads(config: Any, num_heads: int) -> int:
    for name in ("num_key_value_heads", "num_kv_heads"):
        if getattr(config, name, None):
            return int(getattr(config, name))
    return 1 if getattr(config, "multi_query", False) else num_heads


def _window(config: Any) -> int | None:
    """The narrowest window of any layer: up to there it hides nothing."""
    kinds = getattr(config, "layer_types", None)
    if kinds and set(kinds) == {"full_attention"}:
        return None
    widths = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return min((int(width) for width in widths if width), default=None)


def _max_context(config: Any, window: int | None, path: Path) -> int:
    limits = [getattr(config, "max_position_embeddings", None), window]
    rope = getattr(config, "rope_parameters", None) or {}
    scalings = rope.values() if any(isinstance(value, Mapping) for value in rope.values()) else (rope,)
    for scaling in scalings:
        if isinstance(scaling, Mapping) and scaling.get("rope_type") in BATCH_DEPENDENT_ROPE:
            limits.append(scaling.get("original_max_position_embeddings"))
    known = [int(limit) for limit in limits if limit]
    if not known:
        raise ModelLoadError(f"{path / 'config.json'} names no max_position_embeddings; add the length of its context")
    return min(known)


class GenericDecoder:
    """A decoder of the library. Same interface as the native model.

    Raises ModelLoadError for files that do not fit together and for a model whose tokens meet outside of attention.
    """

    is_row_invariant = False

    def __init__(
        self, config: ModelConfig, path: Path, arena: KvArena, tables: BlockTables, attention: AttentionBackend
    ) -> None:
        self._config = config
        self._arena = arena
        self._tables = tables
        self._attention = attention
        self._device = arena.tensor.device
        library = _library()
        library.AttentionInterface.register(ATTENTION, _attend)
        self._model = self._load(path, library)
        accepted = inspect.signature(self._model.forward).parameters
        if "position_ids" not in accepted:
            raise ModelLoadError(f"{config.architecture} of {path} takes no position ids; choose another model")
        self._keeps_logits = "logits_to_keep" in accepted
        self._check_against_library(path)

    def _load(self, path: Path, library: Any) -> Any:
        library.utils.logging.disable_progress_bar()
        dtype = torch.float32 if self._device.type == "cpu" else TORCH_DTYPES[self._arena.layout.dtype]
        try:
            model, info = library.AutoModelForCausalLM.from_pretrained(
                path,
                config=_library_config(path, library),
                dtype=dtype,
                attn_implementation=ATTENTION,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
        except KeyError as error:  # models that look up their attention among their own
            raise ModelLoadError(
                f"{self._config.architecture} of {path} knows no attention {error}: its own cannot be replaced, "
                "choose another model"
            ) from error
        except Exception as error:  # of the library, of the files' format, of the device
            raise ModelLoadError(f"{LIBRARY} cannot load {path}: {_first_line(error)}") from error
        absent = sorted([*info["missing_keys"], *(str(key) for key in info.get("mismatched_keys", ()))])
        if absent:
            raise ModelLoadError(
                f"{path} has no fitting tensor {absent[0]}; the files are incomplete, download them again"
            )
        return model.eval().requires_grad_(False).to(self._device)

    def forward(self, step: StepTensors, layer_done: LayerDone | None) -> Tensor:
        """Vocabulary scores [S, vocab_size] of the sampled rows, float32; keys and values of all rows are stored."""
        running = _Pass(self._config, self._arena, self._attention, step, layer_done)
        options = {"logits_to_keep": step.sampled} if self._keeps_logits else {}
        token = _running.set(running)
        try:
            answer = self._model(
                input_ids=step.tokens[None], position_ids=step.positions[None], use_cache=False, **options
            )
        finally:
            _running.reset(token)
        running.check_complete()
        logits: Tensor = answer.logits[0]
        return (logits if self._keeps_logits else logits.index_select(0, step.sampled)).float()

    def _check_against_library(self, path: Path) -> None:
        """Compare scores of two short prompts with those of the library's own attention."""
        ours = self._probe()
        theirs = self._library_scores()
        worst = float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-6))
        limit = PROBE_TOLERANCE[self._arena.layout.dtype]
        if not worst <= limit:
            raise ModelLoadError(
                f"{self._config.architecture} of {path} gives other scores over a paged KV cache: they differ by "
                f"{worst:.2g} of the largest, {limit} is allowed; its tokens meet outside of plain attention, "
                "choose another model"
            )

    def _prompts(self) -> tuple[Tensor, Tensor]:
        long, short = PROBE_TOKENS
        ids = (torch.arange(long + short) * 7919 + 11) % self._config.vocab_size
        return ids[:long].to(self._device), ids[long:].to(self._device)

    def _probe(self) -> Tensor:
        """Scores [2, vocab_size] of the prompts' last tokens: the first prompt's beside the whole second one."""
        first, second = self._prompts()
        num_first = len(first)
        num_all = 2 * (max(PROBE_TOKENS) + self._arena.layout.block_size)
        if self._arena.num_slots < num_all or self._config.max_context < num_first:
            raise ConfigurationError(
                f"a KV arena of {self._arena.num_slots} tokens is too small to check a model that is not native; "
                f"give at least {num_all} with --kv-memory"
            )
        last = num_first - 1
        self._run([(0, first[:last], 0)])
        return self._run([(0, first[last:], last), (1, second, 0)])

    def _run(self, rows: list[tuple[int, Tensor, int]]) -> Tensor:
        """One step of rows (sequence, its tokens, position of the first) -> last scores of each."""
        block_size = self._arena.layout.block_size
        blocks_each = -(-max(PROBE_TOKENS) // block_size)
        self._tables.begin_step()
        spans: list[RowSpan] = []
        for number, tokens, position in rows:
            start = spans[-1].start + spans[-1].num_tokens if spans else 0
            blocks = tuple(BlockId(number * blocks_each + index) for index in range(blocks_each))
            row = self._tables.place(SequenceId(RequestId(Incarnation(0), number), 0), blocks)
            spans.append(RowSpan(start, len(tokens), position, row))
        ids = torch.cat([tokens for _, tokens, _ in rows]).cpu().numpy()
        return self.forward(make_step(ids, spans, spans, self._tables, block_size, self._attention, self._device), None)

    def _library_scores(self) -> Tensor:
        self._model.set_attn_implementation("eager")
        try:
            answers = [self._model(input_ids=ids[None], use_cache=False).logits[0, -1] for ids in self._prompts()]
        finally:
            self._model.set_attn_implementation(ATTENTION)
        return torch.stack(answers).float()

    def check_invariants(self) -> None:
        """The model still attends through the arena."""
        found = self._model.config._attn_implementation
        if found != ATTENTION:
            raise InternalFault(f"the model's attention is {found!r} instead of {ATTENTION!r}")


class _Pass:
    """One forward pass: counts attention calls, which are the layers in order."""

    def __init__(
        self,
        config: ModelConfig,
        arena: KvArena,
        attention: AttentionBackend,
        step: StepTensors,
        layer_done: LayerDone | None,
    ) -> None:
        self._config = config
        self._arena = arena
        self._attention = attention
        self._step = step
        self._layer_done = layer_done
        self._num_layers = 0

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, scaling: float | None) -> Tensor:
        """queries [M, num_heads, head_dim], keys and values [M, num_kv_heads, head_dim] -> as queries."""
        layer, c = self._num_layers, self._config
        self._num_layers += 1
        expected = (c.num_heads, c.num_kv_heads, c.num_kv_heads)
        found = (queries.shape[1], keys.shape[1], values.shape[1])
        widths = {tensor.shape[2] for tensor in (queries, keys, values)}
        if layer >= c.num_layers or found != expected or widths != {c.head_dim}:
            raise ModelLoadError(
                f"layer {layer} of {c.architecture} attends with {found} heads of {sorted(widths)}, its config says "
                f"{c.num_layers} layers, {expected} heads of {c.head_dim}; such a model is not supported"
            )
        self._arena.store(layer, self._step.slots, keys, values)
        if self._layer_done is not None:
            self._layer_done(layer)
        # The back end scales by the width of a head; some models want another scale.
        ratio = 1.0 if scaling is None else scaling * c.head_dim**0.5
        scaled = queries if abs(ratio - 1.0) < 1e-6 else queries * ratio
        return self._attention.attend(layer, scaled.contiguous(), self._step.attention).view(queries.shape)

    def check_options(self, mask: Tensor | None, options: Mapping[str, Any]) -> None:
        """Refuse what would change the result: a window inside the context, soft caps, sinks, biases."""
        name = self._config.architecture
        if mask is not None:
            raise ModelLoadError(f"{name} masks or biases its attention itself; such a model is not supported")
        window = options.get("sliding_window")
        if window is not None and window < self._config.max_context:
            raise ModelLoadError(
                f"{name} has a sliding window of {window} tokens inside its context of {self._config.max_context}; "
                "such a model is not supported"
            )
        for option, value in options.items():
            is_harmless = option in IGNORED_OPTIONS or option == "sliding_window" or value is None
            if not is_harmless and not (option == "is_causal" and value is True):
                raise ModelLoadError(f"{name} attends with {option}, which is not supported; choose another model")

    def check_complete(self) -> None:
        if self._num_layers != self._config.num_layers:
            raise ModelLoadError(
                f"{self._num_layers} of {self._config.num_layers} layers of {self._config.architecture} have plain "
                "attention; such a model is not supported"
            )


_running: ContextVar[_Pass] = ContextVar("the forward pass of this thread")


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """What the library calls in each layer: tensors [1, heads, M, head_dim] -> ([1, M, num_heads, head_dim], None)."""
    running = _running.get()
    running.check_options(attention_mask, options)
    rows = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    scaling = options.get("scaling", getattr(module, "scaling", None))
    return running.attend(rows[0], rows[1], rows[2], scaling)[None], None


def _first_line(error: Exception) -> str:
    """Type and first line: some errors of the library say little by themselves."""
    return f"{type(error).__name__}: {str(error).strip()}".split("\n", 1)[0]

"""A model's geometry, read from a Hugging Face directory (config.json) or a GGUF file."""

import json
import math
from pathlib import Path
from typing import TypeVar

import msgspec

from disagg.core.errors import ModelLoadError, NotNative
from disagg.core.spans import KvLayout
from disagg.modelfiles.gguf_file import GgufFile, is_gguf, open_gguf
from disagg.modelfiles.rope_scaling import KINDS, RopeFactors, RopeScaling, rope_factors

# What config.json calls a model -> what it is here.
ARCHITECTURES: dict[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
DEFAULT_ROPE_THETA = 10_000.0

T = TypeVar("T")


class ModelConfig(msgspec.Struct, frozen=True):
    """Geometry of a decoder. Sizes count elements, max_context counts tokens.

    Of a model that is not native only the sizes of vocabulary, hidden state, heads, layers and context are filled:
    the library that computes it knows the rest.
    """

    architecture: str  # a value of ARCHITECTURES; the library's class name if not native
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int  # never more than sliding_window: up to there a window hides nothing
    rms_norm_eps: float
    rope_theta: float
    tie_embeddings: bool
    qkv_bias: bool
    rope_factors: tuple[float, ...] = ()  # divisors of the head_dim/2 rotary frequencies; empty: none
    rope_attention_factor: float = 1.0  # on cos and sin
    has_qk_norm: bool = False  # RMS norm of each head's queries and keys, before they are rotated
    sliding_window: int | None = None  # tokens that some layer sees at most
    is_native: bool = True

    def kv_layout(self, block_size: int, dtype: str = "float32") -> KvLayout:
        """The arena layout of this model for blocks of block_size tokens."""
        return KvLayout(self.num_layers, self.num_kv_heads, self.head_dim, dtype, block_size)


class _HfScaling(msgspec.Struct, frozen=True):
    """`rope_scaling` of older config.json files, `rope_parameters` of newer ones."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    partial_rotary_factor: float = 1.0
    factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def resolved(self, max_positions: int, original: int | None) -> RopeScaling:
        """With what the file leaves to be concluded. `original` is what the file says outside of the scaling."""
        context = original or self.original_max_position_embeddings or max_positions
        return RopeScaling(
            kind=self.rope_type or self.type or "default",
            factor=self.factor if self.factor is not None else max(max_positions / max(context, 1), 1.0),
            original_context=context,
            low_freq_factor=self.low_freq_factor,
            high_freq_factor=self.high_freq_factor,
            beta_fast=self.beta_fast or 32.0,
            beta_slow=self.beta_slow or 1.0,
            attention_factor=self.attention_factor,
            mscale=self.mscale or 0.0,
            mscale_all_dim=self.mscale_all_dim or 0.0,
            truncate=self.truncate,
        )


class _HfQuantization(msgspec.Struct, frozen=True):
    """Weights that are no plain floats: other files, or the same names with scales beside them."""

    quant_method: str = "unknown"


class _HfConfig(msgspec.Struct, frozen=True):
    """The parts of config.json that matter. UNSET is told from null where a missing entry means something else."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    num_key_value_heads: int | msgspec.UnsetType | None = msgspec.UNSET
    head_dim: int | msgspec.UnsetType | None = msgspec.UNSET
    rope_theta: float | None = None
    rope_scaling: _HfScaling | None = None
    rope_parameters: _HfScaling | None = None
    original_max_position_embeddings: int | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    sliding_window: int | msgspec.UnsetType | None = msgspec.UNSET
    use_sliding_window: bool | None = None
    max_window_layers: int | None = None
    quantization_config: _HfQuantization | None = None

    @property
    def scaling(self) -> _HfScaling:
        return self.rope_parameters or self.rope_scaling or _HfScaling()


class _Missing(msgspec.Struct, frozen=True):
    """What a published architecture means by an entry that its config.json does not have. None: concluded."""

    num_key_value_heads: int | None = None
    head_dim: int | None = None
    sliding_window: int | None = None


_MISSING: dict[str, _Missing] = {
    "llama": _Missing(),
    "mistral": _Missing(num_key_value_heads=8, sliding_window=4096),
    "qwen2": _Missing(num_key_value_heads=32, sliding_window=4096),
    "qwen3": _Missing(num_key_value_heads=32, head_dim=128, sliding_window=4096),
}


def read_config(path: Path) -> ModelConfig:
    """The geometry of the model at `path`: a directory with config.json, or a GGUF file.

    Raises ModelLoadError, with one plain line, for anything else: NotNative if it is a whole model of another kind.
    """
    if not path.exists():
        raise ModelLoadError(
            f"no model at {path}; give a directory with config.json and *.safetensors, or a .gguf file"
        )
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelLoadError(f"{path} has no config.json; give a Hugging Face model directory or a .gguf file")
        return _checked(_read_hf(path / "config.json"), path)
    if not is_gguf(path):
        raise ModelLoadError(f"{path} is not a model; give a directory with config.json, or a GGUF file")
    return _checked(_read_gguf(open_gguf(path)), path)


def _read_hf(path: Path) -> ModelConfig:
    found = _read_object(path)
    names = found.get("architectures") or ["none"]
    name = names[0] if isinstance(names, list) else names
    architecture = ARCHITECTURES.get(str(name))
    if architecture is None:
        raise NotNative(
            f"architecture {name!r} of {path} is not supported natively; supported: {', '.join(ARCHITECTURES)}"
        )
    try:
        raw = msgspec.convert(found, type=_HfConfig)
    except msgspec.ValidationError as error:
        raise ModelLoadError(f"{path} lacks what the model needs: {error}; download the model again") from error
    _refuse_unsupported(raw, architecture, path)
    missing = _MISSING[architecture]
    head_dim = _given(raw.head_dim, missing.head_dim) or raw.hidden_size // max(raw.num_attention_heads, 1)
    theta = _first(raw.rope_theta, raw.scaling.rope_theta, DEFAULT_ROPE_THETA)
    scaling = raw.scaling.resolved(raw.max_position_embeddings, raw.original_max_position_embeddings)
    factors = _rope_factors(scaling, head_dim, theta, path)
    window = _window(raw, architecture)
    return ModelConfig(
        architecture=architecture,
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        intermediate_size=raw.intermediate_size,
        num_layers=raw.num_hidden_layers,
        num_heads=raw.num_attention_heads,
        num_kv_heads=_first(_given(raw.num_key_value_heads, missing.num_key_value_heads), raw.num_attention_heads),
        head_dim=head_dim,
        max_context=_max_context(raw.max_position_embeddings, scaling, window),
        rms_norm_eps=raw.rms_norm_eps,
        rope_theta=theta,
        tie_embeddings=raw.tie_word_embeddings,
        qkv_bias=architecture == "qwen2",
        rope_factors=factors.divisors,
        rope_attention_factor=factors.attention_factor,
        has_qk_norm=architecture == "qwen3",
        sliding_window=window,
    )


def _read_object(path: Path) -> dict[str, object]:
    """By Python's own reader, which takes what Python's own writer may have written: infinities, a byte order mark."""
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not a JSON object ({error}); download the model again") from error
    if not isinstance(found, dict):
        raise ModelLoadError(f"{path} is not a JSON object ({type(found).__name__}); download the model again")
    return found


def _first(*values: T | None) -> T:
    """The first value that is given."""
    return next(value for value in values if value is not None)


def _given(value: T | msgspec.UnsetType, missing: T) -> T:
    return missing if isinstance(value, msgspec.UnsetType) else value


def _window(raw: _HfConfig, architecture: str) -> int | None:
    """The window of the layers that have one. Qwen's are off unless told, and begin at max_window_layers."""
    if architecture == "llama":
        return None
    if architecture != "mistral" and not (
        raw.use_sliding_window and _first(raw.max_window_layers, 28) < raw.num_hidden_layers
    ):
        return None
    return _given(raw.sliding_window, _MISSING[architecture].sliding_window)


def _max_context(max_positions: int, scaling: RopeScaling, window: int | None) -> int:
    """Tokens that can be served. Yarn reaches past what the file calls its positions, a window not past itself."""
    context = max_positions
    if scaling.kind == "yarn":
        context = max(context, int(scaling.original_context * scaling.factor))
    return context if window is None else min(context, window)


def _refuse_unsupported(raw: _HfConfig, architecture: str, path: Path) -> None:
    if raw.quantization_config is not None:
        raise NotNative(
            f"weights quantised by {raw.quantization_config.quant_method!r} in {path} are not read natively; "
            "use weights in F32, F16 or BF16, or a GGUF file"
        )
    if raw.attention_bias and architecture != "qwen2":
        raise NotNative(
            f"attention_bias=true of {path} is not supported natively; of the native models only qwen2 has a QKV bias"
        )
    if raw.mlp_bias:
        raise NotNative(f"mlp_bias=true of {path} is not supported natively; use a model without it")
    if raw.hidden_act != "silu":
        raise NotNative(f"hidden_act={raw.hidden_act!r} of {path} is not supported natively; supported: silu")
    if raw.scaling.partial_rotary_factor != 1.0:
        raise NotNative(
            f"partial_rotary_factor={raw.scaling.partial_rotary_factor} of {path} is not supported natively; "
            "supported: 1.0"
        )


def _rope_factors(scaling: RopeScaling, head_dim: int, theta: float, path: Path) -> RopeFactors:
    if scaling.kind not in KINDS:
        raise NotNative(
            f"rope scaling {scaling.kind!r} of {path} is not supported natively; supported: {', '.join(KINDS)}"
        )
    try:
        return rope_factors(scaling, head_dim, theta)
    except (ValueError, ArithmeticError) as error:
        raise ModelLoadError(
            f"the rope scaling of {path} cannot be right: {error}; download the model again"
        ) from error


def _read_gguf(file: GgufFile) -> ModelConfig:
    architecture = file.text("general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        raise ModelLoadError(
            f"architecture {architecture!r} of {file.path} is not supported; supported in GGUF: "
            f"{', '.join(GGUF_ARCHITECTURES)}: use the model's Hugging Face directory instead"
        )
    if num_experts := file.integer(f"{architecture}.expert_count", 0):
        raise ModelLoadError(
            f"{file.path} has {num_experts} experts a layer, which is not supported in GGUF; "
            "use the model's Hugging Face directory instead"
        )
    num_heads = file.integer(f"{architecture}.attention.head_count")
    hidden_size = file.integer(f"{architecture}.embedding_length")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelLoadError(f"{file.path} has no tensor token_embd.weight; it is not a whole language model")
    head_dim = file.integer(f"{architecture}.attention.key_length", hidden_size // max(num_heads, 1))
    theta = file.number(f"{architecture}.rope.freq_base", DEFAULT_ROPE_THETA)
    rotated = file.integer(f"{architecture}.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise ModelLoadError(
            f"{file.path} rotates {rotated} of {head_dim} elements of a head, which is not supported; "
            "use the model's Hugging Face directory instead"
        )
    max_positions = file.integer(f"{architecture}.context_length")
    scaling = _gguf_scaling(file, architecture, max_positions)
    factors = _gguf_rope_factors(file, scaling, head_dim, theta)
    window = file.integer(f"{architecture}.attention.sliding_window", 0) or None
    return ModelConfig(
        architecture=architecture,
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        intermediate_size=file.integer(f"{architecture}.feed_forward_length"),
        num_layers=file.integer(f"{architecture}.block_count"),
        num_heads=num_heads,
        num_kv_heads=file.integer(f"{architecture}.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_context=_max_context(max_positions, scaling, window),
        rms_norm_eps=file.number(f"{architecture}.attention.layer_norm_rms_epsilon"),
        rope_theta=theta,
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        rope_factors=factors.divisors,
        rope_attention_factor=factors.attention_factor,
        has_qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        sliding_window=window,
    )


def _gguf_scaling(file: GgufFile, architecture: str, max_positions: int) -> RopeScaling:
    prefix = f"{architecture}.rope.scaling"
    kind = file.text(f"{prefix}.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise ModelLoadError(
            f"rope scaling {kind!r} of {file.path} is not supported; supported in GGUF: none, linear, yarn, rope_freqs"
        )
    scaling = RopeScaling(
        kind="default" if kind == "none" else kind,
        factor=file.number(f"{prefix}.factor", 1.0) or 1.0,
        original_context=file.integer(f"{prefix}.original_context_length", max_positions) or max_positions,
        beta_fast=file.number(f"{prefix}.yarn_beta_fast", 32.0),
        beta_slow=file.number(f"{prefix}.yarn_beta_slow", 1.0),
    )
    if kind != "yarn":
        return scaling
    # GGUF's factor multiplies the rule's own, Hugging Face's replaces it.
    implied = rope_factors(scaling, 2, DEFAULT_ROPE_THETA).attention_factor
    own = file.number(f"{prefix}.attn_factor", file.number(f"{prefix}.yarn_attn_factor", 1.0))
    return msgspec.structs.replace(scaling, attention_factor=implied * own)


def _gguf_rope_factors(file: GgufFile, scaling: RopeScaling, head_dim: int, theta: float) -> RopeFactors:
    """The scaling's factors times those of the file's own table, which is how Llama 3.1's rule is stored."""
    factors = _rope_factors(scaling, head_dim, theta, file.path)
    if "rope_freqs.weight" not in file.tensors:
        return factors
    table = tuple(float(factor) for factor in file.array("rope_freqs.weight"))
    if factors.divisors and len(table) == len(factors.divisors):
        table = tuple(one * other for one, other in zip(table, factors.divisors, strict=True))
    return factors._replace(divisors=table)


def _checked(config: ModelConfig, path: Path) -> ModelConfig:
    """Refuse sizes with which no forward pass can work."""
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
        if getattr(config, name) < 1:
            raise ModelLoadError(
                f"{name}={getattr(config, name)} of {path} must be at least 1; download the model again"
            )
    if config.num_heads % config.num_kv_heads:
        raise ModelLoadError(f"{config.num_heads} heads of {path} do not divide over {config.num_kv_heads} KV heads")
    if config.head_dim < 2 or config.head_dim % 2:
        raise ModelLoadError(f"head_dim={config.head_dim} of {path} must be even: rotary positions turn pairs")
    if config.max_context < 1:
        raise ModelLoadError(f"max_context={config.max_context} of {path} must be at least 1 token")
    if not 0 < config.rope_theta < math.inf:
        raise ModelLoadError(f"rope_theta={config.rope_theta} of {path} must be positive: angles are its powers")
    if config.rope_factors and len(config.rope_factors) != config.head_dim // 2:
        raise ModelLoadError(
            f"{len(config.rope_factors)} rope factors of {path}, expected head_dim/2 = {config.head_dim // 2}"
        )
    return config

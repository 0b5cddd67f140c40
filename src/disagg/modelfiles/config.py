"""A model's geometry, read from a Hugging Face directory (config.json) or a GGUF file."""

import json
import math
from pathlib import Path
from typing import TypeVar

import msgspec

from disagg.core.errors import ModelLoadError
from disagg.core.spans import KvLayout
from disagg.modelfiles.gguf_file import GgufFile, is_gguf

# What config.json calls a model -> what it is here.
ARCHITECTURES: dict[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
}
GGUF_ARCHITECTURES = ("llama", "qwen2")
DEFAULT_ROPE_THETA = 10_000.0

T = TypeVar("T")


class ModelConfig(msgspec.Struct, frozen=True):
    """Geometry of a Llama-family model. Sizes count elements, max_context counts tokens."""

    architecture: str  # "llama" or "qwen2"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    rms_norm_eps: float
    rope_theta: float
    tie_embeddings: bool
    qkv_bias: bool
    has_qk_norm: bool = False  # RMS norm of each head's queries and keys, before they are rotated
    rope_factors: tuple[float, ...] = ()  # divisors of the head_dim/2 rotary frequencies; empty: none

    def kv_layout(self, block_size: int, dtype: str = "float32") -> KvLayout:
        """The arena layout of this model for blocks of block_size tokens."""
        return KvLayout(self.num_layers, self.num_kv_heads, self.head_dim, dtype, block_size)


class _RopeScaling(msgspec.Struct, frozen=True):
    """`rope_scaling` of older config.json files, `rope_parameters` of newer ones."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    @property
    def kind(self) -> str:
        return self.rope_type or self.type or "default"


class _HfConfig(msgspec.Struct, frozen=True):
    """The parts of config.json that matter."""

    architectures: tuple[str, ...]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rope_theta: float | None = None
    rope_scaling: _RopeScaling | None = None
    rope_parameters: _RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    sliding_window: int | None = None
    use_sliding_window: bool | None = None


def read_config(path: Path) -> ModelConfig:
    """The geometry of the model at `path`: a directory with config.json, or a GGUF file.

    Raises ModelLoadError, with one plain line, for anything else.
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
    return _checked(_read_gguf(GgufFile(path)), path)


def _read_hf(path: Path) -> ModelConfig:
    text = path.read_bytes()
    try:
        names = json.loads(text).get("architectures") or ["none"]
    except (ValueError, AttributeError) as error:
        raise ModelLoadError(f"{path} is not a JSON object ({error}); download the model again") from error
    architecture = ARCHITECTURES.get(str(names[0]))
    if architecture is None:
        raise ModelLoadError(
            f"architecture {names[0]!r} of {path} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    try:
        raw = msgspec.json.decode(text, type=_HfConfig)
    except msgspec.ValidationError as error:
        raise ModelLoadError(f"{path} lacks what the model needs: {error}; download the model again") from error
    _refuse_unsupported(raw, architecture, path)
    scaling = raw.rope_parameters or raw.rope_scaling or _RopeScaling()
    head_dim = raw.head_dim or raw.hidden_size // max(raw.num_attention_heads, 1)
    theta = _first(raw.rope_theta, scaling.rope_theta, DEFAULT_ROPE_THETA)
    return ModelConfig(
        architecture=architecture,
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        intermediate_size=raw.intermediate_size,
        num_layers=raw.num_hidden_layers,
        num_heads=raw.num_attention_heads,
        num_kv_heads=_first(raw.num_key_value_heads, raw.num_attention_heads),
        head_dim=head_dim,
        max_context=raw.max_position_embeddings,
        rms_norm_eps=raw.rms_norm_eps,
        rope_theta=theta,
        tie_embeddings=raw.tie_word_embeddings,
        qkv_bias=architecture == "qwen2",
        rope_factors=_rope_factors(scaling, head_dim, theta, path),
    )


def _first(*values: T | None) -> T:
    """The first value that is given."""
    return next(value for value in values if value is not None)


def _refuse_unsupported(raw: _HfConfig, architecture: str, path: Path) -> None:
    windowed = raw.sliding_window is not None and raw.sliding_window < raw.max_position_embeddings
    if windowed and raw.use_sliding_window is not False:
        raise ModelLoadError(
            f"sliding_window={raw.sliding_window} of {path} is not supported; "
            "use a model with full attention (sliding_window null)"
        )
    if raw.attention_bias and architecture != "qwen2":
        raise ModelLoadError(f"attention_bias=true of {path} is not supported; only qwen2 models carry a QKV bias")
    if raw.mlp_bias:
        raise ModelLoadError(f"mlp_bias=true of {path} is not supported; use a model without it")
    if raw.hidden_act != "silu":
        raise ModelLoadError(f"hidden_act={raw.hidden_act!r} of {path} is not supported; supported: silu")


def _rope_factors(scaling: _RopeScaling, head_dim: int, theta: float, path: Path) -> tuple[float, ...]:
    """Divisors of the rotary frequencies. Llama 3.1's rule: long waves are stretched, short ones kept."""
    if scaling.kind == "default":
        return ()
    if scaling.kind != "llama3":
        raise ModelLoadError(
            f"rope scaling {scaling.kind!r} of {path} is not supported; supported: none ('default') and 'llama3'"
        )
    original = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    factors: list[float] = []
    for pair in range(head_dim // 2):
        turns = original * theta ** (-2 * pair / head_dim) / (2 * math.pi)  # over the original context
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1.0 / (kept + (1.0 - kept) / scaling.factor))
    return tuple(factors)


def _read_gguf(file: GgufFile) -> ModelConfig:
    architecture = file.text("general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        raise ModelLoadError(
            f"architecture {architecture!r} of {file.path} is not supported; supported: {', '.join(GGUF_ARCHITECTURES)}"
        )
    scaling = file.text(f"{architecture}.rope.scaling.type", "none")
    if scaling != "none":
        raise ModelLoadError(f"rope scaling {scaling!r} of {file.path} is not supported; supported: none, rope_freqs")
    num_heads = file.integer(f"{architecture}.attention.head_count")
    hidden_size = file.integer(f"{architecture}.embedding_length")
    rope_factors: tuple[float, ...] = ()
    if "rope_freqs.weight" in file.tensors:
        rope_factors = tuple(float(factor) for factor in file.array("rope_freqs.weight"))
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelLoadError(f"{file.path} has no tensor token_embd.weight; it is not a whole language model")
    return ModelConfig(
        architecture=architecture,
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        intermediate_size=file.integer(f"{architecture}.feed_forward_length"),
        num_layers=file.integer(f"{architecture}.block_count"),
        num_heads=num_heads,
        num_kv_heads=file.integer(f"{architecture}.attention.head_count_kv", num_heads),
        head_dim=file.integer(f"{architecture}.attention.key_length", hidden_size // max(num_heads, 1)),
        max_context=file.integer(f"{architecture}.context_length"),
        rms_norm_eps=file.number(f"{architecture}.attention.layer_norm_rms_epsilon"),
        rope_theta=file.number(f"{architecture}.rope.freq_base", DEFAULT_ROPE_THETA),
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        rope_factors=rope_factors,
    )


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
    if config.rope_factors and len(config.rope_factors) != config.head_dim // 2:
        raise ModelLoadError(
            f"{len(config.rope_factors)} rope factors of {path}, expected head_dim/2 = {config.head_dim // 2}"
        )
    return config

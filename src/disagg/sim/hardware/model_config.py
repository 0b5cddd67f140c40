"""What time and memory depend on in a Hugging Face config.json, under one name per thing."""

from collections.abc import Mapping

import msgspec

from disagg.core.errors import ConfigurationError

# Older model types name the same things otherwise.
_ALIASES = {
    "n_layer": "num_hidden_layers",
    "n_layers": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_heads": "num_attention_heads",
    "n_embd": "hidden_size",
    "n_embed": "hidden_size",
    "d_model": "hidden_size",
    "ffn_dim": "intermediate_size",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "seq_length": "max_position_embeddings",
    "num_local_experts": "num_experts",
    "n_routed_experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "moe_num_experts": "num_experts",
}
# Two matrices with biases in the feed-forward part, and a width of 4 x hidden where none is given.
_PLAIN = frozenset({"opt", "bloom", "gpt2", "gpt_neox", "falcon", "phi"})
_TIED_UNLESS_TOLD = frozenset({"opt", "bloom", "gpt2", "gemma", "gemma2", "gemma3_text"})
# Layers that keep a state instead of KV: another kind of cost altogether.
_STATEFUL = ("linear", "mamba", "recurrent", "rwkv", "conv")


class HfConfig(msgspec.Struct, frozen=True):
    """The entries that matter, with what their absence means."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    model_type: str = ""
    intermediate_size: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 0
    tie_word_embeddings: bool | None = None
    attention_bias: bool = False
    sliding_window: int | None = None
    use_sliding_window: bool | None = None
    max_window_layers: int | None = None
    layer_types: tuple[str, ...] | None = None
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    shared_expert_intermediate_size: int | None = None
    n_shared_experts: int = 0
    first_k_dense_replace: int = 0
    moe_layer_freq: int = 1
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    kv_lora_rank: int | None = None
    q_lora_rank: int | None = None
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0

    @property
    def is_plain(self) -> bool:
        return self.model_type in _PLAIN

    @property
    def ties_embeddings(self) -> bool:
        if self.tie_word_embeddings is None:
            return self.model_type in _TIED_UNLESS_TOLD
        return self.tie_word_embeddings

    @property
    def has_qkv_bias(self) -> bool:
        return self.attention_bias or self.is_plain or self.model_type in ("qwen2", "qwen2_moe", "qwen")

    @property
    def feed_forward_size(self) -> int:
        return 4 * self.hidden_size if self.intermediate_size is None else self.intermediate_size

    @property
    def expert_size(self) -> int:
        return self.feed_forward_size if self.moe_intermediate_size is None else self.moe_intermediate_size

    @property
    def num_per_token(self) -> int:
        return self.num_experts_per_tok or 1

    @property
    def dense_layers(self) -> frozenset[int]:
        """Layers of a mixture of experts that have none."""
        step = self.moe_layer_freq if self.moe_layer_freq > 1 else self.decoder_sparse_step
        return frozenset(
            layer
            for layer in range(self.num_hidden_layers)
            if layer < self.first_k_dense_replace
            or layer in self.mlp_only_layers
            or (step > 1 and (layer + 1) % step != 0)
        )

    @property
    def num_windowed_layers(self) -> int:
        if self.sliding_window is None:
            return 0
        if self.layer_types is not None:
            return sum(kind == "sliding_attention" for kind in self.layer_types)
        if self.use_sliding_window is False:
            return 0
        if self.use_sliding_window and self.max_window_layers is not None:
            return max(0, self.num_hidden_layers - self.max_window_layers)
        # Qwen's windows are off unless told; elsewhere a window that is given is used.
        return 0 if self.model_type.startswith("qwen") else self.num_hidden_layers


def parse_config(content: Mapping[str, object], where: str) -> HfConfig:
    """The entries of a config.json; `where` names it in errors. Raises ConfigurationError."""
    inner = content.get("text_config")
    if isinstance(inner, dict):  # a model that also sees or hears: its decoder
        content = {**content, **inner}
    named = dict(content)
    for old, new in _ALIASES.items():
        if named.get(old) is not None and named.get(new) is None:
            named[new] = named[old]
    try:
        config = msgspec.convert({key: value for key, value in named.items() if value is not None}, HfConfig)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{where} does not describe a decoder: {error}; a config.json is needed") from error
    _refuse_unsupported(config, named, where)
    return config


def _refuse_unsupported(config: HfConfig, named: dict[str, object], where: str) -> None:
    stateful = [kind for kind in config.layer_types or () if kind.startswith(_STATEFUL)]
    if stateful or any(key.startswith(("ssm_", "mamba_")) for key in named):
        kind = stateful[0] if stateful else "state-space"
        raise ConfigurationError(f"{where} has {kind} layers, whose times are not known; give a measured table instead")
    for size in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        if getattr(config, size) < 1:
            raise ConfigurationError(f"{size}={getattr(config, size)} of {where} must be at least 1")
    if config.kv_lora_rank and not (config.qk_nope_head_dim and config.v_head_dim):
        raise ConfigurationError(f"{where} has a kv_lora_rank but no qk_nope_head_dim or v_head_dim")

"""Small models with random weights that are not native, by the name of their architecture."""

from collections.abc import Callable

import torch
import transformers as library
from transformers import PreTrainedModel

VOCAB = 313
CONTEXT = 400
WINDOW = 96

_OLD = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": CONTEXT, "initializer_range": 0.2}
_ONE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
_GROUPED = {**_ONE, "num_key_value_heads": 2}
_WIDE = {**_GROUPED, "head_dim": 24}
_EXPERTS = {**_GROUPED, "num_experts_per_tok": 2}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.1] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 128,
}

SERVED: dict[str, Callable[[], object]] = {
    "gpt2": lambda: library.GPT2Config(**_OLD),
    "gpt2, scaled by layer": lambda: library.GPT2Config(**_OLD, scale_attn_by_inverse_layer_idx=True),
    "gpt_bigcode": lambda: library.GPTBigCodeConfig(**_OLD),
    "gptj": lambda: library.GPTJConfig(**_OLD, rotary_dim=8),
    "gpt_neox": lambda: library.GPTNeoXConfig(**_ONE),
    "opt": lambda: library.OPTConfig(
        **{**_ONE, "ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.2, "intermediate_size": None}
    ),
    "phi": lambda: library.PhiConfig(**_GROUPED),
    "phi3": lambda: library.Phi3Config(**_GROUPED),
    "phi3, longrope": lambda: library.Phi3Config(
        **_GROUPED, original_max_position_embeddings=128, rope_parameters=dict(_LONGROPE)
    ),
    "gemma": lambda: library.GemmaConfig(**_WIDE),
    "gemma3, windows": lambda: library.Gemma3TextConfig(**_WIDE, sliding_window=WINDOW),
    "stablelm": lambda: library.StableLmConfig(**_GROUPED),
    "olmo2": lambda: library.Olmo2Config(**_GROUPED),
    "granite": lambda: library.GraniteConfig(
        **_GROUPED, attention_multiplier=0.3, logits_scaling=4.0, embedding_multiplier=2.0, residual_multiplier=0.5
    ),
    "starcoder2": lambda: library.Starcoder2Config(**_GROUPED),
    "cohere": lambda: library.CohereConfig(**_GROUPED),
    "smollm3": lambda: library.SmolLM3Config(**_GROUPED),
    "glm": lambda: library.GlmConfig(**_WIDE),
    "nemotron": lambda: library.NemotronConfig(**_GROUPED),
    "persimmon": lambda: library.PersimmonConfig(**_ONE),
    "helium": lambda: library.HeliumConfig(**_GROUPED, head_dim=16),
    "ernie4_5": lambda: library.Ernie4_5Config(**_WIDE),
    "mixtral": lambda: library.MixtralConfig(**_EXPERTS, num_local_experts=4),
    "olmoe": lambda: library.OlmoeConfig(**_EXPERTS, num_experts=4),
    "qwen3_moe": lambda: library.Qwen3MoeConfig(**_EXPERTS, head_dim=24, num_experts=4, moe_intermediate_size=32),
    "llama with biases": lambda: library.LlamaConfig(**_GROUPED, attention_bias=True, mlp_bias=True),
    "llama, dynamic rope": lambda: library.LlamaConfig(
        **_GROUPED, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    ),
}

# Not served, and what the refusal must name.
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "gemma2": (lambda: library.Gemma2Config(**_WIDE), "soft-capped attention scores"),
    "gpt_oss": (lambda: library.GptOssConfig(**_WIDE, num_local_experts=4), "attends with s_aux"),
    "deepseek_v3": (lambda: library.DeepseekV3Config(**_GROUPED, first_k_dense_replace=3), "latent KV cache"),
    "falcon": (
        lambda: library.FalconConfig(**{**_ONE, "max_position_embeddings": CONTEXT}),
        "its own cannot be replaced",
    ),
    "mamba": (lambda: library.MambaConfig(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2), "layers of kind"),
    "bloom": (lambda: library.BloomConfig(vocab_size=VOCAB, hidden_size=64, n_layer=2, n_head=4), "names no max_pos"),
}


def build(config: object, seed: int = 0) -> PreTrainedModel:
    """A seeded model whose biases are not all zero."""
    torch.manual_seed(seed)
    model: PreTrainedModel = library.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    return model.float().eval()

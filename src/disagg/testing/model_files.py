"""A small real model on disk, made without torch: random weights of the Llama family and a real tokenizer."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from safetensors.numpy import save_file

from disagg.testing.tokenizer_files import write_tiny_tokenizer

VOCAB_SIZE = 512


def write_tiny_llama(
    folder: Path, *, seed: int = 0, num_layers: int = 4, max_context: int = 1024, words: Sequence[str] = ()
) -> Path:
    """A Hugging Face directory: 6 heads over 2 KV heads of 16, weights wide enough for tokens to vary.

    Each of `words` is one token of its tokenizer.
    """
    hidden, inner, heads, kv_heads, head_dim = 96, 160, 6, 2, 16
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        return (random.standard_normal((rows, columns)) * 0.2).astype(np.float32)

    folder.mkdir(parents=True, exist_ok=True)
    ones = np.ones(hidden, np.float32)
    tensors = {"model.embed_tokens.weight": matrix(VOCAB_SIZE, hidden), "model.norm.weight": ones}
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.input_layernorm.weight": ones,
            f"{prefix}.post_attention_layernorm.weight": ones,
            f"{prefix}.self_attn.q_proj.weight": matrix(heads * head_dim, hidden),
            f"{prefix}.self_attn.k_proj.weight": matrix(kv_heads * head_dim, hidden),
            f"{prefix}.self_attn.v_proj.weight": matrix(kv_heads * head_dim, hidden),
            f"{prefix}.self_attn.o_proj.weight": matrix(hidden, heads * head_dim),
            f"{prefix}.mlp.gate_proj.weight": matrix(inner, hidden),
            f"{prefix}.mlp.up_proj.weight": matrix(inner, hidden),
            f"{prefix}.mlp.down_proj.weight": matrix(hidden, inner),
        }
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
    write_tiny_tokenizer(folder, vocab_size=VOCAB_SIZE, words=words)
    return folder

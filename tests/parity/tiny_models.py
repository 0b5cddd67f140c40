"""Small models with random weights, written to disk as real ones are: a Hugging Face directory or a GGUF file."""

from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

TINY_VOCAB = 313
TINY_CONTEXT = 700


def tiny_model(
    architecture: str = "llama",
    *,
    seed: int = 0,
    tie_embeddings: bool = True,
    rope_scaling: dict[str, object] | None = None,
    num_layers: int = 3,
    num_kv_heads: int = 2,
    sliding_window: int | None = None,
    hidden_size: int = 72,
) -> PreTrainedModel:
    """A seeded model in memory: 6 heads over 2, odd sizes, weights wide enough for models to disagree.

    Qwen3's heads are wider than hidden_size / 6; sliding_window is Mistral's.
    """
    sizes: dict[str, object] = {
        "vocab_size": TINY_VOCAB,
        "hidden_size": hidden_size,
        "intermediate_size": 112,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 6,
        "num_key_value_heads": num_kv_heads,
        "max_position_embeddings": TINY_CONTEXT,
        "tie_word_embeddings": tie_embeddings,
        "initializer_range": 0.25,
    }
    if rope_scaling is not None:
        sizes["rope_scaling"] = rope_scaling
    torch.manual_seed(seed)
    model: PreTrainedModel
    if architecture == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**sizes))
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.5)
    elif architecture == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=20))
        for name, parameter in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    elif architecture == "mistral":
        model = MistralForCausalLM(MistralConfig(**sizes, sliding_window=sliding_window))
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    return model.float().eval()


def write_tiny_model(
    path: Path,
    architecture: str = "llama",
    *,
    seed: int = 0,
    tie_embeddings: bool = True,
    shard_size: str = "50GB",
    hidden_size: int = 72,
) -> Path:
    """Write a tiny model as a Hugging Face directory (config.json + safetensors) and return the directory."""
    model = tiny_model(architecture, seed=seed, tie_embeddings=tie_embeddings, hidden_size=hidden_size)
    model.save_pretrained(path, max_shard_size=shard_size)
    return path


def write_gguf(
    path: Path, model: PreTrainedModel, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32
) -> Path:
    """Write a llama, qwen2 or qwen3 model as GGUF: matrices as `kind`, llama's q and k rows in interleaved order."""
    config = model.config
    architecture = config.model_type
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if architecture == "qwen3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_array("tokenizer.ggml.tokens", [f"<{index}>" for index in range(config.vocab_size)])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.numpy()
        if architecture == "llama" and "q_proj" in name:
            array = interleave(array, config.num_attention_heads)
        elif architecture == "llama" and "k_proj" in name:
            array = interleave(array, config.num_key_value_heads)
        stored = kind if array.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(
            names.get_name(name, (".weight", ".bias")), gguf.quants.quantize(array, stored), raw_dtype=stored
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def interleave(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head from (first half, second half) to pairs, as GGUF stores llama's q and k."""
    half = array.shape[0] // num_heads // 2
    return array.reshape(num_heads, 2, half, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)

"""An independent judge: transformers reads the same weights and says which token it would choose at each position."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

NEAR_TIE = 1e-3  # logits: closer than this, two implementations may order the first two tokens differently


class Difference(NamedTuple):
    """Where an answer leaves the reference's greedy choice."""

    position: int  # in the answer
    token: int  # ours
    reference_token: int
    gap: float  # the reference's logit of its token minus that of ours

    @property
    def is_near_tie(self) -> bool:
        return self.gap < NEAR_TIE


class Reference:
    """Teacher forcing: one forward pass over prompt and answer judges every position of the answer."""

    def __init__(self, path: Path) -> None:
        self._model = _load(path)

    def differences(self, prompt: Sequence[int], answer: Sequence[int]) -> list[Difference]:
        """Positions at which the reference, given everything before, would have chosen another token."""
        ids = torch.tensor([[*prompt, *answer[:-1]]])
        with torch.inference_mode():
            logits: Tensor = self._model(ids).logits[0, len(prompt) - 1 :]
        found = []
        for position, (row, token) in enumerate(zip(logits, answer, strict=True)):
            best = int(row.argmax())
            if best != token:
                found.append(Difference(position, token, best, float(row[best] - row[token])))
        return found


def prompt_logprobs(path: Path, prompt: Sequence[int]) -> list[tuple[float, float]]:
    """(natural-log probability of the token, of the likeliest one) at each place of a prompt after the first."""
    with torch.inference_mode():
        logits: Tensor = _load(path)(torch.tensor([prompt])).logits[0, :-1]
    logs = torch.log_softmax(logits.double(), dim=-1)
    chosen = logs[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:], dtype=torch.int64)]
    return list(zip(chosen.tolist(), logs.max(dim=-1).values.tolist(), strict=True))


def _load(path: Path) -> PreTrainedModel:
    model: PreTrainedModel
    if path.is_dir():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    else:
        model = _load_gguf(gguf.GGUFReader(path))
    return model.float().eval()


def _load_gguf(reader: gguf.GGUFReader) -> PreTrainedModel:
    """A GGUF file of the llama architecture as transformers' own model."""

    def value(key: str) -> float:
        return float(reader.fields[f"llama.{key}"].contents())

    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = LlamaConfig(
        vocab_size=int(tensors["token_embd.weight"].shape[1]),
        hidden_size=int(value("embedding_length")),
        intermediate_size=int(value("feed_forward_length")),
        num_hidden_layers=int(value("block_count")),
        num_attention_heads=int(value("attention.head_count")),
        num_key_value_heads=int(value("attention.head_count_kv")),
        max_position_embeddings=int(value("context_length")),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        rope_theta=value("rope.freq_base"),
        tie_word_embeddings="output.weight" not in tensors,
    )
    model = LlamaForCausalLM(config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            tensor = tensors[names.get_name(name, (".weight",))]
            array = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(tuple(parameter.shape))
            for part, num_heads in heads.items():
                if part in name:
                    array = _halves(array, num_heads)
            parameter.copy_(torch.from_numpy(np.array(array)))
    return model


def _halves(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head from interleaved pairs, as GGUF stores llama's q and k, to (first half, second half)."""
    half = array.shape[0] // num_heads // 2
    return array.reshape(num_heads, half, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)

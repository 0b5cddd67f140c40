"""Answers that other implementations have written down for real weights."""

import math
import os
import struct
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.unit.engine.steps import generate, make_engine

from disagg.engine.runner import TorchEngine

MODELS = Path(os.environ.get("DISAGG_SHARED", Path(__file__).parents[2].parent / "shared")) / "models"
STORIES = MODELS / "stories260K"
GOLDEN = MODELS / "golden_llamacpp_greedy.jsonl"
# Nat between the first two tokens: above, another way of rounding cannot change the choice. llama.cpp rounds more.
CLEAR_GAP = 1.2


def _needs(path: Path) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        not path.exists(), reason=f"{path} is not here: set DISAGG_SHARED to the folder that holds models/"
    )


class Checkpoint:
    """A llama2.c checkpoint: seven sizes, then float32 tensors one after the other."""

    def __init__(self, path: Path) -> None:
        data = path.read_bytes()
        header: tuple[int, ...] = struct.unpack_from("<7i", data)
        self.hidden, self.inner, self.layers, self.heads, self.kv_heads, self.vocab, self.context = header
        self._floats = np.frombuffer(data, np.float32, offset=struct.calcsize("<7i"))
        self._next = 0

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def take(self, *shape: int) -> np.ndarray:
        size = math.prod(shape)
        self._next += size
        return self._floats[self._next - size : self._next].reshape(shape)

    def take_rotated(self, heads: int) -> np.ndarray:
        """Rows of each head come as pairs that rotate together; Hugging Face has the first halves, then the second."""
        rows = self.take(self.layers, heads, self.head_dim // 2, 2, self.hidden)
        return rows.swapaxes(2, 3).reshape(self.layers, heads * self.head_dim, self.hidden)

    def write(self, folder: Path) -> Path:
        """As a Hugging Face directory."""
        layers, hidden, kv_size = self.layers, self.hidden, self.kv_heads * self.head_dim
        tensors = {"model.embed_tokens.weight": self.take(self.vocab, hidden)}
        stacked = {
            "input_layernorm": self.take(layers, hidden),
            "self_attn.q_proj": self.take_rotated(self.heads),
            "self_attn.k_proj": self.take_rotated(self.kv_heads),
            "self_attn.v_proj": self.take(layers, kv_size, hidden),
            "self_attn.o_proj": self.take(layers, hidden, hidden),
            "post_attention_layernorm": self.take(layers, hidden),
            "mlp.gate_proj": self.take(layers, self.inner, hidden),
            "mlp.down_proj": self.take(layers, hidden, self.inner),
            "mlp.up_proj": self.take(layers, self.inner, hidden),
        }
        for name, stack in stacked.items():
            tensors |= {f"model.layers.{layer}.{name}.weight": rows for layer, rows in enumerate(stack)}
        tensors["model.norm.weight"] = self.take(hidden)
        save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / "model.safetensors")
        config: dict[str, Any] = {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": self.vocab,
            "hidden_size": hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": self.context,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
        }
        (folder / "config.json").write_bytes(msgspec.json.encode(config))
        return folder


def read_pieces(path: Path, vocab: int) -> list[str]:
    """The texts of llama2.c's tokens: u32 longest, then score, length and bytes of each."""
    data, offset, pieces = path.read_bytes(), 4, []
    for _ in range(vocab):
        (length,) = struct.unpack_from("<i", data, offset + 4)
        pieces.append(data[offset + 8 : offset + 8 + length].decode())
        offset += 8 + length
    return pieces


@_needs(STORIES)
def test_stories260k_tells_the_published_story(tmp_path: Path) -> None:
    checkpoint = Checkpoint(STORIES / "stories260K.bin")
    engine = make_engine(checkpoint.write(tmp_path), num_blocks=16)
    text, ids = (STORIES / "golden_greedy_200.txt").read_text().splitlines()
    got = generate(engine, [1], list(range(16)), 200)
    assert got[:20] == msgspec.json.decode(ids)
    pieces = read_pieces(STORIES / "tok512.bin", checkpoint.vocab)
    assert "".join(pieces[token] for token in got) == text


class GoldenRun(msgspec.Struct):
    """One greedy answer of llama.cpp, with the likeliest tokens of each step."""

    model: str
    prompt: str
    prompt_ids: list[int]
    greedy_ids: list[int]
    top5_logprobs: list[list[tuple[int, float]]]

    @property
    def num_clear(self) -> int:
        """Tokens before the first whose choice is close. Rows that are not aligned with the ids end it too."""
        for position, (token, top) in enumerate(zip(self.greedy_ids, self.top5_logprobs, strict=False)):
            if top[0][0] != token or top[0][1] - top[1][1] < CLEAR_GAP:
                return position
        return min(len(self.greedy_ids), len(self.top5_logprobs))


@pytest.mark.real_model
@_needs(GOLDEN)
def test_smollm2_answers_as_llama_cpp_where_the_choice_is_clear(smollm2_path: Path) -> None:
    runs = [msgspec.json.decode(line, type=GoldenRun) for line in GOLDEN.read_bytes().splitlines()]
    runs = [run for run in runs if run.model == "smollm2-135m" and run.num_clear]
    assert runs
    assert any(run.num_clear == len(run.greedy_ids) for run in runs), "one answer is clear to its end"
    engine: TorchEngine = make_engine(smollm2_path, num_blocks=16)
    for run in runs:
        got = generate(engine, run.prompt_ids, list(range(16)), run.num_clear)
        assert got == run.greedy_ids[: run.num_clear], run.prompt
    print(f"{len(runs)} answers, {sum(run.num_clear for run in runs)} tokens")

"""A model's weights under Hugging Face names, whatever file they come from. Float32."""

import contextlib
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from disagg.core.errors import ModelLoadError
from disagg.modelfiles.config import ModelConfig
from disagg.modelfiles.gguf_file import GgufFile

# GGUF's names of tensors outside and inside the layers -> Hugging Face's.
_GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_LAYER = re.compile(r"blk\.(\d+)\.(.+)")


class WeightTable:
    """Tensors by name, read when they are taken, so that a model is never in memory twice. Checks names and shapes."""

    def __init__(self, readers: Mapping[str, Callable[[], Tensor]], path: Path) -> None:
        self._readers = readers
        self._path = path

    def __contains__(self, name: str) -> bool:
        return name in self._readers

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor as float32. Raises ModelLoadError if it is missing or of another shape."""
        reader = self._readers.get(name)
        if reader is None:
            raise ModelLoadError(f"{self._path} has no tensor {name}; the files are incomplete, download them again")
        tensor = reader()
        if tuple(tensor.shape) != shape:
            raise ModelLoadError(
                f"tensor {name} of {self._path} is {tuple(tensor.shape)}, config says {shape}; files and config differ"
            )
        return tensor.to(torch.float32)


class _ShardIndex(msgspec.Struct, frozen=True):
    """model.safetensors.index.json: which file holds which tensor."""

    weight_map: dict[str, str]


def load_weights(path: Path, config: ModelConfig) -> WeightTable:
    """Weights of the model at `path` (directory or GGUF file). Files are mapped; tensors are read later."""
    if path.is_dir():
        return WeightTable(_read_safetensors(path), path)
    return WeightTable(_read_gguf(GgufFile(path), config), path)


def _read_safetensors(path: Path) -> dict[str, Callable[[], Tensor]]:
    readers: dict[str, Callable[[], Tensor]] = {}
    for file in _shards(path):
        if not file.is_file():
            raise ModelLoadError(f"{file} is missing; the model has several files, download all of them")
        try:
            shard: Any = safe_open(file, framework="pt", device="cpu")  # stays open as long as a reader holds it
            readers.update((name, partial(shard.get_tensor, name)) for name in shard.keys())  # noqa: SIM118
        except SafetensorError as error:
            raise ModelLoadError(f"{file} is damaged ({error}); download it again") from error
    return readers


def _shards(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = set(msgspec.json.decode(index.read_bytes(), type=_ShardIndex).weight_map.values())
        except msgspec.DecodeError as error:
            raise ModelLoadError(f"{index} is damaged ({error}); download it again") from error
        return [path / name for name in sorted(names)]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ModelLoadError(f"{path} has no *.safetensors; other weight formats are not read, convert the model")
    return files


def _read_gguf(file: GgufFile, config: ModelConfig) -> dict[str, Callable[[], Tensor]]:
    readers: dict[str, Callable[[], Tensor]] = {}
    for name in file.tensors:
        canonical = _canonical_name(name)
        if canonical is None:
            continue
        interleaved_heads = 0
        if config.architecture == "llama" and ".q_proj." in canonical:
            interleaved_heads = config.num_heads
        elif config.architecture == "llama" and ".k_proj." in canonical:
            interleaved_heads = config.num_kv_heads
        readers[canonical] = partial(_read_gguf_tensor, file, name, interleaved_heads)
    return readers


def _read_gguf_tensor(file: GgufFile, name: str, interleaved_heads: int) -> Tensor:
    array = file.array(name)
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return _undo_interleaving(tensor, interleaved_heads) if interleaved_heads else tensor


def _canonical_name(name: str) -> str | None:
    """Hugging Face's name of a GGUF tensor; None for one that is not a weight (rope factors)."""
    stem, _, suffix = name.rpartition(".")
    layer = _GGUF_LAYER.fullmatch(stem)
    prefix = f"model.layers.{layer[1]}." if layer else ""
    with contextlib.suppress(KeyError):
        return f"{prefix}{_GGUF_NAMES[layer[2] if layer else stem]}.{suffix}"
    return None


def _undo_interleaving(tensor: Tensor, num_heads: int) -> Tensor:
    """GGUF's llama stores the rows of one head as (first, second) pairs that rotate together; here halves rotate."""
    per_head = tensor.shape[0] // num_heads
    rest = tensor.shape[1:]
    return tensor.reshape(num_heads, per_head // 2, 2, *rest).transpose(1, 2).reshape(num_heads * per_head, *rest)

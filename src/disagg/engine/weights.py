"""A model's weights under Hugging Face names, whatever file they come from.

take          float32, or a view of the file where it is stored so
take_stored   float16, bfloat16 or float32 as the file has it, without a copy; what is stored in blocks as float32
take_joined   several tensors in one, written once into the memory where they stay, in any float type
matrix        likewise of matrices, read when and as it is asked for: by the native kernels from the file itself
"""

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from disagg.core.errors import ModelLoadError
from disagg.engine.matrix import BLOCK_ELEMENTS, MatrixRows, joined, rows_of, stored_rows
from disagg.modelfiles.config import ModelConfig
from disagg.modelfiles.gguf_file import GgufFile, open_gguf

# GGUF's names of tensors outside and inside the layers -> Hugging Face's.
_GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
# A tensor of a layer, under whatever name; old converters wrote rotary frequencies too, which the config gives.
_LAYER = re.compile(r"(?:model\.layers|blk)\.(\d+)\.(?!.*\binv_freq$)")
_PLAIN_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class StoredTensor(Protocol):
    """A tensor in a file. Nothing is read before it is asked for."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def stored(self) -> Tensor:
        """In the file's own float type, a view of the file where possible; float32 if it is stored in blocks."""

    def read_into(self, out: Tensor) -> None:
        """Write the values into out, of the same shape, contiguous, in host memory."""

    def rows(self) -> MatrixRows:
        """Where the rows of a matrix lie."""


class WeightTable:
    """Tensors by name, read when they are taken, so that a model is never in memory twice. Checks names and shapes.

    A tensor that is a view of the file must not be written to. All methods raise ModelLoadError for a tensor that is
    missing or of another shape.
    """

    def __init__(self, tensors: Mapping[str, StoredTensor], path: Path) -> None:
        self._tensors = tensors
        self._path = path
        self._taken: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor as float32."""
        return self.take_stored(name, *shape).to(torch.float32)

    def take_stored(self, name: str, *shape: int) -> Tensor:
        """The tensor as the file has it: float16, bfloat16 or float32; float32 too if it is stored in blocks."""
        return self._found(name, shape).stored()

    def take_joined(
        self, names: Sequence[str], shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """The tensors one after the other along their first axis, contiguous, in a float type of the caller's."""
        return _joined(self._all_found(names, shapes), dtype)

    def matrix(self, names: Sequence[str], shapes: Sequence[tuple[int, int]], device: torch.device) -> "StoredMatrix":
        """Matrices of one width below each other."""
        return StoredMatrix(self._all_found(names, shapes), device)

    def check_all_taken(self, num_layers: int) -> None:
        """Raises ModelLoadError when layers below num_layers have tensors that nobody took: they would be left out."""
        for name in sorted(self._tensors.keys() - self._taken):
            layer = _LAYER.match(name)
            if layer is not None and int(layer[1]) < num_layers:
                text = f"{self._path} has a tensor {name}, which models of its architecture do not have here"
                raise ModelLoadError(f"{text}: its answers would be wrong; choose another model")

    def _all_found(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> list[StoredTensor]:
        return [self._found(name, shape) for name, shape in zip(names, shapes, strict=True)]

    def _found(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelLoadError(f"{self._path} has no tensor {name}; the files are incomplete, download them again")
        if tensor.shape != shape:
            raise ModelLoadError(
                f"tensor {name} of {self._path} is {tensor.shape}, config says {shape}; files and config differ"
            )
        self._taken.add(name)
        return tensor


class StoredMatrix:
    """Matrices of a file below each other, [num_outputs, num_inputs]. Nothing is read before it is asked for."""

    def __init__(self, parts: Sequence[StoredTensor], device: torch.device) -> None:
        self._parts = parts
        self._device = device
        self._read: Tensor | None = None

    def read(self, dtype: torch.dtype) -> Tensor:
        """On its device, contiguous. Asked again it is the same tensor: an embedding may be the head too."""
        if self._read is None or self._read.dtype != dtype:
            self._read = _joined(self._parts, dtype).to(self._device)
        return self._read

    def rows(self) -> MatrixRows:
        """Where they lie in host memory: in the file itself as far as its way of storing can be read there."""
        return joined([part.rows() for part in self._parts])


def _joined(parts: Sequence[StoredTensor], dtype: torch.dtype) -> Tensor:
    sizes = [part.shape[0] for part in parts]
    whole = torch.empty(sum(sizes), *parts[0].shape[1:], dtype=dtype)
    for part, out in zip(parts, torch.split(whole, sizes), strict=True):
        part.read_into(out)
    return whole


class _ShardIndex(msgspec.Struct, frozen=True):
    """model.safetensors.index.json: which file holds which tensor."""

    weight_map: dict[str, str]


def load_weights(path: Path, config: ModelConfig) -> WeightTable:
    """Weights of the model at `path` (directory or GGUF file). Files are mapped; tensors are read later."""
    if path.is_dir():
        return WeightTable(_read_safetensors(path), path)
    return WeightTable(_read_gguf(open_gguf(path), config), path)


class _SafeTensor(NamedTuple):
    """In a safetensors file, which stays open as long as this is held."""

    path: Path
    file: Any
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.file.get_slice(self.name).get_shape())

    def stored(self) -> Tensor:
        tensor: Tensor = self.file.get_tensor(self.name)  # of the mapped file
        if tensor.dtype not in _PLAIN_DTYPES:  # whose scales would be elsewhere
            raise ModelLoadError(
                f"tensor {self.name} of {self.path} is stored as {tensor.dtype}, which is not read; "
                "give weights in F32, F16 or BF16, or a GGUF file"
            )
        return tensor if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.to(torch.float32)

    def read_into(self, out: Tensor) -> None:
        out.copy_(self.stored())

    def rows(self) -> MatrixRows:
        return rows_of(self.stored())


def _read_safetensors(path: Path) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for file in _shards(path):
        if not file.is_file():
            raise ModelLoadError(f"{file} is missing; the model has several files, download all of them")
        try:
            shard: Any = safe_open(file, framework="pt", device="cpu")
            tensors.update((name, _SafeTensor(file, shard, name)) for name in shard.keys())  # noqa: SIM118
        except SafetensorError as error:
            raise ModelLoadError(f"{file} is damaged ({error}); download it again") from error
    return tensors


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


class _GgufWeight(NamedTuple):
    """In a GGUF file. interleaved_heads: heads whose rows the file has in another order; 0: none."""

    file: GgufFile
    name: str
    interleaved_heads: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.file.tensors[self.name].shape

    def stored(self) -> Tensor:
        array = self.file.view(self.name)
        if array is None:  # in blocks
            out = torch.empty(self.shape)
            self.read_into(out)
            return out
        # A file that could not be mapped privately gives read-only memory, which torch does not take.
        tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
        if tensor.dtype == torch.int16:  # numpy has no bfloat16: these are its bits
            tensor = tensor.view(torch.bfloat16)
        return _undo_interleaving(tensor, self.interleaved_heads) if self.interleaved_heads else tensor

    def read_into(self, out: Tensor) -> None:
        if self.file.view(self.name) is not None:
            out.copy_(self.stored())
            return
        rows = torch.empty_like(out) if self.interleaved_heads else out
        if rows.dtype == torch.float32:
            self.file.read_into(self.name, rows.numpy())
        else:  # torch rounds many times as fast as numpy
            start, flat = 0, rows.view(-1)
            for part in self.file.parts(self.name):
                flat[start : start + len(part)] = torch.from_numpy(part)
                start += len(part)
        if self.interleaved_heads:
            out.copy_(_undo_interleaving(rows, self.interleaved_heads))

    def rows(self) -> MatrixRows:
        kind, (num_rows, num_inputs) = self.file.tensors[self.name].kind.number, self.shape
        block = BLOCK_ELEMENTS.get(kind)
        if block is None or num_inputs % block:  # the kernels do not read it: into memory first
            return rows_of(self.stored())
        raw, order = self.file.raw(self.name), torch.arange(num_rows)
        if self.interleaved_heads:
            order = _undo_interleaving(order, self.interleaved_heads)
        return stored_rows(raw.ctypes.data, raw.nbytes // num_rows, order.numpy(), num_inputs, kind, raw)


def _read_gguf(file: GgufFile, config: ModelConfig) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for name in file.tensors:
        canonical = _canonical_name(name) or name
        interleaved_heads = 0
        if config.architecture == "llama" and ".q_proj." in canonical:
            interleaved_heads = config.num_heads
        elif config.architecture == "llama" and ".k_proj." in canonical:
            interleaved_heads = config.num_kv_heads
        tensors[canonical] = _GgufWeight(file, name, interleaved_heads)
    return tensors


def _canonical_name(name: str) -> str | None:
    """Hugging Face's name of a GGUF tensor; None for one that we know no other name of."""
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

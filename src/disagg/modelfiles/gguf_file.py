"""Reading a GGUF file: metadata as Python values, tensors by name as float32 numpy.

The header is walked here rather than by `gguf.GGUFReader`, which takes seconds on a file with a vocabulary in it;
element types, block sizes and dequantisation come from the `gguf` package.

    offset 0   magic "GGUF", u32 version, u64 number of tensors, u64 number of metadata entries
    then       metadata entries (name, type, value), tensor entries (name, shape, type, offset)
    then       tensor data, aligned; offsets count from here
"""

import math
import mmap
import struct
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from disagg.core.errors import ModelLoadError

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32  # bytes
SUPPORTED_VERSIONS = (2, 3)
BLOCKS_PER_PART = 1 << 12  # dequantised at once: temporaries stay in the cache, few calls are made
MAX_HEADER_ITEMS = 10_000_000  # a count above this is a damaged header, not a model

Scalar = str | int | float | bool
Value = Scalar | list[Scalar]

_FORMATS: dict[GGUFValueType, str] = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}


class GgufTensor(NamedTuple):
    """Where one tensor lies. `shape` is row-major, as numpy and torch have it (the file stores it reversed)."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int  # bytes from the start of the file
    num_bytes: int


class _Cursor:
    """A position in the header. Running past the end is a damaged file."""

    def __init__(self, data: mmap.mmap, offset: int) -> None:
        self.data = data
        self.offset = offset

    def unpack(self, fmt: str) -> Scalar:
        value: Scalar = struct.unpack_from(fmt, self.data, self.offset)[0]
        self.offset += struct.calcsize(fmt)
        return value

    def count(self) -> int:
        value = int(self.unpack("<Q"))
        if value > MAX_HEADER_ITEMS:
            raise ValueError(f"count {value} in the header")
        return value

    def string(self) -> str:
        length = self.count()
        start = self.offset
        self.offset += length
        if self.offset > len(self.data):
            raise ValueError("text runs past the end of the file")
        return self.data[start : self.offset].decode("utf-8", errors="surrogateescape")

    def value(self, kind: GGUFValueType) -> Value:
        if kind is GGUFValueType.STRING:
            return self.string()
        if kind is GGUFValueType.ARRAY:
            return self._array()
        return self.unpack(_FORMATS[kind])

    def _array(self) -> list[Scalar]:
        kind = GGUFValueType(self.unpack("<I"))
        number = self.count()
        if kind is GGUFValueType.STRING:
            return [self.string() for _ in range(number)]
        fmt = f"<{number}{_FORMATS[kind][1]}"
        values = list(struct.unpack_from(fmt, self.data, self.offset))
        self.offset += struct.calcsize(fmt)
        return values


def is_gguf(path: Path) -> bool:
    """Whether the file starts with GGUF's magic. False for a directory or a missing file."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


class GgufFile:
    """An open GGUF file (memory-mapped). Raises ModelLoadError for a file that is not whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not is_gguf(path):
            raise ModelLoadError(f"{path} is not a GGUF file (it does not start with {MAGIC.decode()}); check the path")
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.fields: dict[str, Value] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            self._read_header()
        except (struct.error, ValueError, KeyError) as error:
            raise ModelLoadError(f"{path} is a damaged GGUF file ({error}); download it again") from error

    def _read_header(self) -> None:
        cursor = _Cursor(self._data, len(MAGIC))
        version = cursor.unpack("<I")
        if version not in SUPPORTED_VERSIONS:
            raise ValueError(f"version {version}, this reader knows {SUPPORTED_VERSIONS}")
        num_tensors, num_fields = cursor.count(), cursor.count()
        for _ in range(num_fields):
            name = cursor.string()
            self.fields[name] = cursor.value(GGUFValueType(cursor.unpack("<I")))
        entries = [self._tensor_entry(cursor) for _ in range(num_tensors)]
        alignment = self.integer("general.alignment", DEFAULT_ALIGNMENT)
        start = math.ceil(cursor.offset / alignment) * alignment
        for entry in entries:
            tensor = entry._replace(offset=start + entry.offset)
            if tensor.offset + tensor.num_bytes > len(self._data):
                raise ValueError(f"tensor {tensor.name} runs past the end: {len(self._data)} bytes are here")
            self.tensors[tensor.name] = tensor

    @staticmethod
    def _tensor_entry(cursor: _Cursor) -> GgufTensor:
        name = cursor.string()
        num_dims = int(cursor.unpack("<I"))
        reversed_shape = [int(cursor.unpack("<Q")) for _ in range(num_dims)]
        kind = GGMLQuantizationType(cursor.unpack("<I"))
        offset = int(cursor.unpack("<Q"))
        elements_per_block, bytes_per_block = GGML_QUANT_SIZES[kind]
        num_bytes = math.prod(reversed_shape) // elements_per_block * bytes_per_block
        return GgufTensor(name, tuple(reversed(reversed_shape)), kind, offset, num_bytes)

    def text(self, name: str, default: str | None = None) -> str:
        """A text field. Raises ModelLoadError if it is missing (and no default is given) or of another type."""
        value = self._field(name, default)
        if not isinstance(value, str):
            raise ModelLoadError(f"field {name} of {self.path} is {value!r}, expected text")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole-number field, with the errors of text()."""
        value = self._field(name, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ModelLoadError(f"field {name} of {self.path} is {value!r}, expected a whole number")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number field, with the errors of text()."""
        value = self._field(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ModelLoadError(f"field {name} of {self.path} is {value!r}, expected a number")
        return float(value)

    def _field(self, name: str, default: Value | None) -> Value:
        value = self.fields.get(name, default)
        if value is None:
            raise ModelLoadError(f"{self.path} has no field {name}; the file is incomplete, convert the model again")
        return value

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The stored bytes of a tensor, a read-only view of the file: [num_bytes]."""
        tensor = self._tensor(name)
        return np.frombuffer(self._data, np.uint8, tensor.num_bytes, tensor.offset)

    def array(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor as float32, dequantised, in its own shape."""
        tensor = self._tensor(name)
        raw = self.raw(name)
        if tensor.kind is GGMLQuantizationType.F32:
            return raw.view(np.float32).reshape(tensor.shape)
        if tensor.kind is GGMLQuantizationType.F16:
            return raw.view(np.float16).astype(np.float32).reshape(tensor.shape)
        flat = np.empty(math.prod(tensor.shape), np.float32)
        elements_per_block, bytes_per_block = GGML_QUANT_SIZES[tensor.kind]
        part = BLOCKS_PER_PART * bytes_per_block
        try:
            for index, start in enumerate(range(0, len(raw), part)):
                values = gguf.quants.dequantize(raw[start : start + part], tensor.kind)
                first = index * BLOCKS_PER_PART * elements_per_block
                flat[first : first + len(values)] = values
        except NotImplementedError as error:
            raise ModelLoadError(
                f"tensor {name} of {self.path} is stored as {tensor.kind.name}, which cannot be read; "
                "convert the model to F16, Q8_0 or Q4_0"
            ) from error
        return flat.reshape(tensor.shape)

    def _tensor(self, name: str) -> GgufTensor:
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelLoadError(f"{self.path} has no tensor {name}; the file is incomplete, convert the model again")
        return tensor

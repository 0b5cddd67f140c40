"""Reading a GGUF file: metadata as Python values, tensors by name as numpy.

The header is walked here rather than by `gguf.GGUFReader`, which takes seconds on a file with a vocabulary in it: lists
of text are stepped over and decoded when somebody asks.

    offset 0   magic "GGUF", u32 version, u64 number of tensors, u64 number of metadata entries
    then       metadata entries (name, type, value), tensor entries (name, shape, type, offset)
    then       tensor data, aligned; offsets count from here
"""

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from disagg.core.errors import ModelLoadError
from disagg.modelfiles import gguf_kinds
from disagg.modelfiles.gguf_blocks import dequantise_into, dequantised_parts
from disagg.modelfiles.gguf_kinds import TensorKind, ValueKind, tensor_kind

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32  # bytes
SUPPORTED_VERSIONS = (2, 3)
MAX_HEADER_ITEMS = 10_000_000  # a count above this is a damaged header, not a model

Scalar = str | int | float | bool
Value = Scalar | list[Scalar]

_FORMATS: dict[ValueKind, str] = {
    ValueKind.UINT8: "<B",
    ValueKind.INT8: "<b",
    ValueKind.UINT16: "<H",
    ValueKind.INT16: "<h",
    ValueKind.UINT32: "<I",
    ValueKind.INT32: "<i",
    ValueKind.FLOAT32: "<f",
    ValueKind.BOOL: "<?",
    ValueKind.UINT64: "<Q",
    ValueKind.INT64: "<q",
    ValueKind.FLOAT64: "<d",
}


_PLAIN: dict[TensorKind, type[np.generic]] = {
    gguf_kinds.F32: np.float32,
    gguf_kinds.F16: np.float16,
    gguf_kinds.BF16: np.int16,
}


class GgufTensor(NamedTuple):
    """Where one tensor lies. `shape` is row-major, as numpy and torch have it (the file stores it reversed)."""

    name: str
    shape: tuple[int, ...]
    kind: TensorKind
    offset: int  # bytes from the start of the file
    num_bytes: int


class _TextList(NamedTuple):
    """A list of texts in the header that nobody has asked for yet."""

    offset: int  # of the first text's length
    number: int


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
        start = self.offset + _LENGTH.size
        self.offset = start + self.count()
        if self.offset > len(self.data):
            raise ValueError("text runs past the end of the file")
        return _decoded(self.data[start : self.offset])

    def value(self, kind: ValueKind) -> Value | _TextList:
        if kind is ValueKind.STRING:
            return self.string()
        if kind is ValueKind.ARRAY:
            return self._array()
        return self.unpack(_FORMATS[kind])

    def _array(self) -> list[Scalar] | _TextList:
        kind = ValueKind(int(self.unpack("<I")))
        number = self.count()
        if kind is ValueKind.STRING:
            texts = _TextList(self.offset, number)
            self._skip_texts(number)
            return texts
        fmt = f"<{number}{_FORMATS[kind][1]}"
        values = list(struct.unpack_from(fmt, self.data, self.offset))
        self.offset += struct.calcsize(fmt)
        return values

    def _skip_texts(self, number: int) -> None:
        offset, data, unpack = self.offset, self.data, _LENGTH.unpack_from
        for _ in range(number):
            (length,) = unpack(data, offset)
            offset += _LENGTH.size + length
        if offset > len(data):
            raise ValueError("a list of texts runs past the end of the file")
        self.offset = offset


_LENGTH = struct.Struct("<Q")


def _decoded(text: bytes) -> str:
    return text.decode("utf-8", errors="surrogateescape")


class _Fields(Mapping[str, Value]):
    """Metadata by name. A list of texts is decoded once, at the first look."""

    def __init__(self, data: mmap.mmap, stored: dict[str, Value | _TextList]) -> None:
        self._data = data
        self._stored = stored

    def __getitem__(self, name: str) -> Value:
        value = self._stored[name]
        if isinstance(value, _TextList):
            value = self._stored[name] = list(self._texts(value))
        return value

    def _texts(self, texts: _TextList) -> Iterator[str]:
        offset, data, unpack = texts.offset, self._data, _LENGTH.unpack_from
        for _ in range(texts.number):
            start = offset + _LENGTH.size
            offset = start + unpack(data, offset)[0]
            yield _decoded(data[start:offset])

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def is_gguf(path: Path) -> bool:
    """Whether the file starts with GGUF's magic. False for a directory or a missing file."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _map(file_number: int) -> mmap.mmap:
    """The file in memory. Private to this process where that can be had: torch takes only writable memory uncopied."""
    try:
        return mmap.mmap(file_number, 0, access=mmap.ACCESS_COPY)
    except OSError:  # the system may refuse to promise private memory for a file larger than it has
        return mmap.mmap(file_number, 0, access=mmap.ACCESS_READ)


def open_gguf(path: Path) -> "GgufFile":
    """The file, opened once and kept while nothing replaces it: a header of 100,000 texts takes a tenth of a second.

    Raises ModelLoadError for a file that is not whole.
    """
    try:
        state = path.stat()
    except OSError:
        return GgufFile(path)  # which says what is wrong
    return _opened(path, (state.st_ino, state.st_size, state.st_mtime_ns))


@lru_cache(maxsize=2)
def _opened(path: Path, _state: tuple[int, int, int]) -> "GgufFile":
    return GgufFile(path)


class GgufFile:
    """An open GGUF file (memory-mapped). Raises ModelLoadError for a file that is not whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not is_gguf(path):
            raise ModelLoadError(f"{path} is not a GGUF file (it does not start with {MAGIC.decode()}); check the path")
        with path.open("rb") as file:
            self._data = _map(file.fileno())
        self.tensors: dict[str, GgufTensor] = {}
        stored: dict[str, Value | _TextList] = {}
        self.fields: Mapping[str, Value] = _Fields(self._data, stored)
        try:
            self._read_header(stored)
        except (struct.error, ValueError, KeyError) as error:
            raise ModelLoadError(f"{path} is a damaged GGUF file ({error}); download it again") from error

    def _read_header(self, fields: dict[str, Value | _TextList]) -> None:
        cursor = _Cursor(self._data, len(MAGIC))
        version = cursor.unpack("<I")
        if version not in SUPPORTED_VERSIONS:
            raise ValueError(f"version {version}, this reader knows {SUPPORTED_VERSIONS}")
        num_tensors, num_fields = cursor.count(), cursor.count()
        for _ in range(num_fields):
            name = cursor.string()
            fields[name] = cursor.value(ValueKind(int(cursor.unpack("<I"))))
        entries = [self._tensor_entry(cursor) for _ in range(num_tensors)]
        alignment = self.integer("general.alignment", DEFAULT_ALIGNMENT)
        if alignment < 1:
            raise ValueError(f"alignment of {alignment} bytes")
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
        kind = tensor_kind(int(cursor.unpack("<I")))
        offset = int(cursor.unpack("<Q"))
        if any(width % kind.block_elements for width in reversed_shape[:1]):
            raise ValueError(f"{name} has rows of {reversed_shape[0]}, which are no whole blocks of {kind.name}")
        num_bytes = math.prod(reversed_shape) // kind.block_elements * kind.block_bytes
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
        """The stored bytes of a tensor, a view of the file: [num_bytes]. Writing to it does not change the file."""
        tensor = self._tensor(name)
        return np.frombuffer(self._data, np.uint8, tensor.num_bytes, tensor.offset)

    def view(self, name: str) -> npt.NDArray[np.generic] | None:
        """A tensor stored as numbers, in its own shape, without a copy: float32, float16, or BF16's bits as int16.

        None for one stored in blocks, which has to be dequantised.
        """
        tensor = self._tensor(name)
        dtype = _PLAIN.get(tensor.kind)
        return None if dtype is None else self.raw(name).view(dtype).reshape(tensor.shape)

    def read_into(self, name: str, out: npt.NDArray[np.float32]) -> None:
        """Write a tensor's values into out, of the tensor's shape, contiguous."""
        try:
            dequantise_into(self.raw(name), self._tensor(name).kind, out.reshape(-1))
        except NotImplementedError as error:
            raise self._unreadable(name) from error

    def parts(self, name: str) -> Iterator[npt.NDArray[np.float32]]:
        """A tensor's values in order, some at a time, each part in the same memory: use it before the next."""
        try:
            yield from dequantised_parts(self.raw(name), self._tensor(name).kind)
        except NotImplementedError as error:
            raise self._unreadable(name) from error

    def _unreadable(self, name: str) -> ModelLoadError:
        return ModelLoadError(
            f"tensor {name} of {self.path} is stored as {self.tensors[name].kind.name}, which cannot be read; "
            "convert the model to F16, Q8_0 or Q4_0"
        )

    def array(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor as float32, dequantised, in its own shape; a view of the file if it is stored so."""
        tensor = self._tensor(name)
        if tensor.kind == gguf_kinds.F32:
            return self.raw(name).view(np.float32).reshape(tensor.shape)
        out = np.empty(tensor.shape, np.float32)
        self.read_into(name, out)
        return out

    def _tensor(self, name: str) -> GgufTensor:
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelLoadError(f"{self.path} has no tensor {name}; the file is incomplete, convert the model again")
        return tensor

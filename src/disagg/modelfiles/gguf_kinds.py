"""In which forms a GGUF file stores tensors and metadata, by the numbers that the format gives them.

What nearly every file has is known here. Others the `gguf` package knows, which takes longer to import than such a file
to open.
"""

import enum
import importlib
from typing import Any, Final, NamedTuple


class ValueKind(enum.IntEnum):
    """Of a metadata entry."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


class TensorKind(NamedTuple):
    """Of a tensor: so many elements take so many bytes together."""

    name: str
    number: int
    block_elements: int
    block_bytes: int


F32: Final = TensorKind("F32", 0, 1, 4)
F16: Final = TensorKind("F16", 1, 1, 2)
Q4_0: Final = TensorKind("Q4_0", 2, 32, 18)
Q4_1: Final = TensorKind("Q4_1", 3, 32, 20)
Q8_0: Final = TensorKind("Q8_0", 8, 32, 34)
BF16: Final = TensorKind("BF16", 30, 1, 2)
KNOWN_KINDS: Final = {kind.number: kind for kind in (F32, F16, Q4_0, Q4_1, Q8_0, BF16)}


def tensor_kind(number: int) -> TensorKind:
    """Raises ValueError for a number that neither we nor the package know."""
    return KNOWN_KINDS.get(number) or _of_package(number)


def package() -> Any:
    """The `gguf` package, imported at first use."""
    return importlib.import_module("gguf")


def _of_package(number: int) -> TensorKind:
    constants = package().constants
    kind = constants.GGMLQuantizationType(number)
    return TensorKind(kind.name, number, *constants.GGML_QUANT_SIZES[kind])

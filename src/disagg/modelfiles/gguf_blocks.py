"""Dequantising GGUF's blocks straight into the memory where a weight will stay.

    Q8_0   scale f16, 32 signed bytes             value = scale * q
    Q4_0   scale f16, 16 bytes of two nibbles     value = scale * (q - 8)
    Q4_1   scale f16, minimum f16, 16 bytes       value = scale * q + minimum

The low nibbles are elements 0 to 15 of a block, the high ones 16 to 31. These and plain floats are done here, a part at
a time so that temporaries stay in the cache: several times as fast as by the `gguf` package, which does the rest.
Values are the same to the bit.
"""

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from disagg.modelfiles import gguf_kinds
from disagg.modelfiles.gguf_kinds import TensorKind

PART_ELEMENTS = 1 << 16  # dequantised at once
ELEMENTS = 32  # of a block of nibbles

_NIBBLES = np.uint64(0x0F0F0F0F0F0F0F0F)
_HIGH = np.uint64(4)

Blocks = npt.NDArray[np.uint8]  # [num_blocks, bytes per block]
Values = npt.NDArray[np.float32]  # [num_blocks, elements per block]


def dequantise_into(raw: npt.NDArray[np.uint8], kind: TensorKind, out: npt.NDArray[np.float32]) -> None:
    """Write the values of raw [num_bytes] into out [num_elements], contiguous.

    Raises NotImplementedError for a kind that nobody here can read.
    """
    blocks, values, step = _cut(raw, kind, out)
    for start in range(0, len(blocks), step):
        _dequantise(kind, blocks[start : start + step], values[start : start + step])


def dequantised_parts(raw: npt.NDArray[np.uint8], kind: TensorKind) -> Iterator[npt.NDArray[np.float32]]:
    """The values of raw [num_bytes] in order, some at a time, each part in the same memory: use it before the next.

    Raises NotImplementedError for a kind that nobody here can read.
    """
    blocks, values, step = _cut(raw, kind, np.empty(PART_ELEMENTS, np.float32))
    for start in range(0, len(blocks), step):
        source = blocks[start : start + step]
        part = values[: len(source)]
        _dequantise(kind, source, part)
        yield part.reshape(-1)


def _cut(raw: npt.NDArray[np.uint8], kind: TensorKind, out: npt.NDArray[np.float32]) -> tuple[Blocks, Values, int]:
    """raw and out as rows of one block, and how many are done at once."""
    num_elements = kind.block_elements
    return raw.reshape(-1, kind.block_bytes), out.reshape(-1, num_elements), PART_ELEMENTS // num_elements


def _dequantise(kind: TensorKind, blocks: Blocks, out: Values) -> None:
    own = _OWN.get(kind)
    if own is not None:
        own(blocks, out)
    else:
        library = gguf_kinds.package()
        theirs = library.GGMLQuantizationType(kind.number)
        out[...] = library.quants.dequantize(blocks.reshape(-1), theirs).reshape(out.shape)


def _f32(blocks: Blocks, out: Values) -> None:
    out[...] = blocks.view(np.float32)


def _f16(blocks: Blocks, out: Values) -> None:
    out[...] = blocks.view(np.float16)


def _bf16(blocks: Blocks, out: Values) -> None:
    np.left_shift(blocks.view(np.uint16), 16, out=out.view(np.uint32), dtype=np.uint32)


def _q8_0(blocks: Blocks, out: Values) -> None:
    out[...] = blocks[:, 2:].view(np.int8)
    out *= _halves(blocks, 2)


def _q4_0(blocks: Blocks, out: Values) -> None:
    out[...] = _nibbles(blocks[:, 2:])
    out -= 8
    out *= _halves(blocks, 2)


def _q4_1(blocks: Blocks, out: Values) -> None:
    halves = _halves(blocks, 4)
    out[...] = _nibbles(blocks[:, 4:])
    out *= halves[:, :1]
    out += halves[:, 1:]


def _halves(blocks: Blocks, num_bytes: int) -> Values:
    """The float16 numbers at the front of each block."""
    return blocks[:, :num_bytes].copy().view(np.float16).astype(np.float32)


def _nibbles(packed: Blocks) -> Blocks:
    """[num_blocks, 16] of two each -> [num_blocks, 32], eight bytes at a time."""
    words = packed.copy().view(np.uint64)
    split = np.empty((len(words), 2, 2), np.uint64)
    np.bitwise_and(words, _NIBBLES, out=split[:, 0])
    np.bitwise_and(words >> _HIGH, _NIBBLES, out=split[:, 1])
    return split.view(np.uint8).reshape(len(words), ELEMENTS)


_OWN: dict[TensorKind, Callable[[Blocks, Values], None]] = {
    gguf_kinds.F32: _f32,
    gguf_kinds.F16: _f16,
    gguf_kinds.BF16: _bf16,
    gguf_kinds.Q8_0: _q8_0,
    gguf_kinds.Q4_0: _q4_0,
    gguf_kinds.Q4_1: _q4_1,
}

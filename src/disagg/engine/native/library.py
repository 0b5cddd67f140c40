"""The compiled kernels as typed calls on tensors. All tensors are contiguous and on the CPU.

    library = load_library()      None where there is none: callers then use torch's own operations

Calls release the GIL. Results do not depend on threads, nor on the instruction set that is used; but for float products
in bf16 tiles, which only AMX gives (NativeLibrary.portable goes without).
"""

import ctypes
import enum
import logging
import math
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from disagg.core.errors import ConfigurationError, InternalFault
from disagg.core.formats import Kernels
from disagg.engine.large_pages import LargePages
from disagg.engine.matrix import BLOCK_ELEMENTS, MatrixRows
from disagg.engine.native.build import BuildError, build

_log = logging.getLogger(__name__)

PANEL = 32  # as in kernels.h
INT8_PANEL = 16
GROUP, FINE_GROUP = 64, 32
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # as in malloc.h
LARGEST_KEPT, KEPT_BYTES = 32 << 20, 256 << 20  # of one buffer: no more is allowed; of all

_POINTER, _COUNT = c_void_p, c_int64
_SIGNATURES = {
    "disagg_product": [c_int, c_int, *[_COUNT] * 3, *[_POINTER] * 4],
    "disagg_product_int8": [*[_COUNT] * 4, *[_POINTER] * 5],
    "disagg_pack": [c_int, *[_COUNT] * 2, *[_POINTER] * 3],
    "disagg_pack_int8": [*[_COUNT] * 3, *[_POINTER] * 4],
    "disagg_unpack": [c_int, *[_COUNT] * 2, *[_POINTER] * 3],
    "disagg_attend": [c_int, *[_COUNT] * 5, *[_POINTER] * 3, _COUNT, *[_POINTER] * 3],
    "disagg_rotate_store": [c_int, *[_COUNT] * 4, *[_POINTER] * 7, c_float, *[_POINTER] * 2],
    "disagg_add_norm": [*[_COUNT] * 2, *[_POINTER] * 3, c_float, _POINTER],
    "disagg_gate": [*[_COUNT] * 2, *[_POINTER] * 2],
    "disagg_set_num_threads": [c_int],
}


class Isa(enum.IntEnum):
    """Levels of instruction sets, each with all below it."""

    NONE = 0
    AVX2 = 1
    AVX512 = 2
    AMX = 3
    AMX_BF16 = 4


class Int8Matrix(NamedTuple):
    """Weights as products read them: values int8 [panel, group, group size / 4, INT8_PANEL, 4], scales [panel, group,
    INT8_PANEL] float32."""

    num_outputs: int
    group: int  # its size
    values: Tensor
    scales: Tensor


class NativeLibrary:
    """The number of threads and the instruction set are the process's.

    is_portable: float products give the bits of every x86-64 CPU. Else, at level AMX_BF16, they are made of parts in
    tiles: about three times as fast, with bits of their own.
    """

    def __init__(self, library: ctypes.CDLL, *, is_portable: bool = False) -> None:
        self._library = library
        self._is_portable = is_portable
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
        library.disagg_choose_isa.argtypes, library.disagg_choose_isa.restype = [c_int], c_int
        library.disagg_isa.argtypes, library.disagg_isa.restype = [], c_int

    def portable(self) -> "NativeLibrary":
        """The same kernels, with the float products of every x86-64 CPU."""
        return NativeLibrary(self._library, is_portable=True)

    @property
    def isa(self) -> Isa:
        return Isa(self._library.disagg_isa())

    @property
    def arithmetic(self) -> str:
        """Float products of the same name give the same bits."""
        return "native" if self._is_portable or self.isa < Isa.AMX_BF16 else "native in bf16 tiles"

    def choose_isa(self, wanted: Isa) -> Isa:
        """Use the best level of this machine up to `wanted`; says which."""
        return Isa(self._library.disagg_choose_isa(int(wanted)))

    def set_num_threads(self, num_threads: int) -> None:
        self._library.disagg_set_num_threads(num_threads)

    def product(self, x: Tensor, weights: Tensor, bias: Tensor | None, num_outputs: int) -> Tensor:
        """x [M, K] times packed weights -> [M, num_outputs], float32. bias is padded to whole panels."""
        y = torch.empty(x.shape[0], num_outputs)
        is_half = weights.dtype == torch.float16
        self._library.disagg_product(
            is_half,
            not self._is_portable,
            *x.shape,
            num_outputs,
            x.data_ptr(),
            weights.data_ptr(),
            _pointer(bias),
            y.data_ptr(),
        )
        return y

    def pack(self, matrix: MatrixRows, dtype: torch.dtype, memory: LargePages) -> Tensor:
        """[num_outputs, num_inputs] -> [panel, num_inputs, PANEL] as dtype, float32 or float16."""
        packed = _taken(memory, (-(-matrix.num_outputs // PANEL), matrix.num_inputs, PANEL), dtype)
        self._library.disagg_pack(dtype == torch.float16, *_where(matrix), packed.data_ptr())
        return packed

    def unpack(self, matrix: MatrixRows, dtype: torch.dtype) -> Tensor:
        """[num_outputs, num_inputs] as dtype, float32 or float16."""
        plain = torch.empty(matrix.num_outputs, matrix.num_inputs, dtype=dtype)
        self._library.disagg_unpack(dtype == torch.float16, *_where(matrix), plain.data_ptr())
        return plain

    def pack_int8(self, matrix: MatrixRows, group: int, memory: LargePages) -> Int8Matrix:
        """group: GROUP or FINE_GROUP inputs share a scale.

        The scale of a group is the one of a few that gives the least squared error; values are rounded to nearest.
        """
        num_panels, num_groups = -(-matrix.num_outputs // INT8_PANEL), -(-matrix.num_inputs // group)
        values = _taken(memory, (num_panels, num_groups, group // 4, INT8_PANEL, 4), torch.int8)
        scales = _taken(memory, (num_panels, num_groups, INT8_PANEL), torch.float32)
        self._library.disagg_pack_int8(group, *_where(matrix), values.data_ptr(), scales.data_ptr())
        return Int8Matrix(matrix.num_outputs, group, values, scales)

    def product_int8(self, x: Tensor, matrix: Int8Matrix, bias: Tensor | None) -> Tensor:
        """x [M, K] times int8 weights -> [M, num_outputs], float32."""
        y = torch.empty(x.shape[0], matrix.num_outputs)
        self._library.disagg_product_int8(
            matrix.group,
            *x.shape,
            matrix.num_outputs,
            x.data_ptr(),
            matrix.values.data_ptr(),
            matrix.scales.data_ptr(),
            _pointer(bias),
            y.data_ptr(),
        )
        return y

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """x [M, width] += delta, in place; x over its root mean square, times weight."""
        y = torch.empty_like(x)
        self._library.disagg_add_norm(*x.shape, x.data_ptr(), _pointer(delta), weight.data_ptr(), eps, y.data_ptr())
        return y

    def gate(self, x: Tensor) -> Tensor:
        """silu(x[:, :width]) * x[:, width:] for x [M, 2 * width]."""
        num_rows, width = x.shape[0], x.shape[1] // 2
        y = torch.empty(num_rows, width)
        self._library.disagg_gate(num_rows, width, x.data_ptr(), y.data_ptr())
        return y

    def rotate_store(
        self,
        qkv: Tensor,
        head_counts: tuple[int, int],
        rotary: tuple[Tensor, Tensor],
        positions: Tensor,
        slots: Tensor,
        norms: tuple[Tensor | None, Tensor | None],
        eps: float,
        cache: tuple[Tensor, Tensor],
    ) -> None:
        """Turn the queries of qkv [M, (heads + 2 * kv heads) * head_dim] in place; put away keys and values.

        cache: keys and values [slot, kv head, head_dim], float32 or float16. positions, slots [M], int64.
        """
        keys, values = cache
        cos, sin = rotary
        is_half = keys.dtype == torch.float16
        self._library.disagg_rotate_store(
            is_half,
            qkv.shape[0],
            *head_counts,
            keys.shape[-1],
            qkv.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            positions.data_ptr(),
            slots.data_ptr(),
            _pointer(norms[0]),
            _pointer(norms[1]),
            eps,
            keys.data_ptr(),
            values.data_ptr(),
        )

    def attend(
        self, queries: Tensor, spans: Tensor, tables: Tensor, block_size: int, cache: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Queries [M, num_heads, head_dim], rows any stride apart, over the paged cache -> [M, num_heads * head_dim].

        spans [4, sequences] int64: first row, number of rows, position of the first, offset in tables (int32).
        """
        keys, values = cache
        num_rows, num_heads, head_dim = queries.shape
        out = torch.empty(num_rows, num_heads * head_dim)
        self._library.disagg_attend(
            keys.dtype == torch.float16,
            spans.shape[1],
            num_heads,
            keys.shape[1],
            head_dim,
            block_size,
            spans.data_ptr(),
            tables.data_ptr(),
            queries.data_ptr(),
            queries.stride(0),
            keys.data_ptr(),
            values.data_ptr(),
            out.data_ptr(),
        )
        return out


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _where(matrix: MatrixRows) -> tuple[int, int, int, int]:
    """As the kernels take it. Raises InternalFault for a way of storing that they do not read."""
    unknown = set(np.unique(matrix.kinds).tolist()) - BLOCK_ELEMENTS.keys()
    if unknown:
        raise InternalFault(f"rows of kinds {sorted(unknown)}, the kernels read {sorted(BLOCK_ELEMENTS)}")
    return matrix.num_outputs, matrix.num_inputs, matrix.addresses.ctypes.data, matrix.kinds.ctypes.data


def _taken(memory: LargePages, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Of any values."""
    return torch.from_numpy(memory.take(math.prod(shape) * dtype.itemsize)).view(dtype).view(shape)


def _keep_freed_memory() -> None:
    """A step's buffers come back in the next layer: giving them to the kernel between costs a page fault per 4 KiB."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # of the GNU C library
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


@cache
def load_library() -> NativeLibrary | None:
    """The kernels, compiled first if need be. None, with the reason in the log, where they cannot be had."""
    try:
        library = NativeLibrary(ctypes.CDLL(str(build())))
    except (BuildError, OSError) as error:
        _log.warning("no native kernels, torch's own are used instead: %s", error)
        return None
    if library.choose_isa(Isa.AMX_BF16) is Isa.NONE:
        _log.warning("no native kernels, torch's own are used instead: this processor has no AVX2, FMA and F16C")
        return None
    _keep_freed_memory()
    return library


def choose_library(kernels: Kernels, device: torch.device) -> NativeLibrary | None:
    """None: torch's own. Raises ConfigurationError when native kernels are asked for and not here."""
    library = load_library() if kernels is not Kernels.TORCH and device.type == "cpu" else None
    if kernels in (Kernels.NATIVE, Kernels.PORTABLE) and library is None:
        raise ConfigurationError("native kernels are not here: they need an x86-64 CPU with AVX2 and a C++ compiler")
    return library.portable() if library is not None and kernels is Kernels.PORTABLE else library


def pack_bias(bias: Tensor | None, panel: int) -> Tensor | None:
    """Padded with zeros to whole panels, float32."""
    if bias is None:
        return None
    packed = torch.zeros(-(-len(bias) // panel) * panel)
    packed[: len(bias)] = bias
    return packed

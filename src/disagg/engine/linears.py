"""Matrix products with a model's weights. One class per way of storing them; the native ones are batch-invariant by
construction, torch's where a rule was found that makes them so.
"""

import logging
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from disagg.core.errors import ConfigurationError
from disagg.core.formats import Weights
from disagg.engine.invariance import NO_LIMIT, RowRule, find_row_rule
from disagg.engine.large_pages import LargePages
from disagg.engine.matrix import MatrixRows, rows_of
from disagg.engine.native.library import FINE_GROUP, GROUP, INT8_PANEL, PANEL, NativeLibrary, pack_bias
from disagg.engine.weights import StoredMatrix

_log = logging.getLogger(__name__)


class Linear(Protocol):
    """y = x W^T + b. Row m of y depends on row m of x only, bit for bit: see LinearMaker.is_row_invariant."""

    @property
    def num_bytes(self) -> int:
        """Bytes of weights that one call reads."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, num_inputs] -> [M, num_outputs], both float32."""


class PackedLinear:
    """Weights [num_outputs, num_inputs] in panels, as float32 or float16; sums are float32, in order of the inputs."""

    def __init__(
        self,
        library: NativeLibrary,
        weight: MatrixRows,
        bias: Tensor | None,
        dtype: torch.dtype,
        memory: LargePages,
    ) -> None:
        self._library = library
        self._num_outputs = weight.num_outputs
        self._weights = library.pack(weight, dtype, memory)
        self._bias = pack_bias(bias, PANEL)

    @property
    def num_bytes(self) -> int:
        return self._weights.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self._library.product(x, self._weights, self._bias, self._num_outputs)


class Int8Linear:
    """Weights as int8 with a scale per output and group of inputs; rows of x become 16-bit integers in the same groups.

    Sums within a group are exact integers. So a row's result depends on nothing but the row.
    """

    def __init__(
        self, library: NativeLibrary, weight: MatrixRows, bias: Tensor | None, group: int, memory: LargePages
    ) -> None:
        self._library = library
        self._matrix = library.pack_int8(weight, group, memory)
        self._bias = pack_bias(bias, INT8_PANEL)

    @property
    def num_bytes(self) -> int:
        return self._matrix.values.nbytes + self._matrix.scales.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self._library.product_int8(x, self._matrix, self._bias)


class TorchLinear:
    """Weights [num_outputs, num_inputs] as float32, bias [num_outputs] or None, with torch's own products.

    On a CPU, oneDNN with weights packed once: at few rows it reads them nearly twice as fast as MKL, which packs them
    at every call, and from two rows on it sums rows alike. Where it is missing or fails the check, torch's own product.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, rule: RowRule | None = None) -> None:
        self._shape = (weight.shape[0], weight.shape[1])
        self._bias = bias
        self._is_packed = weight.device.type == "cpu" and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self._is_packed else weight.contiguous()
        if rule is None:
            rule = RowRule(1, holds=False) if weight.is_cuda else self._find_rule(weight)
        elif rule.is_unpacked:
            self._is_packed, self._weight = False, weight.contiguous()
        self.rule = rule

    def _find_rule(self, weight: Tensor) -> RowRule:
        num_outputs, num_inputs = self._shape
        rule = find_row_rule(self._multiply, num_inputs, num_outputs)
        if self._is_packed and (rule is None or rule.max_rows != NO_LIMIT):
            self._is_packed, self._weight = False, weight.contiguous()
            rule = find_row_rule(self._multiply, num_inputs, num_outputs)
            rule = rule and rule._replace(is_unpacked=True)
        if rule is None:
            _log.warning(
                "no row rule makes the %d -> %d product independent of its batch on this machine; "
                "answers may differ in the last bits between batches",
                num_inputs,
                num_outputs,
            )
        return rule or RowRule(1, is_unpacked=True, holds=False)

    @property
    def num_bytes(self) -> int:
        return self._shape[0] * self._shape[1] * torch.float32.itemsize

    def __call__(self, x: Tensor) -> Tensor:
        return self.rule.apply(self._multiply, x)

    def _multiply(self, x: Tensor) -> Tensor:
        if self._is_packed:
            packed: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return packed
        return functional.linear(x, self._weight, self._bias)


class Table(Protocol):
    """Rows of a matrix by number."""

    def __call__(self, numbers: Tensor) -> Tensor:
        """numbers [M] int64 -> [M, width] float32."""


class KeptTable:
    """A matrix in memory."""

    def __init__(self, matrix: Tensor) -> None:
        self._matrix = matrix

    def __call__(self, numbers: Tensor) -> Tensor:
        return functional.embedding(numbers, self._matrix).float()


class StoredTable:
    """A matrix where it lies in its file, rounded to `dtype`: a step wants few rows, and most are never wanted."""

    def __init__(self, library: NativeLibrary, matrix: MatrixRows, dtype: torch.dtype) -> None:
        self._library = library
        self._matrix = matrix
        self._dtype = dtype

    def __call__(self, numbers: Tensor) -> Tensor:
        return self._library.unpack(self._matrix.taken(numbers.numpy()), self._dtype).float()


class LinearMaker:
    """Makes a model's linears of one kind. Layers share their shapes, so torch's row rules are found once for each."""

    def __init__(self, kind: Weights, library: NativeLibrary | None) -> None:
        if kind is Weights.INT8 and library is None:
            raise ConfigurationError(
                "int8 weights need the native kernels (an x86-64 CPU with AVX2, and a C++ compiler); "
                "use --weights fp32 or fp16"
            )
        self._kind = kind
        self._library = library
        self._memory = LargePages()
        self._rules: dict[tuple[int, ...], RowRule] = {}

    @property
    def is_row_invariant(self) -> bool:
        """Whether rows are independent, bit for bit, in all that was made so far. On a GPU nobody has looked."""
        return all(rule.holds for rule in self._rules.values())

    @property
    def _dtype(self) -> torch.dtype:
        """What weights are kept as; of int8 what they are made of."""
        return torch.float16 if self._kind is Weights.FP16 else torch.float32

    def table(self, matrix: StoredMatrix) -> Table:
        """Rows of a matrix by number, with the values that products with it would take."""
        if self._library is None:
            return KeptTable(matrix.read(self._dtype))
        return StoredTable(self._library, matrix.rows(), self._dtype)

    def make(self, weight: Tensor | StoredMatrix, bias: Tensor | None = None, *, is_head: bool = False) -> Linear:
        """weight [num_outputs, num_inputs], bias [num_outputs]. is_head: what it gives are scores, no layer follows.

        As int8 the errors of a head are all seen, and only rows that sample pay for it: its groups are finer.
        """
        if self._library is None:
            return self._torch_linear(weight if isinstance(weight, Tensor) else weight.read(self._dtype), bias)
        rows = rows_of(weight) if isinstance(weight, Tensor) else weight.rows()
        if self._kind is Weights.INT8:
            return Int8Linear(self._library, rows, bias, FINE_GROUP if is_head else GROUP, self._memory)
        return PackedLinear(self._library, rows, bias, self._dtype, self._memory)

    def _torch_linear(self, weight: Tensor, bias: Tensor | None) -> TorchLinear:
        """float16 weights keep their values here, not their size: torch has no such product for a CPU."""
        weight = weight.to(self._dtype).to(torch.float32)
        linear = TorchLinear(weight, bias, self._rules.get(tuple(weight.shape)))
        self._rules.setdefault(tuple(weight.shape), linear.rule)
        return linear

"""A matrix of weights where it lies: each row by its address and the way it is stored, whatever file it is of."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from disagg.core.errors import InternalFault
from disagg.modelfiles.gguf_kinds import BF16, F16, F32, Q4_0, Q4_1, Q8_0

# Ways of storing a row that the native kernels read, in GGUF's numbers, and how many elements lie together in each.
BLOCK_ELEMENTS = {kind.number: kind.block_elements for kind in (F32, F16, Q4_0, Q4_1, Q8_0, BF16)}
_NUMBERS = {torch.float32: F32.number, torch.float16: F16.number, torch.bfloat16: BF16.number}

Order = npt.NDArray[np.int64]


class MatrixRows(NamedTuple):
    """[num_outputs, num_inputs]. What the addresses point into lives as long as `memory` does."""

    num_inputs: int
    addresses: npt.NDArray[np.int64]  # [num_outputs]
    kinds: npt.NDArray[np.uint8]  # [num_outputs]
    memory: tuple[object, ...]

    @property
    def num_outputs(self) -> int:
        return len(self.addresses)

    def taken(self, order: Order) -> "MatrixRows":
        """Some rows of it, in this order."""
        return self._replace(addresses=self.addresses[order], kinds=self.kinds[order])


def stored_rows(start: int, row_bytes: int, order: Order, num_inputs: int, kind: int, memory: object) -> MatrixRows:
    """Rows of one kind that lie row_bytes apart from the address `start` on, taken in `order` [num_outputs]."""
    return MatrixRows(num_inputs, start + order * row_bytes, np.full(len(order), kind, np.uint8), (memory,))


def rows_of(tensor: Tensor) -> MatrixRows:
    """Of a tensor [num_outputs, num_inputs] in host memory: float32, float16 or bfloat16."""
    kind = _NUMBERS.get(tensor.dtype)
    if kind is None or tensor.dim() != 2 or tensor.device.type != "cpu":
        raise InternalFault(f"a tensor of {tensor.dtype} {tuple(tensor.shape)} on {tensor.device} has no rows to read")
    tensor = tensor.contiguous()
    num_outputs, num_inputs = tensor.shape
    order = np.arange(num_outputs, dtype=np.int64)
    return stored_rows(tensor.data_ptr(), num_inputs * tensor.element_size(), order, num_inputs, kind, tensor)


def joined(parts: Sequence[MatrixRows]) -> MatrixRows:
    """Matrices of one width below each other."""
    widths = {part.num_inputs for part in parts}
    if len(widths) != 1:
        raise InternalFault(f"rows of {sorted(widths)} inputs are no matrix")
    return MatrixRows(
        widths.pop(),
        np.concatenate([part.addresses for part in parts]),
        np.concatenate([part.kinds for part in parts]),
        tuple(memory for part in parts for memory in part.memory),
    )

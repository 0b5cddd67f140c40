"""Keeping one row's result independent of the other rows of a matrix product.

A matrix library picks its kernel by the number of rows, and kernels sum in different orders: the same row gets other
last bits in another batch. Two measures, both checked on the spot rather than believed:

1. Intel's MKL is asked for its strict reproducible mode, in which rows are independent (and threads do not matter).
   It reads the wish at its first product, hence at the import of this module.
2. A *row rule* pads small products and cuts large ones. `find_row_rule` takes the cheapest rule that holds on this
   machine for these weights: typically none or "at least 2 rows", "at least 4" or "at least 16" with other libraries.
"""

import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

MKL_MODE_VARIABLE = "MKL_CBWR"
MKL_STRICT_MODE = "AUTO,STRICT"
NO_LIMIT = 1 << 62

# Numbers of rows at which kernels are known to change over.
PROBE_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 24, 31, 33, 48, 57, 64, 100, 128, 256)
PROBE_FLOPS = 4e9  # what one check may cost


def ask_for_strict_mode() -> None:
    """Set MKL's mode for this process, unless the operator has. Only on Intel: elsewhere MKL would turn slow."""
    cpuinfo = Path("/proc/cpuinfo")
    if platform.machine() == "x86_64" and cpuinfo.is_file() and "GenuineIntel" in cpuinfo.read_text():
        os.environ.setdefault(MKL_MODE_VARIABLE, MKL_STRICT_MODE)


ask_for_strict_mode()


class RowRule(NamedTuple):
    """Products are done with min_rows to max_rows rows at a time; missing rows are zeros."""

    min_rows: int
    max_rows: int = NO_LIMIT
    is_unpacked: bool = False  # holds for weights in their plain layout only
    holds: bool = True  # False: taken for want of one that keeps rows independent

    def apply(self, multiply: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """multiply(x) for x [M, K] -> [M, N], by this rule."""
        num_rows = x.shape[0]
        if num_rows <= self.max_rows:
            return self._padded(multiply, x)
        return torch.cat([self._padded(multiply, part) for part in torch.split(x, self.max_rows)])

    def _padded(self, multiply: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        num_rows = x.shape[0]
        if num_rows >= self.min_rows:
            return multiply(x)
        return multiply(functional.pad(x, (0, 0, 0, self.min_rows - num_rows)))[:num_rows]


# Cheapest first. The last one makes every product the same shape.
ROW_RULES = (RowRule(1), RowRule(2), RowRule(4), RowRule(8), RowRule(16), RowRule(16, 48), RowRule(16, 16))


def find_row_rule(multiply: Callable[[Tensor], Tensor], num_inputs: int, num_outputs: int) -> RowRule | None:
    """The cheapest rule that keeps rows of multiply, [M, num_inputs] -> [M, num_outputs], independent here, if any."""
    budget = int(PROBE_FLOPS / (2 * num_inputs * num_outputs))
    sizes = [rows for rows in PROBE_ROWS if 3 * rows <= max(budget, 3 * 24)]
    generator = torch.Generator().manual_seed(num_inputs)
    x = torch.randn(2 * sizes[-1], num_inputs, generator=generator)
    for rule in ROW_RULES:
        if is_row_invariant(lambda part, rule=rule: rule.apply(multiply, part), x, sizes):  # type: ignore[misc]
            return rule
    return None


def is_row_invariant(function: Callable[[Tensor], Tensor], x: Tensor, sizes: Sequence[int]) -> bool:
    """Whether function gives each row of x [M, K] the same bits alone and among others, from either end."""
    reference = function(x)
    return all(
        torch.equal(function(x[:size]), reference[:size]) and torch.equal(function(x[-size:]), reference[-size:])
        for size in sizes
    )

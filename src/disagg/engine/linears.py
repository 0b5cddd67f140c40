"""Matrix products with a model's weights. One kind per way of storing them; all are batch-invariant on a CPU."""

import logging
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from disagg.core.errors import ConfigurationError
from disagg.engine.invariance import NO_LIMIT, RowRule, find_row_rule

_log = logging.getLogger(__name__)

BYTES_PER_FLOAT32 = 4


class Linear(Protocol):
    """y = x W^T + b. Row m of y depends on row m of x only, bit for bit."""

    @property
    def num_bytes(self) -> int:
        """Bytes of weights that one call reads."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, num_inputs] -> [M, num_outputs], both float32."""


class Float32Linear:
    """Weights [num_outputs, num_inputs] as float32, bias [num_outputs] or None.

    On a CPU, oneDNN with weights packed once: at few rows it reads them nearly twice as fast as MKL, which packs them
    at every call, and from two rows on it sums rows alike. Where it is missing or fails the check, torch's own product.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, rule: RowRule | None = None) -> None:
        self._shape = (weight.shape[0], weight.shape[1])
        self._bias = bias
        self._is_packed = weight.device.type == "cpu" and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self._is_packed else weight.contiguous()
        if rule is None:
            rule = RowRule(1) if weight.is_cuda else self._find_rule(weight)
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
        return rule or RowRule(1, is_unpacked=True)

    @property
    def num_bytes(self) -> int:
        return self._shape[0] * self._shape[1] * BYTES_PER_FLOAT32

    def __call__(self, x: Tensor) -> Tensor:
        return self.rule.apply(self._multiply, x)

    def _multiply(self, x: Tensor) -> Tensor:
        if self._is_packed:
            packed: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return packed
        return functional.linear(x, self._weight, self._bias)


LinearFactory = Callable[[Tensor, Tensor | None, RowRule | None], Linear]

LINEARS: dict[str, LinearFactory] = {"float32": Float32Linear}


def linear_factory(kind: str) -> LinearFactory:
    """The registered kind of linear. Raises ConfigurationError for an unknown one."""
    if kind not in LINEARS:
        raise ConfigurationError(f"linear kind {kind!r} is unknown; choose one of: {', '.join(LINEARS)}")
    return LINEARS[kind]

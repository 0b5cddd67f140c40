"""Paged attention by the native kernel: each key and value is read once, where it lies.

Keys are taken in tiles of 64 at fixed positions, softmax is brought along from tile to tile (Milakov and Gimelshein,
2018), sums of 512 keys are formed apart and merged in order. So a row sees the same sums however its prompt was cut.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from disagg.engine.arena import KvArena
from disagg.engine.attention import RowSpan
from disagg.engine.native.library import NativeLibrary
from disagg.engine.tables import BlockTables


class NativePlan(NamedTuple):
    """spans [4, sequences]: first row, number of rows, position of the first, offset of the block table."""

    spans: Tensor
    tables: Tensor


class NativeAttention:
    """head_dim is a multiple of 16, the cache float32 or float16."""

    is_row_invariant = True  # sums run in order of position, in tiles that begin at fixed ones

    def __init__(self, library: NativeLibrary, arena: KvArena, tables: BlockTables) -> None:
        self._library = library
        self._arena = arena
        self._tables = tables

    def plan(self, spans: Sequence[RowSpan]) -> NativePlan:
        array = np.array(spans, np.int64).T.copy()
        array[3] *= self._tables.blocks.shape[1]
        return NativePlan(torch.from_numpy(array), torch.from_numpy(self._tables.blocks))

    def attend(self, layer: int, queries: Tensor, plan: object) -> Tensor:
        assert isinstance(plan, NativePlan)
        cache = self._arena.by_slot(layer)
        return self._library.attend(queries, plan.spans, plan.tables, self._arena.layout.block_size, cache)

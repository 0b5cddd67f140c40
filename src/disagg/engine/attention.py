"""Paged attention in plain torch: each row's result is independent of the batch and of how the prompt was chunked.

Keys are taken in tiles of TILE tokens at fixed positions of the sequence:

    scores = q K^T      all tiles in one product; a column does not depend on how many there are
    p = softmax         masked places are exact zeros, so further masked tiles add nothing
    out = sum_t p_t V_t one product of TILE tokens per tile, added in order of position

so a row sees the same sums whether it is decoded alone, beside a longer neighbour, or prefilled in a chunk. Single
tokens are batched over sequences of similar length; a chunk is cut into blocks of rows, which skip later tiles.

A place past a sequence's end is never read: its row of the gather points at the sequence's own first token. So what
lies in unwritten or foreign blocks (even NaN) cannot reach a result.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from disagg.engine.arena import KvArena
from disagg.engine.invariance import is_row_invariant
from disagg.engine.tables import BlockTables

TILE = 128  # tokens
MAX_BLOCK_ROWS = 256  # query rows of one chunk that are done together
MAX_SCORES = 4 << 20  # elements of one block's scores: what keeps a long prompt's memory bounded
MIN_ROWS_CANDIDATES = (2, 4, 8, 16)  # one row would be a matrix-vector product, which sums in another order


class RowSpan(NamedTuple):
    """One sequence's tokens of a step: where its KV lies and which rows of the step are its own."""

    start: int  # first row in the step
    num_tokens: int
    position: int  # of the first token
    table_row: int  # of BlockTables


class RowBlock(NamedTuple):
    """Query rows that are done together. mask is added to the scores from column first_masked on."""

    start: int  # first row in the step; sequence b's rows follow those of sequence b-1
    num_rows: int  # of each sequence
    width: int  # keys, a multiple of TILE
    first_masked: int
    mask: Tensor | None  # [sequences, 1, rows * group or 1, width - first_masked]


class AttentionGroup(NamedTuple):
    """Sequences whose keys are gathered together. gather [sequences * kv heads * width] counts rows of the arena."""

    num_sequences: int
    width: int
    gather: Tensor
    blocks: tuple[RowBlock, ...]


class TiledPlan(NamedTuple):
    """Of one step."""

    groups: tuple[AttentionGroup, ...]


class AttentionBackend(Protocol):
    """Attention over the arena. The plan is made once per step and used in every layer; only its maker looks inside."""

    @property
    def is_row_invariant(self) -> bool:
        """Whether a row's result is independent of its batch and its chunk, bit for bit."""

    def plan(self, spans: Sequence[RowSpan]) -> object:
        """Spans in the order of their rows; single tokens first, shortest first, batch best."""

    def attend(self, layer: int, queries: Tensor, plan: object) -> Tensor:
        """Queries [M, num_heads, head_dim] against the stored keys -> [M, num_heads * head_dim]."""


class TiledAttention:
    """The pure-torch back end. num_heads is a multiple of the arena's num_kv_heads."""

    def __init__(self, arena: KvArena, tables: BlockTables, num_heads: int, min_rows: int | None = None) -> None:
        self._arena = arena
        self._tables = tables
        self._num_kv_heads = arena.layout.num_kv_heads
        self._group = num_heads // self._num_kv_heads  # query heads that share one KV head
        self._head_dim = arena.layout.head_dim
        self._block_size = arena.layout.block_size
        self._scale = self._head_dim**-0.5
        self._device = arena.tensor.device
        is_cpu = self._device.type == "cpu"
        found = find_min_rows(self._num_kv_heads, self._head_dim) if min_rows is None and is_cpu else min_rows
        self.is_row_invariant = found is not None  # on a GPU nobody has looked
        self.min_rows = found or (MIN_ROWS_CANDIDATES[-1] if is_cpu else 1)

    def plan(self, spans: Sequence[RowSpan]) -> TiledPlan:
        groups: list[AttentionGroup] = []
        singles: list[RowSpan] = []
        for span in spans:
            is_single = span.num_tokens == 1
            if singles and (not is_single or _num_tiles(span) > 2 * _num_tiles(singles[0])):
                groups.append(self._decode_group(singles))
                singles = []
            if is_single:
                singles.append(span)
            else:
                groups.append(self._chunk_group(span))
        if singles:
            groups.append(self._decode_group(singles))
        return TiledPlan(tuple(groups))

    def _decode_group(self, spans: Sequence[RowSpan]) -> AttentionGroup:
        lengths = np.array([span.position + 1 for span in spans])
        width = TILE * max(_num_tiles(span) for span in spans)
        first_masked = int(lengths.min())
        mask = _visible_up_to(lengths - 1, first_masked, width)[:, None, None, :]
        block = RowBlock(spans[0].start, 1, width, first_masked, self._to_device(mask) if mask.size else None)
        return AttentionGroup(len(spans), width, self._gather_index(spans, width), (block,))

    def _chunk_group(self, span: RowSpan) -> AttentionGroup:
        width = TILE * _num_tiles(span)
        heads = self._num_kv_heads * self._group
        step = max(16, min(MAX_BLOCK_ROWS, MAX_SCORES // (heads * width)))
        blocks = tuple(
            self._row_block(span, first, min(step, span.num_tokens - first))
            for first in range(0, span.num_tokens, step)
        )
        return AttentionGroup(1, width, self._gather_index([span], width), blocks)

    def _row_block(self, span: RowSpan, first: int, num_rows: int) -> RowBlock:
        positions = span.position + np.arange(first, first + num_rows)
        width = -(-int(positions[-1] + 1) // TILE) * TILE
        first_masked = int(positions[0]) + 1
        mask = np.repeat(_visible_up_to(positions, first_masked, width), self._group, axis=0)
        missing = self.min_rows - len(mask)
        if missing > 0:
            mask = np.pad(mask, ((0, missing), (0, 0)))
        block_mask = self._to_device(mask[None, None]) if mask.size else None
        return RowBlock(span.start + first, num_rows, width, first_masked, block_mask)

    def _gather_index(self, spans: Sequence[RowSpan], width: int) -> Tensor:
        slots = np.empty((len(spans), 1, width), np.int64)
        for row, span in zip(slots[:, 0], spans, strict=True):
            positions = np.arange(span.position + span.num_tokens)
            slots_of = self._tables.slots(np.full_like(positions, span.table_row), positions, self._block_size)
            row[: len(positions)] = slots_of
            row[len(positions) :] = slots_of[0]
        heads = np.arange(self._num_kv_heads)[:, None]
        return self._to_device((slots * self._num_kv_heads + heads).reshape(-1))

    def _to_device(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    def attend(self, layer: int, queries: Tensor, plan: object) -> Tensor:
        assert isinstance(plan, TiledPlan)
        key_rows, value_rows = self._arena.head_rows(layer)
        queries = queries * self._scale
        out = torch.empty_like(queries)
        for group in plan.groups:
            shape = (group.num_sequences * self._num_kv_heads, group.width, self._head_dim)
            keys = key_rows.index_select(0, group.gather).view(shape).to(queries.dtype)
            values = value_rows.index_select(0, group.gather).view(shape).to(queries.dtype)
            for block in group.blocks:
                stop = block.start + group.num_sequences * block.num_rows
                out[block.start : stop] = self._block(queries[block.start : stop], keys, values, block)
        return out.flatten(1)

    def _block(self, queries: Tensor, keys: Tensor, values: Tensor, block: RowBlock) -> Tensor:
        """One block of rows, [B * R, heads, head_dim] -> same. Heads that share a KV head are rows of one product."""
        kv_heads, group, head_dim, rows = self._num_kv_heads, self._group, self._head_dim, block.num_rows
        split = queries.view(-1, rows, kv_heads, group, head_dim).transpose(1, 2)
        stacked = split.reshape(-1, rows * group, head_dim)
        missing = self.min_rows - rows * group
        if missing > 0:
            stacked = pad(stacked, (0, 0, 0, missing))
        keys, values = keys[:, : block.width], values[:, : block.width]
        mixed = attend_tiles(stacked, keys, values, block.first_masked, block.mask)[:, : rows * group]
        return mixed.reshape(-1, kv_heads, rows, group, head_dim).transpose(1, 2).reshape(queries.shape)


def attend_tiles(queries: Tensor, keys: Tensor, values: Tensor, first_masked: int, mask: Tensor | None) -> Tensor:
    """Queries [P, M, D] (scaled), keys and values [P, S, D], S a multiple of TILE -> [P, M, D].

    P counts (sequence, kv head) pairs; mask [sequences, 1, M or 1, S - first_masked] is 0 or -inf.
    """
    scores = torch.bmm(queries, keys.transpose(1, 2))
    if mask is not None:
        num_sequences = mask.shape[0]
        scores.view(num_sequences, -1, *scores.shape[1:])[..., first_masked:].add_(mask)
    weights = torch.softmax(scores, -1)
    out = torch.bmm(weights[..., :TILE], values[:, :TILE])
    for start in range(TILE, keys.shape[1], TILE):
        out.baddbmm_(weights[..., start : start + TILE], values[:, start : start + TILE])
    return out


def find_min_rows(num_kv_heads: int, head_dim: int) -> int | None:
    """Fewest rows per product at which attention rows are independent of each other on this CPU; None: not found."""
    generator = torch.Generator().manual_seed(head_dim)
    keys, values = torch.randn(2, num_kv_heads, 2 * TILE, head_dim, generator=generator).unbind(0)
    queries = torch.randn(130, num_kv_heads * head_dim, generator=generator)
    for min_rows in MIN_ROWS_CANDIDATES:

        def attend(x: Tensor, min_rows: int = min_rows) -> Tensor:
            padded = pad(x, (0, 0, 0, max(0, min_rows - len(x))))
            split = padded.view(len(padded), num_kv_heads, head_dim).transpose(0, 1).contiguous()
            return attend_tiles(split, keys, values, 2 * TILE, None).transpose(0, 1)[: len(x)]

        if is_row_invariant(attend, queries, (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 21, 48, 64, 100)):
            return min_rows
    return None


def _num_tiles(span: RowSpan) -> int:
    return -(-(span.position + span.num_tokens) // TILE)


def _visible_up_to(positions: npt.NDArray[np.int64], start: int, stop: int) -> npt.NDArray[np.float32]:
    """[len(positions), stop - start]: 0 at columns up to the row's position, -inf after it."""
    columns = np.arange(start, stop)
    return np.where(columns <= positions[:, None], np.float32(0), np.float32(-np.inf))

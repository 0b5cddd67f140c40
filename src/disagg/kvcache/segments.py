"""Where a span lies in the arena of one rank, as byte runs in wire order.

Wire order is layer, keys before values, then the arena's own: token before head, or (KvOrder.HEADS) head before token.
Two arenas whose wire order is the same exchange bytes as they are, however their blocks are cut.

A row of `row_bytes` bytes is one head of one token. Every order is a choice of strides, in rows:

    order     layer        kv       block       token   head
    PLANES    planes*N*B*H   N*B*H  B*H         H       1
    BLOCKS    planes*N*B*H   B*H    planes*B*H  H       1
    HEADS     planes*N*B*H   N*B*H  B*H         1       B        N blocks of B tokens, H heads
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from disagg.core.errors import InternalFault
from disagg.core.ids import BlockId
from disagg.core.spans import KvLayout, KvOrder, Span
from disagg.kvcache.memory import Segment


class RowStrides(NamedTuple):
    """Rows between two neighbours in each dimension of an arena."""

    layer: int
    kv: int
    block: int
    token: int
    head: int


def row_strides(layout: KvLayout, num_blocks: int) -> RowStrides:
    """Of an arena of num_blocks blocks. Raises InternalFault for an order that nobody here knows."""
    heads, tokens, planes = layout.num_kv_heads, layout.block_size, layout.num_planes
    block = tokens * heads
    layer, plane = planes * num_blocks * block, num_blocks * block
    if layout.order == KvOrder.PLANES.value:
        return RowStrides(layer, plane, block, heads, 1)
    if layout.order == KvOrder.BLOCKS.value:
        return RowStrides(layer, block, planes * block, heads, 1)
    if layout.order == KvOrder.HEADS.value:
        return RowStrides(layer, plane, block, 1, tokens)
    raise InternalFault(f"KV order {layout.order!r} is not one of {', '.join(KvOrder)}; such a pair must be refused")


def span_segments(
    layout: KvLayout,
    num_blocks: int,
    blocks: Sequence[BlockId],
    span: Span,
    row_bytes: int | None = None,
    base: int = 0,
) -> tuple[Segment, ...]:
    """Byte runs of `span` of a sequence whose i-th block is blocks[i]. Neighbouring runs are merged.

    row_bytes and base: for an arena of as many rows of another size that begins at another offset.
    """
    span = layout.clipped(span)
    if span.token_stop > len(blocks) * layout.block_size or span.layer_stop > layout.num_layers:
        raise InternalFault(
            f"{span} reaches past {len(blocks)} blocks of {layout.block_size} tokens and {layout.num_layers} layers"
        )
    if span.is_empty:
        return ()
    strides, size = row_strides(layout, num_blocks), row_bytes or layout.row_bytes
    tokens, heads = (span.token_start, span.token_stop), (span.head_start, span.head_stop)
    runs = _plane_runs(layout, num_blocks, tuple(blocks), tokens, heads, size)
    segments: list[Segment] = []
    for layer in range(span.layer_start, span.layer_stop):
        for plane in range(layout.num_planes):
            start = base + (layer * strides.layer + plane * strides.kv) * size
            segments.extend(Segment(start + offset, length) for offset, length in runs)
    return tuple(segments)


def block_segments(
    layout: KvLayout, num_blocks: int, blocks: Sequence[BlockId], row_bytes: int | None = None, base: int = 0
) -> tuple[Segment, ...]:
    """Byte runs of whole blocks in all layers, sorted by offset but for KvOrder.BLOCKS; row_bytes, base as above."""
    strides, size = row_strides(layout, num_blocks), row_bytes or layout.row_bytes
    length = layout.block_size * layout.num_kv_heads * size
    runs: list[Segment] = []
    for block in sorted(blocks):
        _append(runs, block * strides.block * size, length)
    return tuple(
        Segment(base + (layer * strides.layer + plane * strides.kv) * size + offset, num_bytes)
        for layer in range(layout.num_layers)
        for plane in range(layout.num_planes)
        for offset, num_bytes in runs
    )


@lru_cache(maxsize=256)  # a chunk is pushed in several groups of layers; all have the same runs
def _plane_runs(
    layout: KvLayout,
    num_blocks: int,
    blocks: tuple[BlockId, ...],
    tokens: tuple[int, int],
    heads: tuple[int, int],
    row_bytes: int,
) -> tuple[Segment, ...]:
    """Byte runs inside one layer's keys (or values)."""
    strides, runs = row_strides(layout, num_blocks), list[Segment]()
    pieces = _block_pieces(layout.block_size, blocks, *tokens)
    if layout.is_head_major:
        for head in range(*heads):
            for block, within, count in pieces:
                row = block * strides.block + head * strides.head + within * strides.token
                _append(runs, row * row_bytes, count * row_bytes)
    elif heads == (0, layout.num_kv_heads):
        for block, within, count in pieces:
            row = block * strides.block + within * strides.token
            _append(runs, row * row_bytes, count * strides.token * row_bytes)
    else:
        for block, within, count in pieces:
            for token in range(within, within + count):
                row = block * strides.block + token * strides.token + heads[0]
                _append(runs, row * row_bytes, (heads[1] - heads[0]) * row_bytes)
    return tuple(runs)


def _block_pieces(
    block_size: int, blocks: tuple[BlockId, ...], token_start: int, token_stop: int
) -> list[tuple[BlockId, int, int]]:
    """(block, first place in it, places) of a token range."""
    pieces, token = [], token_start
    while token < token_stop:
        index, within = divmod(token, block_size)
        count = min(block_size - within, token_stop - token)
        pieces.append((blocks[index], within, count))
        token += count
    return pieces


def _append(runs: list[Segment], offset: int, length: int) -> None:
    if runs and runs[-1].offset + runs[-1].length == offset:
        runs[-1] = Segment(runs[-1].offset, runs[-1].length + length)
    else:
        runs.append(Segment(offset, length))

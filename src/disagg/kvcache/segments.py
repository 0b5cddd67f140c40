"""Where a span lies in an arena, as byte runs in wire order: layer, then keys before values, then token."""

from collections.abc import Sequence
from functools import lru_cache

from disagg.core.errors import InternalFault
from disagg.core.ids import BlockId
from disagg.core.spans import KvLayout, Span
from disagg.kvcache.memory import Segment


def span_segments(layout: KvLayout, num_blocks: int, blocks: Sequence[BlockId], span: Span) -> tuple[Segment, ...]:
    """Byte runs of `span` of a sequence whose i-th block is blocks[i]. Neighbouring runs are merged."""
    if span.token_stop > len(blocks) * layout.block_size or span.layer_stop > layout.num_layers:
        raise InternalFault(
            f"{span} reaches past {len(blocks)} blocks of {layout.block_size} tokens and {layout.num_layers} layers"
        )
    runs = _token_runs(layout, tuple(blocks), span.token_start, span.token_stop)
    plane_bytes = num_blocks * layout.block_bytes
    segments: list[Segment] = []
    for plane in range(2 * span.layer_start, 2 * span.layer_stop):
        base = plane * plane_bytes
        segments.extend(Segment(base + offset, length) for offset, length in runs)
    return tuple(segments)


def block_segments(layout: KvLayout, num_blocks: int, blocks: Sequence[BlockId]) -> tuple[Segment, ...]:
    """Byte runs of whole blocks in all layers, sorted by offset."""
    span = Span(0, len(blocks) * layout.block_size, 0, layout.num_layers)
    return span_segments(layout, num_blocks, sorted(blocks), span)


@lru_cache(maxsize=256)  # a chunk is pushed in several groups of layers; all have the same runs
def _token_runs(
    layout: KvLayout, blocks: tuple[BlockId, ...], token_start: int, token_stop: int
) -> tuple[Segment, ...]:
    """Byte runs inside one (layer, K or V) plane."""
    runs: list[Segment] = []
    token = token_start
    while token < token_stop:
        index, within = divmod(token, layout.block_size)
        count = min(layout.block_size - within, token_stop - token)
        offset = blocks[index] * layout.block_bytes + within * layout.token_bytes
        length = count * layout.token_bytes
        if runs and runs[-1].offset + runs[-1].length == offset:
            runs[-1] = Segment(runs[-1].offset, runs[-1].length + length)
        else:
            runs.append(Segment(offset, length))
        token += count
    return tuple(runs)

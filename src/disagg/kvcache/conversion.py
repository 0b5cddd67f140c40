"""What is to be moved when two workers keep KV in different ways. Integers only; engine.span_conversion does it.

A push of one span becomes one piece per pair of ranks that share layers and heads. The writer of a piece produces what
the destination keeps, so that it lands in place:

    same dtype and wire order     byte runs of both arenas, whatever their block sizes, shards and plane order
    another dtype or row order    a read: the source gathers and turns its rows while they are sent
    a compressed wire             a read; and destination segments in the *coded arena*: as many rows of another size,
                                  behind the end of the arena. Whoever lands there decodes row by row into the arena.
"""

import math
from typing import Protocol

import msgspec

from disagg.core.formats import KvWire
from disagg.core.ids import BlockId
from disagg.core.spans import KvLayout, Span
from disagg.kvcache.memory import Memory, Segment
from disagg.kvcache.segments import block_segments, span_segments


class SpanRead(msgspec.Struct, frozen=True):
    """Rows of one rank's arena, to be turned into what the destination takes."""

    blocks: tuple[BlockId, ...]
    span: Span  # in this arena's own layers and heads
    dtype: str  # of the destination's arena
    wire: KvWire
    is_head_major: bool  # order of the rows that come out: layer, plane, then head and token or token and head
    num_bytes: int  # that come out


class ConvertingMemory(Memory, Protocol):
    """An arena out of which also spans that must be turned first can be read, like any other bytes."""

    def open_read(self, read: SpanRead) -> Segment:
        """A segment that stands for the read until close_read(); gather() of it turns the rows, on its own thread."""

    def close_read(self, segment: Segment) -> None:
        """Nobody gathers it any more. Idempotent."""


class Holding(msgspec.Struct, frozen=True):
    """Where one worker keeps a sequence: the same blocks in every rank's arena."""

    layout: KvLayout
    num_blocks: int  # of each arena
    blocks: tuple[BlockId, ...]


class Piece(msgspec.Struct, frozen=True):
    """What one rank writes into one rank's arena. Both sides take the same number of bytes."""

    source_rank: int
    destination_rank: int
    span: Span
    source: tuple[Segment, ...] | SpanRead
    destination: tuple[Segment, ...]


def rank_pairs(source: KvLayout, destination: KvLayout, span: Span) -> list[tuple[int, int, Span]]:
    """(source rank, destination rank, what both keep of `span`), in order of ranks."""
    pairs = []
    for mine in range(source.num_ranks):
        part = span.intersection(source.rank_span(mine))
        for theirs in range(destination.num_ranks):
            both = part.intersection(destination.rank_span(theirs))
            if not both.is_empty:
                pairs.append((mine, theirs, both))
    return pairs


def plan_pieces(source: Holding, destination: Holding, span: Span, wire: KvWire) -> list[Piece]:
    """How `span` gets from one to the other. Raises InternalFault for a span outside the blocks or layers."""
    pieces = []
    for mine, theirs, part in rank_pairs(source.layout, destination.layout, span):
        read_from, land_in = source.layout.rank_layout(mine), destination.layout.rank_layout(theirs)
        local = _within(part, source.layout.rank_span(mine))
        target = _within(part, destination.layout.rank_span(theirs))
        row_bytes, base = landing_rows(land_in, destination.num_blocks, wire)
        segments = span_segments(land_in, destination.num_blocks, destination.blocks, target, row_bytes, base)
        found: tuple[Segment, ...] | SpanRead
        if wire is KvWire.NATIVE and is_same_on_wire(read_from, land_in, part):
            found = span_segments(read_from, source.num_blocks, source.blocks, local)
        else:
            num_bytes = land_in.span_bytes(target, wire)
            found = SpanRead(source.blocks, local, land_in.dtype, wire, land_in.is_head_major, num_bytes)
        pieces.append(Piece(mine, theirs, part, found, segments))
    return pieces


def shared_heads(one: KvLayout, other: KvLayout) -> int:
    """Kv heads that every piece between the two carries all or none of."""
    return one.num_kv_heads // math.lcm(one.head_shards, other.head_shards)


def is_same_on_wire(source: KvLayout, destination: KvLayout, span: Span) -> bool:
    """Whether a span's bytes are the same in both arenas' wire order."""
    is_same_order = source.is_head_major == destination.is_head_major or span.num_heads == 1 or span.num_tokens == 1
    return source.dtype == destination.dtype and is_same_order


def landing_rows(layout: KvLayout, num_blocks: int, wire: KvWire) -> tuple[int, int]:
    """Bytes of a row and offset of the first one, where bytes for one rank's arena land."""
    if wire is KvWire.NATIVE:
        return layout.row_bytes, 0
    return layout.wire_row_bytes(wire), layout.arena_bytes(num_blocks)


def landing_blocks(layout: KvLayout, num_blocks: int, blocks: tuple[BlockId, ...], wire: KvWire) -> tuple[Segment, ...]:
    """What a peer may write to when it may fill these blocks of one rank's arena."""
    return block_segments(layout, num_blocks, blocks, *landing_rows(layout, num_blocks, wire))


def lossy_form(source: KvLayout, destination: KvLayout, wire: KvWire) -> str:
    """What KV has lost when it has come from `source`; "" for nothing. Seeds the hashes of its blocks."""
    if wire is not KvWire.NATIVE:
        return wire.value
    if destination.dtype in (source.dtype, "float32"):
        return ""
    return f"{source.dtype} as {destination.dtype}"


def _within(span: Span, part: Span) -> Span:
    """A span of the whole in the layers and heads of one rank's arena."""
    return Span(
        span.token_start,
        span.token_stop,
        span.layer_start - part.layer_start,
        span.layer_stop - part.layer_start,
        span.head_start - part.head_start,
        span.head_stop - part.head_start,
    )

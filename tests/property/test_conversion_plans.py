"""Plans between any two layouts: every row of a span goes to its place, once, and nothing else is touched."""

import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.property.examples import examples

from disagg.core.formats import KvWire
from disagg.core.ids import BlockId
from disagg.core.spans import KvLayout, KvOrder, Span
from disagg.kvcache.conversion import Holding, SpanRead, landing_blocks, plan_pieces, shared_heads
from disagg.kvcache.memory import Segment
from disagg.kvcache.span_ledger import SpanLedger

NUM_LAYERS, NUM_HEADS, HEAD_DIM = 4, 4, 2
_DIMS = ("layer", "kv", "block", "token", "head")
Row = tuple[int, int, int, int]  # layer, plane, head, token: whose it is


@st.composite
def holdings(draw: st.DrawFn, num_tokens: int, dtype: str) -> Holding:
    size, order = draw(st.sampled_from([1, 3, 8, 16])), draw(st.sampled_from(list(KvOrder)))
    heads, layers = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4]))
    needed = -(-num_tokens // size)
    table = draw(st.permutations(range(needed + 2)))[:needed]
    layout = KvLayout(NUM_LAYERS, NUM_HEADS, HEAD_DIM, dtype, size, order.value, heads, layers)
    return Holding(layout, needed + 2, tuple(BlockId(block) for block in table))


@st.composite
def moves(draw: st.DrawFn) -> tuple[Holding, Holding, Span, KvWire]:
    num_tokens = draw(st.integers(1, 20))
    ends = [draw(holdings(num_tokens, draw(st.sampled_from(["float32", "float16"])))) for _ in range(2)]
    start, first = draw(st.integers(0, num_tokens - 1)), draw(st.integers(0, NUM_LAYERS - 1))
    stop, last = draw(st.integers(start + 1, num_tokens)), draw(st.integers(first + 1, NUM_LAYERS))
    return ends[0], ends[1], Span(start, stop, first, last), draw(st.sampled_from(list(KvWire)))


def places(holding: Holding, rank: int, row_bytes: int, base: int) -> dict[int, Row]:
    """Byte offset of each row that a sequence has in one rank's arena: said once more in the plainest way."""
    layout, part = holding.layout.rank_layout(rank), holding.layout.rank_span(rank)
    sizes = dict(
        zip(_DIMS, (layout.num_layers, 2, holding.num_blocks, layout.block_size, layout.num_kv_heads), strict=True)
    )
    names = [name for name in layout.order.split(",") if name != "dim"]
    found = {}
    for index, at in enumerate(itertools.product(*(range(sizes[name]) for name in names))):
        where = dict(zip(names, at, strict=True))
        if where["block"] in holding.blocks:
            token = holding.blocks.index(BlockId(where["block"])) * layout.block_size + where["token"]
            row = (part.layer_start + where["layer"], where["kv"], part.head_start + where["head"], token)
            found[base + index * row_bytes] = row
    return found


def rows_at(segments: tuple[Segment, ...], by_offset: dict[int, Row], row_bytes: int) -> list[Row]:
    return [by_offset[at] for offset, length in segments for at in range(offset, offset + length, row_bytes)]


def rows_of_read(read: SpanRead, part: Span) -> list[Row]:
    """What a read gives, in its order, as rows of the whole: part is where its arena begins."""
    span = read.span
    tokens, heads = range(span.token_start, span.token_stop), range(span.head_start, span.head_stop)
    inner = [(h, t) for h in heads for t in tokens] if read.is_head_major else [(h, t) for t in tokens for h in heads]
    layers = range(span.layer_start, span.layer_stop)
    return [
        (part.layer_start + layer, kv, part.head_start + head, token)
        for layer in layers
        for kv in (0, 1)
        for head, token in inner
    ]


@settings(max_examples=examples(200), deadline=None)
@given(move=moves())
def test_every_row_of_a_span_goes_to_its_place_once(move: tuple[Holding, Holding, Span, KvWire]) -> None:
    source, target, span, wire = move
    written: list[Row] = []
    for piece in plan_pieces(source, target, span, wire):
        own, theirs = (h.layout.rank_layout(0) for h in (source, target))
        row_bytes = theirs.wire_row_bytes(wire)
        base = (
            0
            if wire is KvWire.NATIVE
            else target.layout.rank_layout(piece.destination_rank).arena_bytes(target.num_blocks)
        )
        landed = rows_at(piece.destination, places(target, piece.destination_rank, row_bytes, base), row_bytes)
        if isinstance(piece.source, SpanRead):
            sent = rows_of_read(piece.source, source.layout.rank_span(piece.source_rank))
            assert piece.source.num_bytes == len(sent) * row_bytes
        else:
            sent = rows_at(piece.source, places(source, piece.source_rank, own.row_bytes, 0), own.row_bytes)
        assert sent == landed
        assert len(landed) == target.layout.span_rows(piece.span)
        allowed = landing_blocks(
            target.layout.rank_layout(piece.destination_rank), target.num_blocks, target.blocks, wire
        )
        bytes_allowed = {at for offset, length in allowed for at in range(offset, offset + length)}
        assert all({*range(s.offset, s.offset + s.length)} <= bytes_allowed for s in piece.destination)
        written += landed
    wanted = itertools.product(
        range(span.layer_start, span.layer_stop), (0, 1), range(NUM_HEADS), range(span.token_start, span.token_stop)
    )
    assert sorted(written) == sorted(wanted)


@settings(max_examples=examples(200), deadline=None)
@given(move=moves(), order=st.randoms(use_true_random=False))
def test_a_ledger_is_complete_when_the_last_piece_has_come_and_not_before(
    move: tuple[Holding, Holding, Span, KvWire], order: random.Random
) -> None:
    source, target, span, wire = move
    pieces = [
        piece.span
        for layer in range(span.layer_start, span.layer_stop)
        for piece in plan_pieces(source, target, Span(span.token_start, span.token_stop, layer, layer + 1), wire)
    ]
    order.shuffle(pieces)
    ledger = SpanLedger(target.layout.clipped(span), shared_heads(source.layout, target.layout))
    for index, piece in enumerate(pieces):
        assert not ledger.is_complete
        assert ledger.complete_until() == span.token_start
        ledger.add(piece)
        if index % 2:
            ledger.add(pieces[0])
        ledger.check_invariants()
    assert ledger.is_complete

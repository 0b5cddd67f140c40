"""Where spans lie and which have arrived: the edges; random ones are in tests/property."""

import pytest

from disagg.core.errors import InternalFault
from disagg.core.ids import BlockId
from disagg.core.spans import KvLayout, Span
from disagg.kvcache.memory import Segment
from disagg.kvcache.segments import block_segments, span_segments
from disagg.kvcache.span_ledger import SpanLedger

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=1, dtype="float32", block_size=4)
NUM_BLOCKS = 8
PLANE = NUM_BLOCKS * 16


def blocks(*ids: int) -> list[BlockId]:
    return [BlockId(each) for each in ids]


def test_neighbouring_blocks_become_one_run_per_plane() -> None:
    segments = span_segments(LAYOUT, NUM_BLOCKS, blocks(2, 3, 4), Span(0, 12, 0, 2))
    assert segments == tuple(Segment(plane * PLANE + 32, 48) for plane in range(4))


def test_a_span_inside_blocks_starts_and_ends_at_its_tokens() -> None:
    segments = span_segments(LAYOUT, NUM_BLOCKS, blocks(5, 0), Span(3, 6, 1, 2))
    assert segments == (
        Segment(2 * PLANE + 5 * 16 + 12, 4),
        Segment(2 * PLANE, 8),
        Segment(3 * PLANE + 5 * 16 + 12, 4),
        Segment(3 * PLANE, 8),
    )


def test_an_empty_span_has_no_bytes() -> None:
    assert span_segments(LAYOUT, NUM_BLOCKS, blocks(1), Span(2, 2, 0, 2)) == ()
    assert block_segments(LAYOUT, NUM_BLOCKS, ()) == ()


def test_whole_blocks_are_sorted_and_merged_whatever_their_order() -> None:
    segments = block_segments(LAYOUT, NUM_BLOCKS, blocks(3, 7, 2))
    assert segments[:2] == (Segment(32, 32), Segment(112, 16))
    assert sum(segment.length for segment in segments) == 3 * 4 * LAYOUT.block_bytes


@pytest.mark.parametrize("span", [Span(0, 9, 0, 1), Span(0, 8, 0, 3)])
def test_a_span_past_the_blocks_or_layers_is_a_fault(span: Span) -> None:
    with pytest.raises(InternalFault, match="reaches past 2 blocks of 4 tokens and 2 layers"):
        span_segments(LAYOUT, NUM_BLOCKS, blocks(0, 1), span)


def test_nothing_wanted_is_complete_at_once() -> None:
    assert SpanLedger(Span(12, 12, 0, 2)).is_complete
    assert not SpanLedger(Span(0, 12, 0, 2)).is_complete


def test_a_gap_in_one_layer_holds_back_the_prefix() -> None:
    ledger = SpanLedger(Span(4, 20, 0, 2))
    ledger.add(Span(4, 20, 0, 1))
    ledger.add(Span(4, 10, 1, 2))
    ledger.add(Span(12, 20, 1, 2))
    assert (ledger.complete_until(), ledger.is_complete) == (10, False)
    ledger.add(Span(9, 13, 1, 2))
    assert (ledger.complete_until(), ledger.is_complete) == (20, True)
    ledger.check_invariants()


def test_layers_that_nobody_wants_are_passed_over() -> None:
    ledger = SpanLedger(Span(0, 4, 1, 2))
    ledger.add(Span(0, 4, 0, 1))
    ledger.add(Span(0, 4, 2, 9))
    assert not ledger.is_complete
    ledger.add(Span(0, 4, -3, 9))
    assert ledger.is_complete


def test_layers_count_from_the_first_and_only_when_all_tokens_are_there() -> None:
    ledger = SpanLedger(Span(4, 20, 0, 3))
    assert (ledger.complete_layers(), ledger.num_missing()) == (0, 48)
    ledger.add(Span(4, 20, 1, 2))
    assert (ledger.complete_layers(), ledger.num_missing()) == (0, 32)
    ledger.add(Span(0, 19, 0, 1))  # tokens that nobody wants are no gain
    assert (ledger.complete_layers(), ledger.num_missing()) == (0, 17)
    ledger.add(Span(19, 99, 0, 1))
    assert (ledger.complete_layers(), ledger.num_missing()) == (2, 16)
    ledger.add(Span(4, 20, 2, 3))
    assert (ledger.complete_layers(), ledger.num_missing()) == (3, 0)


def test_a_layer_is_there_when_all_its_groups_of_heads_are() -> None:
    ledger = SpanLedger(Span(0, 8, 0, 2, 0, 4), group_heads=2)
    ledger.add(Span(0, 8, 0, 2, 0, 2))
    assert (ledger.complete_layers(), ledger.num_missing()) == (0, 8)
    ledger.add(Span(0, 8, 0, 1, 2, 4))
    assert (ledger.complete_layers(), ledger.num_missing()) == (1, 4)


def test_where_nothing_is_wanted_every_layer_is_there() -> None:
    ledger = SpanLedger(Span(12, 12, 0, 2))
    assert (ledger.complete_layers(), ledger.num_missing()) == (2, 0)

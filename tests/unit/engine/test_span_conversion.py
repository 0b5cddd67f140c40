"""Every pair of layouts, bit by bit: what one arena keeps is what the other has after the pieces were moved."""

import itertools
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from disagg.core.errors import InternalFault
from disagg.core.formats import KvWire
from disagg.core.ids import BlockId
from disagg.core.spans import KvLayout, KvOrder, Span
from disagg.engine.arena import TORCH_DTYPES, KvArena
from disagg.engine.span_conversion import (
    ArenaRows,
    CodedArena,
    OutgoingSpans,
    decode_rows,
    encode_rows,
    rank_memory,
)
from disagg.kvcache.conversion import Holding, Piece, SpanRead, landing_blocks, plan_pieces
from disagg.kvcache.memory import Memory, Segment
from disagg.testing.memory import BytesMemory
from disagg.transport.segments import SegmentSet

NUM_TOKENS = 61
CUTS = ((0, 5), (5, 33), (33, NUM_TOKENS))  # pushes: within blocks and across them
WIRE_ERROR = 0.5 / 127 + 1e-6  # of a row's largest number


def layout(
    order: KvOrder = KvOrder.PLANES,
    heads: int = 1,
    layers: int = 1,
    block_size: int = 8,
    dtype: str = "float32",
) -> KvLayout:
    return KvLayout(2, 4, 8, dtype, block_size, order.value, heads, layers)


class Ranks:
    """The arenas of one worker."""

    def __init__(self, kv: KvLayout, seed: int | None) -> None:
        self.layout = kv
        self.num_blocks = -(-NUM_TOKENS // kv.block_size) + 3
        rng = random.Random(f"{kv} {seed}")
        self.blocks = tuple(BlockId(b) for b in rng.sample(range(self.num_blocks), self.num_blocks - 3))
        shapes = [kv.rank_layout(rank) for rank in range(kv.num_ranks)]
        self.memories = [BytesMemory(shape.arena_bytes(self.num_blocks)) for shape in shapes]
        self.rows = [
            ArenaRows(tensor_of(memory), shape, self.num_blocks)
            for memory, shape in zip(self.memories, shapes, strict=True)
        ]
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            for each in self.rows:
                each.rows.copy_(torch.randn(each.rows.shape, generator=generator))

    @property
    def holding(self) -> Holding:
        return Holding(self.layout, self.num_blocks, self.blocks)

    def kv(self) -> Tensor:
        """[layer, plane, head, token, dim] of all ranks together, read number by number."""
        kv = self.layout
        found = torch.zeros(kv.num_layers, 2, kv.num_kv_heads, NUM_TOKENS, kv.head_dim, dtype=TORCH_DTYPES[kv.dtype])
        dims = {"layer": 0, "kv": 1, "block": 2, "token": 3, "head": 4, "dim": 5}
        for rank, memory in enumerate(self.memories):
            part, shape = kv.rank_span(rank), kv.rank_layout(rank)
            sizes = (shape.num_layers, 2, self.num_blocks, kv.block_size, shape.num_kv_heads, kv.head_dim)
            names = kv.order.split(",")
            arena = tensor_of(memory).view(TORCH_DTYPES[kv.dtype]).view([sizes[dims[name]] for name in names])
            arena = arena.permute([names.index(name) for name in dims])
            own = arena[:, :, list(self.blocks)].flatten(2, 3)[:, :, :NUM_TOKENS].transpose(2, 3)
            found[part.layer_start : part.layer_stop, :, part.head_start : part.head_stop] = own
        return found


def tensor_of(memory: BytesMemory) -> Tensor:
    (view,) = memory.gather([Segment(0, memory.num_bytes)])
    return torch.frombuffer(view, dtype=torch.uint8)


def move(source: Ranks, target: Ranks, wire: KvWire = KvWire.NATIVE) -> list[Piece]:
    """Everything, as a worker's pushes would."""
    moved = []
    for (start, stop), layer in itertools.product(CUTS, range(2)):
        for piece in plan_pieces(source.holding, target.holding, Span(start, stop, layer, layer + 1), wire):
            out = OutgoingSpans(source.memories[piece.source_rank], source.rows[piece.source_rank])
            place: Memory = target.memories[piece.destination_rank]
            if wire is not KvWire.NATIVE:
                place = CodedArena(place, target.rows[piece.destination_rank], wire)
            is_read = isinstance(piece.source, SpanRead)
            reading = (out.open_read(piece.source),) if isinstance(piece.source, SpanRead) else piece.source
            carry(out.gather(reading), place, piece.destination)
            if is_read:
                out.close_read(reading[0])
            out.check_invariants()
            assert out.num_reads == 0
            moved.append(piece)
    return moved


def carry(views: Sequence[memoryview], place: Memory, segments: Sequence[Segment]) -> None:
    payload = b"".join(views)
    landing, offset = place.landing(segments), 0
    for buffer in landing.buffers:
        buffer[:] = payload[offset : offset + len(buffer)]
        offset += len(buffer)
    assert offset == len(payload)
    landing.commit()


@pytest.mark.parametrize("orders", list(itertools.product(KvOrder, KvOrder)), ids=str)
@pytest.mark.parametrize("heads", list(itertools.product((1, 2, 4), (1, 2, 4))), ids=str)
def test_kv_is_bit_equal_between_all_orders_and_shards(orders: tuple[KvOrder, ...], heads: tuple[int, ...]) -> None:
    sizes, layers = ((8, 16), (64, 8), (32, 32), (16, 64)), ((1, 1), (1, 2), (2, 1), (2, 2))
    for blocks, shards in zip(sizes, layers, strict=True):
        ends = [layout(orders[at], heads[at], shards[at], blocks[at]) for at in (0, 1)]
        source, target = Ranks(ends[0], 1), Ranks(ends[1], None)
        moved = move(source, target)
        assert torch.equal(source.kv(), target.kv())
        is_turned = (orders[0] is KvOrder.HEADS) != (orders[1] is KvOrder.HEADS) and max(heads) < 4
        assert any(isinstance(piece.source, SpanRead) for piece in moved) is is_turned


@pytest.mark.parametrize("dtypes", list(itertools.product(TORCH_DTYPES, TORCH_DTYPES)), ids=str)
@pytest.mark.parametrize("orders", list(itertools.product(KvOrder, (KvOrder.PLANES, KvOrder.HEADS))), ids=str)
def test_another_dtype_is_torchs_own_rounding(orders: tuple[KvOrder, ...], dtypes: tuple[str, str]) -> None:
    source = Ranks(layout(orders[0], 2, block_size=16, dtype=dtypes[0]), 2)
    target = Ranks(layout(orders[1], 4, block_size=32, dtype=dtypes[1]), None)
    move(source, target)
    assert torch.equal(source.kv().to(TORCH_DTYPES[dtypes[1]]), target.kv())


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("float16", "float32"), ("bfloat16", "float16")], ids=str)
@pytest.mark.parametrize("orders", list(itertools.product(KvOrder, KvOrder)), ids=str)
def test_a_compressed_wire_is_within_half_a_step_of_each_rows_largest(
    orders: tuple[KvOrder, ...], dtypes: tuple[str, str]
) -> None:
    source = Ranks(layout(orders[0], 4, block_size=16, dtype=dtypes[0]), 3)
    target = Ranks(layout(orders[1], 2, 2, block_size=8, dtype=dtypes[1]), None)
    moved = move(source, target, KvWire.INT8)
    assert all(isinstance(piece.source, SpanRead) for piece in moved)
    wanted, found = source.kv().float(), target.kv().float()
    rounding = torch.finfo(TORCH_DTYPES[dtypes[1]]).eps
    assert ((wanted - found).abs() / wanted.abs().amax(-1, keepdim=True)).max() <= WIRE_ERROR + rounding


def test_coded_rows_depend_on_nothing_but_themselves() -> None:
    """Zeros stay zeros, huge and tiny rows keep their scale, and a neighbour changes no byte."""
    rows = torch.randn(6, 16, generator=torch.Generator().manual_seed(7))
    rows[1] = 0.0
    rows[2] *= 1e30
    rows[3] *= 1e-30
    rows[4, 3] = 1e4  # an outlier costs its own row only
    coded = encode_rows(rows)
    assert coded.shape == (6, 20)
    for index in range(6):
        assert torch.equal(encode_rows(rows[index : index + 1])[0], coded[index])
    found = decode_rows(coded, torch.float32)
    assert torch.equal(found[1], rows[1])
    largest = rows.abs().amax(1, keepdim=True).clamp(min=1e-38)
    assert ((found - rows).abs() / largest).max() <= WIRE_ERROR


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_no_number_stays_none_and_spoils_its_own_row_only(number: float) -> None:
    rows = torch.randn(2, 16)
    rows[0, 3] = number
    found = decode_rows(encode_rows(rows), torch.float32)
    assert not found[0, 3].isfinite()
    assert found[1].isfinite().all()


def test_a_grant_of_coded_blocks_covers_what_is_written_there_and_nothing_else() -> None:
    source, target = Ranks(layout(), 4), Ranks(layout(KvOrder.BLOCKS, 2), None)
    granted = SegmentSet(
        landing_blocks(target.layout.rank_layout(0), target.num_blocks, target.blocks[:3], KvWire.INT8)
    )
    inside = plan_pieces(source.holding, target.holding, Span(0, 24, 0, 2), KvWire.INT8)
    past = plan_pieces(source.holding, target.holding, Span(20, 25, 0, 2), KvWire.INT8)
    assert all(granted.first_outside(piece.destination) is None for piece in inside)
    assert all(granted.first_outside(piece.destination) is not None for piece in past)
    arena_bytes = target.memories[0].num_bytes
    assert granted.first_outside([Segment(arena_bytes - 8, 8)]) is not None


def test_what_is_not_a_whole_coded_row_or_an_open_read_is_a_fault() -> None:
    ranks = Ranks(layout(), 5)
    coded = CodedArena(ranks.memories[0], ranks.rows[0], KvWire.INT8)
    first = ranks.memories[0].num_bytes
    for segment in (Segment(0, 12), Segment(first, 5), Segment(first + 3, 12), Segment(coded.num_bytes - 12, 24)):
        with pytest.raises(InternalFault, match="whole rows"):
            coded.landing([segment])
    out = OutgoingSpans(ranks.memories[0], ranks.rows[0])
    read = SpanRead(ranks.blocks, Span(0, 3, 0, 1, 0, 4), "float32", KvWire.NATIVE, True, 3 * 2 * 4 * 32)
    segment = out.open_read(read)
    assert b"".join(out.gather([segment]))
    for wrong in ([Segment(segment.offset, 8)], [segment, segment]):
        with pytest.raises(InternalFault, match="whole read"):
            out.gather(wrong)
    out.close_read(segment)
    out.close_read(segment)
    with pytest.raises(InternalFault, match="whole read"):
        out.gather([segment])


def test_reads_have_addresses_of_their_own() -> None:
    ranks = Ranks(layout(), 6)
    out = OutgoingSpans(ranks.memories[0], ranks.rows[0])
    reads = [SpanRead(ranks.blocks, Span(0, n, 0, 1, 0, 4), "float16", KvWire.NATIVE, True, n * 128) for n in (1, 2, 3)]
    segments = [out.open_read(read) for read in reads]
    assert len({segment.offset for segment in segments}) == 3
    assert all(ranks.memories[0].num_bytes <= each.offset < out.num_bytes for each in segments)
    for read, segment in zip(reads, segments, strict=True):
        assert b"".join(out.gather([segment])) == bytes(out.convert(read).numpy())
        assert len(b"".join(out.gather([segment]))) == read.num_bytes
    out.check_invariants()


def test_an_engines_arena_sends_what_it_stores() -> None:
    arena = KvArena(layout(block_size=4), 6)
    keys = torch.randn(5, 4, 8)
    arena.store(1, torch.arange(4, 9), keys, -keys)
    out, incoming = rank_memory(arena, KvWire.NATIVE)
    assert incoming is None
    blocks = (BlockId(1), BlockId(2))
    found = out.convert(SpanRead(blocks, Span(0, 5, 1, 2, 0, 4), "float32", KvWire.NATIVE, False, 0))
    assert torch.equal(found.view(torch.float32).view(2, 5, 4, 8), torch.stack((keys, -keys)))
    assert isinstance(rank_memory(arena, KvWire.INT8)[1], CodedArena)


@pytest.mark.parametrize("changes", [{"order": KvOrder.HEADS}, {"heads": 2}])
def test_attention_computes_in_one_order_only(changes: dict[str, object]) -> None:
    with pytest.raises(InternalFault, match="not what attention reads"):
        KvArena(layout(**changes), 4)  # type: ignore[arg-type]

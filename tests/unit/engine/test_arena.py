"""The arena's bytes: offsets, direct and staged access."""

import gc
import os
import time

import numpy as np
import pytest
import torch

from disagg.core.errors import ConfigurationError, InternalFault
from disagg.core.spans import KvLayout
from disagg.engine.arena import KvArena, max_blocks_for
from disagg.kvcache.memory import Segment
from disagg.transport.runs import MappedArena

LAYOUT = KvLayout(num_layers=3, num_kv_heads=2, head_dim=4, dtype="float32", block_size=5)
NUM_BLOCKS = 7


def offset_of(layer: int, kv: int, block: int, token: int, layout: KvLayout = LAYOUT) -> int:
    return ((layer * 2 + kv) * NUM_BLOCKS + block) * layout.block_bytes + token * layout.token_bytes


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("is_staged", [False, True])
def test_stored_tokens_are_found_at_their_offset(is_staged: bool, dtype: str) -> None:
    layout = KvLayout(3, 2, 4, dtype, 5)
    arena = KvArena(layout, NUM_BLOCKS, is_staged=is_staged)
    keys, values = torch.randn(2, 3, 2, 4).unbind(0)
    slots = torch.tensor([4 * 5 + 3, 0, 6 * 5 + 4])
    arena.store(1, slots, keys, values)
    for kv, tensor in enumerate((keys, values)):
        for row, slot in enumerate(slots.tolist()):
            segment = Segment(offset_of(1, kv, slot // 5, slot % 5, layout), layout.token_bytes)
            (view,) = arena.gather([segment])
            found = torch.frombuffer(bytearray(view), dtype=arena.tensor.dtype)
            assert torch.equal(found, tensor[row].to(arena.tensor.dtype).flatten())
    arena.check_invariants()


@pytest.mark.parametrize("is_staged", [False, True])
def test_landing_writes_what_gather_reads(is_staged: bool) -> None:
    source = KvArena(LAYOUT, NUM_BLOCKS)
    source.tensor.copy_(torch.randn(source.tensor.shape))
    arena = KvArena(LAYOUT, NUM_BLOCKS, is_staged=is_staged)
    segments = [
        Segment(offset_of(0, 0, 2, 1), 3 * LAYOUT.token_bytes),
        Segment(offset_of(2, 1, 6, 0), LAYOUT.block_bytes),
        Segment(offset_of(1, 0, 0, 0), 0),
    ]
    landing = arena.landing(segments)
    for buffer, view in zip(landing.buffers, source.gather(segments), strict=True):
        assert not buffer.readonly
        buffer[:] = view
    if is_staged:
        assert not bool(arena.tensor.any()), "visible before commit"
    landing.commit()
    assert [bytes(view) for view in arena.gather(segments)] == [bytes(view) for view in source.gather(segments)]
    assert torch.equal(arena.tensor[2, 1, 6], source.tensor[2, 1, 6])
    assert torch.equal(arena.tensor[0, 0, 2, 1:4], source.tensor[0, 0, 2, 1:4])
    assert int((arena.tensor != 0).any(-1).sum()) == (3 + 5) * 2, "nothing else was written"


def test_direct_views_are_the_arena_itself() -> None:
    arena = KvArena(LAYOUT, NUM_BLOCKS)
    (view,) = arena.gather([Segment(0, 4)])
    arena.tensor.view(-1)[0] = 1.5
    assert view.cast("f")[0] == 1.5


def test_others_map_the_arena_itself_and_cannot_change_its_size() -> None:
    arena = KvArena(LAYOUT, NUM_BLOCKS)
    assert arena.descriptor is not None
    mapped = MappedArena(arena.descriptor, arena.num_bytes)
    mapped.bytes[:4] = np.frombuffer(np.float32(2.5).tobytes(), np.uint8)
    assert arena.tensor.view(-1)[0] == 2.5
    arena.tensor.view(-1)[-1] = 3.5
    assert mapped.bytes[-4:].view(np.float32)[0] == 3.5
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(arena.descriptor, 0)
    mapped.close()
    arena.check_invariants()
    assert KvArena(LAYOUT, NUM_BLOCKS, is_staged=True).descriptor is None


def test_an_arena_gives_its_file_back() -> None:
    gc.collect()  # those of other tests
    before = len(os.listdir("/proc/self/fd"))
    arena = KvArena(LAYOUT, NUM_BLOCKS)
    assert len(os.listdir("/proc/self/fd")) > before
    del arena
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("is_staged", [False, True])
@pytest.mark.parametrize("change", [(-1, 4), (0, -4), (1, "all"), ("all", 1)])
def test_a_segment_outside_the_arena_is_a_fault(change: tuple[int | str, int | str], is_staged: bool) -> None:
    arena = KvArena(LAYOUT, NUM_BLOCKS, is_staged=is_staged)
    offset, length = (arena.num_bytes if part == "all" else int(part) for part in change)
    for call in (arena.gather, arena.landing):
        with pytest.raises(InternalFault, match=rf"{offset}\+{length} leaves .* {arena.num_bytes} bytes"):
            call([Segment(offset, length)])


def test_a_budget_becomes_blocks() -> None:
    one = LAYOUT.arena_bytes(1)
    assert max_blocks_for(LAYOUT, 10 * one - 1) == 9
    assert KvArena(LAYOUT, 9).num_bytes == 9 * one
    with pytest.raises(ConfigurationError, match=f"{one - 1} bytes holds no block"):
        max_blocks_for(LAYOUT, one - 1)
    with pytest.raises(ConfigurationError, match="num_blocks=0"):
        KvArena(LAYOUT, 0)


def test_a_big_arena_costs_nothing_before_it_is_used() -> None:
    layout = KvLayout(30, 3, 64, "float32", 16)
    before = resident_bytes()
    started_s = time.monotonic()
    arena = KvArena(layout, max_blocks_for(layout, 4 << 30))
    assert time.monotonic() - started_s < 1.0
    assert resident_bytes() - before < 64 << 20
    assert arena.num_bytes > 3 << 30


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

"""Which prefix is found again, what is evicted first, and hashes that all processes agree on."""

import os
import subprocess
import sys

import pytest

from disagg.core.errors import InternalFault
from disagg.core.ids import BlockId
from disagg.kvcache.block_hash import HASH_BYTES, BlockHash, append_hashes, root_hash
from disagg.kvcache.block_pool import BlockState
from disagg.kvcache.kv_cache import KvCache
from disagg.kvcache.prefix_index import PrefixIndex

SIZE = 4
ROOT = root_hash("m", "exact")


def tokens(*runs: int) -> tuple[int, ...]:
    """One full block of equal ids per run."""
    return tuple(token for run in runs for token in (run,) * SIZE)


def store(cache: KvCache, ids: tuple[int, ...]) -> tuple[BlockId, ...]:
    """Compute and release a prompt: its full blocks stay cached."""
    hashes = cache.append_hashes([], ids, ROOT)
    allocation = cache.try_allocate(hashes, len(ids), len(ids))
    assert allocation is not None
    cache.commit(hashes, allocation.blocks, allocation.num_cached)
    cache.release(allocation.blocks)
    cache.check_invariants()
    return allocation.blocks


def matching(cache: KvCache, ids: tuple[int, ...]) -> int:
    return cache.num_matching_tokens(cache.append_hashes([], ids, ROOT), len(ids))


def test_hashes_are_equal_in_processes_with_different_hash_seeds() -> None:
    code = (
        "from disagg.kvcache.block_hash import append_hashes, root_hash;"
        "root = root_hash('m', 'exact', 'salt');"
        "print([h.hex() for h in append_hashes([], list(range(40)), 8, root)])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": "src"},
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    own = [block_hash.hex() for block_hash in append_hashes([], list(range(40)), 8, root_hash("m", "exact", "salt"))]
    assert outputs == {f"{own}\n"}
    assert len(set(own)) == 5


@pytest.mark.parametrize(
    "other", [root_hash("n", "exact"), root_hash("m", "bounded"), root_hash("m", "exact", "tenant")]
)
def test_other_weights_numerics_or_tenants_never_match(other: BlockHash) -> None:
    ids = tokens(1, 2, 3)
    assert not set(append_hashes([], ids, SIZE, ROOT)) & set(append_hashes([], ids, SIZE, other))


def test_a_hash_covers_everything_before_it() -> None:
    one, other = append_hashes([], tokens(1, 2), SIZE, ROOT), append_hashes([], tokens(3, 2), SIZE, ROOT)
    assert one[1] != other[1]
    assert all(len(each) == HASH_BYTES for each in one)


def test_only_full_blocks_are_hashed_and_hashing_goes_on_where_it_stopped() -> None:
    ids = tokens(1, 2, 3)
    hashes = append_hashes([], ids[:7], SIZE, ROOT)
    assert len(hashes) == 1
    assert append_hashes(hashes, ids[SIZE:], SIZE, ROOT) == append_hashes([], ids, SIZE, ROOT)


def test_a_stored_prefix_is_found_in_whole_blocks() -> None:
    cache = KvCache(8, SIZE)
    store(cache, tokens(1, 2, 3))
    assert matching(cache, tokens(1, 2, 9)) == 8
    assert matching(cache, tokens(1)[:3]) == 0
    assert matching(cache, tokens(2)) == 0
    hashes = cache.append_hashes([], tokens(1, 2, 3), ROOT)
    assert cache.num_matching_tokens(hashes, 11) == 8


def test_a_match_is_held_and_cannot_be_evicted() -> None:
    cache = KvCache(4, SIZE)
    store(cache, tokens(1, 2))
    held = cache.try_allocate(cache.append_hashes([], tokens(1, 2), ROOT), 8, 12)
    assert held is not None
    assert (held.num_cached, len(held.blocks)) == (2, 3)
    assert cache.try_allocate([], 0, 8) is None
    assert cache.try_allocate([], 0, 4) is not None
    assert matching(cache, tokens(1, 2)) == 8
    assert cache.num_evicted == 0


def test_a_refusal_evicts_nothing() -> None:
    """1 free block, 1 evictable, 2 that the allocation would share itself: 3 new ones cannot be had."""
    cache = KvCache(4, SIZE)
    store(cache, tokens(7))
    store(cache, tokens(1, 2))
    assert cache.num_available == 4
    assert cache.try_allocate(cache.append_hashes([], tokens(1, 2), ROOT), 8, 5 * SIZE) is None
    assert (matching(cache, tokens(7)), matching(cache, tokens(1, 2)), cache.num_evicted) == (4, 8, 0)
    assert cache.try_allocate(cache.append_hashes([], tokens(1, 2), ROOT), 8, 4 * SIZE) is not None
    cache.check_invariants()


def test_leaves_are_evicted_before_their_parents_and_oldest_first() -> None:
    cache = KvCache(5, SIZE)
    store(cache, tokens(1, 2, 3))
    store(cache, tokens(7, 8))
    assert cache.pool.count(BlockState.FREE) == 0
    lengths = []
    for _ in range(5):
        assert cache.try_allocate([], 0, SIZE) is not None
        lengths.append((matching(cache, tokens(1, 2, 3)), matching(cache, tokens(7, 8))))
        cache.check_invariants()
    assert lengths == [(8, 8), (4, 8), (0, 8), (0, 4), (0, 0)]
    assert cache.num_evicted == 5


def test_use_makes_a_prefix_young_again() -> None:
    cache = KvCache(4, SIZE)
    store(cache, tokens(1, 2))
    store(cache, tokens(7, 8))
    store(cache, tokens(1, 2))
    cache.try_allocate([], 0, 2 * SIZE)
    assert (matching(cache, tokens(1, 2)), matching(cache, tokens(7, 8))) == (8, 0)


def test_the_second_of_two_equal_prefixes_stays_private() -> None:
    cache = KvCache(6, SIZE)
    hashes = cache.append_hashes([], tokens(1, 2), ROOT)
    one, other = cache.try_allocate(hashes, 8, 8), cache.try_allocate(hashes, 8, 8)
    assert one is not None
    assert other is not None
    cache.commit(hashes, one.blocks, 0)
    cache.commit(hashes, other.blocks, 0)
    cache.release(other.blocks)
    assert cache.pool.count(BlockState.CACHED) == 0
    cache.release(one.blocks)
    assert cache.pool.blocks_in(BlockState.CACHED) == set(one.blocks)
    cache.check_invariants()


def test_the_second_of_two_equal_prefixes_can_take_the_first_ones_blocks() -> None:
    cache = KvCache(8, SIZE)
    hashes = cache.append_hashes([], tokens(1, 2, 3), ROOT)
    one, other = cache.try_allocate(hashes, 12, 8), cache.try_allocate(hashes, 12, 12)
    assert one is not None
    assert other is not None
    assert cache.commit_shared(hashes[:2], one.blocks, 0) is one.blocks
    shared = cache.commit_shared(hashes, other.blocks, 0)
    assert shared == (*one.blocks, other.blocks[2])
    assert cache.pool.count(BlockState.FREE) == 5
    assert [cache.pool.refcount(block) for block in shared] == [2, 2, 1]
    assert matching(cache, tokens(1, 2, 3)) == 12
    cache.release(one.blocks)
    cache.release(shared)
    cache.check_invariants()
    assert cache.pool.blocks_in(BlockState.CACHED) == set(shared)


def test_behind_a_private_block_nothing_is_shared() -> None:
    cache = KvCache(8, SIZE)
    hashes = cache.append_hashes([], tokens(1, 2), ROOT)
    one, other = cache.try_allocate(hashes, 8, 8), cache.try_allocate(hashes, 8, 8)
    assert one is not None
    assert other is not None
    cache.commit(hashes, one.blocks, 0)
    cache.commit(hashes[:1], other.blocks, 0)
    assert cache.commit_shared(hashes, other.blocks, 1) is other.blocks
    cache.release(other.blocks)
    cache.release(one.blocks)
    cache.check_invariants()


def test_a_private_chain_is_not_continued_in_the_index() -> None:
    """A child is indexed under its own parent's block only, or eviction could take the parent first."""
    cache = KvCache(6, SIZE)
    one = cache.try_allocate([], 0, 4)
    other = cache.try_allocate([], 0, 8)
    assert one is not None
    assert other is not None
    hashes = cache.append_hashes([], tokens(1, 2), ROOT)
    cache.commit(hashes[:1], one.blocks, 0)
    cache.commit(hashes[:1], other.blocks, 0)
    cache.commit(hashes, other.blocks, 1)
    assert matching(cache, tokens(1, 2)) == 4
    cache.release(other.blocks)
    cache.release(one.blocks)
    cache.check_invariants()


def test_a_reservation_is_cached_then_reserved_then_held() -> None:
    cache = KvCache(8, SIZE)
    store(cache, tokens(1))
    reservation = cache.try_reserve(cache.append_hashes([], tokens(1, 2, 3), ROOT), 12, 17)
    assert reservation is not None
    assert (len(reservation.blocks), reservation.num_cached, reservation.num_reserved) == (5, 1, 2)
    assert {cache.pool.state(block) for block in reservation.reserved} == {BlockState.RESERVED}
    assert {cache.pool.state(block) for block in (*reservation.cached, *reservation.empty)} == {BlockState.HELD}
    cache.confirm(reservation)
    assert {cache.pool.state(block) for block in reservation.blocks} == {BlockState.HELD}


def test_a_given_up_reservation_waits_for_the_fence() -> None:
    cache = KvCache(5, SIZE)
    store(cache, tokens(1))
    hashes = cache.append_hashes([], tokens(1, 2, 3), ROOT)
    reservation = cache.try_reserve(hashes, 12, 16)
    assert reservation is not None
    cache.quarantine(reservation)
    assert {cache.pool.state(block) for block in reservation.reserved} == {BlockState.QUARANTINED}
    assert {cache.pool.state(block) for block in reservation.cached} == {BlockState.HELD}  # what is kept builds on it
    assert {cache.pool.state(block) for block in reservation.empty} == {BlockState.FREE}
    assert cache.try_allocate([], 0, 3 * SIZE) is None
    cache.end_quarantine(reservation, hashes, 0)
    cache.check_invariants()
    assert matching(cache, tokens(1, 2, 3)) == 4
    assert cache.try_allocate([], 0, 5 * SIZE) is not None


@pytest.mark.parametrize(("num_kept", "num_found"), [(0, 1), (1, 1), (2, 2), (3, 3)])
def test_what_arrived_whole_before_the_end_is_kept_in_the_index(num_kept: int, num_found: int) -> None:
    cache = KvCache(5, SIZE)
    store(cache, tokens(1))
    hashes = cache.append_hashes([], tokens(1, 2, 3), ROOT)
    reservation = cache.try_reserve(hashes, 12, 16)
    assert reservation is not None
    cache.quarantine(reservation)
    cache.end_quarantine(reservation, hashes, num_kept)
    cache.check_invariants()
    assert matching(cache, tokens(1, 2, 3)) == num_found * SIZE
    assert cache.pool.blocks_in(BlockState.CACHED) == set(reservation.blocks[:num_found])
    assert cache.pool.count(BlockState.FREE) == 5 - num_found


def test_kept_blocks_that_another_holds_already_are_freed() -> None:
    """Two hand-offs of one prompt break: the second brings nothing that is not there."""
    cache = KvCache(6, SIZE)
    hashes = cache.append_hashes([], tokens(1, 2, 3), ROOT)
    pair = [cache.try_reserve(hashes, 12, 12) for _ in range(2)]
    for reservation, num_kept in zip(pair, (2, 3), strict=True):
        assert reservation is not None
        cache.quarantine(reservation)
        cache.end_quarantine(reservation, hashes, num_kept)
        cache.check_invariants()
    assert matching(cache, tokens(1, 2, 3)) == 8
    assert cache.pool.count(BlockState.FREE) == 4


def test_an_admission_leaves_room_for_those_that_grow() -> None:
    cache = KvCache(4, SIZE)
    assert cache.try_allocate([], 0, 3 * SIZE, num_spare=2) is None
    assert cache.try_reserve([], 3 * SIZE, 3 * SIZE, num_spare=2) is None
    assert cache.pool.count(BlockState.FREE) == 4
    assert cache.try_allocate([], 0, 2 * SIZE, num_spare=2) is not None


def test_growing_evicts_what_nobody_uses_and_no_more() -> None:
    cache = KvCache(4, SIZE)
    store(cache, tokens(1, 2))
    held = cache.try_extend(3)
    assert held is not None
    assert {cache.pool.state(block) for block in held} == {BlockState.HELD}
    assert (matching(cache, tokens(1, 2)), cache.num_evicted) == (4, 1)
    assert cache.try_extend(2) is None
    assert (matching(cache, tokens(1, 2)), cache.num_evicted) == (4, 1)  # a refusal evicts nothing
    cache.check_invariants()


def test_one_block_has_one_hash() -> None:
    index = PrefixIndex()
    assert index.try_insert(BlockHash(b"a"), None, BlockId(0))
    assert index.try_insert(BlockHash(b"a"), None, BlockId(0))
    assert not index.try_insert(BlockHash(b"a"), None, BlockId(1))
    assert not index.try_insert(BlockHash(b"c"), BlockHash(b"unknown"), BlockId(1))
    with pytest.raises(InternalFault, match="block 0 is already indexed"):
        index.try_insert(BlockHash(b"b"), None, BlockId(0))
    assert len(index) == 1

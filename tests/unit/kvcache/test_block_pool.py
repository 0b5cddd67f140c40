"""Every transition of a block, legal and not, and the sums that must hold after each."""

from collections.abc import Callable

import pytest

from disagg.core.errors import InternalFault
from disagg.core.ids import BlockId
from disagg.kvcache.block_pool import BlockPool, BlockState

B0 = BlockId(0)


def _quarantined(pool: BlockPool) -> None:
    pool.try_reserve(1)
    pool.quarantine([B0])


PREPARE: dict[BlockState, Callable[[BlockPool], object]] = {
    BlockState.FREE: lambda pool: None,
    BlockState.RESERVED: lambda pool: pool.try_reserve(1),
    BlockState.HELD: lambda pool: pool.try_take(1),
    BlockState.CACHED: lambda pool: (pool.try_take(1), pool.release(B0, keep_cached=True)),
    BlockState.QUARANTINED: _quarantined,
}
MOVES: dict[str, Callable[[BlockPool], object]] = {
    "hold": lambda pool: pool.hold([B0]),
    "release": lambda pool: pool.release(B0, keep_cached=False),
    "release to cache": lambda pool: pool.release(B0, keep_cached=True),
    "uncache": lambda pool: pool.uncache(B0),
    "confirm": lambda pool: pool.confirm([B0]),
    "quarantine": lambda pool: pool.quarantine([B0]),
    "unquarantine": lambda pool: pool.unquarantine([B0]),
    "salvage": lambda pool: pool.salvage([B0]),
}
F, R, H, C, Q = BlockState.FREE, BlockState.RESERVED, BlockState.HELD, BlockState.CACHED, BlockState.QUARANTINED
LEGAL = {
    (H, "hold"): H,
    (C, "hold"): H,
    (H, "release"): F,
    (H, "release to cache"): C,
    (C, "uncache"): F,
    (R, "confirm"): H,
    (R, "quarantine"): Q,
    (Q, "unquarantine"): F,
    (Q, "salvage"): H,
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("state", BlockState)
def test_every_transition(state: BlockState, move: str) -> None:
    pool = BlockPool(3)
    PREPARE[state](pool)
    assert pool.state(B0) is state
    target = LEGAL.get((state, move))
    if target is None:
        with pytest.raises(InternalFault, match=f"block 0 is {state.value}"):
            MOVES[move](pool)
        target = state
    else:
        MOVES[move](pool)
    assert pool.state(B0) is target
    pool.check_invariants()
    assert sum(pool.count(each) for each in BlockState) == 3


def test_a_held_block_is_released_once_by_each_user() -> None:
    pool = BlockPool(2)
    pool.try_take(1)
    pool.hold([B0])
    assert pool.refcount(B0) == 2
    assert not pool.release(B0, keep_cached=True)
    assert pool.state(B0) is BlockState.HELD
    assert pool.release(B0, keep_cached=True)
    assert (pool.state(B0), pool.refcount(B0)) == (BlockState.CACHED, 0)


def test_too_few_free_blocks_change_nothing() -> None:
    pool = BlockPool(3)
    assert pool.try_take(2) == [0, 1]
    assert pool.try_take(2) is None
    assert pool.try_reserve(2) is None
    assert pool.count(BlockState.FREE) == 1
    pool.check_invariants()


def test_taking_nothing_is_fine_even_when_nothing_is_left() -> None:
    pool = BlockPool(1)
    pool.try_take(1)
    assert pool.try_take(0) == []
    assert pool.try_reserve(0) == []


def test_lowest_free_blocks_go_first_so_allocations_are_runs() -> None:
    pool = BlockPool(8)
    pool.try_take(8)
    for block in (6, 1, 4, 2, 5, 3):
        pool.release(BlockId(block), keep_cached=False)
    assert pool.try_take(3) == [1, 2, 3]
    assert pool.try_reserve(3) == [4, 5, 6]


def test_blocks_and_counts_by_state_agree() -> None:
    pool = BlockPool(6)
    pool.try_take(2)
    pool.try_reserve(2)
    pool.quarantine([BlockId(3)])
    pool.release(B0, keep_cached=True)
    by_state = {state: pool.blocks_in(state) for state in BlockState}
    assert by_state == {F: {4, 5}, R: {2}, H: {1}, C: {0}, Q: {3}}
    assert {state: pool.count(state) for state in BlockState} == {state: len(s) for state, s in by_state.items()}
    assert pool.refcounts() == [0, 1, 0, 0, 0, 0]


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(InternalFault, match="got 0"):
        BlockPool(0)


@pytest.mark.parametrize("spoil", ["count", "refcount", "free list"])
def test_invariants_notice_what_is_wrong(spoil: str) -> None:
    pool = BlockPool(3)
    pool.try_take(1)
    if spoil == "count":
        pool._counts[BlockState.FREE] += 1
    elif spoil == "refcount":
        pool._refcounts[0] = 0
    else:
        pool._free.append(BlockId(0))
    with pytest.raises(InternalFault):
        pool.check_invariants()

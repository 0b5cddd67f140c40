"""Every block of one arena is in exactly one state, and the states sum to the total.

free -> held | reserved
reserved -> held | quarantined
held (refcount >= 1) -> free | cached
cached (refcount 0, in the prefix index) -> held | free
quarantined -> free | held (what was complete and verified)
"""

import enum
import heapq
from collections.abc import Iterable, Sequence

from disagg.core.errors import InternalFault
from disagg.core.ids import BlockId


class BlockState(enum.StrEnum):
    """Who may read or write a block."""

    FREE = "free"
    RESERVED = "reserved"  # a peer may be writing it
    HELD = "held"  # sequences here use it
    CACHED = "cached"  # nobody uses it, its contents are in the prefix index
    QUARANTINED = "quarantined"  # given up, but a late byte may still land


class BlockPool:
    """Owns all blocks of one worker. Lowest free ids go first, so that allocations tend to be runs."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise InternalFault(f"a block pool needs at least 1 block, got {num_blocks}")
        self.num_blocks = num_blocks
        self._states = [BlockState.FREE] * num_blocks
        self._refcounts = [0] * num_blocks
        self._free = [BlockId(block) for block in range(num_blocks)]  # a heap
        self._counts = dict.fromkeys(BlockState, 0)
        self._counts[BlockState.FREE] = num_blocks

    def count(self, state: BlockState) -> int:
        return self._counts[state]

    def state(self, block: BlockId) -> BlockState:
        return self._states[block]

    def refcount(self, block: BlockId) -> int:
        return self._refcounts[block]

    def refcounts(self) -> list[int]:
        """By block."""
        return list(self._refcounts)

    def blocks_in(self, state: BlockState) -> set[BlockId]:
        return {BlockId(block) for block, each in enumerate(self._states) if each is state}

    def try_take(self, num_blocks: int) -> list[BlockId] | None:
        """Free blocks become held once each; None when there are too few."""
        return self._take(num_blocks, BlockState.HELD, refcount=1)

    def try_reserve(self, num_blocks: int) -> list[BlockId] | None:
        """Free blocks become reserved for a peer's writes; None when there are too few."""
        return self._take(num_blocks, BlockState.RESERVED, refcount=0)

    def hold(self, blocks: Iterable[BlockId]) -> None:
        """One more user of held or cached blocks."""
        for block in blocks:
            if self._states[block] is BlockState.CACHED:
                self._move(block, BlockState.CACHED, BlockState.HELD)
            elif self._states[block] is not BlockState.HELD:
                raise self._illegal(block, "hold")
            self._refcounts[block] += 1

    def release(self, block: BlockId, *, keep_cached: bool) -> bool:
        """One user less. True when it was the last: the block is now cached or free."""
        if self._states[block] is not BlockState.HELD:
            raise self._illegal(block, "release")
        self._refcounts[block] -= 1
        if self._refcounts[block] > 0:
            return False
        if keep_cached:
            self._move(block, BlockState.HELD, BlockState.CACHED)
        else:
            self._set_free(block, BlockState.HELD)
        return True

    def uncache(self, block: BlockId) -> None:
        """Evicted from the prefix index."""
        self._set_free(block, BlockState.CACHED)

    def confirm(self, blocks: Sequence[BlockId]) -> None:
        """A peer's writes are complete and fenced off: reserved blocks become held once each."""
        self._move_all(blocks, BlockState.RESERVED, BlockState.HELD)
        for block in blocks:
            self._refcounts[block] = 1

    def quarantine(self, blocks: Sequence[BlockId]) -> None:
        """Given up while a peer could still write: unusable until the transport's fence holds."""
        self._move_all(blocks, BlockState.RESERVED, BlockState.QUARANTINED)

    def unquarantine(self, blocks: Sequence[BlockId]) -> None:
        for block in blocks:
            self._set_free(block, BlockState.QUARANTINED)

    def salvage(self, blocks: Sequence[BlockId]) -> None:
        """The fence holds and the contents are complete and verified: held once each."""
        self._move_all(blocks, BlockState.QUARANTINED, BlockState.HELD)
        for block in blocks:
            self._refcounts[block] = 1

    def check_invariants(self) -> None:
        recount = {state: self._states.count(state) for state in BlockState}
        for block, refcount in enumerate(self._refcounts):
            if (refcount > 0) != (self._states[block] is BlockState.HELD):
                raise InternalFault(f"block {block} is {self._states[block]} with refcount {refcount}")
        if recount != self._counts or sum(recount.values()) != self.num_blocks:
            raise InternalFault(f"block states {recount} differ from the counts {self._counts}")
        if sorted(self._free) != [b for b, state in enumerate(self._states) if state is BlockState.FREE]:
            raise InternalFault("the free list differs from the free blocks")

    def _take(self, num_blocks: int, state: BlockState, *, refcount: int) -> list[BlockId] | None:
        if num_blocks > len(self._free):
            return None
        blocks = [heapq.heappop(self._free) for _ in range(num_blocks)]
        self._move_all(blocks, BlockState.FREE, state)
        if refcount:
            for block in blocks:
                self._refcounts[block] = refcount
        return blocks

    def _set_free(self, block: BlockId, expected: BlockState) -> None:
        self._move(block, expected, BlockState.FREE)
        heapq.heappush(self._free, block)

    def _move_all(self, blocks: Sequence[BlockId], expected: BlockState, state: BlockState) -> None:
        """Like _move for each, counted once."""
        states, num_moved = self._states, 0
        for block in blocks:
            if states[block] is not expected:
                break
            states[block] = state
            num_moved += 1
        self._counts[expected] -= num_moved
        self._counts[state] += num_moved
        if num_moved < len(blocks):
            raise self._illegal(blocks[num_moved], f"{expected} -> {state}")

    def _move(self, block: BlockId, expected: BlockState, state: BlockState) -> None:
        if self._states[block] is not expected:
            raise self._illegal(block, f"{expected} -> {state}")
        self._states[block] = state
        self._counts[expected] -= 1
        self._counts[state] += 1

    def _illegal(self, block: BlockId, what: str) -> InternalFault:
        return InternalFault(f"block {block} is {self._states[block]} (refcount {self._refcounts[block]}): no {what}")

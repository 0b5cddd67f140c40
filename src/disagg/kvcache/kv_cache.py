"""One worker's KV blocks: the pool and the prefix index kept in step."""

from collections.abc import Sequence

import msgspec

from disagg.core.errors import InternalFault
from disagg.core.ids import BlockId
from disagg.kvcache.block_hash import BlockHash, append_hashes
from disagg.kvcache.block_pool import BlockPool, BlockState
from disagg.kvcache.prefix_index import PrefixIndex


class Allocation(msgspec.Struct, frozen=True):
    """Blocks of one sequence, in token order.

    blocks    0 .. num_cached-1                     held, from the prefix index
              num_cached .. num_cached+num_reserved-1   reserved for a peer's writes (only of a reservation)
              the rest                              held, empty
    """

    blocks: tuple[BlockId, ...]
    num_cached: int
    num_reserved: int = 0

    @property
    def reserved(self) -> tuple[BlockId, ...]:
        return self.blocks[self.num_cached : self.num_cached + self.num_reserved]

    @property
    def cached(self) -> tuple[BlockId, ...]:
        return self.blocks[: self.num_cached]

    @property
    def empty(self) -> tuple[BlockId, ...]:
        return self.blocks[self.num_cached + self.num_reserved :]


class KvCache:
    """Allocation with reuse: evicts unused cached blocks, least recently used leaf first."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self._index = PrefixIndex()
        self.num_evicted = 0

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    @property
    def num_available(self) -> int:
        """Blocks that an allocation could get now."""
        return self.pool.count(BlockState.FREE) + self.pool.count(BlockState.CACHED)

    def append_hashes(self, hashes: list[BlockHash], token_ids: Sequence[int], root: BlockHash) -> list[BlockHash]:
        """Append the hashes of the full blocks of tokens that follow those of `hashes`, in a chain of this root."""
        return append_hashes(hashes, token_ids, self.block_size, root)

    def num_matching_tokens(self, hashes: Sequence[BlockHash], max_tokens: int) -> int:
        """Tokens of the longest cached prefix, in whole blocks, at most max_tokens."""
        return len(self._match(hashes, max_tokens)) * self.block_size

    def try_allocate(
        self, hashes: Sequence[BlockHash], max_cached: int, num_tokens: int, num_spare: int = 0
    ) -> Allocation | None:
        """Hold the longest cached prefix (at most max_cached tokens) and take blocks for num_tokens in all.

        None when that would leave fewer than num_spare blocks available.
        """
        return self._try(hashes, max_cached, num_reserved_tokens=0, num_tokens=num_tokens, num_spare=num_spare)

    def can_reserve(
        self, hashes: Sequence[BlockHash], num_prompt_tokens: int, num_tokens: int, num_spare: int = 0
    ) -> bool:
        """Whether try_reserve would find room."""
        return self._has_room(self._match(hashes, num_prompt_tokens), num_tokens, num_spare)

    def try_extend(self, num_blocks: int) -> list[BlockId] | None:
        """Held, empty blocks; evicts if need be, and nothing when it cannot be enough."""
        if num_blocks > self.num_available or not self._evict_until_free(num_blocks):
            return None
        return self.pool.try_take(num_blocks)

    def try_reserve(
        self, hashes: Sequence[BlockHash], num_prompt_tokens: int, num_tokens: int, num_spare: int = 0
    ) -> Allocation | None:
        """Hold the longest cached prefix, reserve the rest of the prompt for a peer, take blocks for the answer."""
        return self._try(
            hashes,
            num_prompt_tokens,
            num_reserved_tokens=num_prompt_tokens,
            num_tokens=num_tokens,
            num_spare=num_spare,
        )

    def confirm(self, allocation: Allocation) -> None:
        """The peer's writes are complete: the reserved blocks are held like the others."""
        self.pool.confirm(allocation.reserved)

    def quarantine(self, allocation: Allocation, *, keeps_empty: bool = False) -> None:
        """Give up a reservation a peer may still write to: keep the reserved blocks apart, and the prefix held.

        keeps_empty: the caller still writes into the empty ones, and releases them later.
        """
        self.pool.quarantine(allocation.reserved)
        if not keeps_empty:
            self.release(allocation.empty)

    def end_quarantine(self, allocation: Allocation, hashes: Sequence[BlockHash], num_kept: int) -> None:
        """The fence holds. The first num_kept blocks are complete and verified: they go into the index."""
        num_kept = max(num_kept, allocation.num_cached)
        kept = allocation.blocks[allocation.num_cached : num_kept]
        self.pool.salvage(kept)
        self.pool.unquarantine(allocation.reserved[len(kept) :])
        self.commit(hashes[:num_kept], allocation.blocks, allocation.num_cached)
        self.release(allocation.blocks[:num_kept])

    def commit(self, hashes: Sequence[BlockHash], blocks: Sequence[BlockId], first: int) -> None:
        """Index full, verified blocks [first, len(hashes)) of a chain whose blocks the caller holds.

        Stops where another block already has the hash: whoever holds a child must hold its indexed parent.
        """
        for index in range(first, len(hashes)):
            parent = hashes[index - 1] if index else None
            if index and blocks[index - 1] not in self._index:
                return
            if not self._index.try_insert(hashes[index], parent, blocks[index]):
                return

    def commit_shared(
        self, hashes: Sequence[BlockHash], blocks: tuple[BlockId, ...], first: int
    ) -> tuple[BlockId, ...]:
        """Like commit, but gives up blocks whose contents are indexed already and holds the indexed ones instead.

        Returns the blocks that the caller holds now; the same tuple when nothing changed. Nobody else may be reading
        or writing blocks [first, len(hashes)).
        """
        held: list[BlockId] | None = None
        for index in range(first, len(hashes)):
            known = self._index.find(hashes[index])
            if known == blocks[index]:
                continue
            if known is None or (index and (held or blocks)[index - 1] not in self._index):
                break
            held = held or list(blocks)
            self._hold([known])
            self.release([held[index]])
            held[index] = known
        shared = blocks if held is None else tuple(held)
        self.commit(hashes, shared, first)
        return shared

    def release(self, blocks: Sequence[BlockId]) -> None:
        """One user less of each. Last block first, so that leaves are evicted before their parents."""
        for block in reversed(blocks):
            is_indexed = block in self._index
            if self.pool.release(block, keep_cached=is_indexed) and is_indexed:
                self._index.mark_unused(block)

    def check_invariants(self) -> None:
        self.pool.check_invariants()
        self._index.check_invariants()
        indexed, cached = self._index.blocks(), self.pool.blocks_in(BlockState.CACHED)
        if not cached <= indexed:
            raise InternalFault(f"blocks {cached - indexed} are cached but not indexed")
        if not indexed <= cached | self.pool.blocks_in(BlockState.HELD):
            raise InternalFault(f"of the indexed blocks {indexed} some are neither cached nor held")

    def _match(self, hashes: Sequence[BlockHash], max_tokens: int) -> list[BlockId]:
        return self._index.match(hashes[: max_tokens // self.block_size])

    def _has_room(self, cached: list[BlockId], num_tokens: int, num_spare: int) -> bool:
        """Whether num_tokens fit whose first are in these cached blocks, with num_spare blocks left."""
        num_new = max(0, self.num_blocks_for(num_tokens) - len(cached))
        num_pinned = sum(1 for block in cached if self.pool.state(block) is BlockState.CACHED)
        return num_new + num_spare <= self.num_available - num_pinned

    def _try(
        self, hashes: Sequence[BlockHash], max_cached: int, *, num_reserved_tokens: int, num_tokens: int, num_spare: int
    ) -> Allocation | None:
        cached = self._match(hashes, max_cached)
        num_total = self.num_blocks_for(num_tokens)
        num_reserved = max(0, self.num_blocks_for(num_reserved_tokens) - len(cached))
        num_new = max(0, num_total - len(cached))
        num_reserved = min(num_reserved, num_new)
        if not self._has_room(cached, num_tokens, num_spare):
            return None
        self._hold(cached)
        if not self._evict_until_free(num_new):
            self.release(cached)
            return None
        reserved = self.pool.try_reserve(num_reserved) or []
        taken = self.pool.try_take(num_new - num_reserved) or []
        return Allocation(blocks=(*cached, *reserved, *taken), num_cached=len(cached), num_reserved=num_reserved)

    def _hold(self, blocks: Sequence[BlockId]) -> None:
        self.pool.hold(blocks)
        for block in blocks:
            self._index.mark_used(block)

    def _evict_until_free(self, num_blocks: int) -> bool:
        while self.pool.count(BlockState.FREE) < num_blocks:
            block = self._index.evict()
            if block is None:
                return False
            self.pool.uncache(block)
            self.num_evicted += 1
        return True

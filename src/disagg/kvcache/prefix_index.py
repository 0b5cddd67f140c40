"""Which block holds the KV of which token prefix.

A chain is a path of block hashes from the root. Whoever holds a block of a chain holds all blocks before it, and
releases them last block first; so the least recently used cached block is always a leaf, and eviction never leaves
a child without its parent.
"""

from collections import OrderedDict
from collections.abc import Sequence

from disagg.core.errors import InternalFault
from disagg.core.ids import BlockId
from disagg.kvcache.block_hash import BlockHash


class PrefixIndex:
    """Hash -> block, and the order in which unused blocks may be evicted."""

    def __init__(self) -> None:
        self._blocks: dict[BlockHash, BlockId] = {}
        self._hashes: dict[BlockId, BlockHash] = {}
        self._parents: dict[BlockHash, BlockHash | None] = {}
        self._num_children: dict[BlockHash, int] = {}
        self._unused: OrderedDict[BlockId, None] = OrderedDict()  # refcount 0, least recently used first

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: BlockId) -> bool:
        return block in self._hashes

    def blocks(self) -> set[BlockId]:
        """All indexed blocks."""
        return set(self._hashes)

    def find(self, block_hash: BlockHash) -> BlockId | None:
        """The block that is indexed under this hash."""
        return self._blocks.get(block_hash)

    def match(self, hashes: Sequence[BlockHash]) -> list[BlockId]:
        """Blocks of the longest indexed prefix of the chain."""
        blocks: list[BlockId] = []
        for block_hash in hashes:
            block = self._blocks.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def try_insert(self, block_hash: BlockHash, parent: BlockHash | None, block: BlockId) -> bool:
        """Index a held block. False when the hash, or the place of its parent, belongs to another block."""
        known = self._blocks.get(block_hash)
        if known is not None:
            return known == block
        if parent is not None and parent not in self._blocks:
            return False
        if block in self._hashes:
            raise InternalFault(f"block {block} is already indexed under another hash")
        self._blocks[block_hash] = block
        self._hashes[block] = block_hash
        self._parents[block_hash] = parent
        self._num_children[block_hash] = 0
        if parent is not None:
            self._num_children[parent] += 1
        return True

    def mark_unused(self, block: BlockId) -> None:
        """The last user has released it: most recently used of the evictable."""
        self._unused[block] = None
        self._unused.move_to_end(block)

    def mark_used(self, block: BlockId) -> None:
        self._unused.pop(block, None)

    def evict(self) -> BlockId | None:
        """Forget the least recently used unused leaf and return its block."""
        for block in self._unused:
            block_hash = self._hashes[block]
            if self._num_children[block_hash] == 0:
                break
        else:
            return None
        del self._unused[block], self._hashes[block], self._blocks[block_hash], self._num_children[block_hash]
        parent = self._parents.pop(block_hash)
        if parent is not None:
            self._num_children[parent] -= 1
        return block

    def check_invariants(self) -> None:
        children = dict.fromkeys(self._blocks, 0)
        for block_hash, parent in self._parents.items():
            if parent is not None:
                if parent not in self._blocks:
                    raise InternalFault(f"block {self._blocks[block_hash]} is indexed without its parent")
                children[parent] += 1
        if children != self._num_children:
            raise InternalFault("numbers of children differ from the parents' table")
        if {block: block_hash for block_hash, block in self._blocks.items()} != self._hashes:
            raise InternalFault("hash -> block and block -> hash differ")
        for block in self._unused:
            if block not in self._hashes:
                raise InternalFault(f"block {block} is evictable but not indexed")

"""Chained hashes of full blocks: equal in every process, whatever PYTHONHASHSEED says."""

import hashlib
from array import array
from collections.abc import Sequence
from typing import NewType

BlockHash = NewType("BlockHash", bytes)

HASH_BYTES = 16


def root_hash(model_digest: str, numerics: str, salt: str = "", form: str = "") -> BlockHash:
    """Seed of every chain: KV of other weights, another precision promise or another tenant never matches.

    form: what its bits have lost on the way here ("" for nothing): such KV never answers for KV that was computed.
    """
    promise = f"{numerics} but {form}" if form else numerics
    text = f"{model_digest}\0{promise}\0{salt}"
    return BlockHash(hashlib.blake2b(text.encode(), digest_size=HASH_BYTES).digest())


def append_hashes(
    hashes: list[BlockHash], token_ids: Sequence[int], block_size: int, root: BlockHash
) -> list[BlockHash]:
    """Append to `hashes` those of the full blocks of the tokens that follow its last block; returns it."""
    blake2b, block_bytes = hashlib.blake2b, 8 * block_size  # looked up once: prompts have thousands of blocks
    packed = array("q", token_ids).tobytes()
    parent: bytes = hashes[-1] if hashes else root
    for start in range(0, len(packed) - block_bytes + 1, block_bytes):
        parent = blake2b(parent + packed[start : start + block_bytes], digest_size=HASH_BYTES).digest()
        hashes.append(BlockHash(parent))
    return hashes

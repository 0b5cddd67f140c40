"""The bytes of one frame on their way, and their sum.

They are taken in batches: whoever sends or fills them has done with one when it asks for the next. By then its bytes
are in the cache, and the peer is at work, so that is when they are summed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import xxhash

from disagg.transport.segments import batches

# One system call's worth. Small enough to be still in cache when it is summed, large enough to hide the call.
BATCH_BYTES = 512 << 10
MAX_VIEWS = 1024  # IOV_MAX on Linux and macOS


class Payload(NamedTuple):
    """Views in wire order, at most MAX_VIEWS of them in a batch."""

    batches: Iterator[Sequence[memoryview]]
    checksum: Callable[[], int]  # XXH3 of all bytes, once the batches are at their end; 0 where nothing is summed


def payload_of(groups: Iterable[Sequence[memoryview]], seed: int | None) -> Payload:
    """Views wherever they lie, any number in a group. With seed None nothing is summed."""
    digest = None if seed is None else xxhash.xxh3_64(seed=seed)
    return Payload(_summed(groups, digest), (lambda: 0) if digest is None else digest.intdigest)


def _summed(groups: Iterable[Sequence[memoryview]], digest: xxhash.xxh3_64 | None) -> Iterator[Sequence[memoryview]]:
    for views in groups:
        for batch in batches(views, max_bytes=BATCH_BYTES, max_views=MAX_VIEWS):
            yield batch
            if digest is not None:
                for view in batch:
                    digest.update(view)

"""Memory for what is written once and read at every step: in pages of 2 MiB where the kernel has them.

A step reads all weights front to back. In pages of 4 KiB that is a look into the page tables for every 64 lines, twice
as deep on a virtual machine, and at start a fault for every page.
"""

import contextlib
import mmap

import numpy as np
import numpy.typing as npt

CHUNK_BYTES = 64 << 20  # asked of the kernel at once, which gives pages at first touch only
ALIGNMENT = 64  # bytes: a cache line


class LargePages:
    """Hands out memory piece by piece. A chunk goes back to the kernel when nobody holds a piece of it any more."""

    def __init__(self) -> None:
        self._rest: npt.NDArray[np.uint8] = np.empty(0, np.uint8)  # of the last chunk

    def take(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """[num_bytes], of any value, at the start of a cache line."""
        whole = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if whole > len(self._rest):
            self._rest = np.frombuffer(_map(max(whole, CHUNK_BYTES)), np.uint8)
        piece, self._rest = self._rest[:num_bytes], self._rest[whole:]
        return piece


def _map(num_bytes: int) -> mmap.mmap:
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # no huge pages here: slower, not wrong
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages

"""Memory that other processes can map: a file without a name, its size sealed.

Nothing is left behind: the kernel frees the pages when the last process that maps them has ended. The seals keep a
process that maps it from shrinking it under the others, which would end them by SIGBUS.
"""

import contextlib
import fcntl
import mmap
import os
import weakref

import numpy as np
import numpy.typing as npt

_SEALS = ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")


def is_sealable() -> bool:
    """Whether this system has such memory (Linux)."""
    return hasattr(os, "memfd_create") and all(hasattr(fcntl, name) for name in (*_SEALS, "F_ADD_SEALS"))


class SealedMemory:
    """`num_bytes` zero bytes. The kernel gives pages at first touch. Raises OSError when it gives none at all."""

    def __init__(self, num_bytes: int) -> None:
        self.descriptor = os.memfd_create("disagg-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, num_bytes)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        pages = mmap.mmap(self.descriptor, num_bytes)
        with contextlib.suppress(AttributeError, OSError):  # no huge pages here: slower, not wrong
            pages.madvise(mmap.MADV_HUGEPAGE)
        self.array: npt.NDArray[np.uint8] = np.frombuffer(pages, np.uint8)  # keeps the mapping

    def check_invariants(self) -> None:
        assert os.fstat(self.descriptor).st_size == self.array.nbytes, "the file is not as long as its mapping"

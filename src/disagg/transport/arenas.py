"""Arenas in host memory, as arrays of bytes: this process's own, and those of others that are mapped here."""

import contextlib
import mmap
import os

import numpy as np
import numpy.typing as npt

from disagg.core.errors import InternalFault
from disagg.kvcache.memory import MappableMemory, Memory, Segment

Bytes = npt.NDArray[np.uint8]


def whole_arena(memory: MappableMemory) -> Bytes:
    """All bytes of an own arena, without mapping it once more."""
    (view,) = memory.gather((Segment(0, memory.num_bytes),))
    return np.frombuffer(view, np.uint8)


def host_arena(memory: Memory | None) -> Bytes | None:
    """All bytes of an own arena where it is host memory, byte for byte; None elsewhere."""
    if not isinstance(memory, MappableMemory) or memory.descriptor is None:
        return None
    return whole_arena(memory)


class MappedArena:
    """An arena of another process, mapped from its descriptor (which the caller may close)."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        """Raises InternalFault when the file is not as long as told, OSError when it cannot be mapped."""
        size = os.fstat(descriptor).st_size
        if size != num_bytes:
            raise InternalFault(f"the arena's file has {size} bytes, not the {num_bytes} that were told")
        self.num_bytes = num_bytes
        self._map = mmap.mmap(descriptor, num_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # no huge pages here: slower, not wrong
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self.bytes: Bytes = np.frombuffer(self._map, np.uint8)

    def close(self) -> None:
        """Unmap; nothing may use `bytes` any more."""
        self.bytes = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):  # a failed copy's traceback still refers to it: unmapped with that
            self._map.close()

"""Many short runs of an arena, taken together: so many bytes per call, however they are scattered.

    rows      the arena as a table whose row is the greatest size that all offsets and lengths are multiples of
    window    the next rows of the runs, in order, WINDOW_BYTES at most
    scratch   memory of one window, which stays in cache: bytes are gathered into it, or scattered from it
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from disagg.transport.arenas import Bytes
from disagg.transport.segments import SegmentArray

WINDOW_BYTES = 256 << 10
LONG_RUN_BYTES = 128 << 10  # from here on a run is better taken alone, and one call for it costs little
MIN_ROW_BYTES = 1024  # smaller rows cost more per byte than runs taken one by one

_Ints = npt.NDArray[np.int64]


class RowWindows:
    """The bytes of some runs, window by window."""

    def __init__(self, arena: Bytes, rows: _Ints, row_bytes: int) -> None:
        """rows [number]: indices of rows in the arena, all of them within."""
        self._table = arena[: len(arena) // row_bytes * row_bytes].reshape(-1, row_bytes)
        self._rows = rows
        self._row_bytes = row_bytes
        self._per_window = WINDOW_BYTES // row_bytes
        self._scratch = np.empty(min(self._per_window, len(rows)) * row_bytes, np.uint8)

    @classmethod
    def try_make(cls, arena: Bytes, runs: SegmentArray) -> "RowWindows | None":
        """None where the runs are better taken one by one, or leave the arena."""
        offsets, lengths = runs.columns()
        if len(lengths) < 2 or int(lengths.sum()) >= len(lengths) * LONG_RUN_BYTES:
            return None
        size = int(np.gcd.reduce(np.concatenate((offsets, lengths))))
        if not MIN_ROW_BYTES <= size <= WINDOW_BYTES:
            return None
        if int(offsets.min()) < 0 or int((offsets + lengths).max()) > arena.nbytes:
            return None
        counts = lengths // size
        before = np.cumsum(counts) - counts
        return cls(arena, np.repeat(offsets // size - before, counts) + np.arange(int(counts.sum())), size)

    def __iter__(self) -> Iterator[_Ints]:
        """The rows of each window, for the methods below."""
        for at in range(0, len(self._rows), self._per_window):
            yield self._rows[at : at + self._per_window]

    def num_bytes(self, window: _Ints) -> int:
        return len(window) * self._row_bytes

    def scratch(self, window: _Ints) -> memoryview:
        """Room for the bytes of a window, the same for all of them."""
        return self._scratch[: self.num_bytes(window)].data

    def gather(self, window: _Ints) -> memoryview:
        """The bytes of a window, until the next is asked for."""
        filled = self._scratch[: self.num_bytes(window)]
        np.take(self._table, window, axis=0, out=filled.reshape(-1, self._row_bytes), mode="clip")
        return filled.data

    def scatter(self, window: _Ints) -> None:
        """Put what is in scratch where the window's bytes belong."""
        self._table[window] = self._scratch[: self.num_bytes(window)].reshape(-1, self._row_bytes)

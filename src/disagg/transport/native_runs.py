"""The compiled way to copy and sum scattered runs: one call for many of them, in which other threads run.

    runs = native_runs()      None where nothing is compiled or the CPU is too old: callers then use numpy and xxhash
"""

import ctypes
from ctypes import c_int, c_int64, c_uint64, c_void_p
from functools import cache

import numpy as np
import numpy.typing as npt

from disagg.engine.native.build import compiled

MIN_BYTES = 241  # shorter inputs have another form of XXH3

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]


class NativeRuns:
    """Offsets are not checked here."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        state = [c_void_p]
        for name, arguments, result in (
            ("disagg_sum_bytes", [], c_int64),
            ("disagg_sum_begin", [*state, c_uint64], None),
            ("disagg_copy_sum", [*state, *[c_void_p] * 5, c_int64], None),
            ("disagg_sum_end", state, c_uint64),
        ):
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, result
        self.state_bytes = int(library.disagg_sum_bytes())

    def begin(self, seed: int = 0) -> "NativeSum":
        return NativeSum(self._library, ctypes.create_string_buffer(self.state_bytes), seed)


class NativeSum:
    """The XXH3 of at least MIN_BYTES bytes, taken in by runs."""

    def __init__(self, library: ctypes.CDLL, state: "ctypes.Array[ctypes.c_char]", seed: int) -> None:
        self._library = library
        self._state = state
        library.disagg_sum_begin(state, seed)

    def copy(self, source: Bytes, starts: Ints, target: Bytes, places: Ints, lengths: Ints) -> None:
        """Copy runs and take them in."""
        self._library.disagg_copy_sum(
            self._state,
            source.ctypes.data,
            target.ctypes.data,
            starts.ctypes.data,
            places.ctypes.data,
            lengths.ctypes.data,
            len(lengths),
        )

    def add(self, source: Bytes, starts: Ints, lengths: Ints) -> None:
        """Take runs in where they lie."""
        at = starts.ctypes.data
        self._library.disagg_copy_sum(
            self._state, source.ctypes.data, None, at, at, lengths.ctypes.data, len(lengths)
        )

    def end(self) -> int:
        """Of what was taken in so far."""
        return int(self._library.disagg_sum_end(self._state))


@cache
def native_runs() -> NativeRuns | None:
    """Looked for once per process; nothing is compiled here."""
    path = compiled()
    if path is None:
        return None
    library = ctypes.CDLL(str(path))
    library.disagg_has_runs.argtypes, library.disagg_has_runs.restype = [], c_int
    return NativeRuns(library) if library.disagg_has_runs() else None

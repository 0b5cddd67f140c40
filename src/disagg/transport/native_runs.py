"""Many short runs of an arena, moved by way of a window in cache by compiled code that sums them in the same pass.

    windows = windows_of(arena, runs, seed)     None where runs are better taken one by one, or nothing can be compiled

Bytes on the wire and their sum are the same either way. Calls let other threads run.

    packed      memory of one window: runs are gathered into it, or scattered from it
    window      runs that follow each other, WINDOW_BYTES together; longer ones are cut
"""

import ctypes
import logging
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from ctypes import c_int, c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from disagg.engine.native.build import BuildError, Library, build
from disagg.kvcache.memory import Segment
from disagg.transport.runs import LONG_RUN_BYTES, WINDOW_BYTES, Bytes
from disagg.transport.segments import SegmentArray

_log = logging.getLogger(__name__)

MIN_RUNS = 16  # fewer cost less one by one
MIN_BYTES = 241  # shorter inputs have another form of XXH3

_SOURCES = Path(__file__).parent / "native"
RUNS = Library(
    "runs", _SOURCES, ("-O3", "-std=c++17", "-fPIC", "-Wno-maybe-uninitialized"), {"runs.o": ("runs.cpp", ())}
)
_RUNS = [c_void_p, c_void_p, c_int64]  # offsets, lengths, how many
_SIGNATURES = {
    "disagg_runs_work": ([], c_int),
    "disagg_sum_bytes": ([], c_int64),
    "disagg_sum_begin": ([c_void_p, c_uint64], None),
    "disagg_sum_end": ([c_void_p], c_uint64),
    "disagg_gather_runs": ([c_void_p, c_void_p, *_RUNS, c_void_p], None),
    "disagg_scatter_runs": ([c_void_p, c_void_p, c_void_p, *_RUNS], None),
}

_Ints = npt.NDArray[np.int64]


@cache
def load_runs() -> ctypes.CDLL | None:
    """The compiled code, compiled first if need be. None, with the reason in the log, where it cannot be had."""
    try:
        library = ctypes.CDLL(str(build(library=RUNS)))
    except (BuildError, OSError) as error:
        _log.warning("short runs are sent one by one, which is slower: %s", error)
        return None
    for name, (arguments, result) in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
    if not library.disagg_runs_work():
        _log.warning("short runs are sent one by one, which is slower: this processor has no AVX2")
        return None
    return library


def windows_of(arena: Bytes, runs: Sequence[Segment], seed: int | None) -> "RunWindows | None":
    """None also where runs leave the arena."""
    if len(runs) < MIN_RUNS:
        return None
    offsets, lengths = SegmentArray.of(runs).columns()
    num_bytes = int(lengths.sum())
    if num_bytes < MIN_BYTES or num_bytes >= len(lengths) * LONG_RUN_BYTES:
        return None
    # Compiled code would write wherever it is told to. The first two bounds keep the sum from running over.
    stops = offsets.max(), lengths.max(), (offsets + lengths).max()
    if int(offsets.min()) < 0 or max(map(int, stops)) > arena.nbytes:
        return None
    library = load_runs()
    return None if library is None else RunWindows(library, arena, offsets, lengths, seed)


class _Window(NamedTuple):
    """Some runs that follow each other."""

    offsets: int  # addresses, as compiled code takes them
    lengths: int
    num_runs: int
    num_bytes: int


class RunWindows:
    """The bytes of some runs, window by window, once; and the XXH3 of them all."""

    def __init__(self, library: ctypes.CDLL, arena: Bytes, offsets: _Ints, lengths: _Ints, seed: int | None) -> None:
        """offsets, lengths [number]: all within the arena, none empty."""
        self._library = library
        self._arena = arena
        self._offsets, self._lengths = _cut(offsets, lengths)
        self._packed = np.empty(min(WINDOW_BYTES, int(lengths.sum())), np.uint8)
        self._state = ctypes.create_string_buffer(int(library.disagg_sum_bytes()))
        self._is_asked_for = seed is not None  # summed they are in any case: it costs nothing
        library.disagg_sum_begin(self._state, seed or 0)

    def gathered(self) -> Iterator[Sequence[memoryview]]:
        """Each window is overwritten by the next."""
        gather, state, arena = self._library.disagg_gather_runs, self._state, self._arena.ctypes.data
        packed, view = self._packed.ctypes.data, self._packed.data
        for offsets, lengths, num_runs, num_bytes in self._windows():
            gather(state, arena, offsets, lengths, num_runs, packed)
            yield (view[:num_bytes],)

    def scattered(self) -> Iterator[Sequence[memoryview]]:
        """Windows to be filled; each is put in place when the next is asked for."""
        scatter, state, arena = self._library.disagg_scatter_runs, self._state, self._arena.ctypes.data
        packed, view = self._packed.ctypes.data, self._packed.data
        for offsets, lengths, num_runs, num_bytes in self._windows():
            yield (view[:num_bytes],)
            scatter(state, packed, arena, offsets, lengths, num_runs)

    def checksum(self) -> int:
        """Once the windows are at their end; 0 where no seed was given."""
        return int(self._library.disagg_sum_end(self._state)) if self._is_asked_for else 0

    def _windows(self) -> Iterator[_Window]:
        offsets, lengths = self._offsets.ctypes.data, self._lengths.ctypes.data
        ends: list[int] = np.cumsum(self._lengths).tolist()
        at = done = 0
        while at < len(ends):
            stop = bisect_right(ends, done + WINDOW_BYTES, at)
            where = at * self._lengths.itemsize
            yield _Window(offsets + where, lengths + where, stop - at, ends[stop - 1] - done)
            at, done = stop, ends[stop - 1]


def _cut(offsets: _Ints, lengths: _Ints) -> tuple[_Ints, _Ints]:
    """The same bytes, no run longer than a window; each array of its own memory, without gaps."""
    if int(lengths.max()) <= WINDOW_BYTES:
        return np.ascontiguousarray(offsets), np.ascontiguousarray(lengths)
    counts = -(-lengths // WINDOW_BYTES)
    within = (np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)) * WINDOW_BYTES
    return np.repeat(offsets, counts) + within, np.minimum(np.repeat(lengths, counts) - within, WINDOW_BYTES)

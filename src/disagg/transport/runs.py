"""Copying and summing runs of bytes in mapped arenas.

copying   Each run is summed right after it was copied, in windows that stay in cache. Between runs shorter than
          LONG_RUN_BYTES no other thread gets the interpreter; but PROGRESS_BYTES take well under a millisecond, and to
          report them is to let others run.
summing   Runs of at least LONG_RUN_BYTES are summed one by one. Shorter ones are taken together as rows of one table,
          so many bytes per call, however they are scattered: a call that lets other threads run may have to wait long
          to get the interpreter back.

    rows      the arena as a table whose row is the greatest size that all offsets and lengths are multiples of
    scratch   WINDOW_BYTES, in cache: rows are gathered into it and summed there
"""

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from disagg.core.errors import InternalFault
from disagg.kvcache.memory import MappableMemory, Memory, Segment
from disagg.transport.segments import SegmentArray, copy_views

WINDOW_BYTES = 256 << 10
PROGRESS_BYTES = 2 << 20
LONG_RUN_BYTES = 128 << 10  # above this xxhash and numpy let other threads run, and one call costs little
MIN_ROW_BYTES = 1024  # smaller rows cost more per byte than runs taken one by one

Bytes = npt.NDArray[np.uint8]
_Ints = npt.NDArray[np.int64]


def whole_arena(memory: MappableMemory) -> Bytes:
    """All bytes of an own arena, without mapping it once more."""
    (view,) = memory.gather((Segment(0, memory.num_bytes),))
    return np.frombuffer(view, np.uint8)


def host_arena(memory: Memory) -> Bytes | None:
    """The same where it is host memory, byte for byte; None elsewhere."""
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


class _Pieces(msgspec.Struct, frozen=True):
    """Runs of equal length in two arenas, as arrays."""

    starts: _Ints
    places: _Ints
    lengths: _Ints


class RunCopy:
    """A copy between two mapped arenas: runs of equal total, however each side is cut.

    Made while its permit is on the way: what both sides' cuts cost is spent then.
    """

    def __init__(
        self, source: Bytes, source_runs: Sequence[Segment], destination: Bytes, destination_runs: Sequence[Segment]
    ) -> None:
        """Raises InternalFault for unequal totals."""
        self._source = source
        self._destination = destination
        self._pieces = _paired(SegmentArray.of(source_runs), SegmentArray.of(destination_runs))

    def run(self, on_progress: Callable[[int], None] = lambda num_bytes: None) -> int:
        """Copy. Returns the XXH3 of the bytes in order.

        `on_progress` is told, from time to time before the end, how many of the first bytes are in place.
        """
        digest = xxhash.xxh3_64()
        told = 0
        for num_bytes in _copy(self._source, self._destination, self._pieces, digest):
            if num_bytes - told >= PROGRESS_BYTES:
                told = num_bytes
                on_progress(told)
        return digest.intdigest()


def _copy(source: Bytes, destination: Bytes, pieces: _Pieces, digest: xxhash.xxh3_64) -> Iterator[int]:
    """Yields how many of the first bytes are in place."""
    read_from, write_to, num_bytes = source.data, destination.data, 0
    for start, place, length in zip(
        pieces.starts.tolist(), pieces.places.tolist(), pieces.lengths.tolist(), strict=True
    ):
        if length < LONG_RUN_BYTES:  # the cheapest calls, during which no other thread runs
            run = read_from[start : start + length]
            write_to[place : place + length] = run
            digest.update(run)
            num_bytes += length
            yield num_bytes
            continue
        for at in range(0, length, WINDOW_BYTES):
            stop = min(at + WINDOW_BYTES, length)
            window = source[start + at : start + stop]
            destination[place + at : place + stop] = window
            digest.update(window.data)
            num_bytes += window.nbytes
            yield num_bytes


def copy_buffers(views: Sequence[memoryview], destination: Bytes, runs: Sequence[Segment]) -> int:
    """The same out of buffers that are no part of a mapped arena."""
    digest = xxhash.xxh3_64()
    for view in views:
        digest.update(view)
    arena = destination.data
    copy_views(views, [arena[offset : offset + length] for offset, length in runs])
    return digest.intdigest()


class RunSum:
    """The XXH3 of runs in order, as they lie; taken as far as they are in place already."""

    def __init__(self, arena: Bytes, runs: Sequence[Segment]) -> None:
        self._digest = xxhash.xxh3_64()
        self._windows = self._sum_windows(arena, runs)
        self._next_bytes: int | None = None  # of the window to be summed next; 0 at the end
        self._num_bytes = 0

    def prepare(self) -> None:
        """Do what costs something per run, if it is not done yet."""
        if self._next_bytes is None:
            self._next_bytes = next(self._windows, 0)

    def advance(self, num_bytes: int) -> None:
        """The first `num_bytes` are in place: sum all windows that end there or before."""
        self.prepare()
        while self._next_bytes and self._num_bytes + self._next_bytes <= num_bytes:
            self._num_bytes += self._next_bytes
            self._next_bytes = next(self._windows, 0)

    def finish(self) -> int:
        """All are in place."""
        self.prepare()
        while self._next_bytes:
            self.advance(self._num_bytes + self._next_bytes)
        return self._digest.intdigest()

    def _sum_windows(self, arena: Bytes, runs: Sequence[Segment]) -> Iterator[int]:
        """Yields the size of each window before it is summed."""
        offsets, lengths = SegmentArray.of(runs).columns()
        if size := _row_bytes(offsets, lengths):
            table, wanted = _table(arena, size), _rows(offsets, lengths, size)
            per_window = WINDOW_BYTES // size
            scratch = np.empty((per_window, size), np.uint8)
            for at in range(0, len(wanted), per_window):
                window = scratch[: len(wanted) - at]
                yield window.nbytes
                np.take(table, wanted[at : at + per_window], axis=0, out=window, mode="clip")
                self._digest.update(window.data)
            return
        for start, length in zip(offsets.tolist(), lengths.tolist(), strict=True):
            for at in range(start, start + length, WINDOW_BYTES):
                window = arena[at : min(at + WINDOW_BYTES, start + length)]
                yield window.nbytes
                self._digest.update(window.data)


def _paired(source: SegmentArray, destination: SegmentArray) -> _Pieces:
    """Cut both sides wherever one is cut."""
    if source.num_bytes != destination.num_bytes:
        raise InternalFault(f"{source.num_bytes} bytes for runs of {destination.num_bytes}; they must be equal")
    (ours, our_lengths), (theirs, their_lengths) = source.columns(), destination.columns()
    if np.array_equal(our_lengths, their_lengths):
        return _Pieces(ours, theirs, our_lengths)
    # Positions in the byte stream where some run starts, on either side.
    our_starts, their_starts = (np.cumsum(lengths) - lengths for lengths in (our_lengths, their_lengths))
    total = int(our_lengths.sum())
    edges = np.union1d(our_starts, their_starts)
    edges = edges[edges < total]
    lengths = np.diff(edges, append=total)
    return _Pieces(_offsets(ours, our_starts, edges), _offsets(theirs, their_starts, edges), lengths)


def _offsets(offsets: _Ints, starts: _Ints, edges: _Ints) -> _Ints:
    """Where in the arena each position of the byte stream lies."""
    run = np.searchsorted(starts, edges, side="right") - 1
    found: _Ints = offsets[run] + edges - starts[run]
    return found


def _row_bytes(offsets: _Ints, lengths: _Ints) -> int:
    """Size of a row that divides every offset and length; 0 when the runs are better taken one by one."""
    if len(lengths) < 2 or int(lengths.sum()) >= len(lengths) * LONG_RUN_BYTES:
        return 0
    size = int(np.gcd.reduce(np.concatenate((offsets, lengths))))
    return size if MIN_ROW_BYTES <= size <= WINDOW_BYTES else 0


def _table(arena: Bytes, size: int) -> Bytes:
    """[arena bytes // size, size]. A tail shorter than a row is in no run."""
    return arena[: len(arena) // size * size].reshape(-1, size)


def _rows(offsets: _Ints, lengths: _Ints, size: int) -> _Ints:
    """Indices of all rows of the runs, in order."""
    counts = lengths // size
    before = np.cumsum(counts) - counts
    return np.repeat(offsets // size - before, counts) + np.arange(int(counts.sum()))

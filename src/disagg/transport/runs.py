"""Copying and summing runs of bytes in mapped arenas, by calls that let other threads run.

Where the compiled library is there, it copies and sums some MiB of runs per call, each piece while it is in cache.
Elsewhere a run of at least LONG_RUN_BYTES is copied piece by piece, and shorter ones are taken together as rows of one
table: so many bytes per call, however they are scattered, because each call that gives the interpreter away may have to
wait long to get it back.

    rows      the arena as a table whose row is the greatest size that all offsets and lengths are multiples of
    scratch   WINDOW_BYTES, in cache: rows are gathered into it, summed there, and scattered from it
"""

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import xxhash

from disagg.core.errors import InternalFault
from disagg.kvcache.memory import MappableMemory, Memory, Segment
from disagg.transport.native_runs import MIN_BYTES, NativeSum, native_runs
from disagg.transport.pieces import Bytes, Ints, Runs, paired, runs_of
from disagg.transport.segments import copy_views

WINDOW_BYTES = 256 << 10
PROGRESS_BYTES = 2 << 20
LONG_RUN_BYTES = 128 << 10  # above this xxhash and numpy let other threads run, and one call costs little
MIN_ROW_BYTES = 1024  # smaller rows cost more per byte than runs taken one by one


def host_bytes(memory: Memory) -> Bytes | None:
    """All bytes of an arena that lies in host memory, without mapping it once more; None for any other."""
    if not isinstance(memory, MappableMemory) or memory.descriptor is None:
        return None
    (view,) = memory.gather((Segment(0, memory.num_bytes),))
    return np.frombuffer(view, np.uint8)


def lie_within(segments: Sequence[Segment], arena: Bytes | None) -> bool:
    """Whether these are bytes of the arena itself, and not what stands for something else behind its end."""
    return arena is not None and all(offset < arena.nbytes for offset, _ in segments)


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


def copy_runs(
    source: Bytes,
    source_runs: Sequence[Segment],
    destination: Bytes,
    destination_runs: Sequence[Segment],
    on_progress: Callable[[int], None] = lambda num_bytes: None,
) -> int:
    """Copy runs of equal total, however each side is cut. Returns the XXH3 of the bytes in order.

    `on_progress` is told, from time to time before the end, how many of the first bytes are in place. Raises
    InternalFault for runs outside their arena.
    """
    ours, theirs = paired(runs_of(source_runs).checked(source), runs_of(destination_runs).checked(destination))
    native = native_runs()
    if native is not None and ours.num_bytes >= MIN_BYTES:
        return _copy_natively(native.begin(), source, ours, destination, theirs, on_progress)
    digest = xxhash.xxh3_64()
    num_bytes = told = 0
    for window in _copy_windows(source, ours, destination, theirs):
        digest.update(window.data)
        if num_bytes - told >= PROGRESS_BYTES:  # of the windows before: this one need not be in place yet
            told = num_bytes
            on_progress(told)
        num_bytes += window.nbytes
    return digest.intdigest()


def _copy_natively(
    digest: NativeSum, source: Bytes, ours: Runs, destination: Bytes, theirs: Runs, on_progress: Callable[[int], None]
) -> int:
    num_done, num_bytes = 0, ours.num_bytes
    ours, theirs = ours.cut(PROGRESS_BYTES), theirs.cut(PROGRESS_BYTES)
    for now, size in ours.groups(PROGRESS_BYTES):
        digest.copy(source, ours.starts[now], destination, theirs.starts[now], ours.lengths[now])
        num_done += size
        if num_done < num_bytes:
            on_progress(num_done)
    return digest.end()


def _copy_windows(source: Bytes, ours: Runs, destination: Bytes, theirs: Runs) -> Iterator[Bytes]:
    """Yields each window of bytes, in order, while it is in cache."""
    if size := _row_bytes(ours, theirs):
        table, target = _table(source, size), _table(destination, size)
        wanted, places = _rows(ours, size), _rows(theirs, size)
        per_window = WINDOW_BYTES // size
        scratch = np.empty((per_window, size), np.uint8)
        for at in range(0, len(wanted), per_window):
            window = scratch[: len(wanted) - at]
            np.take(table, wanted[at : at + per_window], axis=0, out=window, mode="clip")
            yield window
            target[places[at : at + per_window]] = window
        return
    for start, place, length in zip(ours.starts.tolist(), theirs.starts.tolist(), ours.lengths.tolist(), strict=True):
        for at in range(0, length, WINDOW_BYTES):
            stop = min(at + WINDOW_BYTES, length)
            destination[place + at : place + stop] = source[start + at : start + stop]
            yield source[start + at : start + stop]


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

    def __init__(self, arena: Bytes, segments: Sequence[Segment]) -> None:
        """Raises InternalFault for runs outside the arena."""
        runs, native = runs_of(segments).checked(arena), native_runs()
        self._finish: Callable[[], int]
        self._windows: Iterator[int]
        if native is not None and runs.num_bytes >= MIN_BYTES:
            compiled = native.begin()
            self._windows, self._finish = _sum_natively(compiled, arena, runs.cut(WINDOW_BYTES)), compiled.end
        else:
            digest = xxhash.xxh3_64()
            self._windows, self._finish = _sum_windows(digest, arena, runs), digest.intdigest
        self._next_bytes = next(self._windows, 0)  # of the window to be summed next; 0 at the end
        self._num_bytes = 0

    def advance(self, num_bytes: int) -> None:
        """The first `num_bytes` are in place: sum all windows that end there or before."""
        while self._next_bytes and self._num_bytes + self._next_bytes <= num_bytes:
            self._num_bytes += self._next_bytes
            self._next_bytes = next(self._windows, 0)

    def finish(self) -> int:
        """All are in place."""
        while self._next_bytes:
            self.advance(self._num_bytes + self._next_bytes)
        return self._finish()


def _sum_natively(digest: NativeSum, arena: Bytes, runs: Runs) -> Iterator[int]:
    """Yields the size of each window before it is summed."""
    for now, size in runs.groups(WINDOW_BYTES):
        yield size
        digest.add(arena, runs.starts[now], runs.lengths[now])


def _sum_windows(digest: xxhash.xxh3_64, arena: Bytes, runs: Runs) -> Iterator[int]:
    """The same without compiled code."""
    if size := _row_bytes(runs, runs):
        table, wanted = _table(arena, size), _rows(runs, size)
        per_window = WINDOW_BYTES // size
        scratch = np.empty((per_window, size), np.uint8)
        for at in range(0, len(wanted), per_window):
            window = scratch[: len(wanted) - at]
            yield window.nbytes
            np.take(table, wanted[at : at + per_window], axis=0, out=window, mode="clip")
            digest.update(window.data)
        return
    for start, length in zip(runs.starts.tolist(), runs.lengths.tolist(), strict=True):
        for at in range(start, start + length, WINDOW_BYTES):
            window = arena[at : min(at + WINDOW_BYTES, start + length)]
            yield window.nbytes
            digest.update(window.data)


def _row_bytes(ours: Runs, theirs: Runs) -> int:
    """Size of a row that divides every offset and length; 0 when the runs are better taken one by one."""
    num_runs = len(ours.lengths)
    if num_runs < 2 or ours.num_bytes >= num_runs * LONG_RUN_BYTES:
        return 0
    size = int(np.gcd.reduce(np.concatenate((ours.starts, theirs.starts, ours.lengths))))
    return size if MIN_ROW_BYTES <= size <= WINDOW_BYTES else 0


def _table(arena: Bytes, size: int) -> Bytes:
    """[arena bytes // size, size]. A tail shorter than a row is in no run."""
    return arena[: len(arena) // size * size].reshape(-1, size)


def _rows(runs: Runs, size: int) -> Ints:
    """Indices of all rows of the runs, in order."""
    counts = runs.lengths // size
    before = np.cumsum(counts) - counts
    return np.repeat(runs.starts // size - before, counts) + np.arange(int(counts.sum()))

"""Arithmetic on segments and views: totals, containment, cutting into batches, copying across unequal cuts."""

import contextlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise
from operator import attrgetter, itemgetter
from typing import overload

import numpy as np
import numpy.typing as npt

from disagg.core.errors import ProtocolViolation
from disagg.kvcache.memory import Segment

_length_of = itemgetter(1)  # twice as fast as the attribute
_size_of = attrgetter("nbytes")
MANY_SEGMENTS = 64  # from here on arrays are faster than a loop
_PACKED = np.dtype("<i8")  # on the wire


class SegmentArray(Sequence[Segment]):
    """Segments as one array: for arithmetic on many of them, and for a wire that costs nothing per segment."""

    def __init__(self, values: npt.NDArray[np.int64]) -> None:
        """values [number, 2]: offset, length."""
        self.values = values

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> "SegmentArray":
        """Raises OverflowError for numbers of more than 64 bits."""
        if isinstance(segments, SegmentArray):
            return segments
        flat = np.fromiter(chain.from_iterable(segments), np.int64, 2 * len(segments))
        return cls(flat.reshape(-1, 2))

    @classmethod
    def unpack(cls, data: bytes) -> "SegmentArray":
        """What pack() has made. Raises ProtocolViolation."""
        if len(data) % (2 * _PACKED.itemsize):
            raise ProtocolViolation(f"{len(data)} bytes are no whole segments of {2 * _PACKED.itemsize} bytes")
        return cls(np.frombuffer(data, _PACKED).astype(np.int64, copy=False).reshape(-1, 2))

    def pack(self) -> bytes:
        return self.values.astype(_PACKED, copy=False).tobytes()

    @property
    def num_bytes(self) -> int:
        return int(self.values[:, 1].sum())

    def columns(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Offsets and lengths of those that are not empty."""
        filled = self.values[self.values[:, 1] > 0]
        return filled[:, 0], filled[:, 1]

    def __len__(self) -> int:
        return len(self.values)

    @overload
    def __getitem__(self, index: int) -> Segment: ...
    @overload
    def __getitem__(self, index: slice) -> "SegmentArray": ...
    def __getitem__(self, index: int | slice) -> "Segment | SegmentArray":
        if isinstance(index, slice):
            return SegmentArray(self.values[index])
        offset, length = self.values[index].tolist()
        return Segment(offset, length)

    def __iter__(self) -> Iterator[Segment]:
        return (Segment(offset, length) for offset, length in self.values.tolist())


def total_bytes(segments: Iterable[Segment]) -> int:
    """Sum of the segments' lengths."""
    return segments.num_bytes if isinstance(segments, SegmentArray) else sum(map(_length_of, segments))


def viewed_bytes(views: Iterable[memoryview]) -> int:
    """Sum of the views' sizes."""
    return sum(map(_size_of, views))


class SegmentSet:
    """Bytes covered by some segments, as sorted merged intervals [start, stop)."""

    def __init__(self, segments: Iterable[Segment]) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._edges: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = None  # the same, once asked for many
        for offset, length in sorted(segments):
            if offset < 0 or length < 0:
                raise ValueError(f"segment ({offset}, {length}) is negative; offsets and lengths start at 0")
            if length == 0:
                continue
            if self._stops and offset <= self._stops[-1]:
                self._stops[-1] = max(self._stops[-1], offset + length)
            else:
                self._starts.append(offset)
                self._stops.append(offset + length)

    @property
    def num_bytes(self) -> int:
        return sum(self._stops) - sum(self._starts)

    @property
    def stop(self) -> int:
        """One past the highest byte; 0 when empty."""
        return self._stops[-1] if self._stops else 0

    def first_outside(self, segments: Sequence[Segment]) -> Segment | None:
        """The first of `segments` that is not wholly covered, or None."""
        if len(segments) >= MANY_SEGMENTS and self._cover_all(segments):
            return None
        start = stop = 0
        for segment in segments:
            offset, length = segment
            # Neighbours usually share an interval: look in the last one before searching.
            if start <= offset and 0 <= length <= stop - offset:
                continue
            at = bisect_right(self._starts, offset) - 1
            if at < 0 or length < 0 or offset + length > self._stops[at]:
                return segment
            start, stop = self._starts[at], self._stops[at]
        return None

    def _cover_all(self, segments: Sequence[Segment]) -> bool:
        """The same answer for all of them in a few steps; False where that is not certain."""
        if not self._starts:
            return False
        try:
            values = SegmentArray.of(segments).values
        except OverflowError:  # no such arena
            return False
        offsets, lengths = values[:, 0], values[:, 1]
        if self._edges is None:
            self._edges = np.array(self._starts, np.int64), np.array(self._stops, np.int64)
        starts, stops = self._edges
        at = np.searchsorted(starts, offsets, side="right") - 1
        rooms = stops[at] - offsets
        return bool(((at >= 0) & (lengths >= 0) & (lengths <= rooms)).all())

    def check_invariants(self) -> None:
        edges = [edge for pair in zip(self._starts, self._stops, strict=True) for edge in pair]
        assert all(a < b for a, b in pairwise(edges)), f"intervals are not merged: {edges[:16]}"


def write_flaw(source: Sequence[Segment], destination: Sequence[Segment], arena_bytes: int) -> str | None:
    """Why a write out of an arena of so many bytes can never be sent, or None."""
    if len(source) >= MANY_SEGMENTS:
        with contextlib.suppress(OverflowError):  # no such arena: it is named below
            source = SegmentArray.of(source)
    ours, theirs = total_bytes(source), total_bytes(destination)
    if ours != theirs:
        return f"{ours} source bytes for {theirs} destination bytes; they must be equal"
    outside = SegmentSet([Segment(0, arena_bytes)]).first_outside(source)
    if outside is not None:
        return f"{outside} is outside the arena of {arena_bytes} bytes; write only own blocks"
    return None


def grouped(segments: Sequence[Segment], *, max_bytes: int, max_segments: int) -> Iterator[Sequence[Segment]]:
    """Cut a list of segments, in order, into lists of at most so many, about max_bytes together. Cuts no segment."""
    ends = list(accumulate(map(_length_of, segments)))
    at = num_bytes = 0  # segments and bytes before the next list
    while at < len(segments):
        stop = min(bisect_left(ends, num_bytes + max_bytes, at) + 1, at + max_segments, len(segments))
        yield segments[at:stop]
        at, num_bytes = stop, ends[stop - 1]


def batches(views: Sequence[memoryview], *, max_bytes: int, max_views: int) -> Iterator[list[memoryview]]:
    """Cut byte views, in order, into lists of at most `max_views` views and `max_bytes` bytes. Copies nothing.

    Only a view longer than `max_bytes` is cut itself.
    """
    if len(views) <= max_views and 0 < viewed_bytes(views) <= max_bytes:
        yield list(views)
        return
    ends = list(accumulate(map(_size_of, views)))
    at = num_bytes = 0  # views and bytes before the next list
    while at < len(views):
        stop = bisect_right(ends, num_bytes + max_bytes, at, min(at + max_views, len(views)))
        if stop > at:
            if ends[stop - 1] > num_bytes:
                yield list(views[at:stop])
        else:
            stop = at + 1
            view = views[at]
            for start in range(0, view.nbytes, max_bytes):
                yield [view[start : start + max_bytes]]
        at, num_bytes = stop, ends[stop - 1]


def advance(views: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of `views` after their first `num_bytes` bytes."""
    if num_bytes >= viewed_bytes(views):  # as most often
        return []
    for index, view in enumerate(views):
        if num_bytes < view.nbytes:
            return [view[num_bytes:] if num_bytes else view, *views[index + 1 :]]
        num_bytes -= view.nbytes
    return []


def copy_views(source: Sequence[memoryview], destination: Sequence[memoryview]) -> None:
    """Copy bytes in order between two lists of byte views of equal total, however each is cut."""
    targets = iter(destination)
    target = memoryview(b"")
    for view in source:
        start = 0
        while start < view.nbytes:
            while target.nbytes == 0:
                target = next(targets)
            taken = min(view.nbytes - start, target.nbytes)
            target[:taken] = view[start : start + taken]
            target = target[taken:]
            start += taken

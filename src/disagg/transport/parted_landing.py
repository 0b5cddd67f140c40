"""Where one frame's bytes go, made some at a time: the first are taken in while nothing else is ready yet."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from disagg.kvcache.memory import Landing, Memory, Segment
from disagg.transport.arenas import Bytes
from disagg.transport.row_windows import RowWindows
from disagg.transport.segments import MANY_SEGMENTS, SegmentArray

PART_SEGMENTS = 256  # prepared faster than a socket's buffer fills


class GroupedLanding(Protocol):
    """Views in wire order, group by group; whoever fills them has filled one group before it asks for the next."""

    def groups(self) -> Iterator[Sequence[memoryview]]:
        """Writable byte views. Raises as the memory does."""

    def commit(self) -> None:
        """Make the received bytes part of the arena. Called once, after the checksum held."""


class PartedLanding:
    """In whatever the memory gives for it."""

    def __init__(self, memory: Memory, segments: Sequence[Segment]) -> None:
        self._memory = memory
        self._segments = segments
        self._parts: list[Landing] = []

    def groups(self) -> Iterator[Sequence[memoryview]]:
        for at in range(0, len(self._segments), PART_SEGMENTS):
            part = self._memory.landing(self._segments[at : at + PART_SEGMENTS])
            self._parts.append(part)
            yield part.buffers

    def commit(self) -> None:
        for part in self._parts:
            part.commit()


class WindowedLanding:
    """Of many short runs of an arena in host memory: by way of a window in cache."""

    def __init__(self, memory: Memory, windows: RowWindows) -> None:
        self._memory = memory
        self._windows = windows

    def groups(self) -> Iterator[Sequence[memoryview]]:
        for rows in self._windows:
            yield (self._windows.scratch(rows),)
            self._windows.scatter(rows)

    def commit(self) -> None:
        """The bytes are in place already: nothing is left to be put there."""
        self._memory.landing(()).commit()


def landing_for(memory: Memory, arena: Bytes | None, segments: SegmentArray) -> GroupedLanding:
    """`arena`: all bytes of the memory where it is host memory."""
    if arena is not None and len(segments) >= MANY_SEGMENTS:
        windows = RowWindows.try_make(arena, segments)
        if windows is not None:
            return WindowedLanding(memory, windows)
    return PartedLanding(memory, segments)

"""A landing of many segments, made some at a time: the first bytes are taken in while nothing else is ready yet."""

from collections.abc import Callable, Iterator, Sequence

from disagg.kvcache.memory import Landing, Memory, Segment
from disagg.transport.native_runs import windows_of
from disagg.transport.payload import Payload, payload_of
from disagg.transport.runs import Bytes

PART_SEGMENTS = 256  # prepared faster than a socket's buffer fills


class PartedLanding:
    """Where one frame's bytes go."""

    def __init__(self, memory: Memory, segments: Sequence[Segment]) -> None:
        self._memory = memory
        self._segments = segments
        self._parts: list[Landing] = []

    def groups(self) -> Iterator[list[memoryview]]:
        """Writable byte views, in wire order; each group is made when it is asked for. Raises as the memory does."""
        for at in range(0, len(self._segments), PART_SEGMENTS):
            part = self._memory.landing(self._segments[at : at + PART_SEGMENTS])
            self._parts.append(part)
            yield part.buffers

    def commit(self) -> None:
        """Make the received bytes part of the arena. Called once, after the checksum held."""
        for part in self._parts:
            part.commit()


def landing_for(
    memory: Memory, arena: Bytes | None, segments: Sequence[Segment], seed: int | None
) -> tuple[Payload, Callable[[], None]]:
    """Room for one frame's bytes, and what makes them part of the memory once the checksum held.

    arena: all bytes of the memory, where it is host memory.
    """
    windows = None if arena is None else windows_of(arena, segments, seed)
    if windows is not None:
        return Payload(windows.scattered(), windows.checksum), memory.landing(()).commit
    landing = PartedLanding(memory, segments)
    return payload_of(landing.groups(), seed), landing.commit

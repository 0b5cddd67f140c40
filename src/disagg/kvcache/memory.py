"""The border between whoever owns an arena and whoever moves its bytes."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable


class Segment(NamedTuple):
    """A run of bytes in an arena."""

    offset: int
    length: int


class Landing(Protocol):
    """Buffers to receive into; nothing is visible to the engine before commit()."""

    @property
    def buffers(self) -> list[memoryview]:
        """Writable byte views, in wire order."""

    def commit(self) -> None:
        """Make the received bytes part of the arena. Called once, after the checksum held."""


class Memory(Protocol):
    """An arena as a transport sees it: opaque bytes under offsets."""

    @property
    def num_bytes(self) -> int: ...

    def gather(self, segments: Sequence[Segment]) -> list[memoryview]:
        """Readable byte views of the segments, in order. Views of the arena itself where it is host memory."""

    def landing(self, segments: Sequence[Segment]) -> Landing:
        """Where bytes for these segments go."""


@runtime_checkable
class MappableMemory(Memory, Protocol):
    """An arena in host memory that another process can map: bytes written there are in the arena at once."""

    @property
    def descriptor(self) -> int | None:
        """Of the file in memory that is the arena, byte for byte; None where there is no such file."""

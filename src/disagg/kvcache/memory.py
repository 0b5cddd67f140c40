"""The border between whoever owns an arena and whoever moves its bytes."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


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

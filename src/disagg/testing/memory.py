"""An arena of plain bytes: the simplest Memory."""

from collections.abc import Callable, Sequence

from disagg.core.errors import InternalFault
from disagg.engine.sealed_memory import SealedMemory
from disagg.kvcache.memory import Segment


class BytesLanding:
    """A direct landing: its buffers are the arena itself."""

    def __init__(self, buffers: list[memoryview], on_commit: Callable[[], None]) -> None:
        self._buffers = buffers
        self._on_commit = on_commit

    @property
    def buffers(self) -> list[memoryview]:
        return self._buffers

    def commit(self) -> None:
        self._on_commit()


class StagedLanding:
    """A staged landing: bytes reach the arena at commit() only."""

    def __init__(self, targets: list[memoryview], on_commit: Callable[[], None]) -> None:
        self._targets = targets
        self._staging = [memoryview(bytearray(target.nbytes)) for target in targets]
        self._on_commit = on_commit

    @property
    def buffers(self) -> list[memoryview]:
        return self._staging

    def commit(self) -> None:
        for target, staged in zip(self._targets, self._staging, strict=True):
            target[:] = staged
        self._on_commit()


class BytesMemory:
    """`num_bytes` zero bytes, or a copy of `data`. Landings are direct, or staged when `is_staged`."""

    def __init__(self, num_bytes: int = 0, *, data: bytes | None = None, is_staged: bool = False) -> None:
        self._view = memoryview(bytearray(num_bytes) if data is None else bytearray(data))
        self._is_staged = is_staged
        self.num_commits = 0

    @property
    def num_bytes(self) -> int:
        return self._view.nbytes

    def gather(self, segments: Sequence[Segment]) -> list[memoryview]:
        """Views of the arena. Raises InternalFault for a segment outside it."""
        return [self._slice(segment) for segment in segments]

    def landing(self, segments: Sequence[Segment]) -> BytesLanding | StagedLanding:
        """Where bytes for these segments go. Raises InternalFault for a segment outside the arena."""
        targets = [self._slice(segment) for segment in segments]
        kind = StagedLanding if self._is_staged else BytesLanding
        return kind(targets, self._count_commit)

    def read(self, segments: Sequence[Segment]) -> bytes:
        """A copy of the segments' bytes, joined."""
        return b"".join(self._slice(segment) for segment in segments)

    def fill(self, segment: Segment, data: bytes) -> None:
        """Overwrite one segment with as many bytes."""
        self._slice(segment)[:] = data

    def _slice(self, segment: Segment) -> memoryview:
        offset, length = segment
        if offset < 0 or length < 0 or offset + length > self._view.nbytes:
            raise InternalFault(f"{segment} is outside the arena of {self._view.nbytes} bytes")
        return self._view[offset : offset + length]

    def _count_commit(self) -> None:
        self.num_commits += 1


class SealedBytesMemory(BytesMemory):
    """The same in memory that other processes can map. Implements MappableMemory."""

    def __init__(self, num_bytes: int = 0, *, data: bytes | None = None) -> None:
        super().__init__()
        self._sealed = SealedMemory(num_bytes if data is None else len(data))
        self._view = self._sealed.array.data
        if data is not None:
            self._view[:] = data

    @property
    def descriptor(self) -> int:
        return self._sealed.descriptor

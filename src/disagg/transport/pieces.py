"""Runs of bytes as arrays: some thousand of them take a few calls instead of a loop."""

import itertools
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from disagg.core.errors import InternalFault
from disagg.kvcache.memory import Segment

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]


class Runs(msgspec.Struct, frozen=True):
    """Runs in one arena, none of them empty, in wire order. Each array has its own memory, without gaps."""

    starts: Ints
    lengths: Ints

    @property
    def num_bytes(self) -> int:
        return int(self.lengths.sum())

    def checked(self, arena: Bytes) -> "Runs":
        """Raises InternalFault for runs that leave the arena: compiled code would follow them."""
        starts, lengths = self.starts, self.lengths
        if len(starts) and (starts.min() < 0 or lengths.min() < 0 or bool((starts > arena.nbytes - lengths).any())):
            raise InternalFault(f"runs leave their arena of {arena.nbytes} bytes; they must lie within")
        return self

    def cut(self, max_bytes: int) -> "Runs":
        """The same bytes, no run longer than max_bytes."""
        if not len(self.lengths) or int(self.lengths.max()) <= max_bytes:
            return self
        counts = -(-self.lengths // max_bytes)
        within = (np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)) * max_bytes
        lengths = np.minimum(np.repeat(self.lengths, counts) - within, max_bytes)
        return Runs(np.repeat(self.starts, counts) + within, lengths)

    def groups(self, max_bytes: int, max_runs: int = 1 << 62) -> Iterator[tuple[slice, int]]:
        """Runs that follow each other, up to max_bytes together but one at least; and how many bytes they are."""
        ends = np.cumsum(self.lengths)
        at = done = 0
        while at < len(ends):
            stop = max(int(np.searchsorted(ends, done + max_bytes, side="right")), at + 1)
            stop = min(stop, at + max_runs)
            yield slice(at, stop), int(ends[stop - 1]) - done
            at, done = stop, int(ends[stop - 1])


def runs_of(segments: Sequence[Segment]) -> Runs:
    """Those that are not empty."""
    flat = np.fromiter(itertools.chain.from_iterable(segments), np.int64, 2 * len(segments))
    starts, lengths = np.ascontiguousarray(flat[::2]), np.ascontiguousarray(flat[1::2])
    if len(lengths) and lengths.min() == 0:
        starts, lengths = starts[lengths > 0], lengths[lengths > 0]
    return Runs(starts, lengths)


def paired(source: Runs, destination: Runs) -> tuple[Runs, Runs]:
    """The same bytes, both sides cut wherever one is. Raises InternalFault for unequal totals."""
    total = source.num_bytes
    if total != destination.num_bytes:
        raise InternalFault(f"{total} bytes for runs of {destination.num_bytes}; they must be equal")
    if np.array_equal(source.lengths, destination.lengths):
        return source, destination
    # Positions in the byte stream where some run begins, on either side.
    begins, their_begins = (np.cumsum(side.lengths) - side.lengths for side in (source, destination))
    edges = np.union1d(begins, their_begins)
    lengths = np.diff(edges, append=total)
    return Runs(_starts(source, begins, edges), lengths), Runs(_starts(destination, their_begins, edges), lengths)


def _starts(runs: Runs, begins: Ints, edges: Ints) -> Ints:
    """Where in the arena each position of the byte stream lies."""
    run = np.searchsorted(begins, edges, side="right") - 1
    found: Ints = runs.starts[run] + edges - begins[run]
    return found

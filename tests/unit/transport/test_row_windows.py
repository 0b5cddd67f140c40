"""Many short runs taken together: the same bytes, in the same places, whatever the size of a row."""

import random

import numpy as np
import pytest

from disagg.kvcache.memory import Segment
from disagg.testing.memory import BytesMemory, SealedBytesMemory
from disagg.transport.arenas import Bytes, host_arena
from disagg.transport.parted_landing import PartedLanding, WindowedLanding, landing_for
from disagg.transport.row_windows import LONG_RUN_BYTES, WINDOW_BYTES, RowWindows
from disagg.transport.segments import SegmentArray

ARENA_BYTES = (2 << 20) + 100  # the last bytes are no whole row


def arena_of(seed: int) -> Bytes:
    return np.frombuffer(bytearray(random.Random(seed).randbytes(ARENA_BYTES)), np.uint8)


def scattered(unit: int, num_units: int) -> SegmentArray:
    """Runs of one to three units, none twice, in any order; some are empty."""
    rng = random.Random(unit)
    places = rng.sample(range(0, ARENA_BYTES // unit - 3, 3), num_units)
    runs = [Segment(place * unit, unit * rng.randint(1, 3)) for place in places]
    return SegmentArray.of([*runs, Segment(7, 0)])


def joined(arena: Bytes, runs: SegmentArray) -> bytes:
    return b"".join(arena[offset : offset + length].tobytes() for offset, length in runs)


@pytest.mark.parametrize(("unit", "num_units"), [(1024, 500), (1536, 300), (6144, 90), (16384, 40), (40_000, 15)])
def test_windows_gather_and_scatter_what_the_runs_are(unit: int, num_units: int) -> None:
    source, target, runs = arena_of(1), arena_of(2), scattered(unit, num_units)
    before = target.copy()
    windows, places = RowWindows.try_make(source, runs), RowWindows.try_make(target, runs)
    assert windows is not None
    assert places is not None
    moved = b""
    for rows, into in zip(windows, places, strict=True):
        taken = windows.gather(rows)
        assert taken.nbytes == windows.num_bytes(rows) <= WINDOW_BYTES
        moved += taken
        places.scratch(into)[:] = taken
        places.scatter(into)
    assert moved == joined(source, runs) == joined(target, runs)
    for offset, length in runs:
        before[offset : offset + length] = source[offset : offset + length]
    assert np.array_equal(target, before), "bytes beside the runs have changed"


@pytest.mark.parametrize(
    "runs",
    [
        [Segment(0, 4096)],
        [Segment(0, LONG_RUN_BYTES), Segment(LONG_RUN_BYTES, LONG_RUN_BYTES)],
        [Segment(0, 512), Segment(4096, 512)],
        [Segment(1, 4096), Segment(8192, 4096)],
        [Segment(0, 4096), Segment(ARENA_BYTES // 4096 * 4096, 4096)],
        [Segment(-4096, 4096), Segment(8192, 4096)],
        [],
    ],
    ids=["one", "long", "small rows", "odd places", "past the end", "before the start", "none"],
)
def test_other_runs_are_taken_one_by_one(runs: list[Segment]) -> None:
    assert RowWindows.try_make(arena_of(1), SegmentArray.of(runs)) is None


def test_a_landing_goes_by_windows_only_where_the_arena_is_at_hand_and_runs_are_many() -> None:
    sealed, private = SealedBytesMemory(ARENA_BYTES), BytesMemory(ARENA_BYTES)
    many = SegmentArray.of([Segment(index * 8192, 4096) for index in reversed(range(200))])
    arena = host_arena(sealed)
    landing = landing_for(sealed, arena, many)
    assert isinstance(landing, WindowedLanding)
    assert isinstance(landing_for(sealed, arena, many[:3]), PartedLanding)
    assert host_arena(private) is None
    assert isinstance(landing_for(private, None, many), PartedLanding)
    for number, views in enumerate(landing.groups()):
        for view in views:
            view[:] = bytes([number + 1]) * view.nbytes
    assert sealed.num_commits == 0
    landing.commit()
    assert sealed.num_commits == 1
    per_window = WINDOW_BYTES // 4096
    wanted = b"".join(bytes([index // per_window + 1]) * 4096 for index in range(200))
    assert sealed.read(tuple(many)) == wanted

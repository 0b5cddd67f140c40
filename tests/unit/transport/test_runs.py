"""Copying and summing scattered runs: every cut, on both ways of doing it."""

import itertools
import random

import numpy as np
import pytest
import xxhash

from disagg.core.errors import InternalFault
from disagg.kvcache.memory import Segment
from disagg.testing.memory import SealedBytesMemory
from disagg.transport.runs import Bytes, MappedArena, RunCopy, RunSum, copy_buffers

ARENA_BYTES = 1 << 20


def sum_runs(arena: Bytes, runs: tuple[Segment, ...]) -> int:
    return RunSum(arena, runs).finish()


def runs_of(rng: random.Random, unit: int, num_units: int) -> tuple[Segment, ...]:
    """Disjoint runs of whole units, `num_units` in all, in any order, some empty."""
    places = rng.sample(range(ARENA_BYTES // unit), num_units)
    found: list[Segment] = []
    for place in places:
        if found and found[-1].offset + found[-1].length == place * unit:
            found[-1] = Segment(found[-1].offset, found[-1].length + unit)
        else:
            found += [Segment(place * unit, unit)] + [Segment(0, 0)] * (rng.random() < 0.1)
    return tuple(found)


def shuffled_whole(rng: random.Random, num_runs: int) -> tuple[Segment, ...]:
    """The whole arena in runs of any length."""
    edges = sorted({0, ARENA_BYTES, *(rng.randrange(ARENA_BYTES) for _ in range(num_runs - 1))})
    found = [Segment(a, b - a) for a, b in itertools.pairwise(edges)]
    rng.shuffle(found)
    return tuple(found)


def cases() -> list[tuple[tuple[Segment, ...], tuple[Segment, ...]]]:
    rng = random.Random(5)
    whole = (Segment(0, ARENA_BYTES),)
    equal = [(runs_of(rng, unit, num), runs_of(rng, unit, num)) for unit, num in ((4096, 200), (16384, 40), (700, 900))]
    one_sided = [(whole, shuffled_whole(rng, n)) for n in (2, 5, 300)] + [(shuffled_whole(rng, 9), whole)]
    return [*equal, *one_sided, (whole, whole), ((), ()), ((Segment(3, 0),), ()), (whole, runs_of(rng, 2048, 512))]


@pytest.mark.parametrize(("source_runs", "destination_runs"), cases())
def test_bytes_arrive_in_order_and_the_sum_is_that_of_the_bytes(
    source_runs: tuple[Segment, ...], destination_runs: tuple[Segment, ...]
) -> None:
    source = np.frombuffer(random.Random(1).randbytes(ARENA_BYTES), np.uint8)
    target = np.zeros(ARENA_BYTES, np.uint8)
    told = RunCopy(source, source_runs, target, destination_runs).run()
    sent = b"".join(source[offset : offset + length].tobytes() for offset, length in source_runs)
    assert b"".join(target[offset : offset + length].tobytes() for offset, length in destination_runs) == sent
    assert told == xxhash.xxh3_64_intdigest(sent) == sum_runs(target, destination_runs)
    untouched = np.ones(ARENA_BYTES, bool)
    for offset, length in destination_runs:
        untouched[offset : offset + length] = False
    assert not target[untouched].any()
    other = np.zeros(ARENA_BYTES, np.uint8)
    views = [source.data[offset : offset + length] for offset, length in source_runs]
    assert copy_buffers(views, other, destination_runs) == told
    assert np.array_equal(other, target)


def test_a_flipped_bit_changes_the_sum() -> None:
    rng = random.Random(2)
    for runs in (runs_of(rng, 4096, 100), (Segment(0, ARENA_BYTES),), (Segment(5, 7),)):
        arena = np.frombuffer(rng.randbytes(ARENA_BYTES), np.uint8).copy()
        before = sum_runs(arena, runs)
        filled = [segment for segment in runs if segment.length]
        arena[filled[-1].offset + filled[-1].length - 1] ^= 1
        assert sum_runs(arena, runs) != before


def test_unequal_totals_are_refused() -> None:
    arena = np.zeros(100, np.uint8)
    with pytest.raises(InternalFault, match="equal"):
        RunCopy(arena, (Segment(0, 10),), arena, (Segment(0, 11),))


def test_a_mapped_arena_is_the_same_bytes_and_must_be_as_long_as_told() -> None:
    memory = SealedBytesMemory(data=b"abcdefgh" * 1000)
    mapped = MappedArena(memory.descriptor, 8000)
    mapped.bytes[:3] = np.frombuffer(b"xyz", np.uint8)
    assert memory.read((Segment(0, 4),)) == b"xyzd"
    mapped.close()
    with pytest.raises(InternalFault, match="8000 bytes, not the 9000"):
        MappedArena(memory.descriptor, 9000)


@pytest.mark.parametrize("unit", [16 << 10, 1 << 20])
def test_what_is_told_to_be_in_place_is_in_place_and_can_be_summed_early(unit: int) -> None:
    rng = random.Random(3)
    num_bytes = 16 << 20
    source = np.frombuffer(rng.randbytes(num_bytes), np.uint8)
    target = np.zeros(num_bytes, np.uint8)
    places = list(range(0, num_bytes, unit))
    runs = tuple(Segment(place, unit) for place in rng.sample(places, len(places)))
    summing = RunSum(target, runs)
    told: list[int] = []

    def note(num_done: int) -> None:
        told.append(num_done)
        for offset, length in runs[: num_done // unit]:
            assert np.array_equal(target[offset : offset + length], source[offset : offset + length])
        summing.advance(num_done)

    total = RunCopy(source, runs, target, runs).run(note)
    assert told == sorted(told)
    assert len(told) >= 4
    assert summing.finish() == total == sum_runs(source, runs)

"""Copying and summing scattered runs: every cut, with compiled code and without."""

import itertools
import random

import numpy as np
import pytest
import xxhash

from disagg.core.errors import InternalFault
from disagg.kvcache.memory import Segment
from disagg.testing.memory import SealedBytesMemory
from disagg.transport import runs as runs_module
from disagg.transport.native_runs import MIN_BYTES, native_runs
from disagg.transport.pieces import Bytes
from disagg.transport.runs import MappedArena, RunSum, copy_buffers, copy_runs

ARENA_BYTES = 1 << 20


@pytest.fixture(params=["compiled", "without"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "without":
        monkeypatch.setattr(runs_module, "native_runs", lambda: None)
    elif native_runs() is None:
        pytest.skip("nothing is compiled here: python -m disagg.engine.native.build")
    return str(request.param)


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
    told = copy_runs(source, source_runs, target, destination_runs)
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
        copy_runs(arena, (Segment(0, 10),), arena, (Segment(0, 11),))


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

    total = copy_runs(source, runs, target, runs, note)
    assert told == sorted(told)
    assert len(told) >= 4
    assert summing.finish() == total == sum_runs(source, runs)


@pytest.mark.parametrize("bad", [Segment(-1, 300), Segment(701, 300), Segment(2**40, 300)])
def test_runs_outside_their_arena_are_refused_before_a_byte_is_touched(bad: Segment) -> None:
    arena, other = np.zeros(1000, np.uint8), np.ones(1000, np.uint8)
    good = (Segment(0, 300),)
    for source, destination in (((bad,), good), (good, (bad,))):
        with pytest.raises(InternalFault, match="leave their arena of 1000 bytes"):
            copy_runs(other, source, arena, destination)
    with pytest.raises(InternalFault, match="leave their arena"):
        RunSum(arena, (bad,))
    assert not arena.any()


def test_the_compiled_sum_is_that_of_the_library_for_every_length_cut_and_seed() -> None:
    native = native_runs()
    if native is None:
        pytest.skip("nothing is compiled here")
    rng = random.Random(8)
    data = np.frombuffer(rng.randbytes(20_000), np.uint8)
    lengths = [*range(MIN_BYTES, MIN_BYTES + 200), *(rng.randrange(MIN_BYTES, 20_000) for _ in range(200)), 1024, 2048]
    for length in lengths:
        seed = rng.choice([0, 1, rng.getrandbits(32), rng.getrandbits(64)])
        edges = sorted({0, length, *(rng.randrange(length) for _ in range(rng.randrange(6)))})
        starts = np.array(edges[:-1], np.int64)
        digest = native.begin(seed)
        digest.add(data, starts, np.diff(edges).astype(np.int64))
        assert digest.end() == xxhash.xxh3_64_intdigest(data[:length].tobytes(), seed=seed), (length, seed, edges)

"""Short runs by way of a window: the same bytes, in the same places, under the same sum as one by one."""

import random

import numpy as np
import pytest
import xxhash

from disagg.engine.native.build import BuildError
from disagg.kvcache.memory import Segment
from disagg.testing.memory import BytesMemory, SealedBytesMemory
from disagg.transport import native_runs
from disagg.transport.native_runs import MIN_BYTES, MIN_RUNS, RunWindows, load_runs, windows_of
from disagg.transport.parted_landing import landing_for
from disagg.transport.payload import payload_of
from disagg.transport.runs import LONG_RUN_BYTES, WINDOW_BYTES, Bytes, host_arena

ARENA_BYTES = 3 << 20
SEEDS = (None, 0, 7, 2**32 - 1)


@pytest.fixture(autouse=True)
def compiled() -> None:
    if load_runs() is None:
        pytest.skip("nothing can be compiled here")


def arena_of(seed: int) -> Bytes:
    return np.frombuffer(bytearray(random.Random(seed).randbytes(ARENA_BYTES)), np.uint8)


def scattered(rng: random.Random, lengths: list[int]) -> list[Segment]:
    """Runs of these lengths that do not touch, in any order, at odd places and at even ones."""
    room = (ARENA_BYTES - sum(lengths)) // len(lengths)
    step = rng.choice([1, 1, 64]) if room > 64 else 1
    places, at = [], 0
    for length in lengths:
        at += rng.randrange(max(room // step, 1)) * step
        places.append(Segment(at, length))
        at += length
    rng.shuffle(places)
    return places


def joined(arena: Bytes, runs: list[Segment]) -> bytes:
    return b"".join(arena[offset : offset + length].tobytes() for offset, length in runs)


def lengths_of(case: str, rng: random.Random) -> list[int]:
    if case == "odd":
        return [rng.choice([0, 1, 63, 64, 65, 128, 241, 1000, 1024, 4097]) for _ in range(300)]
    if case == "even":
        return [6144] * 150
    if case == "longer than a window":
        return [2 * WINDOW_BYTES + 5, 1, WINDOW_BYTES, *[64] * 40]
    return [1] * (MIN_BYTES - 1) + [1, 0]


@pytest.mark.parametrize("case", ["odd", "even", "longer than a window", "tiny"])
@pytest.mark.parametrize("seed", SEEDS)
def test_runs_arrive_and_their_sum_is_that_of_the_bytes(case: str, seed: int | None) -> None:
    for number in range(5):
        rng = random.Random(number)
        lengths = lengths_of(case, rng)
        source, target = arena_of(1), arena_of(2)
        source_runs, target_runs = scattered(rng, lengths), scattered(rng, lengths)
        target_runs.sort(key=lambda run: run.length)
        source_runs.sort(key=lambda run: run.length)
        sent, landed = windows_of(source, source_runs, seed), windows_of(target, target_runs, seed)
        assert isinstance(sent, RunWindows)
        assert isinstance(landed, RunWindows)
        wanted = target.copy()
        for (view,), (room,) in zip(sent.gathered(), landed.scattered(), strict=True):
            assert view.nbytes <= WINDOW_BYTES
            room[:] = view
        payload = joined(source, source_runs)
        assert joined(target, target_runs) == payload
        told = 0 if seed is None else xxhash.xxh3_64_intdigest(payload, seed=seed)
        assert sent.checksum() == landed.checksum() == told
        for source_run, target_run in zip(source_runs, target_runs, strict=True):
            stop = target_run.offset + target_run.length
            wanted[target_run.offset : stop] = source[source_run.offset : source_run.offset + source_run.length]
        assert np.array_equal(target, wanted), "bytes beside the runs have changed"


@pytest.mark.parametrize(
    "runs",
    [
        [Segment(index * 4096, 4096) for index in range(MIN_RUNS - 1)],
        [Segment(0, LONG_RUN_BYTES)] * MIN_RUNS,
        [Segment(index, 1) for index in range(MIN_BYTES - 1)],
        [Segment(ARENA_BYTES - 100, 101)] * MIN_RUNS,
        [Segment(-1, 100)] * MIN_RUNS,
        [Segment(0, 4096)] * MIN_RUNS + [Segment(2**63 - 1, 4096)],
        [Segment(5, 0)] * MIN_RUNS,
    ],
    ids=["few", "long", "short in all", "past the end", "before the start", "past all numbers", "empty"],
)
def test_other_runs_are_taken_one_by_one(runs: list[Segment]) -> None:
    assert windows_of(arena_of(1), runs, 0) is None


def test_a_landing_without_compiled_code_has_the_same_bytes_and_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = scattered(random.Random(3), [3000] * 100)
    data = random.Random(4).randbytes(300_000)
    found = []
    for is_compiled in (True, False):
        if not is_compiled:
            monkeypatch.setattr(native_runs, "load_runs", lambda: None)
        memory = SealedBytesMemory(ARENA_BYTES)
        payload, commit = landing_for(memory, host_arena(memory), runs, 9)
        at = 0
        for views in payload.batches:
            for view in views:
                view[:] = data[at : at + view.nbytes]
                at += view.nbytes
        assert memory.num_commits == 0
        commit()
        assert memory.num_commits >= 1
        assert payload.checksum() == xxhash.xxh3_64_intdigest(data, seed=9)
        found.append(memory.read((Segment(0, ARENA_BYTES),)))
    assert found[0] == found[1]
    assert host_arena(BytesMemory(10)) is None


def test_where_nothing_can_be_compiled_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(**_: object) -> None:
        raise BuildError("no C++ compiler was found")

    load_runs.cache_clear()
    monkeypatch.setattr(native_runs, "build", fail)
    try:
        runs = [Segment(index * 4096, 4096) for index in range(50)]
        assert [windows_of(arena_of(1), runs, 0) for _ in range(2)] == [None, None]
    finally:
        load_runs.cache_clear()
    assert caplog.text.count("no C++ compiler was found") == 1


def test_views_are_summed_wherever_a_batch_ends() -> None:
    parts = [random.Random(index).randbytes(size) for index, size in enumerate([0, 10, 700_000, 5, 2_000_000])]
    payload = payload_of(([memoryview(part) for part in parts[:2]], [memoryview(part) for part in parts[2:]]), 3)
    joined_views = b"".join(bytes(view) for batch in payload.batches for view in batch)
    assert joined_views == b"".join(parts)
    assert payload.checksum() == xxhash.xxh3_64_intdigest(joined_views, seed=3)
    assert payload_of((), None).checksum() == 0

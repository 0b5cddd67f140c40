"""The parts below both kinds: segments, grants, deadlines, the outbox."""

import threading
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.transport.rigs import DEADLINE_S, PREFILL

from disagg.core.errors import ProtocolViolation
from disagg.kvcache.memory import Segment
from disagg.testing.memory import BytesMemory
from disagg.transport import grants as grants_module
from disagg.transport.api import GrantFenced, TransportEvent, WriteLanded
from disagg.transport.deadlines import DeadlineWatch
from disagg.transport.grants import AlreadyLanded, GrantTable, LandedNumbers, Refused, Visit
from disagg.transport.outbox import Outbox
from disagg.transport.parted_landing import PART_SEGMENTS, PartedLanding
from disagg.transport.segments import (
    SegmentArray,
    SegmentSet,
    advance,
    batches,
    copy_views,
    grouped,
    total_bytes,
)

segment = st.builds(Segment, st.integers(0, 60), st.integers(1, 12))


@given(st.lists(segment, max_size=8), st.lists(segment, max_size=5) | st.lists(segment, min_size=64, max_size=70))
def test_a_segment_set_contains_what_its_bytes_contain(granted: list[Segment], asked: list[Segment]) -> None:
    held = {byte for offset, length in granted for byte in range(offset, offset + length)}
    covered = SegmentSet(granted)
    covered.check_invariants()
    assert covered.num_bytes == len(held)
    assert covered.stop == max(held, default=-1) + 1
    outside = [each for each in asked if not set(range(each.offset, each.offset + each.length)) <= held]
    assert covered.first_outside(asked) == (outside[0] if outside else None)


@pytest.mark.parametrize("bad", [Segment(-1, 2), Segment(3, -1), Segment(0, 2**63), Segment(2**63, 1)])
def test_odd_segments_are_outside(bad: Segment) -> None:
    assert SegmentSet([Segment(0, 100)]).first_outside([Segment(0, 100), bad]) == bad


@given(st.lists(segment, max_size=80))
def test_an_array_of_segments_is_those_segments(segments: list[Segment]) -> None:
    array = SegmentArray.of(segments)
    assert list(array) == list(SegmentArray.unpack(array.pack())) == segments
    assert array.num_bytes == total_bytes(array) == total_bytes(segments)
    assert [array[at] for at in range(len(array))] == segments
    assert list(array[1:3]) == segments[1:3]
    granted = SegmentSet([Segment(0, 50)])
    assert granted.first_outside(array) == granted.first_outside(segments)


def test_bytes_that_are_no_whole_segments_and_numbers_that_no_arena_has_are_refused() -> None:
    with pytest.raises(ProtocolViolation, match="17 bytes are no whole segments"):
        SegmentArray.unpack(bytes(17))
    with pytest.raises(OverflowError):
        SegmentArray.of([Segment(2**63, 1)])


@pytest.mark.parametrize("num_segments", [0, 1, PART_SEGMENTS, 2 * PART_SEGMENTS + 1])
def test_a_landing_in_parts_lands_where_a_whole_one_would(num_segments: int) -> None:
    memory = BytesMemory(2 * num_segments)
    segments = tuple(Segment(2 * index, 1) for index in reversed(range(num_segments)))
    landing = PartedLanding(memory, segments)
    for number, view in enumerate(chain.from_iterable(landing.groups())):
        view[:] = bytes([number % 251])
    assert memory.num_commits == 0
    landing.commit()
    assert memory.read(segments) == bytes(number % 251 for number in range(num_segments))


def test_negative_segments_cannot_be_granted() -> None:
    with pytest.raises(ValueError, match="negative"):
        SegmentSet([Segment(-1, 5)])


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(1, 7), st.integers(1, 4), st.data())
def test_batches_and_advance_keep_every_byte_in_order(
    sizes: list[int], max_bytes: int, max_views: int, data: st.DataObject
) -> None:
    views = [memoryview(bytes([index]) * size) for index, size in enumerate(sizes)]
    joined = b"".join(views)
    cut = list(batches(views, max_bytes=max_bytes, max_views=max_views))
    assert b"".join(view for batch in cut for view in batch) == joined
    assert all(len(batch) <= max_views and 0 < sum(view.nbytes for view in batch) <= max_bytes for batch in cut)
    done = data.draw(st.integers(0, len(joined)))
    assert b"".join(advance(views, done)) == joined[done:]


@given(st.binary(max_size=60), st.data())
def test_copy_crosses_unequal_cuts(payload: bytes, data: st.DataObject) -> None:
    def cut(view: memoryview) -> list[memoryview]:
        edges = sorted(data.draw(st.lists(st.integers(0, view.nbytes), max_size=5)))
        return [view[a:b] for a, b in zip([0, *edges], [*edges, view.nbytes], strict=True)]

    target = bytearray(len(payload))
    copy_views(cut(memoryview(payload)), cut(memoryview(target)))
    assert bytes(target) == payload


def test_landed_numbers_fold_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grants_module, "MAX_LANDED_AHEAD", 3)
    landed = LandedNumbers()
    for number in (1, 2, 5):
        assert landed.can_add(number)
        landed.add(number)
    assert not landed.can_add(9)
    assert landed.can_add(0)
    landed.add(0)
    assert (landed.floor, landed.ahead) == (3, {5})
    assert [number in landed for number in range(-1, 7)] == [False, True, True, True, False, False, True, False]


def test_a_grant_is_fenced_once_when_its_last_visit_leaves() -> None:
    events: list[TransportEvent] = []
    table = GrantTable(100, Outbox(events.append))
    table.grant(PREFILL, b"k", [Segment(0, 50)])

    def enter(number: int) -> Visit | AlreadyLanded | Refused:
        return table.enter(PREFILL, b"k", number, b"", [Segment(0, 10)], 10, ejected.set)

    ejected = threading.Event()
    first, second = enter(0), enter(1)
    assert isinstance(first, Visit)
    assert isinstance(second, Visit)
    table.leave(first, landed=True)
    assert isinstance(enter(0), AlreadyLanded)
    third = enter(2)
    assert isinstance(third, Visit)
    assert set(table.revoke(b"k")) == {second, third}
    assert table.revoke(b"k") == ()
    assert isinstance(enter(4), Refused)
    assert not table.can_commit(second)
    table.check_invariants()
    table.leave(second)
    table.eject(second)
    assert not ejected.is_set()
    table.eject(third)
    assert ejected.is_set()
    assert [type(event) for event in events] == [WriteLanded]
    table.leave(third, failure="broken")
    assert [type(event) for event in events] == [WriteLanded, WriteLanded, GrantFenced]
    table.check_invariants()


def test_deadlines_run_in_order_and_survive_a_failing_action(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 100.0
    watch = DeadlineWatch("test-watch", clock=lambda: now_s)
    done, order = threading.Event(), list[str]()

    def fail() -> None:
        raise RuntimeError("on purpose")

    watch.after(0.04, done.set)
    watch.after(0.02, lambda: order.append("second"))
    watch.after(0.0, lambda: order.append("first"))
    watch.after(0.01, fail)
    watch.after(60.0, lambda: order.append("never"))
    now_s = 101.0  # all of them were added at one time, however long that took
    assert done.wait(DEADLINE_S)
    watch.check_invariants()
    watch.close()
    watch.after(0.0, lambda: order.append("closed"))
    watch.check_invariants()
    assert order == ["first", "second"]
    assert "on purpose" in caplog.text


def test_the_outbox_keeps_order_when_a_callback_puts_more() -> None:
    seen: list[bytes] = []

    def post(event: TransportEvent) -> None:
        assert isinstance(event, GrantFenced)
        seen.append(event.key)
        if event.key == b"a":
            outbox.put(GrantFenced(b"c"))
            outbox.flush()

    outbox = Outbox(post)
    outbox.put(GrantFenced(b"a"))
    outbox.put(GrantFenced(b"b"))
    outbox.flush()
    assert seen == [b"a", b"b", b"c"]


def test_bytes_memory_reads_what_was_filled() -> None:
    memory = BytesMemory(10)
    memory.fill(Segment(2, 3), b"abc")
    assert memory.read((Segment(4, 1), Segment(2, 2))) == b"cab"


@given(st.lists(segment, max_size=40), st.integers(1, 30), st.integers(1, 6))
def test_groups_keep_every_segment_in_order_and_stay_small(segments: list[Segment], limit: int, most: int) -> None:
    groups = list(grouped(segments, max_bytes=limit, max_segments=most))
    assert [each for group in groups for each in group] == segments
    assert all(1 <= len(group) <= most for group in groups)
    assert all(sum(length for _, length in group[:-1]) < limit for group in groups)

"""What every transport promises, proven on each kind."""

import pytest
from tests.unit.transport.rigs import (
    ARENA_BYTES,
    DEADLINE_S,
    DECODE,
    PREFILL,
    RECEIVER_INCARNATION,
    EventLog,
    GatedSource,
    Rig,
    write_of,
)

from disagg.core.errors import InternalFault
from disagg.core.ids import Incarnation, WorkerId
from disagg.kvcache.memory import Segment
from disagg.transport.api import (
    ConnectionLost,
    GrantFenced,
    TransportEvent,
    WriteFinished,
    WriteLanded,
    WritesStopped,
)

KEY = b"key-0"
WHOLE = (Segment(0, ARENA_BYTES),)
BIG = (Segment(0, 256 << 10),)


def test_scattered_segments_of_unequal_cut_arrive_in_order(rig: Rig) -> None:
    source = tuple(Segment(offset, 700) for offset in range(1000, 60_000, 1400))
    total = sum(segment.length for segment in source)
    destination = (Segment(500_000, 1), Segment(9, 11), Segment(700_001, total - 20), Segment(12, 0), Segment(40, 8))
    rig.receiver.grant(PREFILL, KEY, destination)
    rig.sender.write(write_of(KEY, 0, source, destination, tag=b"layer 3"))
    assert rig.sent.wait(WriteFinished) == [WriteFinished(DECODE, KEY, 0, None)]
    assert rig.landed.wait(WriteLanded) == [WriteLanded(PREFILL, KEY, 0, b"layer 3", total, None)]
    assert rig.target.read(destination) == rig.source.read(source)
    assert rig.target.num_commits == 1
    untouched = rig.target.read((Segment(0, 9), Segment(20, 20), Segment(48, 499_952)))
    assert not any(untouched)


def test_an_empty_write_lands(rig: Rig) -> None:
    rig.receiver.grant(PREFILL, KEY, ())
    rig.sender.write(write_of(KEY, 0, (), (), tag=b"nothing"))
    assert rig.landed.wait(WriteLanded)[0].num_bytes == 0
    assert rig.sent.wait(WriteFinished)[0].failure is None


def test_many_keys_interleave_and_all_land(rig: Rig) -> None:
    keys = [bytes([index]) for index in range(20)]
    size, per_key = 1000, 10
    for index, key in enumerate(keys):
        rig.receiver.grant(PREFILL, key, (Segment(index * size * per_key, size * per_key),))
    for index, key in enumerate(keys):
        for number in range(per_key):
            run = (Segment((index * per_key + number) * size, size),)
            rig.sender.write(write_of(key, number, run, run))
    finished = rig.sent.wait(WriteFinished, len(keys) * per_key)
    assert all(event.failure is None for event in finished)
    assert len({(event.key, event.number) for event in finished}) == len(keys) * per_key
    for key in keys:
        numbers = [event.number for event in finished if event.key == key]
        assert (numbers if rig.num_lanes == 1 else sorted(numbers)) == list(range(per_key))
    used = (Segment(0, len(keys) * per_key * size),)
    assert rig.target.read(used) == rig.source.read(used)


@pytest.mark.parametrize("case", ["unknown key", "outside", "straddles", "other peer", "revoked"])
def test_a_write_without_permission_is_refused_and_writes_nothing(rig: Rig, case: str) -> None:
    log, sender, destination = rig.sent, rig.sender, (Segment(4096, 100), Segment(8192, 100))
    if case != "unknown key":
        rig.receiver.grant(PREFILL, KEY, (Segment(4096, 4196),))
    if case == "outside":
        destination = (Segment(4096, 100), Segment(20_000, 100))
    elif case == "straddles":
        destination = (Segment(4096, 100), Segment(8193, 100))
    elif case == "other peer":
        log = EventLog()
        sender = rig.another_sender(WorkerId("stranger"), log)
    elif case == "revoked":
        rig.receiver.revoke(KEY)
    sender.write(write_of(KEY, 0, (Segment(0, 200),), destination))
    failure = log.wait(WriteFinished)[0].failure
    assert failure is not None
    assert ("outside" if case in ("outside", "straddles") else "not granted") in failure
    assert not any(rig.target.read(WHOLE))
    assert rig.landed.of(WriteLanded) == []
    # The connection is still good.
    rig.receiver.grant(PREFILL, b"next", BIG)
    rig.sender.write(write_of(b"next", 0, BIG, BIG))
    assert rig.sent.wait(WriteFinished, 1 if sender is not rig.sender else 2)[-1].failure is None
    sender.close()


def test_a_corrupted_payload_is_told_on_both_sides_and_may_be_sent_again(rig: Rig) -> None:
    rig.receiver.grant(PREFILL, KEY, BIG)
    rig.corrupt_next()
    rig.sender.write(write_of(KEY, 7, BIG, BIG, tag=b"t"))
    failure = rig.sent.wait(WriteFinished)[0].failure
    assert failure is not None
    if rig.is_encrypted:  # TLS notices first, and the connection ends: nothing is told of at the receiver
        assert rig.landed.of(WriteLanded) == []
        rig.sender.write(write_of(KEY, 7, BIG, BIG, tag=b"t"))
        assert rig.sent.wait(WriteFinished, 2)[1].failure is None
        assert rig.target.read(BIG) == rig.source.read(BIG)
        return
    assert "checksum" in failure
    landed = rig.landed.wait(WriteLanded)[0]
    assert (landed.number, landed.tag, landed.failure is None) == (7, b"t", False)
    assert rig.target.num_commits == 0
    rig.sender.write(write_of(KEY, 7, BIG, BIG, tag=b"t"))
    assert rig.sent.wait(WriteFinished, 2)[1].failure is None
    assert rig.landed.wait(WriteLanded, 2)[1].failure is None
    assert rig.target.read(BIG) == rig.source.read(BIG)


def test_revoke_waits_for_the_frame_that_is_being_received(rig: Rig) -> None:
    rig.receiver.grant(PREFILL, KEY, BIG)
    rig.hold_next()
    rig.sender.write(write_of(KEY, 0, BIG, BIG))
    rig.wait_held()
    rig.receiver.revoke(KEY)
    rig.receiver.revoke(KEY)
    assert rig.landed.of(GrantFenced) == []
    with pytest.raises(InternalFault, match="not fenced"):
        rig.receiver.grant(PREFILL, KEY, BIG)
    rig.release()
    assert rig.landed.wait(GrantFenced) == [GrantFenced(KEY)]
    before = rig.target.read(BIG)
    assert rig.sent.wait(WriteFinished)[0].failure is not None
    rig.sender.write(write_of(KEY, 1, BIG, BIG))
    assert rig.sent.wait(WriteFinished, 2)[1].failure is not None
    assert rig.target.read(BIG) == before
    assert rig.target.num_commits == 0
    assert rig.landed.events == [GrantFenced(KEY)]


def test_revoke_of_an_idle_or_unknown_key_is_fenced_at_once(rig: Rig) -> None:
    rig.receiver.grant(PREFILL, KEY, BIG)
    rig.receiver.revoke(KEY)
    assert rig.landed.events == [GrantFenced(KEY)]
    rig.receiver.revoke(b"never seen")
    assert rig.landed.events == [GrantFenced(KEY), GrantFenced(b"never seen")]


def test_cancel_drops_what_is_queued_and_waits_for_what_is_being_sent(rig: Rig) -> None:
    rig.receiver.grant(PREFILL, KEY, WHOLE)
    rig.receiver.grant(PREFILL, b"other", WHOLE)
    rig.hold_next()
    for number in range(40):  # more than sockets hold, so that the sender is stuck inside a frame or its cap
        rig.sender.write(write_of(KEY, number, WHOLE, WHOLE))
    rig.wait_held()
    rig.sender.cancel(DECODE, KEY)
    rig.sender.write(write_of(b"other", 0, BIG, BIG))
    rig.release()
    assert rig.sent.wait(WritesStopped) == [WritesStopped(DECODE, KEY)]
    finished = rig.sent.wait(WriteFinished, 41)
    assert len({(event.key, event.number) for event in finished}) == 41
    cancelled = [event for event in finished if event.failure is not None and "cancelled" in event.failure]
    assert len(cancelled) >= 10
    assert all(event.key == KEY for event in cancelled)
    assert len(rig.sent.of(WritesStopped)) == 1


def test_cancel_of_an_idle_or_unknown_key_stops_at_once(rig: Rig) -> None:
    rig.sender.cancel(DECODE, KEY)
    rig.sender.cancel(WorkerId("nobody"), KEY)
    assert rig.sent.events == [WritesStopped(DECODE, KEY), WritesStopped(WorkerId("nobody"), KEY)]


def test_cancel_waits_for_a_read_under_way_also_where_the_peer_was_let_go(rig: Rig) -> None:
    letting_go, log, memory = WorkerId("letting-go"), EventLog(), GatedSource(data=bytes(ARENA_BYTES))
    rig.source = memory
    sender = rig.another_sender(letting_go, log)
    rig.receiver.grant(letting_go, KEY, BIG)
    sender.write(write_of(KEY, 0, BIG, BIG))
    assert memory.entered.wait(DEADLINE_S)
    sender.disconnect(DECODE)
    sender.cancel(DECODE, KEY)
    assert log.of(WritesStopped) == []
    memory.gate.set()
    assert log.wait(WritesStopped) == [WritesStopped(DECODE, KEY)]
    sender.close()
    assert [event.number for event in log.of(WriteFinished)] == [0]


def test_a_restarted_receiver_refuses_writes_meant_for_the_one_before(rig: Rig) -> None:
    rig.receiver.grant(PREFILL, KEY, BIG)
    rig.sender.write(write_of(KEY, 0, BIG, BIG))
    assert rig.sent.wait(WriteFinished)[0].failure is None
    rig.restart_receiver(Incarnation(99))
    rig.receiver.grant(PREFILL, KEY, BIG)
    number = 1
    rig.sender.write(write_of(KEY, number, BIG, BIG))
    failure = rig.sent.wait(WriteFinished, 2)[1].failure
    if failure is not None and "incarnation" not in failure:  # it was caught by the old connection's end
        number = 2
        rig.sender.write(write_of(KEY, number, BIG, BIG))
        failure = rig.sent.wait(WriteFinished, 3)[2].failure
    assert failure is not None
    assert "incarnation" in failure
    assert rig.landed.of(WriteLanded)[1:] == []
    rig.connect(rig.sender, Incarnation(99))
    rig.sender.write(write_of(KEY, number + 1, BIG, BIG))
    assert rig.sent.wait(WriteFinished, number + 2)[-1].failure is None


def test_a_vanished_receiver_fails_writes_before_the_connection_is_lost(rig: Rig) -> None:
    rig.receiver.close()
    for number in range(3):
        rig.sender.write(write_of(KEY, number, BIG, BIG))
    finished = rig.sent.wait(WriteFinished, 3)
    assert all(event.failure is not None for event in finished)
    assert rig.sent.wait(ConnectionLost)[0].peer == DECODE
    assert isinstance(rig.sent.events[0], WriteFinished)


def test_a_write_that_landed_is_acknowledged_again_without_landing_again(rig: Rig) -> None:
    if rig.num_lanes > 1:
        pytest.skip("the second lane could not even connect while answers are swallowed")
    rig.receiver.grant(PREFILL, KEY, BIG)
    rig.sender.write(write_of(KEY, 0, (), ()))
    assert rig.sent.wait(WriteFinished)[0].failure is None
    rig.lose_next_answer()
    rig.sender.write(write_of(KEY, 1, BIG, BIG))
    rig.landed.wait(WriteLanded, 2)
    rig.cut()
    assert rig.sent.wait(WriteFinished, 2)[1].failure is not None
    rig.sent.wait(ConnectionLost)
    rig.target.fill(Segment(0, 4), b"used")  # the receiver goes on with what landed
    rig.sender.write(write_of(KEY, 1, BIG, BIG))
    assert rig.sent.wait(WriteFinished, 3)[2].failure is None
    assert len(rig.landed.of(WriteLanded)) == 2
    assert rig.target.read((Segment(0, 4),)) == b"used"


def test_impossible_writes_fail_without_reaching_the_peer(rig: Rig) -> None:
    rig.receiver.grant(PREFILL, KEY, BIG)
    rig.sender.write(write_of(KEY, 0, (Segment(0, 10),), (Segment(0, 11),)))
    rig.sender.write(write_of(KEY, 1, (Segment(ARENA_BYTES - 5, 10),), (Segment(0, 10),)))
    rig.sender.write(write_of(KEY, 2, (Segment(-5, 10),), (Segment(0, 10),)))
    rig.sender.disconnect(DECODE)
    rig.sender.write(write_of(KEY, 3, BIG, BIG))
    reasons = [event.failure or "" for event in rig.sent.wait(WriteFinished, 4)]
    for reason, word in zip(reasons, ["equal", "outside", "outside", "not connected"], strict=True):
        assert word in reason


def test_grants_must_lie_in_the_arena_and_keys_are_fresh(rig: Rig) -> None:
    with pytest.raises(InternalFault, match="outside the arena"):
        rig.receiver.grant(PREFILL, KEY, (Segment(ARENA_BYTES - 1, 2),))
    rig.receiver.grant(PREFILL, KEY, BIG)
    with pytest.raises(InternalFault, match="granted already"):
        rig.receiver.grant(PREFILL, KEY, BIG)


def test_disconnect_and_close_finish_every_write_exactly_once(rig: Rig) -> None:
    rig.receiver.grant(PREFILL, KEY, WHOLE)
    rig.hold_next()
    for number in range(30):
        rig.sender.write(write_of(KEY, number, WHOLE, WHOLE))
    rig.wait_held()
    rig.sender.disconnect(DECODE)
    rig.release()
    rig.connect(rig.sender)
    rig.sender.write(write_of(KEY, 30, BIG, BIG))
    rig.sender.close()
    finished = rig.sent.wait(WriteFinished, 31)
    assert sorted(event.number for event in finished) == list(range(31))
    assert rig.sent.of(ConnectionLost) == []
    rig.sender.write(write_of(KEY, 31, BIG, BIG))
    assert rig.sent.wait(WriteFinished, 32)[-1].failure is not None


def test_events_may_call_back_into_the_transport(rig: Rig) -> None:
    chained = WorkerId("chained")
    log = EventLog()

    def answer(event: TransportEvent) -> None:
        if isinstance(event, WriteFinished) and event.number < 4:
            sender.write(write_of(KEY, event.number + 1, BIG, BIG))
        elif isinstance(event, WriteFinished):
            sender.cancel(DECODE, KEY)

    log.on_event = answer
    sender = rig.another_sender(chained, log)
    rig.receiver.grant(chained, KEY, BIG)
    sender.write(write_of(KEY, 0, BIG, BIG))
    log.wait(WritesStopped)
    assert [(event.number, event.failure) for event in log.of(WriteFinished)] == [(n, None) for n in range(5)]
    sender.close()


def test_incarnations_are_told_apart_before_any_byte(rig: Rig) -> None:
    log = EventLog()
    sender = rig.another_sender(WorkerId("confused"), log)
    rig.connect(sender, Incarnation(int(RECEIVER_INCARNATION) + 1))
    rig.receiver.grant(WorkerId("confused"), KEY, BIG)
    sender.write(write_of(KEY, 0, BIG, BIG))
    failure = log.wait(WriteFinished)[0].failure
    assert failure is not None
    assert "incarnation" in failure
    assert "incarnation" in log.wait(ConnectionLost)[0].reason
    assert not any(rig.target.read(BIG))
    sender.close()

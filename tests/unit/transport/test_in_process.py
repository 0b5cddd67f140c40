"""The manual network: a test decides each delivery."""

import threading

import pytest
from tests.unit.transport.rigs import (
    DEADLINE_S,
    DECODE,
    PREFILL,
    RECEIVER_INCARNATION,
    SENDER_INCARNATION,
    EventLog,
    GatedMemory,
    pattern,
    write_of,
)

from disagg.core.endpoints import Endpoint, TransportKind
from disagg.core.errors import InternalFault
from disagg.core.ids import Incarnation
from disagg.kvcache.memory import Segment
from disagg.testing.memory import BytesMemory
from disagg.transport.api import ConnectionLost, GrantFenced, Write, WriteFinished, WriteLanded, WritesStopped
from disagg.transport.in_process import Fault, InProcessNetwork, InProcessReceiver, InProcessSender

KEY = b"k"
RUN = (Segment(0, 10),)


class Manual:
    def __init__(self, *, is_staged: bool = False) -> None:
        self.network = InProcessNetwork(threaded=False)
        self.sent, self.landed = EventLog(), EventLog()
        self.source = BytesMemory(data=pattern(100))
        self.target = BytesMemory(100, is_staged=is_staged)
        self.receiver: InProcessReceiver = self.network.receiver(
            "decode", RECEIVER_INCARNATION, self.target, self.landed.post
        )
        self.sender: InProcessSender = self.network.sender(PREFILL, SENDER_INCARNATION, self.source, self.sent.post)
        self.sender.connect(DECODE, self.receiver.endpoint, RECEIVER_INCARNATION)
        self.receiver.grant(PREFILL, KEY, (Segment(0, 100),))

    def write(self, number: int, start: int = 0) -> None:
        self.sender.write(write_of(KEY, number, (Segment(start, 10),), (Segment(start, 10),)))

    def check(self) -> None:
        self.network.check_invariants()
        self.receiver.check_invariants()


def test_nothing_moves_before_it_is_delivered_and_order_is_the_callers() -> None:
    manual = Manual()
    for number in range(3):
        manual.write(number, number * 10)
    assert [write.number for write in manual.network.pending] == [0, 1, 2]
    assert manual.sent.events == []
    assert manual.network.deliver_next(2)
    assert manual.landed.of(WriteLanded)[0].number == 2
    assert manual.network.deliver_all() == 2
    assert not manual.network.deliver_next()
    assert [event.number for event in manual.sent.of(WriteFinished)] == [2, 0, 1]
    manual.check()


def test_a_delayed_write_goes_behind_the_others() -> None:
    manual = Manual()
    faults = {0: Fault.DELAY}
    manual.network.fault_hook = lambda write: faults.pop(write.number, Fault.NONE)
    for number in range(3):
        manual.write(number)
    assert manual.network.deliver_all() == 4
    assert [event.number for event in manual.sent.of(WriteFinished)] == [1, 2, 0]
    manual.network.fault_hook = lambda write: Fault.DELAY
    manual.write(3)
    with pytest.raises(InternalFault, match="delay"):
        manual.network.deliver_all(max_deliveries=20)
    manual.check()


def test_a_dropped_write_stays_unfinished_until_its_key_is_cancelled() -> None:
    manual = Manual()
    manual.network.fault_hook = lambda write: Fault.DROP
    manual.write(0)
    manual.network.deliver_all()
    assert manual.sent.events == []
    assert manual.landed.events == []
    manual.check()
    manual.sender.cancel(DECODE, KEY)
    assert [type(event) for event in manual.sent.events] == [WriteFinished, WritesStopped]
    manual.check()


def test_a_cut_fails_everything_unfinished_and_then_the_connection() -> None:
    manual = Manual()
    faults = {0: Fault.DROP, 1: Fault.CUT}
    manual.network.fault_hook = lambda write: faults.pop(write.number, Fault.NONE)
    for number in range(3):
        manual.write(number)
    manual.network.deliver_all()
    assert sorted(event.number for event in manual.sent.of(WriteFinished)) == [0, 1, 2]
    assert isinstance(manual.sent.events[-1], ConnectionLost)
    manual.write(2)
    manual.network.deliver_all()
    assert manual.sent.of(WriteFinished)[-1].failure is None
    manual.check()


def test_a_staged_landing_shows_nothing_of_a_corrupted_write() -> None:
    manual = Manual(is_staged=True)
    manual.network.fault_hook = lambda write: Fault.CORRUPT
    manual.write(0)
    manual.network.deliver_all()
    assert manual.landed.of(WriteLanded)[0].failure is not None
    assert not any(manual.target.read((Segment(0, 100),)))
    manual.network.fault_hook = lambda write: Fault.NONE
    manual.write(0)
    manual.network.deliver_all()
    assert manual.target.read(RUN) == manual.source.read(RUN)


def test_revoking_from_inside_the_landing_lets_nothing_more_in() -> None:
    manual = Manual()
    manual.write(0)
    manual.write(1)
    manual.landed.on_event = lambda event: manual.receiver.revoke(KEY) if isinstance(event, WriteLanded) else None
    manual.network.deliver_all()
    assert [type(event) for event in manual.landed.events] == [WriteLanded, GrantFenced]
    assert [event.failure is None for event in manual.sent.of(WriteFinished)] == [True, False]


def test_closing_the_network_finishes_what_is_pending() -> None:
    manual = Manual()
    manual.write(0)
    manual.network.close()
    manual.write(1)
    assert all(event.failure is not None for event in manual.sent.wait(WriteFinished, 2))


def test_names_are_unique_and_kinds_are_checked() -> None:
    manual = Manual()
    with pytest.raises(InternalFault, match="already"):
        manual.network.receiver("decode", Incarnation(1), manual.target, manual.landed.post)
    with pytest.raises(InternalFault, match="in-process"):
        manual.sender.connect(DECODE, Endpoint(TransportKind.TCP, "127.0.0.1:1"), Incarnation(1))


def test_cancel_waits_for_the_copy_under_way() -> None:
    network = InProcessNetwork(threaded=True)
    sent, landed = EventLog(), EventLog()
    memory = GatedMemory(100)
    memory.gate.clear()
    receiver = network.receiver("decode", RECEIVER_INCARNATION, memory, landed.post)
    sender = network.sender(PREFILL, SENDER_INCARNATION, BytesMemory(100), sent.post)
    sender.connect(DECODE, receiver.endpoint, RECEIVER_INCARNATION)
    receiver.grant(PREFILL, KEY, RUN)
    sender.write(write_of(KEY, 0, RUN, RUN))
    assert memory.entered.wait(DEADLINE_S)
    sender.cancel(DECODE, KEY)
    sender.write(write_of(KEY, 1, RUN, RUN))
    assert [event.number for event in sent.of(WriteFinished)] == [1]
    assert sent.of(WritesStopped) == []
    closing = threading.Thread(target=receiver.close)
    closing.start()
    memory.gate.set()
    closing.join(DEADLINE_S)
    assert not closing.is_alive()
    sent.wait(WritesStopped)
    assert [type(event) for event in sent.events] == [WriteFinished, WriteFinished, WritesStopped]
    sender.close()
    network.close()


def test_a_hook_sees_the_write_it_decides_on() -> None:
    manual = Manual()
    seen: list[Write] = []

    def hook(write: Write) -> Fault:
        seen.append(write)
        return Fault.NONE

    manual.network.fault_hook = hook
    manual.write(5)
    manual.network.deliver_all()
    assert [(write.key, write.number) for write in seen] == [(KEY, 5)]

"""Thousands of hand-offs over every transport, with faults and aborts: nothing is lost, nothing grows.

A hand-off here: blocks from a pool, a grant, some writes into it, maybe an abort by either end, the fence, the blocks
back to the pool. Blocks are wiped when they come back: a byte that lands after its fence would show at the end.
"""

import random

import psutil
import pytest
from tests.unit.transport.conftest import shared_pages
from tests.unit.transport.rigs import ARENA_BYTES, DECODE, EventLog, Rig, open_descriptors, write_of

from disagg.core.ids import WorkerId
from disagg.kvcache.memory import Segment
from disagg.testing.faulty_sender import FaultySender, WriteFault
from disagg.transport.api import (
    GrantFenced,
    Post,
    Sender,
    TransportEvent,
    Write,
    WriteFinished,
    WriteLanded,
    WritesStopped,
)

BLOCK_BYTES = 8 << 10
NUM_BLOCKS = ARENA_BYTES // BLOCK_BYTES
FAULTY = WorkerId("faulty")
FAULTS = {WriteFault.FAIL: 3, WriteFault.DELAY: 5, WriteFault.DROP: 3, WriteFault.REPEAT: 5, WriteFault.NONE: 84}
NOBODYS = b"not granted"
COUNTS = [pytest.param(300, id="some"), pytest.param(10_000, id="10000", marks=pytest.mark.slow)]
MAX_GROWTH_BYTES = 16 << 20  # of an interpreter that has run some thousand hand-offs more


class ForwardLog(EventLog):
    """Hands events on instead of keeping them."""

    def __init__(self, post: Post) -> None:
        super().__init__()
        self._forward = post

    def post(self, event: TransportEvent) -> None:
        self._forward(event)


class Handoffs:
    """Both ends' bookkeeping, as small as it can be."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig = rig
        self.rng = random.Random(seed)
        self.free = list(range(NUM_BLOCKS))
        self.num_landed = self.num_failed = self.num_aborted = 0
        self.sent = EventLog()
        self.sender = FaultySender(self._plain, self._note, self._decide)

    def _plain(self, post: Post) -> Sender:
        return self.rig.another_sender(FAULTY, ForwardLog(post))

    def _note(self, event: TransportEvent) -> None:
        self.sent.post(event)  # a fresh log per hand-off

    def _decide(self, write: Write) -> WriteFault:
        if write.key == NOBODYS:
            return WriteFault.NONE
        return self.rng.choices(list(FAULTS), list(FAULTS.values()))[0]

    def run(self, number: int) -> None:
        rng = self.rng
        key = f"handoff-{number}".encode()
        num_writes, blocks_per_write = rng.randint(1, 4), rng.randint(1, 3)
        blocks = [self.free.pop(rng.randrange(len(self.free))) for _ in range(num_writes * blocks_per_write)]
        segments = [Segment(block * BLOCK_BYTES, BLOCK_BYTES) for block in blocks]
        self.sent = EventLog()
        self.rig.landed.events.clear()
        self.rig.receiver.grant(FAULTY, key, segments)
        abort = rng.choices(["none", "source", "destination", "cut"], [70, 14, 14, 2])[0]
        num_asked = num_writes if abort == "none" else rng.randint(1, num_writes)
        for index in range(num_asked):
            destination = tuple(segments[index * blocks_per_write : (index + 1) * blocks_per_write])
            source = tuple(Segment(rng.randrange(NUM_BLOCKS) * BLOCK_BYTES, BLOCK_BYTES) for _ in destination)
            self.sender.write(write_of(key, index, source, destination))
        self.num_aborted += abort != "none"
        if abort == "destination":
            self.rig.receiver.revoke(key)
        elif abort == "cut":
            self.rig.cut()
            self.sender.write(write_of(NOBODYS, number, (), ()))  # connects again
        elif abort == "none":
            self.sent.wait_until(lambda: len(self._ended(key)) >= num_asked - self.sender.num_held)
        self._end(key, num_asked)
        for block in blocks:
            self.rig.target.fill(Segment(block * BLOCK_BYTES, BLOCK_BYTES), bytes(BLOCK_BYTES))
        self.free += blocks

    def _end(self, key: bytes, num_asked: int) -> None:
        """The source has stopped, every write is told as finished once, the grant is fenced."""
        self.sender.cancel(DECODE, key)
        self.sent.wait(WritesStopped)
        self.rig.receiver.revoke(key)
        self.rig.landed.wait(GrantFenced)
        self.sent.wait_until(lambda: len(self._ended(key)) >= num_asked)
        ended = self._ended(key)
        assert sorted(event.number for event in ended) == list(range(num_asked))
        landed = [event for event in self.rig.landed.of(WriteLanded) if event.failure is None]
        # What is told as verified has landed; a loss or a cancellation may hide a landing, never invent one.
        assert {e.number for e in ended if e.failure is None} <= {e.number for e in landed}
        assert len({event.number for event in landed}) == len(landed)
        self.num_landed += len(landed)
        self.num_failed += sum(event.failure is not None for event in ended)

    def _ended(self, key: bytes) -> list[WriteFinished]:
        return [event for event in self.sent.of(WriteFinished) if event.key == key]


def num_sockets(rig: Rig) -> int:
    """Without those of a relay, which keeps what it has cut until its end."""
    relay = getattr(rig, "relay", None)
    return len(open_descriptors()) - (0 if relay is None else 2 * len(relay._pairs))


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", COUNTS)
def test_handoffs_with_faults_and_aborts_leave_blocks_memory_and_descriptors_as_they_were(rig: Rig, count: int) -> None:
    handoffs = Handoffs(rig, seed=count)
    for number in range(count // 2):
        handoffs.run(number)
    before, sockets, pages = resident_bytes(), num_sockets(rig), shared_pages()
    for number in range(count // 2, count):
        handoffs.run(number)
    assert resident_bytes() - before < MAX_GROWTH_BYTES
    assert abs(num_sockets(rig) - sockets) <= 4  # a connection that is being made anew
    assert max(shared_pages()) - max(pages) <= 2  # one connection's mapping, and its descriptor
    assert sorted(handoffs.free) == list(range(NUM_BLOCKS))
    assert not any(rig.target.read((Segment(0, ARENA_BYTES),)))  # wiped, and nothing came later
    assert handoffs.num_landed > count
    assert handoffs.num_failed > count // 10
    assert handoffs.num_aborted > count // 10
    handoffs.sender.check_invariants()
    handoffs.sender.close()


def test_every_fault_keeps_the_senders_promises(rig: Rig) -> None:
    faults = [WriteFault.FAIL, WriteFault.DELAY, WriteFault.REPEAT, WriteFault.DROP, WriteFault.NONE, WriteFault.DROP]
    script = list(faults)
    log = EventLog()
    sender = FaultySender(
        lambda post: rig.another_sender(FAULTY, ForwardLog(post)), log.post, lambda write: script.pop(0)
    )
    rig.receiver.grant(FAULTY, b"key", (Segment(0, ARENA_BYTES),))
    for number in range(len(faults)):
        run = (Segment(number * BLOCK_BYTES, BLOCK_BYTES),)
        sender.write(write_of(b"key", number, run, run))
    finished = {event.number: event.failure for event in log.wait(WriteFinished, 4)}
    assert {number for number, failure in finished.items() if failure is None} == {1, 2, 4}
    assert "script" in (finished[0] or "")
    sender.cancel(DECODE, b"key")
    log.wait(WritesStopped)
    finished = {event.number: event.failure for event in log.wait(WriteFinished, 6)}
    assert "cancelled" in (finished[3] or "")
    assert "cancelled" in (finished[5] or "")
    assert len(log.of(WriteFinished)) == len(faults)
    # Of two lanes one may still be telling what has landed when the other has answered.
    assert sorted(event.number for event in rig.landed.wait(WriteLanded, 3)) == [1, 2, 4]
    assert len(rig.landed.of(WriteLanded)) == 3
    assert [sender.num_faults[fault] for fault in WriteFault] == [1, 1, 1, 2, 1, 0]
    sender.check_invariants()
    sender.close()

"""Rigs of the kinds that stay within one machine, and a writer to shared memory that speaks by hand."""

import os
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.unit.transport.relays import MessageRelay
from tests.unit.transport.rigs import (
    ARENA_BYTES,
    DEADLINE_S,
    DECODE,
    LONG_FENCE_S,
    PREFILL,
    RAW,
    RECEIVER_INCARNATION,
    SENDER_INCARNATION,
    EventLog,
    GatedMemory,
    LinkRig,
    pattern,
)

from disagg.core.endpoints import Endpoint, TransportKind
from disagg.core.ids import Incarnation, WorkerId
from disagg.kvcache.memory import Segment
from disagg.testing.memory import BytesMemory, SealedBytesMemory
from disagg.transport.api import Sender
from disagg.transport.in_process import Fault, InProcessNetwork
from disagg.transport.local_stream import abstract_address
from disagg.transport.segments import SegmentArray
from disagg.transport.shared_memory_receiver import SharedMemoryReceiver
from disagg.transport.shared_memory_sender import SharedMemorySender
from disagg.transport.shared_memory_wire import (
    Admission,
    Greeting,
    OwnerMessage,
    Request,
    WriterMessage,
    decode_owner,
    encode,
)
from disagg.transport.sharing import SharingDomain, draw_domain

KEY = b"key-0"
BIG = (Segment(0, 256 << 10),)


class SharedMemoryRig(LinkRig):
    """Both ends in one process."""

    can_force_fence = False  # a process is ended by force, and this one is the test's own
    relay: MessageRelay
    receiver: SharedMemoryReceiver
    sender: SharedMemorySender

    def __init__(self, fence_s: float = LONG_FENCE_S) -> None:
        self.domain = draw_domain()
        self.source = SealedBytesMemory(data=pattern(ARENA_BYTES))
        self.sealed = SealedBytesMemory(ARENA_BYTES)
        self.target = self.sealed
        self.ended: list[int] = []  # pidfds of processes ended by force
        super().__init__(fence_s)

    def _make_receiver(self, incarnation: Incarnation) -> SharedMemoryReceiver:
        return SharedMemoryReceiver(
            self.sealed,
            incarnation,
            self.landed.post,
            self.domain,
            fence_timeout_s=self.fence_s,
            end_writer=self.ended.append,
        )

    def _make_relay(self, target: str) -> MessageRelay:
        return MessageRelay(self.domain, target)

    def _make_sender(self, worker_id: WorkerId, own: Incarnation, log: EventLog) -> SharedMemorySender:
        return SharedMemorySender(worker_id, self.source, log.post, self.domain)

    def corrupt_next(self) -> None:
        """The first byte changes after it was copied, before the owner sums it."""
        first = Segment(0, 1)
        self.relay.do_before("copied", lambda: self.target.fill(first, bytes([self.target.read((first,))[0] ^ 0x10])))

    def hold_next(self) -> None:
        self.relay.hold("copied")

    def wait_held(self) -> None:
        self.relay.wait_held()

    def close(self) -> None:
        super().close()
        assert not self.ended
        vars(self).clear()  # the arenas are given back, which is checked next


class RawWriter:
    """Speaks by hand, and closes the arena it is given."""

    def __init__(self, address: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(DEADLINE_S)
        self.sock.connect(abstract_address(address))
        self.descriptors: list[int] = []

    def say(self, message: WriterMessage | bytes) -> None:
        body = message if isinstance(message, bytes) else encode(message)
        self.sock.sendall(struct.pack("!I", len(body)) + body)

    def hear(self) -> OwnerMessage:
        head, descriptors, _, _ = socket.recv_fds(self.sock, 4, 1)
        self.descriptors += descriptors
        assert len(head) == 4, "closed"
        (size,) = struct.unpack("!I", head)
        return decode_owner(bytearray(self.sock.recv(size, socket.MSG_WAITALL)))

    def greet(self, domain: SharingDomain) -> None:
        self.say(Greeting(RAW, RECEIVER_INCARNATION, domain.secret))
        assert self.hear() == Admission(None, ARENA_BYTES)

    def is_closed_by_peer(self) -> bool:
        try:
            while self.sock.recv(4096):
                pass
        except ConnectionError:
            pass
        return True  # a socket timeout raises TimeoutError instead

    def close(self) -> None:
        self.sock.close()
        for descriptor in self.descriptors:
            os.close(descriptor)


@contextmanager
def raw_writer(rig: SharedMemoryRig) -> Iterator[RawWriter]:
    writer = RawWriter(rig.receiver.endpoint.address)
    try:
        yield writer
    finally:
        writer.close()


def request(ticket: int, number: int = 0, destination: Sequence[Segment] = BIG, key: bytes = KEY) -> Request:
    runs = SegmentArray.of(destination)
    return Request(ticket, key, number, b"", runs.pack(), runs.num_bytes)


class InProcessRig:
    can_force_fence = False  # a copy in memory can only be waited for
    num_lanes = 1
    is_encrypted = False

    def __init__(self) -> None:
        self.network = InProcessNetwork(threaded=True)
        self.source = BytesMemory(data=pattern(ARENA_BYTES))
        self.gated = GatedMemory(ARENA_BYTES)
        self.target: BytesMemory = self.gated
        self.sent, self.landed = EventLog(), EventLog()
        self.receiver = self.network.receiver("decode", RECEIVER_INCARNATION, self.target, self.landed.post)
        self.sender = self.network.sender(PREFILL, SENDER_INCARNATION, self.source, self.sent.post)
        self.connect(self.sender)

    def connect(self, sender: Sender, incarnation: Incarnation = RECEIVER_INCARNATION) -> None:
        sender.connect(DECODE, Endpoint(TransportKind.IN_PROCESS, "decode"), incarnation)

    def another_sender(self, worker_id: WorkerId, log: EventLog) -> Sender:
        sender = self.network.sender(worker_id, Incarnation(33), self.source, log.post)
        self.connect(sender)
        return sender

    def restart_receiver(self, incarnation: Incarnation) -> None:
        self.receiver.close()
        self.receiver = self.network.receiver("decode", incarnation, self.target, self.landed.post)

    def corrupt_next(self) -> None:
        self._once(Fault.CORRUPT)

    def hold_next(self) -> None:
        self.gated.entered.clear()
        self.gated.gate.clear()

    def wait_held(self) -> None:
        assert self.gated.entered.wait(DEADLINE_S)

    def release(self) -> None:
        self.gated.gate.set()

    def lose_next_answer(self) -> None:
        self._once(Fault.CUT_AFTER_LANDING)

    def cut(self) -> None:
        """The hook has cut it already."""

    def check_invariants(self) -> None:
        self.network.check_invariants()
        self.receiver.check_invariants()

    def close(self) -> None:
        self.release()
        self.sender.close()
        self.receiver.close()
        self.network.close()

    def _once(self, fault: Fault) -> None:
        faults = [fault]
        self.network.fault_hook = lambda write: faults.pop() if faults else Fault.NONE

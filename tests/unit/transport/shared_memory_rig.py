"""Both ends of shared memory in one process, joined by something that can corrupt, hold or cut what passes."""

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence

from tests.unit.transport.rigs import (
    ARENA_BYTES,
    DEADLINE_S,
    DECODE,
    FENCE_S,
    PREFILL,
    RECEIVER_INCARNATION,
    EventLog,
    pattern,
)

from disagg.core.endpoints import Endpoint, TransportKind
from disagg.core.ids import Incarnation, WorkerId
from disagg.kvcache.memory import Segment
from disagg.testing.memory import BytesLanding, BytesMemory, SealedBytesMemory, StagedLanding
from disagg.transport.api import Sender
from disagg.transport.local_stream import abstract_address
from disagg.transport.shared_memory_receiver import SharedMemoryReceiver
from disagg.transport.shared_memory_sender import SharedMemorySender
from disagg.transport.sharing import SharingDomain, draw_domain


class SpoiledMemory(SealedBytesMemory):
    """Bytes of its next landing have changed since they were copied."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self.spoils_next = False

    def landing(self, segments: Sequence[Segment]) -> BytesLanding | StagedLanding:
        made = super().landing(segments)
        if self.spoils_next:
            self.spoils_next = False
            made.buffers[0][0] ^= 0x10
        return made


class MessageRelay:
    """Passes messages, and one descriptor, between a writer and an arena's owner."""

    def __init__(self, domain: SharingDomain, target: str) -> None:
        self.address = f"{domain.name}/relay-{os.urandom(4).hex()}"
        self.target = target
        self.swallows_answers = False
        self._held_tag: bytes | None = None
        self._is_holding = False
        self._is_closed = False
        self._changed = threading.Condition()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(abstract_address(self.address))
        self._listener.listen()
        self._start(self._accept)

    def hold(self, tag: str) -> None:
        """Keep back the next message of this kind, and all after it, on their way to the owner."""
        with self._changed:
            self._held_tag, self._is_holding = tag.encode(), False

    def wait_held(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._is_holding, DEADLINE_S), "nothing was held"

    def release(self) -> None:
        with self._changed:
            self._held_tag, self._is_holding = None, False
            self._changed.notify_all()

    def cut(self) -> None:
        with self._changed:
            for pair in self._pairs:
                for sock in pair:
                    _shut(sock)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
        _shut(self._listener)
        self.cut()
        self.release()
        for thread in self._threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
        self._listener.close()
        for pair in self._pairs:
            for sock in pair:
                sock.close()

    def _start(self, run: Callable[..., None], *args: socket.socket) -> None:
        thread = threading.Thread(target=run, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX)
            try:
                far.connect(abstract_address(self.target))
            except OSError:
                near.close()
                far.close()
                continue
            with self._changed:
                self._pairs.append((near, far))
                self._start(self._to_owner, near, far)
                self._start(self._to_writer, far, near)
                if self._is_closed:
                    _shut(near)
                    _shut(far)

    def _to_owner(self, near: socket.socket, far: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while (message := _read_message(near)) is not None:
                with self._changed:
                    if self._held_tag is not None and self._held_tag in message[: 4 + 2 + len(self._held_tag)]:
                        self._is_holding = True
                        self._changed.notify_all()
                    self._changed.wait_for(lambda: not self._is_holding)
                    if self._is_closed:
                        return
                far.sendall(message)
        _shut(far)

    def _to_writer(self, far: socket.socket, near: socket.socket) -> None:
        with contextlib.suppress(OSError):
            admission, descriptors, _, _ = socket.recv_fds(far, 64 << 10, 1)
            if admission:
                socket.send_fds(near, [admission], descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            while (message := _read_message(far)) is not None:
                if not (self.swallows_answers and b"answer" in message[:12]):
                    near.sendall(message)
        _shut(near)


def _read_message(sock: socket.socket) -> bytes | None:
    data = b""
    wanted = 4
    while len(data) < wanted:
        part = sock.recv(wanted - len(data))
        if not part:
            return None
        data += part
        if len(data) == 4:
            wanted += struct.unpack("!I", data)[0]
    return data


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


class SharedMemoryRig:
    num_lanes = 1
    is_encrypted = False
    can_force_fence = False  # a process is ended by force, and this one is the test's own

    def __init__(self) -> None:
        self.domain = draw_domain()
        self.source: BytesMemory = SealedBytesMemory(data=pattern(ARENA_BYTES))
        self.spoiled = SpoiledMemory(ARENA_BYTES)
        self.target: BytesMemory = self.spoiled
        self.sent, self.landed = EventLog(), EventLog()
        self.ended: list[int] = []  # pidfds of processes ended by force
        self.receiver = self._receiver(RECEIVER_INCARNATION)
        self.relay = MessageRelay(self.domain, self.receiver.endpoint.address)
        self.sender = SharedMemorySender(PREFILL, self.source, self.sent.post, self.domain)
        self.others: list[SharedMemorySender] = []
        self.connect(self.sender)

    def _receiver(self, incarnation: Incarnation) -> SharedMemoryReceiver:
        return SharedMemoryReceiver(
            self.spoiled,
            incarnation,
            self.landed.post,
            self.domain,
            fence_timeout_s=FENCE_S,
            end_writer=self.ended.append,
        )

    def connect(self, sender: Sender, incarnation: Incarnation = RECEIVER_INCARNATION) -> None:
        sender.connect(DECODE, Endpoint(TransportKind.SHARED_MEMORY, self.relay.address), incarnation)

    def another_sender(self, worker_id: WorkerId, log: EventLog) -> Sender:
        sender = SharedMemorySender(worker_id, self.source, log.post, self.domain)
        self.others.append(sender)
        self.connect(sender)
        return sender

    def restart_receiver(self, incarnation: Incarnation) -> None:
        self.receiver.close()
        self.receiver = self._receiver(incarnation)
        self.relay.target = self.receiver.endpoint.address

    def corrupt_next(self) -> None:
        self.spoiled.spoils_next = True

    def hold_next(self) -> None:
        self.relay.hold("copied")

    def wait_held(self) -> None:
        self.relay.wait_held()

    def release(self) -> None:
        self.relay.release()

    def lose_next_answer(self) -> None:
        self.relay.swallows_answers = True

    def cut(self) -> None:
        self.relay.cut()
        self.relay.swallows_answers = False

    def check_invariants(self) -> None:
        for sender in (self.sender, *self.others):
            sender.check_invariants()
        self.receiver.check_invariants()

    def close(self) -> None:
        for sender in (self.sender, *self.others):
            sender.close()
        self.receiver.close()
        self.relay.close()
        assert not self.ended
        vars(self).clear()  # the arenas are given back, which is checked next

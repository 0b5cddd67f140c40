"""Senders and receivers of one process, joined by a network that the caller owns.

Threaded: one thread delivers writes in the order in which they were queued. Manual: nothing moves until deliver_next()
or deliver_all() is called, in the calling thread, so that a test decides every step. A fault hook sees each write
before it is delivered and may have it corrupted, delayed, dropped, or its connection cut.
"""

import enum
import threading
from collections.abc import Callable, Sequence

import xxhash

from disagg.core.endpoints import Endpoint, TransportKind
from disagg.core.errors import InternalFault
from disagg.core.ids import Incarnation, WorkerId
from disagg.kvcache.memory import Memory, Segment
from disagg.transport.api import (
    ConnectionLost,
    Post,
    TransportEvent,
    Write,
    WriteFinished,
    WritesStopped,
)
from disagg.transport.capability import shown
from disagg.transport.deadlines import join_all
from disagg.transport.grants import Arrival, GrantTable, Refused, Visit
from disagg.transport.outbox import Outbox
from disagg.transport.segments import copy_views, total_bytes, write_flaw


class Fault(enum.Enum):
    """What a test does to one delivery."""

    NONE = "none"
    CORRUPT = "corrupt"  # one byte is flipped on the way
    DELAY = "delay"  # goes behind everything queued now
    DROP = "drop"  # neither bytes nor answer arrive; the write stays unfinished until the connection ends
    CUT = "cut"  # the connection is lost before the bytes arrive
    CUT_AFTER_LANDING = "cut_after_landing"  # the connection is lost after the bytes landed, before the answer


FaultHook = Callable[[Write], Fault]


class _Parcel:
    """A write on its way; compared by identity."""

    def __init__(self, sender: "InProcessSender", write: Write) -> None:
        self.sender = sender
        self.write = write


class InProcessNetwork:
    """Registry of in-process receivers by name, and the queue of what is on its way to them."""

    def __init__(self, *, threaded: bool, close_timeout_s: float = 5.0) -> None:
        self._changed = threading.Condition()
        self._close_timeout_s = close_timeout_s
        self._receivers: dict[str, InProcessReceiver] = {}
        self._pending: list[_Parcel] = []
        self._dropped: list[_Parcel] = []  # their senders still wait for an answer
        self._delivering: _Parcel | None = None
        self._stopping: set[tuple[WorkerId, bytes]] = set()  # cancelled while being delivered
        self._is_closed = False
        self.fault_hook: FaultHook = lambda write: Fault.NONE
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._run, name="disagg-in-process", daemon=True)
            self._thread.start()

    def sender(self, worker_id: WorkerId, incarnation: Incarnation, memory: Memory, post: Post) -> "InProcessSender":
        """A sender on this network."""
        return InProcessSender(self, worker_id, incarnation, memory, post)

    def receiver(self, name: str, incarnation: Incarnation, memory: Memory, post: Post) -> "InProcessReceiver":
        """A receiver under a name. Raises InternalFault while another one holds the name."""
        receiver = InProcessReceiver(self, name, incarnation, memory, post)
        with self._changed:
            if name in self._receivers:
                raise InternalFault(f"a receiver named {name!r} is on this network already; close it first")
            self._receivers[name] = receiver
        return receiver

    @property
    def pending(self) -> tuple[Write, ...]:
        """Writes not delivered yet, oldest first."""
        with self._changed:
            return tuple(parcel.write for parcel in self._pending)

    def deliver_next(self, index: int = 0) -> bool:
        """Deliver one pending write, by default the oldest; False when there is none at that index."""
        with self._changed:
            if self._delivering is not None or index >= len(self._pending):
                return False
            parcel = self._delivering = self._pending.pop(index)
        self._deliver(parcel)
        return True

    def deliver_all(self, max_deliveries: int = 1_000_000) -> int:
        """Deliver until nothing is pending; returns the number of deliveries. Raises InternalFault at the maximum."""
        for num_delivered in range(max_deliveries):
            if not self.deliver_next():
                return num_delivered
        raise InternalFault(f"{max_deliveries} deliveries and still not empty; does the fault hook delay everything?")

    def close(self) -> None:
        """Fail what is pending and end the thread. Raises InternalFault when it outlives close_timeout_s."""
        with self._changed:
            self._is_closed = True
            senders = {parcel.sender for parcel in (*self._pending, *self._dropped)}
            self._fail(lambda parcel: True, "the network was closed")
            self._changed.notify_all()
        for sender in senders:
            sender.flush()
        if self._thread is not None and join_all([self._thread], self._close_timeout_s):
            raise InternalFault(f"a copy did not return within {self._close_timeout_s} s; memory is blocking it")

    def check_invariants(self) -> None:
        with self._changed:
            parcels = [*self._pending, *self._dropped, *([self._delivering] if self._delivering else [])]
            assert len(set(map(id, parcels))) == len(parcels), "a write is in two places"
            assert not self._stopping or self._delivering is not None, "a key stops though nothing is delivered"
            assert all(receiver.name == name for name, receiver in self._receivers.items())

    # ---- called by senders and receivers

    def queue(self, sender: "InProcessSender", write: Write) -> None:
        with self._changed:
            if self._is_closed:
                sender.put(WriteFinished(write.peer, write.key, write.number, "the network is closed"))
            elif (write.peer, write.key) in self._stopping:
                sender.put(WriteFinished(write.peer, write.key, write.number, f"key {shown(write.key)} is cancelled"))
            else:
                self._pending.append(_Parcel(sender, write))
                self._changed.notify_all()

    def cancel(self, sender: "InProcessSender", peer: WorkerId, key: bytes) -> None:
        with self._changed:
            failure = f"key {shown(key)} was cancelled"
            self._fail(lambda p: p.sender is sender and p.write.peer == peer and p.write.key == key, failure)
            now = self._delivering
            if now is not None and now.sender is sender and now.write.peer == peer and now.write.key == key:
                self._stopping.add((peer, key))
            else:
                sender.put(WritesStopped(peer, key))

    def cut(self, sender: "InProcessSender", peer: WorkerId | None, failure: str, *, is_loss: bool) -> None:
        """Fail a sender's unfinished writes to a peer (None: to all), but not the one being copied now."""
        with self._changed:
            self._fail(lambda p: p.sender is sender and peer in (None, p.write.peer), failure)
            if is_loss and peer is not None:
                sender.put(ConnectionLost(peer, failure))

    def remove(self, receiver: "InProcessReceiver") -> None:
        """Take a receiver off the network and wait until no copy into it is under way."""
        with self._changed:
            if self._receivers.get(receiver.name) is receiver:
                del self._receivers[receiver.name]
            if threading.current_thread() is self._thread:
                return
            self._wait_idle(lambda: self._delivering is None or not receiver.is_visited)

    def leave(self, sender: "InProcessSender") -> None:
        """Wait until no copy out of a closing sender is under way."""
        with self._changed:
            if threading.current_thread() is not self._thread:
                self._wait_idle(lambda: self._delivering is None or self._delivering.sender is not sender)

    # ---- delivery

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._is_closed and (not self._pending or self._delivering is not None):
                    self._changed.wait()
                if self._is_closed:
                    return
            self.deliver_next()

    def _deliver(self, parcel: _Parcel) -> None:
        fault = self.fault_hook(parcel.write)
        sender, write = parcel.sender, parcel.write
        lost: str | None = None
        failure: str | None = None
        if fault is Fault.CUT:
            lost = "the connection was cut"
        elif fault in (Fault.NONE, Fault.CORRUPT, Fault.CUT_AFTER_LANDING):
            lost, failure = self._land(sender, write, corrupts=fault is Fault.CORRUPT)
            if fault is Fault.CUT_AFTER_LANDING:
                lost = lost or "the connection was cut"
        with self._changed:
            self._delivering = None
            if fault is Fault.DELAY and (write.peer, write.key) not in self._stopping:
                self._pending.append(parcel)
            elif fault is Fault.DROP and (write.peer, write.key) not in self._stopping:
                self._dropped.append(parcel)
            else:
                if fault in (Fault.DELAY, Fault.DROP):
                    failure = f"key {shown(write.key)} was cancelled"
                sender.put(WriteFinished(write.peer, write.key, write.number, lost or failure))
            for peer, key in self._stopping:
                sender.put(WritesStopped(peer, key))
            self._stopping.clear()
            if lost is not None:
                self.cut(sender, write.peer, lost, is_loss=True)
            self._changed.notify_all()
        sender.flush()

    def _land(self, sender: "InProcessSender", write: Write, *, corrupts: bool) -> tuple[str | None, str | None]:
        """Copy one write. Returns (why the connection is lost, why the write failed)."""
        target = sender.target(write.peer)
        if target is None:
            return None, f"{write.peer} was disconnected"
        endpoint, incarnation = target
        with self._changed:
            receiver = self._receivers.get(endpoint.address)
        if receiver is None:
            return f"nobody is named {endpoint.address!r} on this network", None
        if receiver.incarnation != incarnation:
            return f"incarnation {incarnation:x} is not here, {receiver.incarnation:x} is; pair again", None
        return None, receiver.land(sender, write, corrupts=corrupts)

    def _fail(self, matches: Callable[[_Parcel], bool], failure: str) -> None:
        for parcels in (self._dropped, self._pending):
            for parcel in [each for each in parcels if matches(each)]:
                parcels.remove(parcel)
                write = parcel.write
                parcel.sender.put(WriteFinished(write.peer, write.key, write.number, failure))

    def _wait_idle(self, is_idle: Callable[[], bool]) -> None:
        if not self._changed.wait_for(is_idle, self._close_timeout_s):
            raise InternalFault(f"a copy did not return within {self._close_timeout_s} s; memory is blocking it")


class InProcessSender:
    """The writing side. See the transport's Sender."""

    def __init__(
        self, network: InProcessNetwork, worker_id: WorkerId, incarnation: Incarnation, memory: Memory, post: Post
    ) -> None:
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.memory = memory
        self._network = network
        self._outbox = Outbox(post)
        self._lock = threading.Lock()
        self._targets: dict[WorkerId, tuple[Endpoint, Incarnation]] = {}

    def connect(self, peer: WorkerId, endpoint: Endpoint, incarnation: Incarnation) -> None:
        """Name a peer. Raises InternalFault for another kind of endpoint."""
        if endpoint.kind is not TransportKind.IN_PROCESS:
            raise InternalFault(f"{endpoint} is not an in-process endpoint")
        with self._lock:
            before = self._targets.get(peer)
            self._targets[peer] = (endpoint, incarnation)
        if before is not None and before != (endpoint, incarnation):
            self._network.cut(self, peer, f"{peer} is now incarnation {incarnation:x}", is_loss=False)
        self.flush()

    def write(self, write: Write) -> None:
        """Queue one write; exactly one WriteFinished follows, also for a write that can never be sent."""
        failure = write_flaw(write.source, write.destination, self.memory.num_bytes)
        if failure is None and self.target(write.peer) is None:
            failure = f"{write.peer} is not connected; call connect() first"
        if failure is None:
            self._network.queue(self, write)
        else:
            self.put(WriteFinished(write.peer, write.key, write.number, failure))
        self.flush()

    def cancel(self, peer: WorkerId, key: bytes) -> None:
        """Drop queued writes under key; one WritesStopped follows."""
        self._network.cancel(self, peer, key)
        self.flush()

    def disconnect(self, peer: WorkerId) -> None:
        """Forget a peer; its unfinished writes fail."""
        with self._lock:
            self._targets.pop(peer, None)
        self._network.cut(self, peer, f"{peer} was disconnected", is_loss=False)
        self.flush()

    def close(self) -> None:
        """Fail what is unfinished."""
        with self._lock:
            self._targets.clear()
        self._network.cut(self, None, "the sender was closed", is_loss=False)
        self._network.leave(self)
        self._network.cut(self, None, "the sender was closed", is_loss=False)  # what was being delayed meanwhile
        self.flush()

    def check_invariants(self) -> None:
        self._network.check_invariants()

    def target(self, peer: WorkerId) -> tuple[Endpoint, Incarnation] | None:
        """Where a peer is, or None."""
        with self._lock:
            return self._targets.get(peer)

    def put(self, event: TransportEvent) -> None:
        self._outbox.put(event)

    def flush(self) -> None:
        self._outbox.flush()


class InProcessReceiver:
    """The landing side. See the transport's Receiver. A copy in memory cannot be interrupted, only waited for."""

    def __init__(
        self, network: InProcessNetwork, name: str, incarnation: Incarnation, memory: Memory, post: Post
    ) -> None:
        self.name = name
        self.incarnation = incarnation
        self.is_visited = False  # a copy into this arena is under way
        self._network = network
        self._memory = memory
        self._outbox = Outbox(post)
        self._grants = GrantTable(memory.num_bytes, self._outbox)

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(TransportKind.IN_PROCESS, self.name)

    def endpoint_for(self, peer: WorkerId, incarnation: Incarnation) -> Endpoint:
        return self.endpoint  # nobody else can reach it

    def grant(self, peer: WorkerId, key: bytes, segments: Sequence[Segment]) -> None:
        """Allow `peer` to write into these segments under this key. Raises InternalFault for a key in use."""
        self._grants.grant(peer, key, segments)

    def revoke(self, key: bytes) -> None:
        """Withdraw a grant, now; one GrantFenced follows, at the latest when the copy under way returns."""
        self._grants.revoke(key)

    def close(self) -> None:
        """Leave the network. Raises InternalFault when a copy into this arena does not return in time."""
        self._network.remove(self)
        self._outbox.flush()

    def check_invariants(self) -> None:
        self._grants.check_invariants()

    def land(self, sender: InProcessSender, write: Write, *, corrupts: bool) -> str | None:
        """Copy one write into this arena, in the network's delivering thread. Returns why it failed, or None."""
        num_bytes = total_bytes(write.destination)
        entry = self._grants.enter(
            sender.worker_id, write.key, write.number, write.tag, write.destination, num_bytes, lambda: None
        )
        if not isinstance(entry, Visit):
            return entry.reason if isinstance(entry, Refused) else None

        def arrive() -> Arrival:
            source = sender.memory.gather(write.source)
            landing = self._memory.landing(write.destination)
            buffers = landing.buffers
            copy_views(source, buffers)
            # A copy in memory is whole; it is summed only where a fault hook spoils it.
            found, told = (_spoil(buffers), _checksum(source)) if corrupts else (0, 0)
            return Arrival(landing.commit, found, told)

        self.is_visited = True
        try:
            return self._grants.settle(entry, arrive)
        except Exception as error:  # either arena's fault: the write fails, the network goes on
            return f"write {write.number} could not be copied: {error}"
        finally:
            self.is_visited = False


def _spoil(views: Sequence[memoryview]) -> int:
    """Flip the first byte; returns the checksum after that."""
    for view in views:
        if view.nbytes:
            view[0] ^= 0xFF
            break
    return _checksum(views)


def _checksum(views: Sequence[memoryview]) -> int:
    digest = xxhash.xxh3_64()
    for view in views:
        digest.update(view)
    return digest.intdigest()

"""The writing side of every kind that has links: for each peer one link per lane."""

import threading
from abc import ABC, abstractmethod
from itertools import chain
from typing import Protocol
from zlib import crc32

import msgspec

from disagg.core.endpoints import Endpoint
from disagg.core.errors import InternalFault, PeerLost
from disagg.core.ids import Incarnation, WorkerId
from disagg.kvcache.memory import MappableMemory, Memory
from disagg.transport.api import Post, Write, WriteFinished, WritesStopped
from disagg.transport.deadlines import DeadlineWatch, join_all
from disagg.transport.link import Link, Target
from disagg.transport.outbox import Outbox
from disagg.transport.runs import host_arena
from disagg.transport.segments import MANY_SEGMENTS, SegmentArray, write_flaw
from disagg.transport.wire import MAX_KEY_BYTES, MAX_TAG_BYTES


class Shuttable(Protocol):
    """A stream that can be made to fail from any thread."""

    def shut(self) -> None: ...


class StopCount:
    """A cancelled key has stopped when every lane of its peer has."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._lock = threading.Lock()
        self._left: dict[tuple[WorkerId, bytes], int] = {}

    def begin(self, peer: WorkerId, key: bytes, num_lanes: int) -> bool:
        """False when this key is stopping already."""
        with self._lock:
            if (peer, key) in self._left:
                return False
            self._left[peer, key] = num_lanes
            return True

    def one_lane_stopped(self, peer: WorkerId, key: bytes) -> None:
        with self._lock:
            self._left[peer, key] -= 1
            if self._left[peer, key] == 0:
                del self._left[peer, key]
                self._outbox.put(WritesStopped(peer, key))

    def check_invariants(self) -> None:
        with self._lock:
            assert all(left > 0 for left in self._left.values()), "a key has stopped and is still waited for"


class LinkSender(ABC):
    """Writes out of `memory` into peers' grants. Threads start with the first write to a peer."""

    def __init__(
        self,
        memory: Memory,
        post: Post,
        arena: MappableMemory | None,
        *,
        num_lanes: int,
        close_timeout_s: float,
        name: str,
    ) -> None:
        """`arena`: what the first bytes of `memory` are, where it is host memory; found out where it is not given.

        `name` is of the thread that watches deadlines.
        """
        self._memory = memory
        self._source = host_arena(memory if arena is None else arena)
        self._num_lanes = num_lanes
        self._close_timeout_s = close_timeout_s
        self._outbox = Outbox(post)
        self._watch = DeadlineWatch(name)
        self._lock = threading.Lock()
        self._links: dict[WorkerId, tuple[Link, ...]] = {}  # by lane
        self._stops = StopCount(self._outbox)
        self._measuring: set[Shuttable] = set()
        self._retired: list[Link] = []  # ending on their own; joined in close()
        self._is_closed = False

    @abstractmethod
    def _flaw_of(self, endpoint: Endpoint) -> str:
        """Why this kind cannot use an endpoint; "" when it can."""

    @abstractmethod
    def _make_link(self, target: Target, lane: int) -> Link:
        """A link that has not begun."""

    def connect(self, peer: WorkerId, endpoint: Endpoint, incarnation: Incarnation) -> None:
        """Name a peer; nothing is opened yet. A changed address or incarnation fails the peer's unfinished writes.

        Raises InternalFault for an endpoint of another kind.
        """
        if flaw := self._flaw_of(endpoint):
            raise InternalFault(flaw)
        target = Target(peer, endpoint, incarnation)
        with self._lock:
            if self._is_closed:
                raise InternalFault("this sender is closed; make a new one")
            links = self._links.get(peer, ())
            if links and links[0].target == target:
                return
            for link in links:
                self._retire(link, f"{peer} is now incarnation {incarnation:x} at {endpoint.address}")
            self._links[peer] = tuple(self._make_link(target, lane) for lane in range(self._num_lanes))
        self._outbox.flush()

    def write(self, write: Write) -> None:
        """Queue one write; exactly one WriteFinished follows, also for a write that can never be sent."""
        with self._lock:
            links = self._links.get(write.peer, ())
        write = _with_arrays(write)
        failure = self._flaw(write)
        if failure is None and not links:
            failure = f"{write.peer} is not connected; call connect() first"
        if failure is not None:
            self._outbox.put(WriteFinished(write.peer, write.key, write.number, failure))
            self._outbox.flush()
        else:
            # A write that is repeated takes the same lane: its old bytes must not land over its new ones.
            lane = (crc32(write.key) + write.number) % len(links)
            links[lane].write(write)

    def cancel(self, peer: WorkerId, key: bytes) -> None:
        """Drop writes under key that are not being moved; one WritesStopped follows, with the end of a move at latest.

        Never write under the key again.
        """
        with self._lock:
            links = (*self._links.get(peer, ()), *self._ending(peer))
        if not links:
            self._outbox.put(WritesStopped(peer, key))
            self._outbox.flush()
        elif self._stops.begin(peer, key, len(links)):
            for link in links:
                link.cancel(key)

    def disconnect(self, peer: WorkerId) -> None:
        """Forget a peer; its unfinished writes fail, without a ConnectionLost."""
        with self._lock:
            for link in self._links.pop(peer, ()):
                self._retire(link, f"{peer} was disconnected")
        self._outbox.flush()

    def close(self) -> None:
        """Fail what is unfinished, stop all threads, give back all sockets and mappings.

        Raises InternalFault when a thread outlives close_timeout_s.
        """
        with self._lock:
            self._is_closed = True
            for link in chain.from_iterable(self._links.values()):
                self._retire(link, "the sender was closed")
            self._links.clear()
            for stream in self._measuring:
                stream.shut()
            threads = [link.thread for link in self._retired if link.thread is not None]
        left = join_all(threads, self._close_timeout_s)
        self._watch.close()
        self._outbox.flush()
        if left:
            limit_s = self._close_timeout_s
            raise InternalFault(f"threads {left} did not return within {limit_s} s; memory is blocking them")

    def check_invariants(self) -> None:
        with self._lock:
            links = [*chain.from_iterable(self._links.values()), *self._retired]
            assert not self._is_closed or not self._links, "a closed sender keeps links"
            assert all(link.target.peer == peer for peer, lanes in self._links.items() for link in lanes)
        self._stops.check_invariants()
        for link in links:
            link.check_invariants()

    def _begin_measuring(self, stream: Shuttable, limit_s: float) -> None:
        """shut() ends it in limit_s, or when this sender is closed. Raises PeerLost when it is closed already."""
        with self._lock:
            if self._is_closed:
                raise PeerLost("the sender was closed")
            self._measuring.add(stream)
        self._watch.after(limit_s, stream.shut)

    def _end_measuring(self, stream: Shuttable) -> None:
        with self._lock:
            self._measuring.discard(stream)

    def _retire(self, link: Link, reason: str) -> None:
        link.retire(reason)
        self._retired = [each for each in self._retired if each.thread is not None and each.thread.is_alive()]
        self._retired.append(link)

    def _ending(self, peer: WorkerId) -> tuple[Link, ...]:
        """Links to it that were let go, and may be in the middle of a write. Called under the lock."""
        return tuple(link for link in self._retired if link.target.peer == peer)

    def _flaw(self, write: Write) -> str | None:
        """Why a write can never be sent, or None."""
        if len(write.key) > MAX_KEY_BYTES:
            return f"key of {len(write.key)} bytes is over the limit of {MAX_KEY_BYTES}; draw shorter keys"
        if len(write.tag) > MAX_TAG_BYTES:
            return f"tag of {len(write.tag)} bytes is over the limit of {MAX_TAG_BYTES}; send less beside the KV"
        return write_flaw(write.source, write.destination, self._memory.num_bytes)


def _with_arrays(write: Write) -> Write:
    """Many segments cost least as arrays, here and further on: they are made once."""
    if max(len(write.source), len(write.destination)) < MANY_SEGMENTS:
        return write
    try:
        source, destination = SegmentArray.of(write.source), SegmentArray.of(write.destination)
    except OverflowError:  # no such arena: it is named as a flaw
        return write
    return msgspec.structs.replace(write, source=source, destination=destination)

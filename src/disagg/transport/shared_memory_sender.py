"""The writing side of shared memory: one link per peer."""

import threading

from disagg.core.endpoints import Endpoint, TransportKind
from disagg.core.errors import InternalFault
from disagg.core.ids import Incarnation, WorkerId
from disagg.kvcache.memory import MappableMemory, Memory
from disagg.transport.api import Post, Write, WriteFinished, WritesStopped
from disagg.transport.deadlines import join_all
from disagg.transport.outbox import Outbox
from disagg.transport.runs import Bytes, whole_arena
from disagg.transport.segments import write_flaw
from disagg.transport.shared_memory_link import SharedMemoryLink, SharedMemorySenderConfig
from disagg.transport.shared_memory_wire import Greeting
from disagg.transport.sharing import SharingDomain
from disagg.transport.wire import MAX_KEY_BYTES


class SharedMemorySender:
    """Copies out of `memory` into peers' arenas. Threads start with the first write to a peer."""

    def __init__(
        self,
        worker_id: WorkerId,
        memory: Memory,
        post: Post,
        domain: SharingDomain,
        config: SharedMemorySenderConfig | None = None,
        *,
        arena: MappableMemory | None = None,
    ) -> None:
        """`arena`: what the first bytes of `memory` are, where it is host memory; found out where it is not given."""
        self._worker_id = worker_id
        self._memory = memory
        self._domain = domain
        self._config = config or SharedMemorySenderConfig()
        self._source: Bytes | None = None
        if arena is None and isinstance(memory, MappableMemory):
            arena = memory
        if arena is not None and arena.descriptor is not None:
            self._source = whole_arena(arena)
        self._outbox = Outbox(post)
        self._lock = threading.Lock()
        self._links: dict[WorkerId, SharedMemoryLink] = {}
        self._retired: list[SharedMemoryLink] = []  # ending on their own; joined in close()
        self._is_closed = False

    def connect(self, peer: WorkerId, endpoint: Endpoint, incarnation: Incarnation) -> None:
        """Name a peer; nothing is opened yet. A changed address or incarnation fails the peer's unfinished writes.

        Raises InternalFault for an endpoint that is not shared memory of this domain.
        """
        if endpoint.kind is not TransportKind.SHARED_MEMORY or endpoint.domain != self._domain.name:
            raise InternalFault(f"{endpoint} is not shared memory of the domain {self._domain.name}")
        with self._lock:
            if self._is_closed:
                raise InternalFault("this sender is closed; make a new one")
            link = self._links.get(peer)
            if link is not None:
                if (link.endpoint, link.incarnation) == (endpoint, incarnation):
                    return
                self._retire(link, f"{peer} is now incarnation {incarnation:x} at {endpoint.address}")
            greeting = Greeting(self._worker_id, incarnation, self._domain.secret)
            self._links[peer] = SharedMemoryLink(
                greeting, peer, endpoint, self._memory, self._source, self._config, self._outbox
            )
        self._outbox.flush()

    def write(self, write: Write) -> None:
        """Queue one write; exactly one WriteFinished follows, also for a write that can never be sent."""
        with self._lock:
            link = self._links.get(write.peer)
        failure = write_flaw(write.source, write.destination, self._memory.num_bytes)
        if failure is None and len(write.key) > MAX_KEY_BYTES:
            failure = f"key of {len(write.key)} bytes is over the limit of {MAX_KEY_BYTES}; draw shorter keys"
        if failure is None and link is None:
            failure = f"{write.peer} is not connected; call connect() first"
        if failure is not None or link is None:
            self._outbox.put(WriteFinished(write.peer, write.key, write.number, failure))
            self._outbox.flush()
        else:
            link.write(write)

    def cancel(self, peer: WorkerId, key: bytes) -> None:
        """Drop writes under key that are not being copied; one WritesStopped follows, with the end of a copy at latest.

        Never write under the key again.
        """
        with self._lock:
            link = self._links.get(peer)
        if link is None:
            self._outbox.put(WritesStopped(peer, key))
            self._outbox.flush()
        else:
            link.cancel(key)

    def disconnect(self, peer: WorkerId) -> None:
        """Forget a peer; its unfinished writes fail, without a ConnectionLost."""
        with self._lock:
            link = self._links.pop(peer, None)
            if link is not None:
                self._retire(link, f"{peer} was disconnected")
        self._outbox.flush()

    def close(self) -> None:
        """Fail what is unfinished, stop all threads, close all sockets, unmap all arenas.

        Raises InternalFault when a thread outlives close_timeout_s.
        """
        with self._lock:
            self._is_closed = True
            for link in self._links.values():
                self._retire(link, "the sender was closed")
            self._links.clear()
            threads = [link.thread for link in self._retired if link.thread is not None]
        left = join_all(threads, self._config.close_timeout_s)
        self._outbox.flush()
        if left:
            limit_s = self._config.close_timeout_s
            raise InternalFault(f"threads {left} did not return within {limit_s} s; memory is blocking them")

    def check_invariants(self) -> None:
        with self._lock:
            links = [*self._links.values(), *self._retired]
            assert not self._is_closed or not self._links, "a closed sender keeps links"
            assert all(link.peer == peer for peer, link in self._links.items())
        for link in links:
            link.check_invariants()

    def _retire(self, link: SharedMemoryLink, reason: str) -> None:
        link.retire(reason)
        self._retired = [each for each in self._retired if each.thread is not None and each.thread.is_alive()]
        self._retired.append(link)

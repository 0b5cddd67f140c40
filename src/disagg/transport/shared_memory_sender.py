"""The writing side of shared memory."""

from functools import partial

from disagg.core.endpoints import Endpoint, TransportKind
from disagg.core.ids import Incarnation, WorkerId
from disagg.kvcache.memory import MappableMemory, Memory
from disagg.transport.api import Post
from disagg.transport.link import Link, LinkLimits, Target
from disagg.transport.link_sender import LinkSender
from disagg.transport.probe import Measured, measure
from disagg.transport.shared_memory_connection import SharedMemorySenderConfig, dial_owner, open_shared_memory
from disagg.transport.shared_memory_probe import Copies
from disagg.transport.shared_memory_wire import PROBE_BYTES, Greeting
from disagg.transport.sharing import SharingDomain
from disagg.transport.write_queue import WriteQueue


class SharedMemorySender(LinkSender):
    """Copies out of `memory` into peers' arenas. A cancelled key's copy is finished."""

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
        self._config = config or SharedMemorySenderConfig()
        name, limit_s = f"disagg-shm-probe-{worker_id}", self._config.close_timeout_s
        super().__init__(memory, post, arena, num_lanes=1, close_timeout_s=limit_s, name=name)
        self._worker_id = worker_id
        self._domain = domain

    def measure(self, endpoint: Endpoint, incarnation: Incarnation, budget_s: float) -> Measured:
        """Blocking, for budget_s and the time to connect, which is bounded. Raises PeerFault, OSError."""
        limit_s = self._config.connect_timeout_s
        greeting = Greeting(self._worker_id, incarnation, self._domain.secret, is_probe=True)
        stream, arena = dial_owner(endpoint, greeting, limit_s)
        try:
            self._begin_measuring(stream, limit_s + budget_s)
            return measure(Copies(stream, arena).exchange, PROBE_BYTES, budget_s)
        finally:
            self._end_measuring(stream)
            stream.close()
            arena.close()

    def _flaw_of(self, endpoint: Endpoint) -> str:
        if endpoint.kind is not TransportKind.SHARED_MEMORY or endpoint.domain != self._domain.name:
            return f"{endpoint} is not shared memory of the domain {self._domain.name}"
        return ""

    def _make_link(self, target: Target, lane: int) -> Link:
        config = self._config
        return Link(
            target,
            WriteQueue(config.max_ahead_bytes, config.max_ahead, asks=True),
            self._outbox,
            LinkLimits(config.stall_timeout_s),
            partial(
                open_shared_memory,
                endpoint=target.endpoint,
                greeting=Greeting(self._worker_id, target.incarnation, self._domain.secret),
                memory=self._memory,
                source=self._source,
                config=config,
                before=tuple(link.thread for link in self._ending(target.peer) if link.thread is not None),
            ),
            name="disagg-shm",
            stopped=partial(self._stops.one_lane_stopped, target.peer),
        )

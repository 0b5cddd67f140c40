"""The writing side of tcp."""

import ssl
from functools import partial

from disagg.core.endpoints import Endpoint, TransportKind, is_dialable
from disagg.core.ids import Incarnation, WorkerId
from disagg.kvcache.memory import MappableMemory, Memory
from disagg.transport.api import Post
from disagg.transport.link import Link, LinkLimits, Target
from disagg.transport.link_sender import LinkSender
from disagg.transport.native_runs import load_runs
from disagg.transport.probe import Measured, measure
from disagg.transport.tcp_connection import TcpSenderConfig, open_tcp
from disagg.transport.tcp_dial import Introduction, introduce, open_stream
from disagg.transport.tcp_probe import Frames
from disagg.transport.wire import MAX_PROBE_BYTES, PROBE_LANE
from disagg.transport.write_queue import WriteQueue


class TcpSender(LinkSender):
    """Writes out of `memory` into peers' grants. A cancelled key's frame is finished, or its connection shut."""

    def __init__(
        self,
        worker_id: WorkerId,
        incarnation: Incarnation,
        memory: Memory,
        post: Post,
        config: TcpSenderConfig | None = None,
        *,
        tls: ssl.SSLContext | None = None,
        arena: MappableMemory | None = None,
    ) -> None:
        """With `tls`, a context for the dialling end, every connection is encrypted and both ends prove themselves.

        `arena`: what the first bytes of `memory` are, where it is host memory; found out where it is not given.
        """
        self._config = config or TcpSenderConfig()
        lanes, limit_s = self._config.num_lanes, self._config.close_timeout_s
        name = f"disagg-tcp-cancel-{worker_id}"
        super().__init__(memory, post, arena, num_lanes=lanes, close_timeout_s=limit_s, name=name)
        if self._source is not None:
            load_runs()  # compiled now if need be, not within a write
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._tls = tls

    def measure(self, endpoint: Endpoint, incarnation: Incarnation, budget_s: float) -> Measured:
        """Blocking, for budget_s and the time to connect, which is bounded. Raises PeerFault, OSError."""
        limit_s = self._config.connect_timeout_s
        stream = open_stream(endpoint, connect_timeout_s=limit_s, stall_timeout_s=limit_s, tls=self._tls)
        try:
            self._begin_measuring(stream, limit_s + budget_s)
            introduce(stream, self._introduction(incarnation), endpoint.token, PROBE_LANE)
            return measure(Frames(stream, checksums=self._config.checksums).exchange, MAX_PROBE_BYTES, budget_s)
        finally:
            self._end_measuring(stream)
            stream.close()

    def _introduction(self, incarnation: Incarnation) -> Introduction:
        return Introduction(self._worker_id, self._incarnation, incarnation, self._config.checksums)

    def _flaw_of(self, endpoint: Endpoint) -> str:
        if endpoint.kind is not TransportKind.TCP or not is_dialable(endpoint.address):
            where = f"{endpoint.kind} {endpoint.address}"  # never the token
            return f"{where} is not a tcp endpoint with address host:port"
        return ""

    def _make_link(self, target: Target, lane: int) -> Link:
        config = self._config
        return Link(
            target,
            WriteQueue(config.max_inflight_bytes // config.num_lanes, asks=False),
            self._outbox,
            LinkLimits(config.stall_timeout_s, config.max_idle_s),
            partial(
                open_tcp,
                target=target,
                who=self._introduction(target.incarnation),
                lane=lane,
                memory=self._memory,
                source=self._source,
                config=config,
                watch=self._watch,
                tls=self._tls,
            ),
            name="disagg-tcp",
            stopped=partial(self._stops.one_lane_stopped, target.peer),
            eject_later=partial(self._watch.after, config.fence_timeout_s),
        )

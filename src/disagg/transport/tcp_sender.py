"""The writing side of tcp: for each peer one link per lane."""

import ssl
import threading
from functools import partial
from itertools import chain
from zlib import crc32

from disagg.core.endpoints import Endpoint, TransportKind
from disagg.core.errors import InternalFault, PeerLost
from disagg.core.ids import Incarnation, WorkerId
from disagg.kvcache.memory import Memory, Segment
from disagg.transport.api import Post, Write, WriteFinished, WritesStopped
from disagg.transport.deadlines import DeadlineWatch, join_all
from disagg.transport.outbox import Outbox
from disagg.transport.segments import SegmentSet, total_bytes
from disagg.transport.stream import Stream
from disagg.transport.tcp_dial import Introduction, introduce, open_stream
from disagg.transport.tcp_link import PeerLink, TcpSenderConfig
from disagg.transport.tcp_probe import Measured, measure
from disagg.transport.wire import MAX_KEY_BYTES, MAX_TAG_BYTES, PROBE_LANE


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


class TcpSender:
    """Writes out of `memory` into peers' grants. Threads start with the first write to a peer."""

    def __init__(
        self,
        worker_id: WorkerId,
        incarnation: Incarnation,
        memory: Memory,
        post: Post,
        config: TcpSenderConfig | None = None,
        *,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """With `tls`, a context for the dialling end, every connection is encrypted and both ends prove themselves."""
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._memory = memory
        self._arena = SegmentSet([Segment(0, memory.num_bytes)])
        self._config = config or TcpSenderConfig()
        self._tls = tls
        self._outbox = Outbox(post)
        self._watch = DeadlineWatch(f"disagg-tcp-cancel-{worker_id}")
        self._lock = threading.Lock()
        self._links: dict[WorkerId, tuple[PeerLink, ...]] = {}  # by lane
        self._stops = StopCount(self._outbox)
        self._measuring: set[Stream] = set()
        self._retired: list[PeerLink] = []  # ending on their own; joined in close()
        self._is_closed = False

    def connect(self, peer: WorkerId, endpoint: Endpoint, incarnation: Incarnation) -> None:
        """Name a peer; nothing is opened yet. A changed address or incarnation fails the peer's unfinished writes.

        Raises InternalFault for an endpoint that is not tcp.
        """
        host, _, port = endpoint.address.rpartition(":")
        if endpoint.kind is not TransportKind.TCP or not host or not port.isdecimal():
            where = f"{endpoint.kind} {endpoint.address}"  # never the token
            raise InternalFault(f"{where} is not a tcp endpoint with address host:port")
        with self._lock:
            if self._is_closed:
                raise InternalFault("this sender is closed; make a new one")
            links = self._links.get(peer, ())
            if links and (links[0].endpoint, links[0].incarnation) == (endpoint, incarnation):
                return
            for link in links:
                self._retire(link, f"{peer} is now incarnation {incarnation:x} at {endpoint.address}")
            who = Introduction(self._worker_id, self._incarnation, incarnation, self._config.checksums)
            self._links[peer] = tuple(self._link(who, peer, endpoint, lane) for lane in range(self._config.num_lanes))
        self._outbox.flush()

    def _link(self, who: Introduction, peer: WorkerId, endpoint: Endpoint, lane: int) -> PeerLink:
        return PeerLink(
            who,
            peer,
            endpoint,
            self._memory,
            self._config,
            self._outbox,
            self._watch,
            stopped=partial(self._stops.one_lane_stopped, peer),
            lane=lane,
            tls=self._tls,
        )

    def write(self, write: Write) -> None:
        """Queue one write; exactly one WriteFinished follows, also for a write that can never be sent."""
        with self._lock:
            links = self._links.get(write.peer, ())
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
        """Drop queued writes under key; one WritesStopped follows, within fence_timeout_s.

        A frame that is being sent is finished, or its connection shut. Never write under the key again.
        """
        with self._lock:
            links = self._links.get(peer, ())
        if not links:
            self._outbox.put(WritesStopped(peer, key))
            self._outbox.flush()
        elif self._stops.begin(peer, key, len(links)):
            for link in links:
                link.cancel(key)

    def measure(self, peer: WorkerId, budget_s: float) -> Measured:
        """Blocking, for budget_s and the time to connect, which is bounded. Raises PeerFault, OSError."""
        with self._lock:
            links = self._links.get(peer, ())
            if not links:
                raise PeerLost(f"{peer} is not connected; call connect() first")
            config, link = self._config, links[0]
        stream = open_stream(
            link.endpoint,
            connect_timeout_s=config.connect_timeout_s,
            stall_timeout_s=config.connect_timeout_s,
            tls=self._tls,
        )
        try:
            with self._lock:
                if self._is_closed:
                    raise PeerLost("the sender was closed")
                self._measuring.add(stream)
            self._watch.after(config.connect_timeout_s + budget_s, stream.shut)
            introduce(stream, link.who, link.endpoint.token, PROBE_LANE)
            return measure(stream, budget_s)
        finally:
            with self._lock:
                self._measuring.discard(stream)
            stream.close()

    def disconnect(self, peer: WorkerId) -> None:
        """Forget a peer; its unfinished writes fail, without a ConnectionLost."""
        with self._lock:
            for link in self._links.pop(peer, ()):
                self._retire(link, f"{peer} was disconnected")
        self._outbox.flush()

    def close(self) -> None:
        """Fail what is unfinished, stop all threads, close all sockets.

        Raises InternalFault when a thread outlives close_timeout_s.
        """
        with self._lock:
            self._is_closed = True
            for links in self._links.values():
                for link in links:
                    self._retire(link, "the sender was closed")
            self._links.clear()
            for stream in self._measuring:
                stream.shut()
            threads = [link.thread for link in self._retired if link.thread is not None]
        left = join_all(threads, self._config.close_timeout_s)
        self._watch.close()
        self._outbox.flush()
        if left:
            limit_s = self._config.close_timeout_s
            raise InternalFault(f"threads {left} did not return within {limit_s} s; memory is blocking them")

    def check_invariants(self) -> None:
        with self._lock:
            links = [*chain.from_iterable(self._links.values()), *self._retired]
            assert not self._is_closed or not self._links, "a closed sender keeps links"
            assert all(link.peer == peer for peer, lanes in self._links.items() for link in lanes)
        self._stops.check_invariants()
        for link in links:
            link.check_invariants()

    def _retire(self, link: PeerLink, reason: str) -> None:
        link.retire(reason)
        self._retired = [each for each in self._retired if each.thread is not None and each.thread.is_alive()]
        self._retired.append(link)

    def _flaw(self, write: Write) -> str | None:
        """Why a write can never be sent, or None."""
        source, destination = total_bytes(write.source), total_bytes(write.destination)
        if source != destination:
            return f"{source} source bytes for {destination} destination bytes; they must be equal"
        outside = self._arena.first_outside(write.source)
        if outside is not None:
            return f"{outside} is outside the arena of {self._memory.num_bytes} bytes; write only own blocks"
        if len(write.key) > MAX_KEY_BYTES:
            return f"key of {len(write.key)} bytes is over the limit of {MAX_KEY_BYTES}; draw shorter keys"
        if len(write.tag) > MAX_TAG_BYTES:
            return f"tag of {len(write.tag)} bytes is over the limit of {MAX_TAG_BYTES}; send less beside the KV"
        return None

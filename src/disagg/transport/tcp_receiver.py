"""The landing side of tcp.

One thread accepts; one thread per connection does all of this, in order:

    1. TLS where there are keys; CHALLENGE; HELLO: refuse who was not paired, another incarnation, another version,
       garbage; end an older connection of the same sender and lane
    2. header: its proof must be of a grant that stands; then ask the grant table to be let in; a refused or repeated
       frame is drained and answered
    3. payload into the landing's buffers, group by group, then the trailer
    4. commit when the checksum held and the grant still stands; leave the grant table (which posts the events)
    5. ACK, and back to 2

The fence: a revoked grant is fenced when the thread inside its frame has returned from 4. A thread that does not
return within fence_timeout_s has its connection shut, which makes it return.
"""

import contextlib
import logging
import secrets
import socket
import ssl
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

from disagg.channel.tally import Refusal, Tally
from disagg.core.endpoints import Endpoint, TransportKind, join_address
from disagg.core.errors import InternalFault, PeerFault, ProtocolViolation
from disagg.core.ids import Incarnation, WorkerId, worker_of
from disagg.kvcache.memory import Memory, Segment
from disagg.transport.acceptor import Acceptor
from disagg.transport.api import Post
from disagg.transport.capability import (
    NONCE_BYTES,
    SECRET_BYTES,
    frame_proof,
    grant_name,
    hello_proof,
    is_right,
    pairing_token,
)
from disagg.transport.deadlines import DeadlineWatch
from disagg.transport.grants import AlreadyLanded, Arrival, GrantTable, Refused, Visit
from disagg.transport.native_runs import load_runs
from disagg.transport.outbox import Outbox
from disagg.transport.parted_landing import landing_for
from disagg.transport.runs import host_arena
from disagg.transport.segments import SegmentArray
from disagg.transport.stream import Stream
from disagg.transport.tls_stream import TlsRefused, TlsStream
from disagg.transport.wire import (
    MAX_PROBE_BYTES,
    PROBE,
    PROBE_LANE,
    TRAILER_BYTES,
    Ack,
    Challenge,
    FrameHeader,
    Hello,
    Item,
    Welcome,
    clip,
    decode_body,
    decode_trailer,
)

_log = logging.getLogger(__name__)


class _Refused(ProtocolViolation):
    """A connection is turned away; why, for the count."""

    def __init__(self, reason: Refusal, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class _Connection:
    """One accepted connection and its thread."""

    def __init__(self, stream: Stream, address: str) -> None:
        self.stream = stream
        self.address = address
        self.name = f"disagg-tcp-receive-{address}"
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.sender: WorkerId | None = None  # known after the hello, as is its lane
        self.lane = 0
        self.returned = threading.Event()

    def shut(self) -> None:
        self.stream.shut()

    def close(self) -> None:
        self.stream.close()


class TcpReceiver:
    """Accepts connections and lands their frames in `memory`. See the file's head for the life of a frame."""

    def __init__(
        self,
        memory: Memory,
        incarnation: Incarnation,
        post: Post,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        checksums: bool = True,
        fence_timeout_s: float = 2.0,
        hello_timeout_s: float = 5.0,
        stall_timeout_s: float = 30.0,
        close_timeout_s: float = 5.0,
        max_connections: int = 256,
        max_strangers: int = 64,
        secret: bytes | None = None,
        tls: ssl.SSLContext | None = None,
        refused: Tally | None = None,
    ) -> None:
        """Listen on host:port (0: any free port), where peers dial it too. Raises OSError when it cannot be bound.

        max_strangers: connections that have not introduced themselves yet; one more ends the oldest of them.
        secret: behind the tokens of endpoint_for(); drawn here where none is given. tls: for the accepting end.
        """
        self._memory = memory
        self._arena = host_arena(memory)
        if self._arena is not None:
            load_runs()  # compiled now if need be, not within a write
        self._incarnation = incarnation
        self._checksums = checksums
        self._fence_timeout_s = fence_timeout_s
        self._hello_timeout_s = hello_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._close_timeout_s = close_timeout_s
        self._max_strangers = max_strangers
        self._secret = secret or secrets.token_bytes(SECRET_BYTES)
        self._tls = tls
        self.refused = refused or Tally()
        self._lock = threading.Lock()
        self._strangers: dict[_Connection, None] = {}  # oldest first
        self._keys: dict[bytes, bytes] = {}  # of standing grants, by the name that frames carry
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, where = found[0]
        listener = socket.create_server(where, family=family, backlog=128)
        bound_port = listener.getsockname()[1]
        # As it was named, not as it is bound: the name is what stands in its certificate.
        self._endpoint = Endpoint(TransportKind.TCP, join_address(host, bound_port))
        self._outbox = Outbox(post)
        self._grants = GrantTable(memory.num_bytes, self._outbox)
        self._watch = DeadlineWatch(f"disagg-tcp-fence-{bound_port}")
        self._acceptor = Acceptor(
            listener,
            self._endpoint.address,
            name=f"disagg-tcp-accept-{bound_port}",
            make=self._make,
            serve=self._serve,
            max_connections=max_connections,
            on_admitted=self._note_stranger,
            on_full=partial(self.refused.add, Refusal.FULL),
        )
        self._acceptor.start()

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    def endpoint_for(self, peer: WorkerId, incarnation: Incarnation) -> Endpoint:
        """With the token that lets this incarnation of this peer in."""
        token = pairing_token(self._secret, peer, incarnation)
        return Endpoint(self._endpoint.kind, self._endpoint.address, token)

    def grant(self, peer: WorkerId, key: bytes, segments: Sequence[Segment]) -> None:
        """Allow `peer` to write into these segments under this key. Raises InternalFault for a key in use."""
        self._grants.grant(peer, key, segments)
        with self._lock:
            self._keys[grant_name(key)] = key

    def revoke(self, key: bytes) -> None:
        """Withdraw a grant, now; one GrantFenced follows (at once for a key that is unknown or not in use)."""
        with self._lock:
            self._keys.pop(grant_name(key), None)
        for visit in self._grants.revoke(key):
            self._watch.after(self._fence_timeout_s, partial(self._grants.eject, visit))

    def close(self) -> None:
        """Stop all threads and close all sockets. Raises InternalFault when a thread outlives close_timeout_s."""
        left = self._acceptor.close(self._close_timeout_s)
        self._watch.close()
        self._outbox.flush()
        if left:
            limit_s = self._close_timeout_s
            raise InternalFault(f"threads {left} did not return within {limit_s} s; memory is blocking them")

    def check_invariants(self) -> None:
        self._grants.check_invariants()
        self._watch.check_invariants()
        self._acceptor.check_invariants()
        with self._lock:
            assert len(self._strangers) <= self._max_strangers
            assert all(grant_name(key) == name for name, key in self._keys.items())

    # ---- the accepting thread

    def _make(self, sock: socket.socket, address: Any) -> _Connection:
        if self._tls is None:
            stream = Stream(sock, self._stall_timeout_s)
        else:
            stream = TlsStream(sock, self._stall_timeout_s, self._tls)
        return _Connection(stream, f"{address[0]}:{address[1]}")

    def _note_stranger(self, connection: _Connection) -> None:
        with self._lock:
            if len(self._strangers) >= self._max_strangers:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                self.refused.add(Refusal.FULL)
                oldest.shut()
            self._strangers[connection] = None

    # ---- a connection's thread

    def _serve(self, connection: _Connection) -> None:
        try:
            sender = self._welcome(connection)
            while True:
                self._receive_frame(connection, sender)
        except PeerFault as error:
            if isinstance(error, ProtocolViolation):
                self.refused.add(error.reason if isinstance(error, _Refused) else Refusal.GARBAGE)
            level = logging.WARNING if isinstance(error, ProtocolViolation) else logging.DEBUG
            _log.log(level, "connection from %s (%s) ended: %s", connection.address, connection.sender, str(error))
        except Exception:  # memory failed us: this connection ends, the others go on
            _log.exception("connection from %s (%s) failed", connection.address, connection.sender)
        finally:
            with self._lock:
                self._strangers.pop(connection, None)
            self._acceptor.leave(connection)

    def _welcome(self, connection: _Connection) -> WorkerId:
        """Hear who it is within hello_timeout_s; answer. Raises PeerFault when the connection must end."""
        stream = connection.stream
        is_late = threading.Event()

        def give_up() -> None:
            if connection.sender is None:
                is_late.set()
                stream.shut()

        self._watch.after(self._hello_timeout_s, give_up)
        try:
            hello = self._hear_hello(connection)
        except ProtocolViolation as error:
            self._refuse(connection, str(error))
            raise
        except TlsRefused as error:
            raise _Refused(Refusal.LATE if is_late.is_set() else Refusal.NO_TLS, str(error)) from error
        except PeerFault as error:
            if is_late.is_set():
                raise _Refused(Refusal.LATE, f"no whole hello within {self._hello_timeout_s} s") from error
            raise
        refusal = self._refusal(hello, connection.nonce)
        named = (hello.sender, hello.lane)
        if refusal is None and not self._acceptor.supersede(named, connection, self._fence_timeout_s, _Connection.shut):
            refusal = f"an older connection of {hello.sender} is still landing bytes; connect again"
        if refusal is not None:
            self._refuse(connection, refusal)
            raise _Refused(Refusal.NOT_PAIRED, refusal)
        connection.sender, connection.lane = named
        with self._lock:
            self._strangers.pop(connection, None)
        stream.send_item(Item.WELCOME, Welcome(None))
        return hello.sender

    def _hear_hello(self, connection: _Connection) -> Hello:
        stream = connection.stream
        stream.handshake()
        stream.send_item(Item.CHALLENGE, Challenge(connection.nonce))
        prefix = stream.receive_prefix(Item.HELLO)
        return decode_body(stream.receive_bytes(prefix.num_bytes), prefix, Hello)

    def _refusal(self, hello: Hello, nonce: bytes) -> str | None:
        if hello.destination_incarnation != self._incarnation:
            return f"incarnation {hello.destination_incarnation:x} is not here, {self._incarnation:x} is; pair again"
        token = pairing_token(self._secret, worker_of(hello.sender), hello.sender_incarnation)
        if not is_right(hello.proof, hello_proof(token, nonce, hello.lane)):
            return f"no proof that {hello.sender} ({hello.sender_incarnation:x}) was paired here; pair again"
        if hello.checksums != self._checksums:
            return f"checksums are {hello.checksums} at the sender and {self._checksums} here; set both alike"
        return None

    def _refuse(self, connection: _Connection, reason: str) -> None:
        with contextlib.suppress(PeerFault):  # it is closed next, whether or not it still listens
            connection.stream.send_item(Item.WELCOME, Welcome(clip(reason)))

    def _receive_frame(self, connection: _Connection, sender: WorkerId) -> None:
        stream = connection.stream
        prefix = stream.receive_prefix(Item.FRAME, lambda: True)  # idle connections stay open
        header = decode_body(stream.receive_bytes(prefix.num_bytes), prefix, FrameHeader)
        destination = SegmentArray.unpack(header.destination)
        entry = self._enter(connection, sender, header, destination)
        seed = prefix.checksum if self._checksums else None
        if isinstance(entry, Visit):
            failure = self._land(stream, destination, seed, entry)
        else:
            failure = entry.reason if isinstance(entry, Refused) else None
            limit = MAX_PROBE_BYTES if header.name == PROBE else self._memory.num_bytes
            if header.num_bytes > limit:
                raise ProtocolViolation(f"payload of {header.num_bytes} bytes, the limit is {limit}")
            # Bytes that measure are summed like others, so that kinds can be compared; nobody looks at the sum.
            stream.drain(header.num_bytes, seed if entry is None else None)
            stream.drain(TRAILER_BYTES)
        stream.send_item(Item.ACK, Ack(header.name, header.number, None if failure is None else clip(failure)))

    def _enter(
        self, connection: _Connection, sender: WorkerId, header: FrameHeader, destination: SegmentArray
    ) -> Visit | AlreadyLanded | Refused | None:
        """Before a byte of the payload is taken. None: its bytes only measure, and are thrown away."""
        if header.name == PROBE and connection.lane == PROBE_LANE:
            return None
        with self._lock:
            key = self._keys.get(header.name)
        expected = frame_proof(key or b"", connection.nonce, header.number)
        if key is None or not is_right(header.proof, expected):
            self.refused.add(Refusal.NO_GRANT if key is None else Refusal.FALSE_PROOF)
            # One answer for both, so that a stranger cannot probe for grants.
            return Refused(f"key {header.name.hex()} is not granted to {sender}; ask for a new grant")
        entry = self._grants.enter(
            sender, key, header.number, header.tag, destination, header.num_bytes, connection.stream.shut
        )
        if isinstance(entry, Refused):
            self.refused.add(Refusal.NO_GRANT)
        return entry

    def _land(self, stream: Stream, destination: SegmentArray, seed: int | None, visit: Visit) -> str | None:
        """Receive one granted payload. Returns why it did not land, or None."""

        def arrive() -> Arrival:
            payload, commit = landing_for(self._memory, self._arena, destination, seed)
            stream.receive_into(payload.batches)
            told = decode_trailer(stream.receive_bytes(TRAILER_BYTES))
            return Arrival(commit, payload.checksum(), told)

        return self._grants.settle(visit, arrive)

"""The landing side of tcp.

One thread accepts; one thread per connection does all of this, in order:

    1. HELLO: refuse another incarnation, another version, garbage; end an older connection of the same sender
    2. header: ask the grant table to be let in; a refused or repeated frame is drained and answered
    3. payload straight into the landing's buffers, then the trailer
    4. commit when the checksum held and the grant still stands; leave the grant table (which posts the events)
    5. ACK, and back to 2

The fence: a revoked grant is fenced when the thread inside its frame has returned from 4. A thread that does not
return within fence_timeout_s has its connection shut, which makes it return.
"""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Sequence
from functools import partial

from disagg.core.endpoints import Endpoint, TransportKind
from disagg.core.errors import InternalFault, PeerFault, ProtocolViolation
from disagg.core.ids import Incarnation, WorkerId
from disagg.kvcache.memory import Memory, Segment
from disagg.transport.api import Post
from disagg.transport.deadlines import DeadlineWatch, join_all
from disagg.transport.grants import GrantTable, Refused, Visit
from disagg.transport.outbox import Outbox
from disagg.transport.stream import Stream
from disagg.transport.wire import (
    TRAILER_BYTES,
    Ack,
    FrameHeader,
    Hello,
    Item,
    Welcome,
    clip,
    decode_body,
    decode_trailer,
)

_log = logging.getLogger(__name__)

_ACCEPT_POLL_S = 1.0  # only where shutdown() does not wake accept(); Linux wakes at once


class _Connection:
    """One accepted connection and its thread."""

    def __init__(self, stream: Stream, address: str) -> None:
        self.stream = stream
        self.address = address
        self.sender: WorkerId | None = None  # known after the hello
        self.returned = threading.Event()  # its thread will touch neither socket nor arena any more


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
    ) -> None:
        """Listen on host:port (0: any free port). Raises OSError when the address cannot be bound."""
        self._memory = memory
        self._incarnation = incarnation
        self._checksums = checksums
        self._fence_timeout_s = fence_timeout_s
        self._hello_timeout_s = hello_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._close_timeout_s = close_timeout_s
        self._max_connections = max_connections
        self._lock = threading.Lock()
        self._connections: set[_Connection] = set()
        self._threads: list[threading.Thread] = []  # of connections; ended ones are dropped at the next accept
        self._by_sender: dict[WorkerId, _Connection] = {}
        self._is_closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=128)
        self._listener.settimeout(_ACCEPT_POLL_S)
        bound_host, bound_port = self._listener.getsockname()[:2]
        shown = f"[{bound_host}]" if family == socket.AF_INET6 else bound_host
        self._endpoint = Endpoint(TransportKind.TCP, f"{shown}:{bound_port}")
        self._outbox = Outbox(post)
        self._grants = GrantTable(memory.num_bytes, self._outbox)
        self._watch = DeadlineWatch(f"disagg-tcp-fence-{bound_port}")
        self._acceptor = threading.Thread(target=self._accept_loop, name=f"disagg-tcp-accept-{bound_port}", daemon=True)
        self._acceptor.start()

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    def grant(self, peer: WorkerId, key: bytes, segments: Sequence[Segment]) -> None:
        """Allow `peer` to write into these segments under this key. Raises InternalFault for a key in use."""
        self._grants.grant(peer, key, segments)

    def revoke(self, key: bytes) -> None:
        """Withdraw a grant, now; one GrantFenced follows (at once for a key that is unknown or not in use)."""
        for visit in self._grants.revoke(key):
            self._watch.after(self._fence_timeout_s, partial(self._grants.eject, visit))

    def close(self) -> None:
        """Stop all threads and close all sockets. Raises InternalFault when a thread outlives close_timeout_s."""
        with self._lock:
            self._is_closed = True
            connections = list(self._connections)
            threads = [self._acceptor, *self._threads]
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for connection in connections:
            connection.stream.shut()
        left = join_all(threads, self._close_timeout_s)
        self._listener.close()
        self._watch.close()
        self._outbox.flush()
        if left:
            limit_s = self._close_timeout_s
            raise InternalFault(f"threads {left} did not return within {limit_s} s; memory is blocking them")

    def check_invariants(self) -> None:
        self._grants.check_invariants()
        self._watch.check_invariants()
        with self._lock:
            assert len(self._connections) <= self._max_connections
            for sender, connection in self._by_sender.items():
                assert connection.sender == sender, f"{sender} is filed under another sender's connection"
                assert connection in self._connections, f"the connection of {sender} is not registered"

    def _accept_loop(self) -> None:
        while not self._is_closed:
            try:
                sock, address = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if self._is_closed:
                    return
                _log.warning("accept on %s failed: %s", self._endpoint.address, error)
                time.sleep(0.05)  # out of descriptors: do not spin until some are free
                continue
            self._admit(sock, f"{address[0]}:{address[1]}")

    def _admit(self, sock: socket.socket, address: str) -> None:
        try:
            connection = _Connection(Stream(sock, self._stall_timeout_s), address)
        except OSError:  # reset before we looked at it
            sock.close()
            return
        with self._lock:
            is_full = len(self._connections) >= self._max_connections
            if not is_full and not self._is_closed:
                self._connections.add(connection)
                name = f"disagg-tcp-receive-{address}"
                thread = threading.Thread(target=self._serve, args=(connection,), name=name, daemon=True)
                thread.start()
                self._threads = [*(each for each in self._threads if each.is_alive()), thread]
                return
        if is_full:
            _log.warning("closed %s: %d connections are the limit (max_connections)", address, self._max_connections)
        connection.stream.close()

    def _serve(self, connection: _Connection) -> None:
        try:
            sender = self._welcome(connection)
            while True:
                self._receive_frame(connection, sender)
        except PeerFault as error:
            level = logging.WARNING if isinstance(error, ProtocolViolation) else logging.DEBUG
            _log.log(level, "connection from %s (%s) ended: %s", connection.address, connection.sender, error)
        except Exception:  # memory failed us: this connection ends, the others go on
            _log.exception("connection from %s (%s) failed", connection.address, connection.sender)
        finally:
            connection.stream.close()
            with self._lock:
                self._connections.discard(connection)
                if connection.sender is not None and self._by_sender.get(connection.sender) is connection:
                    del self._by_sender[connection.sender]
            connection.returned.set()

    def _welcome(self, connection: _Connection) -> WorkerId:
        """Read the hello within hello_timeout_s; answer it. Raises PeerFault when the connection must end."""
        stream = connection.stream
        is_late = threading.Event()

        def give_up() -> None:
            if connection.sender is None:
                is_late.set()
                stream.shut()

        self._watch.after(self._hello_timeout_s, give_up)
        try:
            prefix = stream.receive_prefix(Item.HELLO)
            hello = decode_body(stream.receive_bytes(prefix.num_bytes), prefix, Hello)
        except ProtocolViolation as error:
            self._refuse(connection, str(error))
            raise
        except PeerFault as error:
            if is_late.is_set():
                raise ProtocolViolation(f"no whole hello within {self._hello_timeout_s} s") from error
            raise
        refusal = self._refusal(hello)
        if refusal is None and not self._supersede(hello.sender, connection):
            refusal = f"an older connection of {hello.sender} is still landing bytes; connect again"
        if refusal is not None:
            self._refuse(connection, refusal)
            raise ProtocolViolation(refusal)
        stream.send_item(Item.WELCOME, Welcome(None))
        return hello.sender

    def _refusal(self, hello: Hello) -> str | None:
        if hello.destination_incarnation != self._incarnation:
            return f"incarnation {hello.destination_incarnation:x} is not here, {self._incarnation:x} is; pair again"
        if hello.checksums != self._checksums:
            return f"checksums are {hello.checksums} at the sender and {self._checksums} here; set both alike"
        return None

    def _refuse(self, connection: _Connection, reason: str) -> None:
        with contextlib.suppress(PeerFault):  # it is closed next, whether or not it still listens
            connection.stream.send_item(Item.WELCOME, Welcome(clip(reason)))

    def _supersede(self, sender: WorkerId, connection: _Connection) -> bool:
        """Make this the sender's only connection. The old one's last bytes must not land over the new one's."""
        deadline_s = time.monotonic() + self._fence_timeout_s
        while True:
            with self._lock:
                older = self._by_sender.get(sender)
                if older is None:
                    connection.sender = sender
                    self._by_sender[sender] = connection
                    return True
            older.stream.shut()
            if not older.returned.wait(max(deadline_s - time.monotonic(), 0.0)):
                return False

    def _receive_frame(self, connection: _Connection, sender: WorkerId) -> None:
        stream = connection.stream
        prefix = stream.receive_prefix(Item.FRAME, lambda: True)  # idle connections stay open
        header = decode_body(stream.receive_bytes(prefix.num_bytes), prefix, FrameHeader)
        entry = self._grants.enter(
            sender, header.key, header.number, header.tag, header.destination, header.num_bytes, stream.shut
        )
        if isinstance(entry, Visit):
            failure = self._land(stream, header, prefix.checksum, entry)
        else:
            failure = entry.reason if isinstance(entry, Refused) else None
            if header.num_bytes > self._memory.num_bytes:
                raise ProtocolViolation(f"payload of {header.num_bytes} bytes for an arena of {self._memory.num_bytes}")
            stream.drain(header.num_bytes + TRAILER_BYTES)
        stream.send_item(Item.ACK, Ack(header.key, header.number, None if failure is None else clip(failure)))

    def _land(self, stream: Stream, header: FrameHeader, head_checksum: int, visit: Visit) -> str | None:
        """Receive one granted payload. Returns why it did not land, or None."""
        landed, wrong = False, None
        try:
            landing = self._memory.landing(header.destination)
            found = stream.receive_into(landing.buffers, head_checksum if self._checksums else None)
            told = decode_trailer(stream.receive_bytes(TRAILER_BYTES))
            if found != told:
                wrong = f"payload of write {header.number} arrived with checksum {found:08x}, not {told:08x}; resend it"
                return wrong
            if not self._grants.can_commit(visit):
                return f"key {header.key.hex()} was revoked while write {header.number} was under way"
            landing.commit()
            landed = True
            return None
        finally:
            self._grants.leave(visit, landed=landed, failure=wrong)

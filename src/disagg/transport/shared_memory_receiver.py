"""The landing side of shared memory: writers of the same domain copy straight into `memory`.

One thread accepts; one thread per connection does all of this, in order:

    1. Greeting: refuse another user, another domain, another incarnation; admit with the arena's descriptor; or with
       one of memory for this connection alone, if it is only to be measured
    2. Request: ask the grant table to be let in; permit, or answer why not
    3. Copied: sum the bytes as they lie in the arena; commit when the sum held and the grant still stands; leave the
       grant table (which posts the events) and answer

The fence: what was permitted is over when the writer has said so (Copied, Withdrawal, Farewell), when its process is
dead (its pidfd says so), or when the same process has connected anew, which its one copier thread does only after its
last copy. The end of a connection alone proves nothing: a stopped process may go on and copy. A writer that has not
said so fence_timeout_s after revoke() is stuck: WriterStuck is posted and the process ended by SIGKILL through its
pidfd, as its supervisor would; GrantFenced follows when it is dead.
"""

import contextlib
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from disagg.core.endpoints import Endpoint, TransportKind
from disagg.core.errors import InternalFault, PeerFault, PeerLost, ProtocolViolation
from disagg.core.ids import Incarnation, WorkerId
from disagg.kvcache.memory import MappableMemory, Segment
from disagg.transport.acceptor import Acceptor
from disagg.transport.api import Post, WriterStuck
from disagg.transport.deadlines import DeadlineWatch
from disagg.transport.grants import Arrival, GrantTable, Refused, Visit
from disagg.transport.local_stream import abstract_address
from disagg.transport.outbox import Outbox
from disagg.transport.runs import RunSum, whole_arena
from disagg.transport.segments import SegmentArray
from disagg.transport.shared_memory_probe import answer_probe
from disagg.transport.shared_memory_wire import (
    Admission,
    Answer,
    Copied,
    Farewell,
    Greeting,
    Permit,
    Progress,
    Request,
    Withdrawal,
    WriterMessage,
    decode_writer,
    encode,
)
from disagg.transport.shared_memory_writer import PermittedWrite, Writer, end_process
from disagg.transport.sharing import SharingDomain
from disagg.transport.wire import clip

_log = logging.getLogger(__name__)

MAX_TICKETS = 64  # open at once, per connection
ANSWER_TIMEOUT_S = 2.0  # a writer that takes no answer for so long gets none any more; what it says is still read
SUPERSEDE_TIMEOUT_S = 2.0

EndWriter = Callable[[int], None]


class SharedMemoryReceiver:
    """Lets writers of one domain copy into `memory`. See the file's head for the life of a write."""

    def __init__(
        self,
        memory: MappableMemory,
        incarnation: Incarnation,
        post: Post,
        domain: SharingDomain,
        *,
        name: str = "",
        fence_timeout_s: float = 30.0,
        hello_timeout_s: float = 5.0,
        close_timeout_s: float = 5.0,
        max_connections: int = 256,
        end_writer: EndWriter = end_process,
    ) -> None:
        """Listen under a name (drawn if none is given). Raises InternalFault for memory that cannot be mapped."""
        if memory.descriptor is None:
            raise InternalFault("this arena cannot be mapped by others; offer it over tcp alone")
        self._memory = memory
        self._descriptor = memory.descriptor
        self._arena = whole_arena(memory)
        self._incarnation = incarnation
        self._domain = domain
        self._fence_timeout_s = fence_timeout_s
        self._hello_timeout_s = hello_timeout_s
        self._close_timeout_s = close_timeout_s
        self._end_writer = end_writer
        self._endpoint = Endpoint(TransportKind.SHARED_MEMORY, f"{domain.name}/{name or secrets.token_hex(8)}")
        self._outbox = Outbox(post)
        self._grants = GrantTable(memory.num_bytes, self._outbox)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(abstract_address(self._endpoint.address))
        listener.listen(128)
        self._watch = DeadlineWatch("disagg-shm-fence")
        self._acceptor = Acceptor(
            listener,
            self._endpoint.address,
            name="disagg-shm-accept",
            make=self._make,
            serve=self._serve,
            max_connections=max_connections,
        )
        self._acceptor.start()

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    def endpoint_for(self, peer: WorkerId, incarnation: Incarnation) -> Endpoint:
        """The endpoint as this paired peer is to see it: the domain's secret is proof enough."""
        return self._endpoint

    def grant(self, peer: WorkerId, key: bytes, segments: Sequence[Segment]) -> None:
        """Allow `peer` to write into these segments under this key. Raises InternalFault for a key in use."""
        self._grants.grant(peer, key, segments)

    def revoke(self, key: bytes) -> None:
        """Withdraw a grant, now; one GrantFenced follows (at once for a key that is unknown or not in use)."""
        for visit in self._grants.revoke(key):
            self._watch.after(self._fence_timeout_s, partial(self._grants.eject, visit))

    def close(self) -> None:
        """Stop all threads and close all sockets. Raises InternalFault when a thread outlives close_timeout_s.

        Writers keep their mapping until they notice; what they write then is seen by nobody.
        """
        left = self._acceptor.close(self._close_timeout_s)
        self._watch.close()
        self._outbox.flush()
        if left:
            raise InternalFault(f"threads {left} did not return within {self._close_timeout_s} s; memory blocks them")

    def check_invariants(self) -> None:
        self._grants.check_invariants()
        self._watch.check_invariants()
        self._acceptor.check_invariants()

    def _make(self, sock: socket.socket, address: Any) -> Writer:
        return Writer(sock, self._hello_timeout_s)

    # ---- a connection's thread

    def _serve(self, writer: Writer) -> None:
        is_over = False
        try:
            greeting = self._welcome(writer)
            if greeting.is_probe:
                answer_probe(writer.stream)
                is_over = True
            while not is_over:
                body = writer.stream.receive()
                if body is not None:
                    is_over = self._take(writer, greeting.sender, decode_writer(body))
        except PeerFault as error:
            level = logging.WARNING if isinstance(error, ProtocolViolation) else logging.DEBUG
            _log.log(level, "connection of process %d (%s) ended: %s", writer.pid, writer.sender, str(error))
        except Exception:  # memory failed us: this connection ends, the others go on
            _log.exception("connection of process %d (%s) failed", writer.pid, writer.sender)
        finally:
            if not is_over:
                self._hear_out(writer)
            for permitted in writer.permitted.values():
                self._grants.leave(permitted.visit)
            self._acceptor.leave(writer)

    def _hear_out(self, writer: Writer) -> None:
        """Until nothing is written over this connection any more, though it has failed."""
        writer.stream.stop_sending()  # the writer ends its copy, says farewell and closes
        try:
            while writer.permitted:
                body = writer.stream.receive()
                match None if body is None else decode_writer(body):
                    case Copied(ticket) | Withdrawal(ticket):
                        self._grants.leave(self._permitted(writer, ticket).visit)
                    case Farewell():
                        return
        except PeerFault:  # its end is no word of the writer
            writer.wait_dead()

    def _welcome(self, writer: Writer) -> Greeting:
        """Read the greeting within hello_timeout_s; answer it. Raises PeerFault when the connection must end."""
        stream = writer.stream
        is_late = threading.Event()

        def give_up() -> None:
            if writer.sender is None:
                is_late.set()
                stream.shut()

        self._watch.after(self._hello_timeout_s, give_up)
        try:
            body = stream.receive()
        except PeerLost as error:
            if is_late.is_set():
                raise ProtocolViolation(f"no whole greeting within {self._hello_timeout_s} s") from error
            raise
        greeting = None if body is None else decode_writer(body)
        if not isinstance(greeting, Greeting):
            raise ProtocolViolation("no greeting came first")
        refusal = self._refusal(greeting)
        if refusal is None and not greeting.is_probe and not self._supersede(greeting.sender, writer):
            refusal = f"an older process of {greeting.sender} may still write here; connect again when it has ended"
        if refusal is not None:
            with contextlib.suppress(PeerFault):  # it is closed next, whether or not it still listens
                stream.send(encode(Admission(clip(refusal), 0)))
            raise ProtocolViolation(refusal)
        writer.sender = greeting.sender
        if not greeting.is_probe:
            stream.set_timeouts(0.0, ANSWER_TIMEOUT_S)  # idle connections stay open
            stream.send(encode(Admission(None, self._memory.num_bytes)), self._descriptor)
        return greeting

    def _refusal(self, greeting: Greeting) -> str | None:
        if not self._domain.admits(greeting.secret):
            return "the secret is not that of this domain; shared memory is for workers of one supervisor"
        if greeting.destination_incarnation != self._incarnation:
            return f"incarnation {greeting.destination_incarnation:x} is not here, {self._incarnation:x} is; pair again"
        return None

    def _supersede(self, sender: WorkerId, writer: Writer) -> bool:
        """Make this the sender's only connection. The old one's last bytes must not land over the new one's."""

        def end(older: Writer) -> None:
            if older.pid == writer.pid:
                older.shut()  # its one copying thread is here, so nothing is copied over there any more
            else:
                older.stream.shut()

        return self._acceptor.supersede(sender, writer, SUPERSEDE_TIMEOUT_S, end)

    def _take(self, writer: Writer, sender: WorkerId, message: WriterMessage) -> bool:
        """Act on one message. Returns whether it was the last. Raises ProtocolViolation."""
        match message:
            case Request():
                self._request(writer, sender, message)
            case Progress(ticket, num_bytes):
                if (found := writer.permitted.get(ticket)) is None:
                    raise ProtocolViolation(f"ticket {ticket} has no permit")
                found.summing.advance(num_bytes)
            case Copied(ticket, checksum):
                failure = self._verify(self._permitted(writer, ticket), checksum)
                writer.say(Answer(ticket, None if failure is None else clip(failure)))
            case Withdrawal(ticket):
                self._grants.leave(self._permitted(writer, ticket).visit)
            case Farewell():
                return True
            case Greeting():
                raise ProtocolViolation("a second greeting")
        return False

    def _request(self, writer: Writer, sender: WorkerId, request: Request) -> None:
        if request.ticket in writer.permitted or len(writer.permitted) >= MAX_TICKETS:
            raise ProtocolViolation(f"ticket {request.ticket} is open already, or {MAX_TICKETS} are")
        if any(p.visit.key == request.key and p.visit.number == request.number for p in writer.permitted.values()):
            raise ProtocolViolation(f"write {request.number} is under way; it could land twice")
        destination = SegmentArray.unpack(request.destination)
        eject = partial(self._enforce, writer, sender, request.key)
        entry = self._grants.enter(
            sender, request.key, request.number, request.tag, destination, request.num_bytes, eject
        )
        if isinstance(entry, Visit):
            summing = RunSum(self._arena, destination)
            writer.permitted[request.ticket] = PermittedWrite(entry, summing)
            writer.say(Permit(request.ticket))
            summing.prepare()  # while the writer begins to copy
        else:
            writer.say(Answer(request.ticket, clip(entry.reason) if isinstance(entry, Refused) else None))

    def _permitted(self, writer: Writer, ticket: int) -> PermittedWrite:
        found = writer.permitted.pop(ticket, None)
        if found is None:
            raise ProtocolViolation(f"ticket {ticket} has no permit")
        return found

    def _verify(self, permitted: PermittedWrite, told: int) -> str | None:
        """Sum the bytes as they lie. Returns why they did not land, or None."""

        def arrive() -> Arrival:
            # The bytes are part of the arena since they were written: nothing is left to be put there.
            return Arrival(self._memory.landing(()).commit, permitted.summing.finish(), told)

        return self._grants.settle(permitted.visit, arrive)

    # ---- the watch's thread

    def _enforce(self, writer: Writer, sender: WorkerId, key: bytes) -> None:
        """End a process that may still write under a revoked key. Called while its visit is open."""

        def end() -> None:
            if writer.pid == os.getpid():
                _log.error("a copy within this process may still be written after %g s", self._fence_timeout_s)
                return
            self._outbox.put(WriterStuck(sender, key, writer.pid))
            self._end_writer(writer.pidfd)

        self._acceptor.if_open(writer, end)
        self._outbox.flush()

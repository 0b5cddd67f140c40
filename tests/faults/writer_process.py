"""A writer in a process of its own that stops at one moment of a write, says so, and waits for a line to go on.

    python writer_process.py STATE ENDPOINT-HEX INCARNATION KEY-HEX NUM-BYTES

In shared memory: asked (a permit has come and is not read), permitted (nothing is copied), copying (some is), copied
(all is, and nobody has been told). Over tcp: permitted (nothing is sent), copying (some is), copied (all but the
trailer is). The endpoint is msgpack; the domain's secret comes in the environment.
"""

import queue
import sys
from collections.abc import Callable
from functools import partialmethod
from typing import Any
from unittest import mock

import msgspec

from disagg.core.endpoints import Endpoint, TransportKind
from disagg.core.ids import Incarnation, WorkerId
from disagg.kvcache.memory import Segment
from disagg.testing.memory import SealedBytesMemory
from disagg.transport.api import Post, Sender, TransportEvent, Write, WriteFinished
from disagg.transport.link import Permitted
from disagg.transport.shared_memory_connection import SharedMemoryConnection
from disagg.transport.shared_memory_sender import SharedMemorySender
from disagg.transport.shared_memory_wire import Copied, Progress
from disagg.transport.sharing import take_domain
from disagg.transport.stream import Stream
from disagg.transport.tcp_sender import TcpSender

STATES = (
    *((TransportKind.SHARED_MEMORY, state) for state in ("asked", "permitted", "copying", "copied")),
    *((TransportKind.TCP, state) for state in ("permitted", "copying", "copied")),
)
WRITER, WRITER_INCARNATION = WorkerId("writer"), Incarnation(3)
BYTE = b"w"


def hold(state: str) -> None:
    """Tell the test where we are; go on at its word."""
    print(state, flush=True)
    if not sys.stdin.readline():
        sys.exit("the test is gone")


class HeldConnection(SharedMemoryConnection):
    held_state = ""

    def hear(self, is_due: Callable[[], bool]) -> Any:
        heard = super().hear(is_due)
        if self.held_state == "asked" and isinstance(heard, Permitted):
            hold("asked")
        return heard

    def copy(self, ticket: Any) -> int:
        if self.held_state == "permitted":
            hold("permitted")
        return super().copy(ticket)

    def say(self, message: Any) -> None:
        wanted = {"copying": Progress, "copied": Copied}.get(self.held_state)
        if wanted is not None and isinstance(message, wanted):
            hold(self.held_state)
            self.held_state = ""
        super().say(message)


class HeldStream:
    """Stands in for the methods of a tcp stream that send a frame."""

    def __init__(self, state: str) -> None:
        self.state = state
        self.num_sends: int | None = None  # of the frame
        self.send_frame, self.send_all, self.send_trailer = Stream.send_frame, Stream._send_all, Stream.send_trailer

    def held_frame(self, stream: Stream, *arguments: Any) -> None:
        if self.state == "permitted":
            hold("permitted")
        self.num_sends = 0
        self.send_frame(stream, *arguments)

    def held_send(self, stream: Stream, *arguments: Any) -> None:
        if self.num_sends is not None:
            self.num_sends += 1
        if self.state == "copying" and self.num_sends == 3:  # after the header and some of the payload
            hold("copying")
        self.send_all(stream, *arguments)

    def held_trailer(self, stream: Stream, trailer: bytes) -> None:
        if self.state == "copied":
            hold("copied")
        self.send_trailer(stream, trailer)

    def patch(self) -> None:
        """For good: the process does nothing else."""
        for name, held in (
            ("send_frame", self.held_frame),
            ("_send_all", self.held_send),
            ("send_trailer", self.held_trailer),
        ):
            mock.patch.object(Stream, name, partialmethod(_call, held)).start()


def _call(stream: Stream, held: Callable[..., Any], *arguments: Any) -> Any:
    return held(stream, *arguments)


def make_sender(kind: TransportKind, state: str, memory: SealedBytesMemory, post: Post) -> Sender:
    if kind is TransportKind.TCP:
        HeldStream(state).patch()
        return TcpSender(WRITER, WRITER_INCARNATION, memory, post)
    domain = take_domain()
    assert domain is not None
    HeldConnection.held_state = state
    mock.patch("disagg.transport.shared_memory_connection.SharedMemoryConnection", HeldConnection).start()
    return SharedMemorySender(WRITER, memory, post, domain)


def main(state: str, endpoint_text: str, incarnation: str, key: str, num_bytes: str) -> None:
    endpoint = msgspec.msgpack.decode(bytes.fromhex(endpoint_text), type=Endpoint)
    size = int(num_bytes)
    events: queue.SimpleQueue[TransportEvent] = queue.SimpleQueue()
    sender = make_sender(endpoint.kind, state, SealedBytesMemory(data=BYTE * size), events.put)
    sender.connect(WorkerId("owner"), endpoint, Incarnation(int(incarnation)))
    whole = (Segment(0, size),)
    sender.write(Write(WorkerId("owner"), bytes.fromhex(key), 0, b"", whole, whole))
    event = events.get(timeout=60)
    assert isinstance(event, WriteFinished)
    print("finished" if event.failure is None else f"failed: {event.failure}", flush=True)
    sender.close()


if __name__ == "__main__":
    main(*sys.argv[1:])

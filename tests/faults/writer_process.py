"""A writer in a process of its own that stops at one moment of a write, says so, and waits for a line to go on.

    python writer_process.py STATE ENDPOINT-ADDRESS INCARNATION KEY-HEX NUM-BYTES

STATE: asked (a permit has come and is not read), permitted (nothing is copied), copying (some is), copied (all is, and
nobody has been told). The domain's secret comes in the environment.
"""

import queue
import sys
from typing import Any
from unittest import mock

from disagg.core.endpoints import Endpoint, TransportKind
from disagg.core.ids import Incarnation, WorkerId
from disagg.kvcache.memory import Segment
from disagg.testing.memory import SealedBytesMemory
from disagg.transport.api import TransportEvent, Write, WriteFinished
from disagg.transport.shared_memory_link import SharedMemoryLink
from disagg.transport.shared_memory_sender import SharedMemorySender
from disagg.transport.shared_memory_wire import Copied, Permit, Progress
from disagg.transport.sharing import take_domain

STATES = ("asked", "permitted", "copying", "copied")
WRITER = WorkerId("writer")
BYTE = b"w"


def hold(state: str) -> None:
    """Tell the test where we are; go on at its word."""
    print(state, flush=True)
    if not sys.stdin.readline():
        sys.exit("the test is gone")


class HeldLink(SharedMemoryLink):
    held_state = ""

    def _take(self, connection: Any, message: Any) -> None:
        if self.held_state == "asked" and isinstance(message, Permit):
            hold("asked")
        super()._take(connection, message)

    def _copy_bytes(self, ticket: Any, arena: Any) -> int:
        if self.held_state == "permitted":
            hold("permitted")
        return super()._copy_bytes(ticket, arena)

    def _say(self, message: Any) -> None:
        wanted = {"copying": Progress, "copied": Copied}.get(self.held_state)
        if wanted is not None and isinstance(message, wanted):
            hold(self.held_state)
            self.held_state = ""
        super()._say(message)


def main(state: str, address: str, incarnation: str, key: str, num_bytes: str) -> None:
    HeldLink.held_state = state
    domain = take_domain()
    assert domain is not None
    size = int(num_bytes)
    events: queue.SimpleQueue[TransportEvent] = queue.SimpleQueue()
    sender = SharedMemorySender(WRITER, SealedBytesMemory(data=BYTE * size), events.put, domain)
    with mock.patch("disagg.transport.shared_memory_sender.SharedMemoryLink", HeldLink):
        sender.connect(WorkerId("owner"), Endpoint(TransportKind.SHARED_MEMORY, address), Incarnation(int(incarnation)))
    whole = (Segment(0, size),)
    sender.write(Write(WorkerId("owner"), bytes.fromhex(key), 0, b"", whole, whole))
    event = events.get(timeout=60)
    assert isinstance(event, WriteFinished)
    print("finished" if event.failure is None else f"failed: {event.failure}", flush=True)
    sender.close()


if __name__ == "__main__":
    main(*sys.argv[1:])

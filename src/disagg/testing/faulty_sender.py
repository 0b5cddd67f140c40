"""Faults between a worker and any transport: wraps a Sender, keeps its promises.

Exactly one WriteFinished still follows each write, and WritesStopped still comes after those of its key. What the
decision says happens to each write:

    NONE     it is passed on
    FAIL     it fails and was never passed on
    DELAY    it goes behind the next write, to whomever
    DROP     it stays unfinished until its key is cancelled, its peer disconnected or the sender closed
    REPEAT   it is passed on twice; its first end is told to nobody
    CUT      it is passed on and the connection is lost at once: it may land, and fails
"""

import enum
import threading
from collections import Counter
from collections.abc import Callable

from disagg.core.endpoints import Endpoint
from disagg.core.ids import Incarnation, WorkerId
from disagg.transport.api import ConnectionLost, Post, Sender, TransportEvent, Write, WriteFinished


class WriteFault(enum.Enum):
    NONE = "none"
    FAIL = "fail"
    DELAY = "delay"
    DROP = "drop"
    REPEAT = "repeat"
    CUT = "cut"


Decide = Callable[[Write], WriteFault]


class FaultySender:
    """A Sender whose writes suffer what `decide` says."""

    def __init__(self, make_sender: Callable[[Post], Sender], post: Post, decide: Decide) -> None:
        """`make_sender` is given the post of the sender that it makes."""
        self._post = post
        self._decide = decide
        self._lock = threading.Lock()
        self._targets: dict[WorkerId, tuple[Endpoint, Incarnation]] = {}
        self._delayed: list[Write] = []
        self._dropped: list[Write] = []
        self._surplus: Counter[tuple[WorkerId, bytes, int]] = Counter()  # ends to be kept from the worker
        self.num_faults: Counter[WriteFault] = Counter()
        self._sender = make_sender(self._pass_on)

    def connect(self, peer: WorkerId, endpoint: Endpoint, incarnation: Incarnation) -> None:
        with self._lock:
            self._targets[peer] = (endpoint, incarnation)
        self._sender.connect(peer, endpoint, incarnation)

    def write(self, write: Write) -> None:
        fault = self._decide(write)
        with self._lock:
            self.num_faults[fault] += 1
            late, self._delayed = self._delayed, [write] if fault is WriteFault.DELAY else []
            if fault is WriteFault.DROP:
                self._dropped.append(write)
            elif fault is WriteFault.REPEAT:
                self._surplus[write.peer, write.key, write.number] += 1
        if fault is WriteFault.FAIL:
            self._fail([write], "the fault script fails it")
        elif fault in (WriteFault.NONE, WriteFault.REPEAT, WriteFault.CUT):
            self._sender.write(write)
        if fault is WriteFault.REPEAT:
            self._sender.write(write)
        elif fault is WriteFault.CUT:
            self._cut(write.peer)
        for each in late:
            self._sender.write(each)

    def cancel(self, peer: WorkerId, key: bytes) -> None:
        self._fail(self._take(lambda write: (write.peer, write.key) == (peer, key)), "its key was cancelled")
        self._sender.cancel(peer, key)

    def disconnect(self, peer: WorkerId) -> None:
        with self._lock:
            self._targets.pop(peer, None)
        self._fail(self._take(lambda write: write.peer == peer), "its peer was disconnected")
        self._sender.disconnect(peer)

    def close(self) -> None:
        self._fail(self._take(lambda write: True), "the sender was closed")
        self._sender.close()

    @property
    def num_held(self) -> int:
        """Writes that were neither passed on nor told as finished."""
        with self._lock:
            return len(self._delayed) + len(self._dropped)

    def check_invariants(self) -> None:
        with self._lock:
            assert all(count > 0 for count in self._surplus.values()), "an end was kept back that was due"

    def _cut(self, peer: WorkerId) -> None:
        with self._lock:
            target = self._targets.get(peer)
        if target is not None:
            self._sender.disconnect(peer)
            self._sender.connect(peer, *target)
            self._post(ConnectionLost(peer, "the fault script cut it"))

    def _take(self, matches: Callable[[Write], bool]) -> list[Write]:
        with self._lock:
            taken = [write for write in (*self._delayed, *self._dropped) if matches(write)]
            self._delayed = [write for write in self._delayed if not matches(write)]
            self._dropped = [write for write in self._dropped if not matches(write)]
        return taken

    def _fail(self, writes: list[Write], reason: str) -> None:
        for write in writes:
            self._post(WriteFinished(write.peer, write.key, write.number, reason))

    def _pass_on(self, event: TransportEvent) -> None:
        if isinstance(event, WriteFinished):
            end = (event.peer, event.key, event.number)
            with self._lock:
                if end in self._surplus:  # of two ends the first is kept back: the write is over with the last
                    self._surplus[end] -= 1
                    self._surplus += Counter()  # without those at 0
                    return
        self._post(event)

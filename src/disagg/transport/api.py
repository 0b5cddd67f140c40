"""The one interface of every transport.

A receiver opens a *grant*: a key that permits writing to some segments of its arena. A sender writes segments of its
arena into the segments of a peer's grant. What became of a write is told by events, posted from the transport's own
threads. A revoked grant is *fenced* when no byte under its key can land any more; only then may its blocks be given
to somebody else.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from disagg.core.endpoints import Endpoint
from disagg.core.ids import Incarnation, WorkerId
from disagg.kvcache.memory import Segment


class Write(msgspec.Struct, frozen=True):
    """Put source segments of my arena into destination segments of the peer's. Equal lengths in total."""

    peer: WorkerId
    key: bytes  # the peer's grant
    number: int  # of this write under this key; a repeated write carries the same number
    tag: bytes  # opaque; delivered with the landing
    source: Sequence[Segment]
    destination: Sequence[Segment]


class WriteFinished(msgspec.Struct, frozen=True):
    """At the sender: the receiver has verified the bytes (failure is None), or why not."""

    peer: WorkerId
    key: bytes
    number: int
    failure: str | None


class WriteLanded(msgspec.Struct, frozen=True):
    """At the receiver: bytes arrived, were verified and committed; or arrived wrong (failure is set)."""

    peer: WorkerId
    key: bytes
    number: int
    tag: bytes
    num_bytes: int
    failure: str | None


class GrantFenced(msgspec.Struct, frozen=True):
    """At the receiver: after revoke(), no byte under this key can land any more."""

    key: bytes


class WritesStopped(msgspec.Struct, frozen=True):
    """At the sender: after cancel(), no byte of the arena is read for this key any more."""

    peer: WorkerId
    key: bytes


class WriterStuck(msgspec.Struct, frozen=True):
    """At the receiver: a process that may still write under a revoked key did not stop in time, and is ended by force.

    GrantFenced follows with its end.
    """

    peer: WorkerId
    key: bytes
    pid: int


class ConnectionLost(msgspec.Struct, frozen=True):
    """At the sender: every unfinished write to this peer has failed (each also got its WriteFinished)."""

    peer: WorkerId
    reason: str


TransportEvent = WriteFinished | WriteLanded | GrantFenced | WritesStopped | WriterStuck | ConnectionLost
Post = Callable[[TransportEvent], None]  # thread-safe, returns at once


class Sender(Protocol):
    """The writing side. Every method returns at once and may be called from any thread."""

    def connect(self, peer: WorkerId, endpoint: Endpoint, incarnation: Incarnation) -> None:
        """Name a peer. Connections open lazily and are refused by a receiver of another incarnation."""

    def write(self, write: Write) -> None:
        """Queue one write; exactly one WriteFinished follows."""

    def cancel(self, peer: WorkerId, key: bytes) -> None:
        """Drop queued writes under key (each gets its WriteFinished), then post WritesStopped."""

    def disconnect(self, peer: WorkerId) -> None:
        """Forget a peer; its unfinished writes fail."""

    def close(self) -> None:
        """Stop all threads and close all sockets. Bounded in time."""


class Receiver(Protocol):
    """The landing side."""

    @property
    def endpoint(self) -> Endpoint: ...

    def endpoint_for(self, peer: WorkerId, incarnation: Incarnation) -> Endpoint:
        """The endpoint as this paired peer, and nobody else, is to see it."""

    def grant(self, peer: WorkerId, key: bytes, segments: Sequence[Segment]) -> None:
        """Allow `peer` to write into these segments under this key."""

    def revoke(self, key: bytes) -> None:
        """Withdraw a grant, now; GrantFenced follows, within fence_timeout_s, by closing the connection if need be."""

    def close(self) -> None:
        """Stop all threads and close all sockets. Bounded in time."""

"""Identifiers. An id is never reused; an incarnation is drawn afresh at every process start.

Every token carries some: they hold nothing that could lead back to them, so the garbage collector need not know them.
"""

from typing import NewType

import msgspec

WorkerId = NewType("WorkerId", str)
BlockId = NewType("BlockId", int)
StepId = NewType("StepId", int)

# A random 62-bit integer that names one process start. Two processes on the same address differ in it.
Incarnation = NewType("Incarnation", int)

MAX_INCARNATION = 2**62

RANK_MARK = "#"  # never in a worker's id


def rank_name(worker_id: WorkerId, rank: int) -> WorkerId:
    """What one of several ranks of a worker calls itself on data connections."""
    return WorkerId(f"{worker_id}{RANK_MARK}{rank}")


def worker_of(name: WorkerId) -> WorkerId:
    """The worker that a rank, or a worker of one rank, belongs to."""
    return WorkerId(name.partition(RANK_MARK)[0])


class RequestId(msgspec.Struct, frozen=True, array_like=True, order=True, cache_hash=True, gc=False):
    """One client request: the n-th one of one router incarnation."""

    router: Incarnation
    number: int

    def __str__(self) -> str:
        return f"{self.router:x}-{self.number}"


class SequenceId(msgspec.Struct, frozen=True, array_like=True, order=True, cache_hash=True, gc=False):
    """One choice of a request. A sequence is token ids + sampling parameters + KV."""

    request_id: RequestId
    choice: int

    def __str__(self) -> str:
        return f"{self.request_id}.{self.choice}"


class HandoffId(msgspec.Struct, frozen=True, array_like=True, order=True, cache_hash=True, gc=False):
    """The n-th attempt to move one sequence's KV."""

    sequence_id: SequenceId
    attempt: int

    def __str__(self) -> str:
        return f"{self.sequence_id}#{self.attempt}"


class Fence(msgspec.Struct, frozen=True, array_like=True, order=True):
    """What a late message or byte must match to be believed."""

    source: Incarnation
    destination: Incarnation
    attempt: int

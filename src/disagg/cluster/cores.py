"""Which cores each local worker computes on."""

import os
from collections.abc import Sequence

import msgspec


class CoreShare(msgspec.Struct, frozen=True):
    """One worker's part. No cores: it is not pinned."""

    cores: tuple[int, ...]
    num_threads: int


def split_cores(num_workers: int, available: Sequence[int] | None = None) -> tuple[CoreShare, ...]:
    """Give each worker cores of its own when there are enough for all, else pin nobody.

    available: cores this process may use, by default what the kernel says. All shares have the same number of
    threads: a sum split over other threads may round otherwise, and workers must agree to the last bit. What does
    not divide is left to the router.
    """
    cores = sorted(os.sched_getaffinity(0) if available is None else available)
    if num_workers <= 0:
        return ()
    share = len(cores) // num_workers
    if share == 0:
        return (CoreShare((), 1),) * num_workers
    return tuple(CoreShare(tuple(cores[n * share : (n + 1) * share]), share) for n in range(num_workers))

"""Two closed loops at once: one whose answers are looked at, and one that keeps something busy beside it.

Where the second one pauses now and then, the first one is seen with and without it, in turns of a second or two.
"""

import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from disagg.bench.workload import ClosedWork, Run, WorkRequest, WorkStream

Stretch = tuple[float, float]  # from, to


class BesideWork(msgspec.Struct, frozen=True):
    """Even numbers are requests of `work`, odd ones of `neighbour`, whose next ones are asked until `work` has ended.

    neighbour: of more requests than that can need. No two of all these prompts share a beginning.
    """

    work: ClosedWork
    neighbour: ClosedWork

    def start(self, rng: random.Random) -> WorkStream:
        return _BesideStream(self, rng)


def is_neighbour(number: int) -> bool:
    """Whether the request of this number only kept something busy."""
    return number % 2 == 1


class _BesideStream:
    def __init__(self, beside: BesideWork, rng: random.Random) -> None:
        self._streams = [each.start(random.Random(rng.getrandbits(64))) for each in (beside.work, beside.neighbour)]
        self._num_left = beside.work.work.num_requests

    def next_request(self) -> WorkRequest | None:
        for place, stream in enumerate(self._streams):
            request = stream.next_request()
            if request is not None:
                return _of_both(request, place)
        return None

    def after_end(self, request: WorkRequest, now_s: float, *, is_whole: bool) -> WorkRequest | None:
        place = int(is_neighbour(request.number))
        self._num_left -= place == 0
        if self._num_left <= 0:
            return None
        own = msgspec.structs.replace(request, number=request.number // 2)
        following = self._streams[place].after_end(own, now_s, is_whole=is_whole)
        return None if following is None else _of_both(following, place)


def _of_both(request: WorkRequest, place: int) -> WorkRequest:
    """Number and labels that the other loop does not use."""
    runs = tuple(Run(2 * run.label + place, run.num_tokens) for run in request.runs)
    return msgspec.structs.replace(request, number=2 * request.number + place, runs=runs)


class InTurns(NamedTuple):
    """Seconds that the same work took while its neighbour had nothing to do, and while it was busy."""

    alone_s: list[float]
    beside_s: list[float]


def in_turns(spans: Iterable[Stretch], busy: Sequence[Stretch], near: Sequence[Stretch]) -> InTurns:
    """Spans of the work that touch no stretch of `near`, and those that lie within one of `busy`; others tell nothing.

    busy: when the neighbour did what is asked about; near: when it did anything at all.
    """
    found = InTurns([], [])
    for begin_s, end_s in spans:
        if any(since_s <= begin_s and end_s <= until_s for since_s, until_s in busy):
            found.beside_s.append(end_s - begin_s)
        elif not any(since_s < end_s and begin_s < until_s for since_s, until_s in near):
            found.alone_s.append(end_s - begin_s)
    return found

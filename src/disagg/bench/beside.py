"""Two closed loops at once: one whose answers are looked at, and one that keeps something busy beside it."""

import random

import msgspec

from disagg.bench.workload import ClosedWork, Run, WorkRequest, WorkStream


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

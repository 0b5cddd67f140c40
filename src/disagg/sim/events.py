"""Virtual time: a heap of what will happen. Events of one moment happen in the order in which they were put in."""

import heapq
from collections.abc import Callable
from itertools import count

from disagg.core.errors import InternalFault

Act = Callable[..., object]


class EventHeap:
    """Everything happens inside run(). Deterministic: there is no chance in it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_events = 0
        self._heap: list[tuple[float, int, Act, tuple[object, ...]]] = []
        self._order = count()

    def at(self, when_s: float, act: Act, *arguments: object) -> None:
        """Call act(*arguments) then, or next when that has passed."""
        heapq.heappush(self._heap, (max(when_s, self.now_s), next(self._order), act, arguments))

    def after(self, delay_s: float, act: Act, *arguments: object) -> None:
        self.at(self.now_s + delay_s, act, *arguments)

    def step(self) -> bool:
        """Let the next event happen; False when there is none."""
        if not self._heap:
            return False
        self.now_s, _, act, arguments = heapq.heappop(self._heap)
        self.num_events += 1
        act(*arguments)
        return True

    def next_s(self) -> float:
        """When the next event is due; infinity for never."""
        return self._heap[0][0] if self._heap else float("inf")

    def check_invariants(self) -> None:
        if self.next_s() < self.now_s:
            raise InternalFault(f"an event of {self.next_s()} s waits at {self.now_s} s")

"""Workers that share a machine: steps that run at the same time slow each other down.

Every step has its own seconds, those it would take alone. It gets on at 1 / slowdown of them per second, and the
slowdown changes whenever a step begins or ends beside it.
"""

from collections.abc import Callable, Sequence

from disagg.core.errors import InternalFault
from disagg.sim.events import EventHeap
from disagg.sim.hardware.serving import Contention

Mark = tuple[float, Callable[[], object]]  # own seconds of a step, and what happens when so many are done

_ROUNDING_S = 1e-9  # what a mark that is due now may still be away


class _Running:
    """One worker's step."""

    __slots__ = ("done_s", "marks", "prompt_share", "rate")

    def __init__(self, prompt_share: float, marks: Sequence[Mark]) -> None:
        self.prompt_share = prompt_share
        self.marks = list(reversed(marks))
        self.done_s = 0.0
        self.rate = 1.0


class Machine:
    """At most one step of each worker at a time."""

    def __init__(self, heap: EventHeap, contention: Contention) -> None:
        self._heap = heap
        self._contention = contention
        self._running: dict[str, _Running] = {}
        self._moved_s = 0.0  # until when done_s is counted
        self._next_s = float("inf")

    def begin(self, worker: str, prompt_share: float, marks: Sequence[Mark]) -> None:
        """A step begins. marks: in order; the last is its end. Raises InternalFault when one of this worker runs."""
        if worker in self._running:
            raise InternalFault(f"{worker} begins a step while one runs")
        self._advance()
        self._running[worker] = _Running(prompt_share, marks)
        self._share()

    def stop(self, worker: str) -> None:
        """It died: nothing of its step happens any more. Idempotent."""
        self._advance()
        if self._running.pop(worker, None) is not None:
            self._share()

    def _advance(self) -> None:
        passed_s = self._heap.now_s - self._moved_s
        for running in self._running.values():
            running.done_s += running.rate * passed_s
        self._moved_s = self._heap.now_s

    def _share(self) -> None:
        """New rates, and when the first mark is due at them."""
        for worker, running in self._running.items():
            others = [other.prompt_share for name, other in self._running.items() if name != worker]
            running.rate = 1.0 / self._contention.slowdown(running.prompt_share, others)
        left_s = min((max(0.0, r.marks[-1][0] - r.done_s) / r.rate for r in self._running.values()), default=None)
        self._next_s = float("inf") if left_s is None else self._heap.now_s + left_s
        if left_s is not None:
            self._heap.at(self._next_s, self._wake, self._next_s)

    def _wake(self, due_s: float) -> None:
        if due_s != self._next_s:
            return  # rates have changed since
        self._advance()
        due: list[Mark] = []
        for worker, running in list(self._running.items()):
            while running.marks and running.marks[-1][0] - running.done_s <= running.rate * _ROUNDING_S:
                due.append(running.marks.pop())
            if not running.marks:
                del self._running[worker]
        self._share()
        for _, happen in due:
            happen()

    def check_invariants(self) -> None:
        for worker, running in self._running.items():
            if not 0 < running.rate <= 1 or not running.marks:
                raise InternalFault(
                    f"the step of {worker} goes at {running.rate:g} with {len(running.marks)} marks left"
                )

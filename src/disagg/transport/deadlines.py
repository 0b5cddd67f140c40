"""One thread that runs small actions when their time has come."""

import heapq
import logging
import threading
import time
from collections.abc import Callable, Iterable

_log = logging.getLogger(__name__)

Action = Callable[[], None]


def join_all(threads: Iterable[threading.Thread], timeout_s: float) -> list[str]:
    """Join threads within one shared deadline. Returns the names of those still running, the caller's own left out."""
    deadline_s = time.monotonic() + timeout_s
    others = [thread for thread in threads if thread is not threading.current_thread()]
    for thread in others:
        thread.join(max(deadline_s - time.monotonic(), 0.0))
    return [thread.name for thread in others if thread.is_alive()]


class DeadlineWatch:
    """Runs each action once, at or after its deadline, unless closed before. Actions must not block."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds that never go back."""
        self._clock = clock
        self._changed = threading.Condition()
        self._heap: list[tuple[float, int, Action]] = []
        self._num_added = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def after(self, delay_s: float, action: Action) -> None:
        """Run `action` in `delay_s` seconds. Ignored once closed."""
        with self._changed:
            if self._closed:
                return
            self._num_added += 1
            heapq.heappush(self._heap, (self._clock() + delay_s, self._num_added, action))
            self._changed.notify()

    def close(self) -> None:
        """Drop what is not due yet and end the thread."""
        with self._changed:
            self._closed = True
            self._heap.clear()
            self._changed.notify()
        join_all([self._thread], 5.0)

    def check_invariants(self) -> None:
        with self._changed:
            assert not (self._closed and self._heap), f"{len(self._heap)} actions wait on a closed watch"
            assert self._closed or self._thread.is_alive(), "the watch's thread has died"

    def _run(self) -> None:
        while (action := self._next()) is not None:
            try:
                action()
            except Exception:  # one failed action must not take the other deadlines with it
                _log.exception("an action at its deadline failed")

    def _next(self) -> Action | None:
        with self._changed:
            while not self._closed:
                if not self._heap:
                    self._changed.wait()
                    continue
                due_in_s = self._heap[0][0] - self._clock()
                if due_in_s <= 0:
                    return heapq.heappop(self._heap)[2]
                self._changed.wait(due_in_s)
            return None

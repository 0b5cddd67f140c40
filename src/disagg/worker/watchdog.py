"""A thread that ends the process when its work has stopped moving. A loop stuck past its deadline is not waited for.

Two hands must keep moving: the event loop's (it stamps at every beat) and, while a step runs, the step thread's (it
stamps at every finished layer). The process ends hard: whatever is stuck would not let go of it otherwise. Peers and
router see the end of its connections at once; a supervisor starts it again.
"""

import os
import sys
import threading
import time
from collections.abc import Callable

STUCK_EXIT_CODE = 70


def end_process(reason: str) -> None:
    """No clean-up: threads that hang would be waited for."""
    print(f"disagg: {reason}; ending this process", file=sys.stderr, flush=True)
    os._exit(STUCK_EXIT_CODE)


class Watchdog:
    """stamp_*() are cheap and may be called from any thread."""

    def __init__(self, timeout_s: float, on_stuck: Callable[[str], None] = end_process) -> None:
        self._timeout_s = timeout_s
        self._on_stuck = on_stuck
        self._loop_s = time.monotonic()
        self._step_s: float | None = None  # None: no step runs
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def stamp_loop(self) -> None:
        self._loop_s = time.monotonic()

    def stamp_step(self) -> None:
        """A step has begun, or has finished a layer."""
        self._step_s = time.monotonic()

    def end_step(self) -> None:
        self._step_s = None

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        interval_s = self._timeout_s / 20
        last_s = time.monotonic()
        while not self._stop.wait(interval_s):
            now_s = time.monotonic()
            if now_s - last_s > 5 * interval_s:  # the whole process was stopped: not their fault
                self._forgive()
            last_s = now_s
            reason = self._stuck()
            if reason:
                self._on_stuck(reason)
                return

    def _forgive(self) -> None:
        self.stamp_loop()
        if self._step_s is not None:
            self.stamp_step()

    def _stuck(self) -> str:
        now_s, step_s = time.monotonic(), self._step_s
        if step_s is not None and now_s - step_s > self._timeout_s:
            return f"no layer has finished for {now_s - step_s:.1f} s, the limit is {self._timeout_s:g} s"
        if now_s - self._loop_s > self._timeout_s:
            return f"the event loop has not turned for {now_s - self._loop_s:.1f} s, the limit is {self._timeout_s:g} s"
        return ""

"""Virtual time and seeded chance: a heap of callbacks, jittered durations, streams that deliver in order."""

import random
from collections import deque
from collections.abc import Callable

import msgspec

from disagg.core.errors import InternalFault
from disagg.sim.events import EventHeap

STORY_LENGTH = 60  # events


class Timing(msgspec.Struct, frozen=True):
    """Durations in virtual seconds; each is stretched by a factor drawn from [1, jitter]."""

    message_s: float = 0.0002
    prompt_token_s: float = 0.001
    step_s: float = 0.01
    byte_s: float = 1e-8
    write_s: float = 0.0005
    detect_s: float = 0.01  # from a death to the others' knowing of it
    stall_s: float = 30.0  # until the transport gives up a write that does not move; not stretched
    fence_s: float = 2.0  # until it lets go of such a write once it is told to; not stretched
    jitter: float = 3.0


class Chances(msgspec.Struct, frozen=True):
    """Probabilities of faults."""

    corrupt: float = 0.0  # of a write
    step_failure: float = 0.0  # of a step: the engine raises
    refused_dial: float = 0.0  # of a worker's dial of another


class VirtualTime(EventHeap):
    """Everything happens inside run(). `check` is called after every event; `story` tells what happened."""

    def __init__(self, seed: int, timing: Timing, chances: Chances, check: Callable[[], None]) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.timing = timing
        self.chances = chances
        self._check = check
        self._history: deque[tuple[float, str, object]] = deque(maxlen=STORY_LENGTH)
        self._in_order_s: dict[tuple[str, str], float] = {}

    def jittered(self, duration_s: float) -> float:
        return duration_s * self.random.uniform(1.0, self.timing.jitter)

    def run(
        self, *, until: Callable[[], bool] | None = None, limit_s: float = 1000.0, max_events: int = 1_000_000
    ) -> None:
        """Until the condition holds, or nothing is left to happen. Raises when the limits are passed first."""
        for _ in range(max_events):
            if until is not None and until():
                return
            if limit_s < self.next_s() < float("inf"):
                raise InternalFault(f"not done after {limit_s} virtual seconds\n{self.story()}")
            if not self.step():
                if until is not None:
                    raise InternalFault(f"nothing is left to happen at {self.now_s:.3f} s\n{self.story()}")
                return
            self._check()
        raise InternalFault(f"not done after {max_events} events\n{self.story()}")

    def run_for(self, duration_s: float) -> None:
        end_s = self.now_s + duration_s
        self.at(end_s, lambda: None)
        self.run(until=lambda: self.now_s >= end_s, limit_s=end_s + 1)

    def deliver(self, source: str, target: str, act: Callable[[], object]) -> None:
        """In order per direction, like a stream."""
        when_s = self.now_s + self.jittered(self.timing.message_s)
        when_s = max(when_s, self._in_order_s.get((source, target), 0.0))
        self._in_order_s[(source, target)] = when_s
        self.at(when_s, act)

    def note(self, who: str, what: object) -> None:
        self._history.append((self.now_s, who, what))  # put into words for those who ask: nearly nobody does

    def story(self) -> str:
        return "\n".join(f"{when_s:10.6f} {who}: {what}" for when_s, who, what in self._history)

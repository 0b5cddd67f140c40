"""Answers of several ranks that are one answer to the scheduler."""

import threading
from typing import Generic, NamedTuple, TypeVar

from disagg.core.errors import InternalFault

_Key = TypeVar("_Key")


class Joined(NamedTuple):
    """All parts have answered; the first failure, if there was one."""

    failure: str | None


class _Open:
    def __init__(self, num_left: int) -> None:
        self.num_left = num_left
        self.failure: str | None = None


class JoinTable(Generic[_Key]):
    """How many answers are still to come, by key. Thread-safe: each answer comes on a thread of its transport."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[_Key, _Open] = {}

    def __len__(self) -> int:
        return len(self._open)

    def expect(self, key: _Key, num_parts: int) -> None:
        """num_parts answers will come. Raises InternalFault for a key that is waited for already."""
        with self._lock:
            if key in self._open or num_parts < 1:
                raise InternalFault(
                    f"{num_parts} answers cannot be expected for {key}; one round of 1 or more at a time"
                )
            self._open[key] = _Open(num_parts)

    def take(self, key: _Key, failure: str | None = None) -> Joined | None:
        """One answer: None until it is the last, or when nobody waits for it."""
        with self._lock:
            open_ = self._open.get(key)
            if open_ is None:
                return None
            open_.failure = open_.failure or failure
            open_.num_left -= 1
            if open_.num_left:
                return None
            del self._open[key]
            return Joined(open_.failure)

    def check_invariants(self) -> None:
        with self._lock:
            if any(open_.num_left < 1 for open_ in self._open.values()):
                raise InternalFault("an answer is kept open although all of its parts have come")

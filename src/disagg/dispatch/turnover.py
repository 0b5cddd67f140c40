"""How fast requests end, and how many are turned away: what Retry-After is predicted from."""

from collections import deque

from disagg.core.errors import InternalFault
from disagg.policy.admission import Turnover

WINDOW_S = 30  # how far back it looks, in slots of a second
MIN_SPAN_S = 1.0


class _Slot:
    """Counts of one second."""

    __slots__ = ("num_ended", "num_turned_away", "second")

    def __init__(self, second: int) -> None:
        self.second = second
        self.num_ended = 0
        self.num_turned_away = 0


class TurnoverCounts:
    """Counts of the last WINDOW_S seconds, or since there was nothing open. Times never go back."""

    def __init__(self) -> None:
        self._slots: deque[_Slot] = deque()
        self._busy_since_s = float("-inf")

    def note_busy(self, now_s: float) -> None:
        """The first request after a time without any: what was before says nothing of what is to come."""
        self._slots.clear()
        self._busy_since_s = now_s

    def note_ended(self, now_s: float) -> None:
        self._slot(now_s).num_ended += 1

    def note_turned_away(self, now_s: float) -> None:
        self._slot(now_s).num_turned_away += 1

    def lately(self, now_s: float) -> Turnover:
        self._forget_old(now_s)
        return Turnover(
            num_ended=sum(slot.num_ended for slot in self._slots),
            num_turned_away=sum(slot.num_turned_away for slot in self._slots),
            seconds=max(MIN_SPAN_S, min(float(WINDOW_S), now_s - self._busy_since_s)),
        )

    def check_invariants(self) -> None:
        seconds = [slot.second for slot in self._slots]
        if seconds != sorted(set(seconds)) or len(seconds) > WINDOW_S + 1:
            raise InternalFault(f"slots of the seconds {seconds}: not in order, or more than {WINDOW_S + 1}")

    def _slot(self, now_s: float) -> _Slot:
        second = int(now_s)
        if not self._slots or self._slots[-1].second != second:
            self._forget_old(now_s)
            self._slots.append(_Slot(second))
        return self._slots[-1]

    def _forget_old(self, now_s: float) -> None:
        while self._slots and self._slots[0].second < int(now_s) - WINDOW_S:
            self._slots.popleft()

"""When the tokens of one request were sent: what its histograms are told."""

from disagg.core.errors import InternalFault
from disagg.policy.routing import Path
from disagg.router.metrics import RouterMetrics
from disagg.telemetry.metrics import E2E_SECONDS, ITL_SECONDS, TPOT_SECONDS, TTFT_SECONDS


class _ChoiceTimes:
    """Of one answer."""

    __slots__ = ("first_s", "is_over", "last_s", "num_tokens")

    def __init__(self) -> None:
        self.first_s = self.last_s = 0.0
        self.num_tokens = 0
        self.is_over = False


class StreamTimes:
    """Counts an answer's tokens and the time between them, from when its request was received (start_s) on.

    Answers that fail or are left are not whole: no TPOT.
    """

    def __init__(self, metrics: RouterMetrics, path: Path, num_choices: int, start_s: float) -> None:
        self._ttft, self._itl = metrics.times(TTFT_SECONDS, path), metrics.times(ITL_SECONDS, path)
        self._tpot, self._e2e = metrics.times(TPOT_SECONDS, path), metrics.times(E2E_SECONDS, path)
        self._start_s = start_s
        self._choices = [_ChoiceTimes() for _ in range(num_choices)]
        self._num_open = num_choices

    def note_tokens(self, choice: int, num_tokens: int, now_s: float) -> None:
        """Tokens that came together; whether their text may go out is not asked."""
        times = self._choices[choice]
        if times.num_tokens == 0:
            times.first_s = now_s
            self._ttft.observe(now_s - self._start_s)
        else:
            self._itl.observe(now_s - times.last_s)
        times.last_s = now_s
        times.num_tokens += num_tokens

    def note_end(self, choice: int) -> None:
        """The answer is whole. Idempotent."""
        times = self._choices[choice]
        if times.is_over:
            return
        times.is_over = True
        self._num_open -= 1
        if times.num_tokens > 1:
            self._tpot.observe((times.last_s - times.first_s) / (times.num_tokens - 1))
        if self._num_open == 0:
            last_s = max((each.last_s for each in self._choices if each.num_tokens), default=self._start_s)
            self._e2e.observe(last_s - self._start_s)

    def check_invariants(self) -> None:
        num_open = sum(not each.is_over for each in self._choices)
        if num_open != self._num_open:
            raise InternalFault(f"{num_open} answers are open, {self._num_open} are counted so")
        if any(each.first_s > each.last_s or (each.num_tokens == 0) != (each.last_s == 0) for each in self._choices):
            raise InternalFault("an answer's tokens do not fit their times")

"""How a running load is shown: one live line on a terminal, a line now and then otherwise. On stderr."""

import statistics
import sys
import time

from rich.console import Console
from rich.live import Live
from rich.text import Text

from disagg.bench.record import RequestRecord

PLAIN_INTERVAL_S = 10.0
NUM_RECENT = 50


class Progress:
    """Use as a context manager; told of every record."""

    def __init__(self, label: str, num_expected: int) -> None:
        self._label = label
        self._num_expected = num_expected
        self._num = 0
        self._num_failed = 0
        self._recent_ttft_s: list[float] = []
        self._start_s = time.perf_counter()
        self._shown_s = self._start_s
        console = Console(stderr=True)
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def __enter__(self) -> "Progress":
        if self._live is not None:
            self._live.start()
            self._draw(self._start_s)  # an answer may be long in coming
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def tell(self, record: RequestRecord) -> None:
        self._num += 1
        if record.is_whole:
            self._recent_ttft_s = [*self._recent_ttft_s[-NUM_RECENT:], record.ttft_s]
        else:
            self._num_failed += 1
        now_s = time.perf_counter()
        if self._live is not None:
            # Drawing takes time that tokens' stamps would feel: four times a second is enough.
            if now_s - self._shown_s >= 0.25:
                self._shown_s = now_s
                self._draw(now_s)
        elif now_s - self._shown_s >= PLAIN_INTERVAL_S:
            self._shown_s = now_s
            print(f"disagg: {self.line(now_s)}", file=sys.stderr, flush=True)

    def _draw(self, now_s: float) -> None:
        if self._live is not None:
            # One line, also on a narrow terminal: two would leave the first behind.
            self._live.update(Text(self.line(now_s), no_wrap=True, overflow="ellipsis"), refresh=True)

    def line(self, now_s: float) -> str:
        """The state of the load in one line."""
        of = f"/{self._num_expected}" if self._num_expected else ""
        ttft = f", recent TTFT p50 {1e3 * statistics.median(self._recent_ttft_s):.0f} ms" if self._recent_ttft_s else ""
        failed = f", {self._num_failed} failed" if self._num_failed else ""
        return f"{self._label}: {self._num}{of} over in {now_s - self._start_s:.0f} s{failed}{ttft}"

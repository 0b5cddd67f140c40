"""What a cluster has counted, read from /metrics again and again: a worker that dies takes its totals with it."""

import asyncio
import contextlib
from collections import Counter, defaultdict

import httpx
from prometheus_client.parser import text_string_to_metric_families

from disagg.core.errors import InternalFault
from disagg.telemetry.metrics import Metric

READ_INTERVAL_S = 0.25  # what a worker counts after the last reading before its death is not seen

_Key = tuple[str, frozenset[tuple[str, str]]]


class CounterWatch:
    """Sums what counters rise by; a fall is a new process that starts at 0."""

    def __init__(self) -> None:
        self._last: dict[_Key, float] = {}
        self._sums: defaultdict[_Key, float] = defaultdict(float)

    def read(self, text: str) -> None:
        """One scrape, in Prometheus' text format."""
        for family in text_string_to_metric_families(text):
            if family.type != "counter":
                continue
            for sample in family.samples:
                key = (sample.name, frozenset(sample.labels.items()))
                last = self._last.get(key, 0.0)
                self._sums[key] += sample.value - last if sample.value >= last else sample.value
                self._last[key] = sample.value

    async def keep_reading(self, client: httpx.AsyncClient) -> None:
        """Until cancelled. A scrape that fails is left out."""
        while True:
            await self.read_once(client)
            await asyncio.sleep(READ_INTERVAL_S)

    async def read_once(self, client: httpx.AsyncClient) -> None:
        with contextlib.suppress(httpx.HTTPError):
            self.read((await client.get("/metrics", timeout=5.0)).text)

    def total(self, metric: Metric) -> int:
        return sum(self.by_label(metric).values())

    def by_label(self, metric: Metric) -> dict[str, int]:
        """Sums above 0 by the metric's own label; "" for one without."""
        found: Counter[str] = Counter()
        for (name, labels), value in self._sums.items():
            if name == metric.name:
                found[dict(labels).get(metric.label, "")] += round(value)
        return {label: count for label, count in sorted(found.items()) if count}

    def check_invariants(self) -> None:
        if self._sums and min(self._sums.values()) < 0:
            raise InternalFault(f"a counter fell by {-min(self._sums.values()):g} in all: counters only rise")

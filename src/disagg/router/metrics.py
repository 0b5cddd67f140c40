"""Prometheus exposition of the router's own metrics and of what its workers report. Names come from the one table."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from typing import Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from disagg.dispatch.dispatcher import Dispatcher
from disagg.dispatch.worker_record import WorkerRecord
from disagg.policy.routing import Path
from disagg.telemetry import metrics as table


class Collector(Protocol):
    """What prometheus_client asks of a collector."""

    def collect(self) -> Iterator[Metric]: ...


class RouterMetrics:
    """Histograms are filled by the streams; all else is read from the dispatcher when somebody scrapes."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_DispatcherCollector(dispatcher))
        self._ttft, self._itl = _Times(table.TTFT_SECONDS), _Times(table.ITL_SECONDS)
        for times in (self._ttft, self._itl):
            self._registry.register(times)

    def observe_first_token(self, path: Path, seconds: float) -> None:
        self._ttft.observe(path, seconds)

    def observe_gap(self, path: Path, seconds: float) -> None:
        self._itl.observe(path, seconds)

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Times:
    """A histogram by path. Of one thread, and without locks: it is told of every token."""

    def __init__(self, metric: table.Metric) -> None:
        self._metric = metric
        self._bounds = list(metric.buckets)
        self._counts: dict[Path, list[int]] = {}  # by path: one for each bucket, and one for what is above all
        self._sums: dict[Path, float] = {}

    def observe(self, path: Path, seconds: float) -> None:
        counts = self._counts.get(path)
        if counts is None:
            counts = self._counts[path] = [0] * (len(self._bounds) + 1)
            self._sums[path] = 0.0
        counts[bisect_left(self._bounds, seconds)] += 1
        self._sums[path] += seconds

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._metric.name, self._metric.help, labels=_labels(self._metric))
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        for path, counts in self._counts.items():
            family.add_metric([path.value], list(zip(bounds, accumulate(counts), strict=True)), self._sums[path])
        yield family


class _DispatcherCollector:
    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def collect(self) -> Iterator[Metric]:
        totals: dict[str, dict[str, float]] = {}
        for name, label, total in self._dispatcher.counters.items():
            totals.setdefault(name, {})[label] = total
        for metric in table.ROUTER_METRICS:
            if metric.kind is table.MetricKind.COUNTER:
                family = CounterMetricFamily(metric.name, metric.help, labels=_labels(metric))
                for label, total in totals.get(metric.name, {}).items():
                    family.add_metric([label] if metric.label else [], total)
                yield family
        yield GaugeMetricFamily(table.REQUESTS_OPEN.name, table.REQUESTS_OPEN.help, value=self._dispatcher.num_open)
        yield from self._of_workers()

    def _of_workers(self) -> Iterator[Metric]:
        records = self._dispatcher.registry.records()
        for metric in table.WORKER_METRICS:
            labels = ["worker", "role", "model", *_labels(metric)]
            kind = CounterMetricFamily if metric.kind is table.MetricKind.COUNTER else GaugeMetricFamily
            family = kind(metric.name, metric.help, labels=labels)
            for record in records:
                card = record.card
                for label, value in _values(metric, record):
                    names = [card.worker_id, card.role.value, card.pool.model]
                    family.add_metric([*names, label] if metric.label else names, value)
            yield family


def _values(metric: table.Metric, record: WorkerRecord) -> list[tuple[str, float]]:
    """(label value, value) pairs of one worker."""
    state = record.state
    gauges: dict[str, list[tuple[str, float]]] = {
        table.BLOCKS.name: [
            ("free", state.num_free_blocks),
            ("cached", state.num_cached_blocks),
            ("reserved", state.num_reserved_blocks),
            ("held", state.num_held_blocks),
            ("quarantined", state.num_quarantined_blocks),
        ],
        table.SEQUENCES_WAITING.name: [("", state.num_waiting)],
        table.SEQUENCES_RUNNING.name: [("", state.num_running)],
        table.HANDOFFS_OPEN.name: [("", state.num_handoffs)],
        table.WORKER_UP.name: [("", 1)],
        table.LINKS.name: list(Counter(link.transport for link in state.links if link.transport).items()),
        table.LINK_RATE.name: [(link.peer, link.measured_bytes_per_s) for link in state.links if link.transport],
    }
    if metric.name in gauges:
        return [(label, float(value)) for label, value in gauges[metric.name]]
    return [(counter.label, counter.total) for counter in state.counters if counter.name == metric.name]


def _labels(metric: table.Metric) -> list[str]:
    return [metric.label] if metric.label else []

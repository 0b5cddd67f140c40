"""What a scrape of the router shows: its own metrics and what its workers report. Names come from the one table."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from disagg.dispatch.dispatcher import Dispatcher
from disagg.policy.routing import Path
from disagg.protocol.state_metrics import ShownWorker, labels_of, worker_families
from disagg.telemetry import metrics as table
from disagg.telemetry.exposition import Family, Sample, exposition, histogram_samples, labels_text
from disagg.telemetry.metrics import Metric, MetricKind


class RouterMetrics:
    """Histograms are filled by the streams; all else is read from the dispatcher when somebody scrapes."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._times: dict[str, dict[Path, Times]] = {
            metric.name: {} for metric in table.ROUTER_METRICS if metric.kind is MetricKind.HISTOGRAM
        }

    def times(self, metric: Metric, path: Path) -> "Times":
        """A histogram's part for one path."""
        by_path = self._times[metric.name]
        if path not in by_path:
            by_path[path] = Times(metric.buckets)
        return by_path[path]

    def text(self) -> bytes:
        return exposition(chain(self._own(), self._of_workers()))

    def _own(self) -> Iterator[Family]:
        totals: dict[str, dict[str, float]] = {}
        for name, label, total in self._dispatcher.counters.items():
            totals.setdefault(name, {})[label] = total
        gauges = self._gauges()
        for metric in table.ROUTER_METRICS:
            if metric.kind is MetricKind.COUNTER:
                yield metric, _counter_samples(metric, totals.get(metric.name, {}))
            elif metric.kind is MetricKind.HISTOGRAM:
                yield metric, _times_samples(metric, self._times[metric.name])
            else:
                yield metric, gauges[metric.name]

    def _gauges(self) -> dict[str, list[Sample]]:
        ready = table.MODEL_READY
        return {
            table.REQUESTS_OPEN.name: [Sample("", self._dispatcher.num_open)],
            table.CHOICES_WAITING.name: [
                Sample("", sum(each.num_unplaced for each in self._dispatcher.open_requests()))
            ],
            ready.name: [
                Sample(labels_text((ready.label, each.model)), each.is_ready) for each in self._dispatcher.models()
            ],
        }

    def _of_workers(self) -> Iterator[Family]:
        """Those that are registered now: the series of one that has gone are gone with it."""
        records = self._dispatcher.registry.records()
        labels = [labels_of(record.card) for record in records]
        yield table.WORKER_UP, [Sample(each, 1) for each in labels]
        drains = zip(labels, records, strict=True)
        yield table.WORKER_DRAINING, [Sample(each, record.is_draining) for each, record in drains]
        shown = [ShownWorker(each, record.state) for each, record in zip(labels, records, strict=True)]
        yield from worker_families(shown, {record.card.worker_id for record in records})


class Times:
    """Counts of one histogram. Of one thread, and without locks: it is told of every token."""

    __slots__ = ("_bounds", "_counts", "_sum_s")

    def __init__(self, bounds: Sequence[float]) -> None:
        """bounds: of the buckets, in seconds, ascending."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)  # the last one: above all bounds
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum_s += seconds

    def samples(self, labels: str) -> list[Sample]:
        """Nothing before the first value."""
        return histogram_samples(labels, self._bounds, self._counts, self._sum_s) if any(self._counts) else []


def _times_samples(metric: Metric, by_path: Mapping[Path, Times]) -> list[Sample]:
    return [
        sample for path, times in by_path.items() for sample in times.samples(labels_text((metric.label, path.value)))
    ]


def _counter_samples(metric: Metric, totals: Mapping[str, float]) -> list[Sample]:
    """Those that may be counted are there from the start, at 0: a first one is a rise then."""
    if not metric.label:
        return [Sample("", totals.get("", 0.0))]
    found = dict.fromkeys(metric.values, 0.0) | dict(totals)
    return [Sample(labels_text((metric.label, value)), total) for value, total in found.items()]

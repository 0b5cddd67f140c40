"""Running totals of one process, keyed by metric and label value."""

from collections.abc import Iterator

from disagg.core.errors import InternalFault
from disagg.telemetry.metrics import MAX_LABEL_VALUES, OTHER, Metric


class Counters:
    """Bounded: label values that the table does not list, or one too many of a label without a list, are "other"."""

    def __init__(self) -> None:
        self._totals: dict[str, dict[str, float]] = {}
        self._metrics: dict[str, Metric] = {}

    def add(self, metric: Metric, amount: float = 1.0, label: str = "") -> None:
        if amount < 0:
            raise InternalFault(f"{metric.name} cannot fall by {-amount}")
        totals = self._totals.get(metric.name)
        if totals is None:
            totals = self._totals[metric.name] = {}
            self._metrics[metric.name] = metric
        if label not in totals:
            label = metric.label_value(label, totals)
        totals[label] = totals.get(label, 0.0) + amount

    def get(self, metric: Metric, label: str = "") -> float:
        return self._totals.get(metric.name, {}).get(label, 0.0)

    def items(self) -> Iterator[tuple[str, str, float]]:
        """(metric name, label value, total)."""
        for name, totals in self._totals.items():
            for label, total in totals.items():
                yield name, label, total

    def check_invariants(self) -> None:
        for name, totals in self._totals.items():
            if len(totals) > MAX_LABEL_VALUES + 1:
                raise InternalFault(f"{name} has {len(totals)} label values, the limit is {MAX_LABEL_VALUES}")
            if OTHER in totals and self._metrics[name].values:
                raise InternalFault(f"{name} was counted under a label value that the table does not list")

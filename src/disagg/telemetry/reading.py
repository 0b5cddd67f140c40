"""What a scrape of ours says: totals, rises between two looks, quantiles. Only families that are asked for are read."""

import functools
import re
from collections.abc import Collection, Mapping

from disagg.telemetry.metrics import Metric

_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")
_SUFFIXES = ("_bucket", "_count", "_sum")

Labels = Mapping[str, str]


class Reading:
    """Some families of one scrape, or what they rose by between two."""

    def __init__(self, values: Mapping[str, Mapping[str, float]], labels: Mapping[str, Labels]) -> None:
        """values: by name, then by the text between the braces; labels: by that text."""
        self._values = values
        self._labels = labels

    def total(self, metric: Metric, **wanted: str) -> float:
        """Sum over the series that carry these labels; 0.0 when there are none."""
        return sum(value for _, value in self._series(metric.name, wanted))

    def by(self, metric: Metric, label: str, **wanted: str) -> dict[str, float]:
        """Sums by the value of one label."""
        found: dict[str, float] = {}
        for labels, value in self._series(metric.name, wanted):
            key = labels.get(label, "")
            found[key] = found.get(key, 0.0) + value
        return found

    def quantile(self, metric: Metric, share: float) -> float | None:
        """Of a histogram, all its series together, linear within a bucket. None when nothing was observed.

        What lies above the last bound counts as the last bound.
        """
        by_edge: dict[float, float] = {}
        for labels, value in self._series(metric.name + "_bucket", {}):
            edge = float(labels.get("le", "inf"))
            by_edge[edge] = by_edge.get(edge, 0.0) + value
        edges = sorted(by_edge)
        if not edges or by_edge[edges[-1]] <= 0:
            return None
        rank = share * by_edge[edges[-1]]
        low, below = 0.0, 0.0
        for edge in edges:
            if by_edge[edge] >= rank:
                within = by_edge[edge] - below
                return low if edge == float("inf") else low + (edge - low) * ((rank - below) / within if within else 1)
            low, below = edge, by_edge[edge]
        return low

    def since(self, before: "Reading") -> "Reading":
        """What has been added. A total that fell is of a new process, which began at 0."""
        risen: dict[str, dict[str, float]] = {}
        for name, series in self._values.items():
            known = before._values.get(name, {})
            olds = ((text, value, known.get(text, 0.0)) for text, value in series.items())
            risen[name] = {text: value - old if value >= old else value for text, value, old in olds}
        return Reading(risen, self._labels)

    def _series(self, name: str, wanted: Labels) -> list[tuple[Labels, float]]:
        return [
            (self._labels[text], value)
            for text, value in self._values.get(name, {}).items()
            if wanted.items() <= self._labels[text].items()
        ]


def read(text: str, metrics: Collection[Metric]) -> Reading:
    """The families of these metrics. Lines that are none of them, or no lines of this format, are left out."""
    names = {metric.name for metric in metrics}
    names |= {metric.name + suffix for metric in metrics if metric.buckets for suffix in _SUFFIXES}
    values: dict[str, dict[str, float]] = {}
    labels: dict[str, Labels] = {}
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name not in names:
            continue
        rest, _, number = line[len(name) :].rpartition(" ")
        inner = rest.strip().removeprefix("{").removesuffix("}")
        try:
            values.setdefault(name, {})[inner] = float(number)
        except ValueError:
            continue
        if inner not in labels:
            labels[inner] = _labels(inner)
    return Reading(values, labels)


@functools.lru_cache(maxsize=8192)  # the next look shows nearly the same series
def _labels(inner: str) -> Labels:
    return {key: _plain(value) for key, value in _LABEL.findall(inner)}


def _plain(value: str) -> str:
    if "\\" not in value:
        return value
    return _ESCAPE.sub(lambda found: "\n" if found[1] == "n" else found[1], value)

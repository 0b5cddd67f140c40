"""What a scrape of ours says: totals, rises between two looks, quantiles.

A scrape is long and most of it is not asked for: it is cut into families first, and only wanted ones are read further.
"""

import functools
import re
from collections.abc import Collection, Mapping, Sequence

from disagg.telemetry.metrics import Metric

_FAMILY = "# HELP "  # what each begins with
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")

Labels = Mapping[str, str]


class Reading:
    """Some families of one scrape, or what they rose by between two."""

    def __init__(self, values: Mapping[str, Mapping[str, float]]) -> None:
        """values: by the family's name, then by series, as the scrape writes them."""
        self._values = values

    def series(self, metric: Metric) -> list[tuple[Labels, float]]:
        """Each with its labels."""
        return self._series(metric, {})

    def total(self, metric: Metric, **wanted: str) -> float:
        """Sum over the series that carry these labels; 0.0 when there are none."""
        return sum([value for _, value in self._series(metric, wanted)])

    def by(self, metric: Metric, label: str, **wanted: str) -> dict[str, float]:
        """Sums by the value of one label."""
        found: dict[str, float] = {}
        for labels, value in self._series(metric, wanted):
            key = labels.get(label, "")
            found[key] = found.get(key, 0.0) + value
        return found

    def quantiles(self, metric: Metric, shares: Sequence[float]) -> list[float]:
        """Of a histogram, all its series together, linear within a bucket. Empty when nothing was observed.

        What lies above the last bound counts as the last bound.
        """
        by_edge: dict[float, float] = {}
        for labels, value in self._series(metric, {}):
            if "le" in labels:  # one of its buckets
                edge = float(labels["le"])
                by_edge[edge] = by_edge.get(edge, 0.0) + value
        buckets = sorted(by_edge.items())
        if not buckets or buckets[-1][1] <= 0:
            return []
        return [_quantile(buckets, share) for share in shares]

    def since(self, before: "Reading") -> "Reading":
        """What has been added. A total that fell is of a new process, which began at 0."""
        risen: dict[str, dict[str, float]] = {}
        for name, series in self._values.items():
            known = before._values.get(name, {})
            risen[name] = {
                text: value - old if value >= (old := known.get(text, 0.0)) else value for text, value in series.items()
            }
        return Reading(risen)

    def _series(self, metric: Metric, wanted: Labels) -> list[tuple[Labels, float]]:
        every = [(_labels(text), value) for text, value in self._values.get(metric.name, {}).items()]
        return [each for each in every if wanted.items() <= each[0].items()] if wanted else every


def _quantile(buckets: Sequence[tuple[float, float]], share: float) -> float:
    """buckets: (upper bound, how many are not above it), ascending."""
    rank = share * buckets[-1][1]
    low, below = 0.0, 0.0
    for edge, count in buckets:
        if count >= rank:
            within = count - below
            return low if edge == float("inf") else low + (edge - low) * ((rank - below) / within if within else 1)
        low, below = edge, count
    return low


def read(text: str, metrics: Collection[Metric]) -> Reading:
    """The families of these metrics, each of which begins with its help. Lines without a number are left out."""
    wanted = {metric.name for metric in metrics}
    values: dict[str, dict[str, float]] = {}
    for family in text.removeprefix(_FAMILY).split("\n" + _FAMILY):
        name = family[: family.find(" ")]
        if name in wanted:
            found = values.setdefault(name, {})
            for line in family.split("\n")[2:]:  # behind its help and its type
                series, _, number = line.rpartition(" ")
                try:
                    found[series] = float(number)
                except ValueError:
                    continue
    return Reading(values)


def cut(scrape: bytes, metrics: Collection[Metric]) -> bytes:
    """The families of these metrics alone, as they stand: little to keep of a long scrape. b"" where there is none."""
    lines = b"\n" + scrape
    found = []
    for metric in metrics:
        start = lines.find(f"\n{_FAMILY}{metric.name} ".encode()) + 1
        if start:
            end = lines.find(f"\n{_FAMILY}".encode(), start)
            found.append(lines[start:].rstrip(b"\n") if end < 0 else lines[start:end])
    return b"\n".join(found)


@functools.lru_cache(maxsize=8192)  # the next look shows nearly the same series
def _labels(series: str) -> Labels:
    return {key: _plain(value) for key, value in _LABEL.findall(series)}


def _plain(value: str) -> str:
    if "\\" not in value:
        return value
    return _ESCAPE.sub(lambda found: "\n" if found[1] == "n" else found[1], value)

"""Prometheus' text format, written. One pass over plain numbers: a scrape holds up the loop that sends tokens."""

import functools
from collections.abc import Iterable, Sequence
from itertools import accumulate

import msgspec

from disagg.telemetry.metrics import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_NAMES = {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}


class Sample(msgspec.Struct, frozen=True, gc=False):
    """One line. labels: as `labels_text` writes them; suffix: of the family's name."""

    labels: str
    value: float
    suffix: str = ""


Family = tuple[Metric, Iterable[Sample]]


def labels_text(*pairs: tuple[str, str]) -> str:
    """(name, value) pairs as they stand between braces; "" for none."""
    return ",".join([_pair(name, value) for name, value in pairs])


@functools.lru_cache(maxsize=16384)  # every scrape asks for the same ones
def add_label(labels: str, name: str, value: str) -> str:
    """One more label behind others; a metric without a label of its own has the name ""."""
    if not name:
        return labels
    return f"{labels},{_pair(name, value)}" if labels else _pair(name, value)


def histogram_samples(labels: str, bounds: Sequence[float], counts: Sequence[int], total: float) -> list[Sample]:
    """counts: of each bucket, and last of what is above all bounds; total: sum of what was observed."""
    edges = [*map(repr, bounds), "+Inf"]
    running = list(accumulate(counts))
    buckets = [
        Sample(add_label(labels, "le", edge), count, "_bucket") for edge, count in zip(edges, running, strict=True)
    ]
    return [*buckets, Sample(labels, running[-1], "_count"), Sample(labels, total, "_sum")]


def exposition(families: Iterable[Family]) -> bytes:
    """The whole text. A family without samples is there with its type and help."""
    lines: list[str] = []
    for metric, samples in families:
        name = metric.name
        lines.append(f"# HELP {name} {metric.help}\n# TYPE {name} {metric.kind.value}")
        for each in samples:
            labels = each.labels
            series = f"{name}{each.suffix}{{{labels}}}" if labels else name + each.suffix
            lines.append(f"{series} {_number(each.value)}")
    return ("\n".join(lines) + "\n").encode()


def _number(value: float) -> str:
    if type(value) is int:
        return str(value)
    text = repr(float(value))
    return text.removesuffix(".0") if text[-1] == "0" else _NAMES.get(text, text)


@functools.lru_cache(maxsize=4096)
def _pair(name: str, value: str) -> str:
    escaped = value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return f'{name}="{escaped}"'

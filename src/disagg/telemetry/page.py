"""The table of metrics as Markdown, for docs/metrics.md."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from disagg.telemetry.metrics import FLEET_METRICS, ROUTER_METRICS, WORKER_METRICS, Metric

# Parts of the page, by the mark under which each stands.
PARTS: Mapping[str, Sequence[Metric]] = MappingProxyType(
    {"router metrics": ROUTER_METRICS, "fleet metrics": FLEET_METRICS, "worker metrics": WORKER_METRICS}
)


def markdown(metrics: Sequence[Metric]) -> str:
    """One row for each metric."""
    rows = ["| name | type | unit | label | what |", "|---|---|---|---|---|"]
    rows += [
        f"| `{metric.name}` | {metric.kind.value} | {metric.unit} | {_label(metric)} | {metric.help} |"
        for metric in metrics
    ]
    return "\n".join(rows) + "\n"


def bucket_lines(metrics: Sequence[Metric]) -> str:
    """The bounds of every histogram."""
    found = [metric for metric in metrics if metric.buckets]
    return "".join(f"- `{metric.name}`: {', '.join(f'{bound:g}' for bound in metric.buckets)}\n" for metric in found)


def _label(metric: Metric) -> str:
    if not metric.label:
        return ""
    values = ", ".join(f"`{value}`" for value in metric.values)
    return f"`{metric.label}`: {values}" if values else f"`{metric.label}`"

"""A worker's snapshot as samples of the table of metrics: the router shows those of all, a worker its own."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from disagg.protocol.cards import WorkerCard
from disagg.protocol.messages import WorkerState
from disagg.telemetry import metrics as table
from disagg.telemetry.exposition import Family, Sample, add_label, exposition, labels_text
from disagg.telemetry.metrics import WORKER_LABELS, WORKER_METRICS, Metric, MetricKind

_COUNTERS = {metric.name: metric for metric in WORKER_METRICS if metric.kind is MetricKind.COUNTER}

_Values = dict[str, dict[str, float]]  # metric name -> label value ("" without) -> value


class ShownWorker(NamedTuple):
    """One worker and the labels of all that is said of it."""

    labels: str
    state: WorkerState


def labels_of(card: WorkerCard) -> str:
    """Who it is."""
    return labels_text(*zip(WORKER_LABELS, (card.worker_id, card.role.value, card.pool.model), strict=True))


def worker_families(workers: Iterable[ShownWorker], fleet: Collection[str] | None = None) -> Iterator[Family]:
    """Every family of WORKER_METRICS. Links are shown to workers of `fleet` only; None: to all."""
    shown = [(worker.labels, _values(worker.state, fleet)) for worker in workers]
    for metric in WORKER_METRICS:
        samples = [
            Sample(add_label(labels, metric.label, value), number)
            for labels, values in shown
            for value, number in values.get(metric.name, {}).items()
        ]
        yield metric, samples


def worker_exposition(card: WorkerCard, state: WorkerState) -> bytes:
    """What one worker shows of itself."""
    return exposition(worker_families([ShownWorker(labels_of(card), state)]))


def _values(state: WorkerState, fleet: Collection[str] | None) -> _Values:
    values = _counted(state)
    values[table.BLOCKS.name] = {
        "free": state.num_free_blocks,
        "reserved": state.num_reserved_blocks,
        "held": state.num_held_blocks,
        "cached": state.num_cached_blocks,
        "quarantined": state.num_quarantined_blocks,
    }
    gauges: tuple[tuple[Metric, float], ...] = (
        (table.SEQUENCES_WAITING, state.num_waiting),
        (table.SEQUENCES_RUNNING, state.num_running),
        (table.SEQUENCES_DECODING, state.num_decoding),
        (table.PROMPT_TOKENS_WAITING, state.num_waiting_tokens),
        (table.HANDOFFS_OPEN, state.num_handoffs),
    )
    for metric, number in gauges:
        values[metric.name] = {"": number}
    links = [link for link in state.links if fleet is None or link.peer in fleet]
    values[table.LINK_BANDWIDTH.name] = {link.peer: link.bytes_per_s for link in links if link.bytes_per_s}
    values[table.LINK_MEASURED.name] = {link.peer: link.measured_bytes_per_s for link in links if link.transport}
    carried = Counter(link.transport for link in links)
    values[table.LINKS.name] = {kind: carried[kind] for kind in table.LINKS.values}
    return values


def _counted(state: WorkerState) -> _Values:
    """Totals that the table knows; a worker is another program, perhaps of another release."""
    values: _Values = {name: {"": 0.0} for name, metric in _COUNTERS.items() if not metric.label}
    for counter in state.counters:
        metric = _COUNTERS.get(counter.name)
        if metric is None:
            continue
        totals = values.setdefault(metric.name, {})
        value = metric.label_value(counter.label, totals)
        totals[value] = totals.get(value, 0.0) + counter.total
    return values

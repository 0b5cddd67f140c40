"""The table of metrics and the counters that fill it."""

import re
from pathlib import Path

import pytest

from disagg.core.errors import InternalFault
from disagg.telemetry import metrics
from disagg.telemetry.counters import MAX_LABEL_VALUES, Counters
from disagg.telemetry.metrics import (
    OUTPUT_TOKENS,
    ROUTER_METRICS,
    STEPS,
    WORKER_METRICS,
    Metric,
    MetricKind,
)

SOURCES = Path(metrics.__file__).parents[1]
ALL = (*WORKER_METRICS, *ROUTER_METRICS)


def test_totals_are_kept_by_metric_and_label() -> None:
    counters = Counters()
    counters.add(OUTPUT_TOKENS, label="whole")
    counters.add(OUTPUT_TOKENS, 3, label="whole")
    counters.add(OUTPUT_TOKENS, 5, label="decode")
    counters.add(STEPS, 0.5)
    assert counters.get(OUTPUT_TOKENS, "whole") == 4
    assert counters.get(OUTPUT_TOKENS, "decode") == 5
    assert counters.get(OUTPUT_TOKENS, "prefill") == 0
    assert sorted(counters.items()) == [
        (OUTPUT_TOKENS.name, "decode", 5),
        (OUTPUT_TOKENS.name, "whole", 4),
        (STEPS.name, "", 0.5),
    ]


def test_a_total_never_falls() -> None:
    counters = Counters()
    with pytest.raises(InternalFault, match=STEPS.name):
        counters.add(STEPS, -1)
    assert counters.get(STEPS) == 0


def test_label_values_are_bounded_and_nothing_is_lost() -> None:
    counters = Counters()
    for number in range(3 * MAX_LABEL_VALUES):
        counters.add(STEPS, label=f"label-{number}")
    counters.add(STEPS, label="label-0")
    counters.check_invariants()
    labels = {label for _, label, _ in counters.items()}
    assert len(labels) == MAX_LABEL_VALUES + 1
    assert counters.get(STEPS, "other") == 2 * MAX_LABEL_VALUES
    assert counters.get(STEPS, "label-0") == 2
    assert sum(total for _, _, total in counters.items()) == 3 * MAX_LABEL_VALUES + 1


def test_names_are_unique_and_follow_prometheus() -> None:
    names = [metric.name for metric in ALL]
    assert len(set(names)) == len(names)
    for metric in ALL:
        assert re.fullmatch(r"disagg_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind is MetricKind.COUNTER), metric
        assert bool(metric.buckets) == (metric.kind is MetricKind.HISTOGRAM), metric
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert metric.help.endswith(".")


def test_every_metric_of_the_module_is_in_exactly_one_table() -> None:
    defined = {value for value in vars(metrics).values() if isinstance(value, Metric)}
    assert defined == set(ALL)
    assert not set(WORKER_METRICS) & set(ROUTER_METRICS)


NAMES = sorted(name for name, value in vars(metrics).items() if isinstance(value, Metric))


@pytest.mark.parametrize("name", NAMES)
def test_every_metric_is_filled_somewhere(name: str) -> None:
    users = [path for path in SOURCES.rglob("*.py") if re.search(rf"\b{name}\b", path.read_text())]
    assert len(users) > 1, f"{name} stands in {users} only"

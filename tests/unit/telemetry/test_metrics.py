"""The one table of metrics: names, units, and labels that say what the code says."""

import re
from enum import StrEnum
from pathlib import Path

import pytest

from disagg.channel.tally import Refusal
from disagg.core.errors import FailureKind
from disagg.kvcache.block_pool import BlockState
from disagg.policy.partial_start import PartialOutcome
from disagg.policy.routing import Path as RoutePath
from disagg.policy.routing import PlacementReason
from disagg.policy.transport_choice import ChoiceReason
from disagg.telemetry import metrics as table
from disagg.telemetry.metrics import (
    ALL_METRICS,
    FLEET_METRICS,
    ROUTER_METRICS,
    WORKER_METRICS,
    Metric,
    MetricKind,
)

SOURCES = Path(table.__file__).parents[1]
UNITS_IN_NAMES = {"seconds": "seconds", "bytes": "bytes", "bytes/s": "bytes_per_second"}


def test_names_are_unique_and_follow_prometheus() -> None:
    names = [metric.name for metric in ALL_METRICS]
    assert len(set(names)) == len(names)
    for metric in ALL_METRICS:
        assert re.fullmatch(r"disagg_[a-z0-9_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind is MetricKind.COUNTER), metric
        assert bool(metric.buckets) == (metric.kind is MetricKind.HISTOGRAM), metric
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert metric.help.endswith(".")
        assert "|" not in metric.help  # it becomes a cell of a table


def test_units_are_named_and_stand_in_the_names_where_they_belong() -> None:
    for metric in ALL_METRICS:
        assert metric.unit
        word = UNITS_IN_NAMES.get(metric.unit)
        assert word in metric.name if word else not re.search("seconds|bytes", metric.name), metric


def test_every_metric_of_the_module_is_in_exactly_one_table() -> None:
    defined = {value.name for value in vars(table).values() if isinstance(value, Metric)}
    assert defined == {metric.name for metric in ALL_METRICS}
    assert len(ALL_METRICS) == len(ROUTER_METRICS) + len(FLEET_METRICS) + len(WORKER_METRICS)


NAMES = sorted(name for name, value in vars(table).items() if isinstance(value, Metric))


@pytest.mark.parametrize("name", NAMES)
def test_every_metric_is_filled_somewhere(name: str) -> None:
    users = [path for path in SOURCES.rglob("*.py") if re.search(rf"\b{name}\b", path.read_text())]
    assert len(users) > 1, f"{name} stands in {users} only"


@pytest.mark.parametrize("path", sorted(SOURCES.rglob("*.py")), ids=lambda path: path.name)
def test_names_are_written_nowhere_else(path: Path) -> None:
    if path != Path(table.__file__):
        written = set(re.findall(r"\bdisagg_[a-z0-9_]+", path.read_text()))
        assert not written & {metric.name for metric in ALL_METRICS}


@pytest.mark.parametrize(
    ("metrics", "enum", "more"),
    [
        ((table.PLACEMENTS,), PlacementReason, ()),
        ((table.TTFT_SECONDS, table.ITL_SECONDS, table.TPOT_SECONDS, table.E2E_SECONDS), RoutePath, ()),
        ((table.CONTROL_REFUSED, table.DATA_REFUSED, table.PEERS_REFUSED), Refusal, ()),
        ((table.MOVES,), FailureKind, ("drain",)),
        ((table.PARTIAL_STARTS,), PartialOutcome, ()),
        ((table.TRANSPORTS_CHOSEN,), ChoiceReason, ()),
    ],
)
def test_listed_values_are_those_of_the_enums_above(
    metrics: tuple[Metric, ...], enum: type[StrEnum], more: tuple[str, ...]
) -> None:
    for metric in metrics:
        assert set(metric.values) == {*more, *(member.value for member in enum)}, metric


def test_block_states_are_those_of_the_pool() -> None:
    assert set(table.BLOCKS.values) == {state.value for state in BlockState}


def test_an_open_label_takes_a_bounded_number_of_values() -> None:
    known = [str(number) for number in range(table.MAX_LABEL_VALUES)]
    assert table.MESSAGES_IGNORED.label_value("new", known[:-1]) == "new"
    assert table.MESSAGES_IGNORED.label_value("new", known) == table.OTHER
    assert table.MESSAGES_IGNORED.label_value("0", known) == "0"
    assert table.PUSHES.label_value("anything", ()) == ""

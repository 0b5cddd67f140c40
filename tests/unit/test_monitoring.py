"""The alert rules and the dashboard name metrics, labels and label values that exist."""

import json
import re
from pathlib import Path

import pytest

from disagg.telemetry.metrics import ALL_METRICS, ROUTER_METRICS, WORKER_LABELS, Metric, MetricKind

MONITORING = Path(__file__).parents[2] / "monitoring"
BY_NAME = {metric.name: metric for metric in ALL_METRICS}
SUFFIXES = ("_bucket", "_sum", "_count")
OF_PROMETHEUS = {"job", "instance", "le"}


def expressions() -> list[str]:
    """Every query of both files, in PromQL."""
    rules = (MONITORING / "alerts.yml").read_text()
    found = re.findall(r"^ +expr: (?!>)(.+)$", rules, re.MULTILINE)
    found += [" ".join(text.split()) for text in re.findall(r"expr: >\n((?:^ {10}.+\n)+)", rules, re.MULTILINE)]
    assert len(found) == rules.count("- alert:")
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    targets = [target for panel in dashboard["panels"] for target in panel["targets"]]
    found += [target["expr"] for target in targets]
    return found + [variable["query"] for variable in dashboard["templating"]["list"]]


def metric_of(name: str) -> Metric:
    family = next((name.removesuffix(s) for s in SUFFIXES if name.removesuffix(s) in BY_NAME), name)
    assert family in BY_NAME, f"no metric is called {name}"
    assert (family != name) == (BY_NAME[family].kind is MetricKind.HISTOGRAM), name
    return BY_NAME[family]


def labels_of(metric: Metric) -> set[str]:
    own = {metric.label} - {""}
    return own if metric in ROUTER_METRICS else own | set(WORKER_LABELS)


@pytest.mark.parametrize("query", expressions())
def test_names_labels_and_values_exist(query: str) -> None:
    uses = re.findall(r"\b(disagg_\w+)(?:\{([^}]*)\})?", query)
    assert uses or query in ('up{job="disagg"} == 0', "prometheus")
    for name, matchers in uses:
        metric = metric_of(name)
        for label, operator, text in re.findall(r'(\w+)(=~|!~|!=|=)"([^"]*)"', matchers):
            assert label in labels_of(metric) | OF_PROMETHEUS, (name, label)
            if label == metric.label and metric.values:
                values = text.split("|") if operator.endswith("~") else [text]
                assert set(values) <= set(metric.values), (name, label, values)
    shared = set.union(*(labels_of(metric_of(name)) for name, _ in uses)) if uses else set()
    for names in re.findall(r"\b(?:by|on) \(([^)]*)\)", query):
        assert {each.strip() for each in names.split(",")} <= shared | OF_PROMETHEUS, query


def test_counters_are_asked_for_rates_and_gauges_are_not() -> None:
    for query in expressions():
        for ranged, name in re.findall(r"((?:rate|increase)\()?\b(disagg_\w+)", query):
            assert bool(ranged) == (metric_of(name).kind is not MetricKind.GAUGE), query


def test_panels_do_not_overlap() -> None:
    panels = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_legends_name_labels_of_their_queries() -> None:
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    for target in (target for panel in dashboard["panels"] for target in panel["targets"]):
        for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
            assert re.search(rf"\bby \([^)]*\b{label}\b", target["expr"]) or "by (" not in target["expr"], target

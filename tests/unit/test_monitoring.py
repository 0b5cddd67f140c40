"""The alert rules and the dashboard name metrics, labels and label values that exist."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from disagg.telemetry.metrics import ALL_METRICS, ROUTER_METRICS, WORKER_LABELS, Metric, MetricKind

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "monitoring"
BY_NAME = {metric.name: metric for metric in ALL_METRICS}
SUFFIXES = ("_bucket", "_sum", "_count")
OF_PROMETHEUS = {"job", "instance", "le"}
OF_ALERTS = {"alertname", *WORKER_LABELS}  # labels of the series that Prometheus makes of firing alerts


def expressions() -> list[str]:
    """Every query of both files, in PromQL."""
    rules = (MONITORING / "alerts.yml").read_text()
    found = re.findall(r"^ +expr: (?!>)(.+)$", rules, re.MULTILINE)
    found += [" ".join(text.split()) for text in re.findall(r"expr: >\n((?:^ {10}.+\n)+)", rules, re.MULTILINE)]
    assert len(found) == rules.count("- alert:")
    found += panel_expressions()
    return found + [variable["query"] for variable in dashboard()["templating"]["list"]]


def dashboard() -> Any:
    return json.loads((MONITORING / "dashboard.json").read_text())


def panel_expressions() -> list[str]:
    return [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]


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
    is_of_alerts = "ALERTS{" in query
    assert uses or is_of_alerts or query in ('up{job="disagg"} == 0', "prometheus")
    for name, matchers in uses:
        metric = metric_of(name)
        for label, operator, text in re.findall(r'(\w+)(=~|!~|!=|=)"([^"]*)"', matchers):
            assert label in labels_of(metric) | OF_PROMETHEUS, (name, label)
            if label == metric.label and metric.values:
                values = text.split("|") if operator.endswith("~") else [text]
                assert set(values) <= set(metric.values), (name, label, values)
    shared = set.union(*(labels_of(metric_of(name)) for name, _ in uses)) if uses else set()
    shared |= OF_ALERTS if is_of_alerts else set()
    for names in re.findall(r"\b(?:by|on) \(([^)]*)\)", query):
        assert {each.strip() for each in names.split(",")} <= shared | OF_PROMETHEUS, query


def test_counters_are_asked_for_rates_and_gauges_are_not() -> None:
    for query in expressions():
        asked = re.sub(r"\b(disagg_\w+) unless \1 offset", "", query)  # a series that is new
        for ranged, name in re.findall(r"((?:rate|increase)\()?\b(disagg_\w+)", asked):
            assert bool(ranged) == (metric_of(name).kind is not MetricKind.GAUGE), query


def test_panels_do_not_overlap() -> None:
    panels = dashboard()["panels"]
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
    for target in (target for panel in dashboard()["panels"] for target in panel["targets"]):
        for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
            assert re.search(rf"\bby \([^)]*\b{label}\b", target["expr"]) or "by (" not in target["expr"], target


def test_every_metric_has_a_panel() -> None:
    shown = {name for query in panel_expressions() for name in re.findall(r"\bdisagg_\w+", query)}
    assert {metric_of(name).name for name in shown} == set(BY_NAME)


def test_the_page_says_for_each_kind_of_fault_where_it_shows() -> None:
    """Its table names panels and alerts that exist, and leaves no alert out."""
    page = (ROOT / "docs" / "metrics.md").read_text().partition("## Where a fault shows")[2].partition("\n## ")[0]
    rows = [row.split(" | ") for row in page.splitlines() if row.startswith("| ")][1:]
    titles = {panel["title"] for panel in dashboard()["panels"]}
    alerts = set(re.findall(r"- alert: (\w+)", (MONITORING / "alerts.yml").read_text()))
    named = [set(re.findall(r"`(Disagg\w+)`", row[1])) for row in rows]
    assert set.union(*named) == alerts
    for row in rows:
        panels = re.findall(r"\*([^*]+)\*", row[2])
        assert panels, row
        assert set(panels) <= titles, set(panels) - titles

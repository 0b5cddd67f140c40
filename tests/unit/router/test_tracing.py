"""Spans made of timelines, as the library's own in-memory exporter gets them."""

import ast
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.unit.router.site import MakeSite
from tests.unit.telemetry.test_timeline import remote

from disagg.router.timing import Timing
from disagg.telemetry.timeline import RequestTimeline, lay_out
from disagg.telemetry.track import Head, RequestTrack
from disagg.testing.generation import Script

export = pytest.importorskip("opentelemetry.sdk.trace.export", reason="disagg[otel] is not installed")
memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")

SOURCES = Path(__file__).parents[3] / "src" / "disagg"
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = TRACE[:-1] + "0"


class Collected:
    """An export that keeps its spans."""

    def __init__(self) -> None:
        from disagg.router.tracing import TraceExport

        self._memory = memory.InMemorySpanExporter()
        self.export = TraceExport(export.SimpleSpanProcessor(self._memory))

    def send(self, *timelines: RequestTimeline, trace: str = "") -> None:
        self.export("/v1/completions", timelines, {"traceparent": trace} if trace else {})

    @property
    def spans(self) -> list[Any]:
        return list(self._memory.get_finished_spans())


@pytest.fixture
def collected() -> Collected:
    return Collected()


def timeline() -> RequestTimeline:
    return lay_out(remote())


def by_name(collected: Collected, name: str) -> list[Any]:
    return [span for span in collected.spans if span.name == name]


def test_one_trace_over_router_prefill_and_decode(collected: Collected) -> None:
    collected.send(timeline())
    (root,) = by_name(collected, "POST /v1/completions")
    assert root.parent is None
    assert {span.context.trace_id for span in collected.spans} == {root.context.trace_id}
    assert root.end_time - root.start_time == 20 * 10**9
    assert root.attributes["disagg.path"] == "remote"
    assert root.resource.attributes["service.name"] == "disagg"
    children = [span for span in collected.spans if span.parent and span.parent.span_id == root.context.span_id]
    children.sort(key=lambda span: span.start_time)
    assert [span.name for span in children] == ["router", "prefill", "network", "decode", "network", "decode"]
    (prefill,) = by_name(collected, "prefill")[-1:]
    assert prefill.attributes["disagg.worker"] == "p"


def test_stages_lie_within_the_stretch_at_their_place(collected: Collected) -> None:
    collected.send(timeline())
    spans = {span.context.span_id: span for span in collected.spans}
    (step,) = by_name(collected, "first_step")
    stretch = spans[step.parent.span_id]
    assert (stretch.name, stretch.attributes["disagg.worker"]) == ("decode", "d")
    assert stretch.start_time <= step.start_time < step.end_time <= stretch.end_time
    assert step.end_time - step.start_time == 1_500_000_000
    assert sum(span.end_time - span.start_time for span in by_name(collected, "router")) == 2 * 10**9
    for span in spans.values():
        assert span.parent is None or spans[span.parent.span_id].start_time <= span.start_time


def test_the_clients_trace_goes_on(collected: Collected) -> None:
    collected.send(timeline(), trace=TRACE)
    (root,) = by_name(collected, "POST /v1/completions")
    assert f"{root.context.trace_id:032x}" == TRACE.split("-")[1]
    assert f"{root.parent.span_id:016x}" == TRACE.split("-")[2]


@pytest.mark.parametrize("trace", ["", "nonsense", "00-" + "0" * 32 + "-b7ad6b7169203331-01", TRACE[:-3]])
def test_a_new_trace_begins_where_there_is_none(collected: Collected, trace: str) -> None:
    collected.send(timeline(), trace=trace)
    collected.send(timeline(), trace=trace)
    roots = by_name(collected, "POST /v1/completions")
    assert [root.parent for root in roots] == [None, None]
    assert roots[0].context.trace_id != roots[1].context.trace_id


def test_what_the_client_does_not_sample_is_not_sent(collected: Collected) -> None:
    collected.send(timeline(), trace=UNSAMPLED)
    assert collected.spans == []


def test_choices_have_spans_of_their_own_and_failures_are_errors(collected: Collected) -> None:
    track = RequestTrack(Head(100.0, slo_class="batch"), 2)
    track.name = "1-1"
    track.choices[0].end("finished", 3, 101.0)
    track.choices[1].end("failed", 0, 102.0)
    collected.send(lay_out(track))
    (root,) = by_name(collected, "POST /v1/completions")
    choices = [*by_name(collected, "choice 0"), *by_name(collected, "choice 1")]
    assert [span.parent.span_id for span in choices] == [root.context.span_id] * 2
    assert [span.end_time - span.start_time for span in choices] == [10**9, 2 * 10**9]
    assert root.attributes["disagg.slo_class"] == "batch"
    assert not root.status.is_ok
    assert root.end_time == choices[1].end_time


async def test_each_answer_is_exported_when_it_ends(make_site: MakeSite, collected: Collected) -> None:
    site = make_site(lambda request: Script(((40, 41, 42),)), timing=Timing(0, lambda: 1e9, collected.export))
    body = {"model": "tiny", "prompt": "hi", "stream": True}
    await site.client.post("/v1/completions", json=body, headers={"traceparent": TRACE})
    await site.client.post("/v1/completions", json=body)
    roots = by_name(collected, "POST /v1/completions")
    assert [root.parent is None for root in roots] == [False, True]
    assert all(root.start_time == 10**18 for root in roots)
    collected.export.close()


def test_the_library_is_known_in_one_place() -> None:
    knowing = []
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if any(name.split(".")[0] == "opentelemetry" for name in names):
                knowing.append(path.relative_to(SOURCES))
    assert set(knowing) == {Path("router/tracing.py")}


def test_a_collector_that_does_not_answer_delays_the_end_by_no_more_than_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from disagg.router import tracing

    free, begun = threading.Event(), threading.Event()

    class Stuck(export.SimpleSpanProcessor):  # type: ignore[misc,name-defined]
        def shutdown(self) -> None:
            begun.set()
            assert free.wait(30.0)

    monkeypatch.setattr(tracing, "STOP_TIMEOUT_S", 0.02)
    tracing.TraceExport(Stuck(memory.InMemorySpanExporter())).close()
    assert begun.wait(30.0)  # perhaps after it was no longer waited for
    free.set()
    for thread in threading.enumerate():
        if thread.name == "traces":
            thread.join(30.0)
            assert not thread.is_alive()


def test_the_operators_name_for_the_service_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
    collected = Collected()
    collected.send(timeline())
    assert {span.resource.attributes["service.name"] for span in collected.spans} == {"ours"}

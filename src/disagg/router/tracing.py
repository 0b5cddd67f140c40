"""Traces for OpenTelemetry, made of timelines. The only place that knows the library.

All spans of a request are made here, in the router, when its answer has ended: workers report durations to it anyway,
so they need no exporter, no clock that agrees with others', and no trace context in their messages.

  request                      as its client saw it; the client's own span is its parent where it names one
    choice n                   only where there are several
      router | prefill | decode    one stretch at one place
        queue, chunk, ...          its stages
      network                  between them
"""

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from disagg import __version__
from disagg.telemetry.stages import STAGE_PLACES, Place
from disagg.telemetry.timeline import ChoiceTimeline, RequestTimeline, TimelineStage

STOP_TIMEOUT_S = 2.0  # for spans that wait, once the router is told to stop


class TraceExport:
    """Gives spans to a processor. Called on the event loop's thread: what takes time is the processor's thread's."""

    def __init__(self, processor: SpanProcessor) -> None:
        resource = Resource.create({SERVICE_VERSION: __version__})
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):  # nobody has named it
            resource = resource.merge(Resource({SERVICE_NAME: "disagg"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("disagg", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def __call__(self, endpoint: str, timelines: Sequence[RequestTimeline], trace: Mapping[str, str]) -> None:
        parent = self._propagator.extract(dict(trace), Context())
        for timeline in timelines:
            self._request(endpoint, timeline, parent)

    def close(self) -> None:
        """Send what waits. Blocking, for STOP_TIMEOUT_S at most: the library goes on trying while nobody answers."""
        stopping = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        stopping.start()
        stopping.join(STOP_TIMEOUT_S)

    def _request(self, endpoint: str, timeline: RequestTimeline, parent: Context) -> None:
        start_s = timeline.received_at
        attributes: dict[str, AttributeValue] = {
            "http.route": endpoint,
            "gen_ai.request.model": timeline.model,
            "gen_ai.usage.input_tokens": timeline.num_prompt_tokens,
            "gen_ai.usage.output_tokens": sum(choice.num_output_tokens for choice in timeline.choices),
            "disagg.request_id": timeline.request_id,
            "disagg.slo_class": timeline.slo_class,
        }
        if len(timeline.choices) == 1:
            attributes |= _attributes(timeline.choices[0])
        span = self._start(f"POST {endpoint}", parent, start_s, attributes, SpanKind.SERVER)
        if any(choice.outcome == "failed" for choice in timeline.choices):
            span.set_status(Status(StatusCode.ERROR))
        inside = set_span_in_context(span, Context())
        for choice in timeline.choices:
            if len(timeline.choices) == 1:
                self._stages(choice, inside, start_s)
            else:
                one = self._start(f"choice {choice.choice}", inside, start_s, _attributes(choice))
                self._stages(choice, set_span_in_context(one, Context()), start_s)
                one.end(_ns(start_s + choice.total_s))
        span.end(_ns(start_s + max(choice.total_s for choice in timeline.choices)))

    def _stages(self, choice: ChoiceTimeline, parent: Context, received_at: float) -> None:
        for place, worker, stages in stretches(choice.stages):
            first, last = stages[0], stages[-1]
            start_s, end_s = received_at + first.start_s, received_at + last.start_s + last.seconds
            attributes: dict[str, AttributeValue] = {"disagg.worker": worker} if worker else {}
            span = self._start(place.value, parent, start_s, attributes)
            inside = set_span_in_context(span, Context())
            for each in stages:
                about: dict[str, AttributeValue] = {"disagg.part": each.part.value}
                if each.num_tokens:
                    about["disagg.num_tokens"] = each.num_tokens
                one = self._start(each.stage.value, inside, received_at + each.start_s, about)
                one.end(_ns(received_at + each.start_s + each.seconds))
            span.end(_ns(end_s))

    def _start(
        self,
        name: str,
        parent: Context,
        start_s: float,
        attributes: Mapping[str, AttributeValue],
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> Span:
        return self._tracer.start_span(name, parent, kind, dict(attributes), start_time=_ns(start_s))


def stretches(stages: Sequence[TimelineStage]) -> Iterator[tuple[Place, str, list[TimelineStage]]]:
    """Stages that follow each other at one place: (place, worker or "", stages)."""
    for (place, worker), group in itertools.groupby(stages, lambda each: (STAGE_PLACES[each.stage], each.worker)):
        yield place, worker, list(group)


def export_by_environment() -> TraceExport:
    """Over OTLP, to where the standard variables say (OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_HEADERS, ...)."""
    return TraceExport(BatchSpanProcessor(OTLPSpanExporter()))


def _attributes(choice: ChoiceTimeline) -> dict[str, AttributeValue]:
    found: dict[str, AttributeValue] = {
        "disagg.outcome": choice.outcome,
        "disagg.path": choice.path,
        "disagg.placement_reason": choice.placement_reason,
        "disagg.fallback_reason": choice.fallback_reason,
        "disagg.transport": choice.transport,
        "disagg.num_attempts": choice.num_attempts,
        "disagg.num_cached_tokens": choice.num_cached_tokens,
        "disagg.handoff_bytes": choice.handoff_bytes,
        "disagg.hidden_bytes": choice.hidden_bytes,
    }
    for name, seconds in (("ttft_s", choice.ttft_s), ("first_gap_s", choice.first_gap_s)):
        if seconds is not None:
            found[f"disagg.{name}"] = seconds
    return found


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)

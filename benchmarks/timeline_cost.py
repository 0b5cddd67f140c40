"""What timelines cost: microseconds of CPU for each request, with and without, in turn within one run.

usage: python benchmarks/timeline_cost.py [--quick]

  decisions  a real dispatcher and the real scheduler of a mixed worker, messages encoded and decoded as between two
             processes; tokens are made up, nothing is computed
  front      the HTTP application over a service that makes tokens up, whole and streamed
  asked      laying a timeline out and writing it as JSON, which only happens when somebody asks
  trace      making the spans of one request (disagg[otel]); sending them is another thread's
"""

import argparse
import asyncio
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import harness
from disagg.core.endpoints import Endpoint, TransportKind
from disagg.core.ids import Incarnation, WorkerId
from disagg.core.request import EmittedToken, SamplingParams
from disagg.core.roles import Numerics, Role
from disagg.core.spans import KvLayout
from disagg.dispatch.actions import DispatchAction, SendToWorker
from disagg.dispatch.config import DispatcherConfig
from disagg.dispatch.dispatcher import Dispatcher
from disagg.dispatch.events import WorkerMessageReceived, WorkerRegistered
from disagg.dispatch.stream import GenerateRequest
from disagg.modelfiles.tokenizer import load_tokenizer
from disagg.policy.batching import StepBudget
from disagg.protocol.cards import PoolCard, WorkerCard
from disagg.protocol.messages import RouterToWorker, StartSequence, WorkerToRouter
from disagg.router.app import create_app
from disagg.router.text import ModelText
from disagg.router.timing import Timing
from disagg.router.tracing import TraceExport
from disagg.scheduler import events
from disagg.scheduler.actions import Action, RunStep, SendToRouter
from disagg.scheduler.config import SchedulerConfig
from disagg.scheduler.engine import StepPlan, StepResult
from disagg.scheduler.scheduler import Scheduler
from disagg.telemetry.timeline import TimelineAnswer, lay_out
from disagg.telemetry.track import Head, RequestTrack
from disagg.testing.generation import FakeGenerationService, Script, ready
from disagg.testing.tokenizer_files import write_tiny_tokenizer

MODEL = "m"
LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32", block_size=16)
WORKER, INCARNATION = WorkerId("w"), Incarnation(1)
NUM_BLOCKS, NUM_PROMPT, NUM_TOKENS, NUM_AT_ONCE = 4096, 64, 64, 32
RATE = 50  # requests/s, for which a share of a core is printed

_ENCODER = msgspec.msgpack.Encoder()
_TO_WORKER: msgspec.msgpack.Decoder[RouterToWorker] = msgspec.msgpack.Decoder(RouterToWorker)
_TO_ROUTER: msgspec.msgpack.Decoder[WorkerToRouter] = msgspec.msgpack.Decoder(WorkerToRouter)


class Decisions:
    """Router and worker without processes, sockets and arithmetic."""

    def __init__(self) -> None:
        pool = PoolCard(MODEL, "d", "t", Numerics.EXACT, vocab_size=1000, max_context=4096)
        endpoints = (Endpoint(TransportKind.TCP, "127.0.0.1:1"),)
        card = WorkerCard(WORKER, INCARNATION, Role.MIXED, pool, LAYOUT, NUM_BLOCKS, "127.0.0.1:1", endpoints)
        self._dispatcher = Dispatcher(DispatcherConfig(Incarnation(0), {MODEL: "t"}, max_claimed_share=1e9))
        self._dispatcher.handle(WorkerRegistered(card), time.monotonic())
        self._scheduler = Scheduler(
            SchedulerConfig(
                worker_id=WORKER,
                incarnation=INCARNATION,
                role=Role.MIXED,
                model_digest="d",
                numerics=Numerics.EXACT,
                layout=LAYOUT,
                num_blocks=NUM_BLOCKS,
                max_context=4096,
                vocab_size=1000,
                budget=StepBudget(512, 512, NUM_AT_ONCE),
            )
        )
        self._plan: StepPlan | None = None
        self._number = 0

    def run(self, num_requests: int, *, is_timed: bool) -> tuple[float, list[RequestTrack]]:
        """CPU seconds, and the tracks."""
        tracks: list[RequestTrack] = []
        start_s = time.process_time()
        for _ in range(num_requests // NUM_AT_ONCE):
            for _ in range(NUM_AT_ONCE):
                self._number += 1
                prompt = (self._number % 997, *range(NUM_PROMPT - 1))
                request = GenerateRequest(MODEL, prompt, SamplingParams(NUM_TOKENS, temperature=0.0))
                track = RequestTrack(Head(time.monotonic()), 1) if is_timed else None
                _, actions = self._dispatcher.submit(request, time.monotonic(), track)
                tracks += [track] if track is not None else []
                self._to_worker(actions)
            while self._plan is not None:
                plan, self._plan = self._plan, None
                rows = [row for row in plan.rows if row.sampling is not None]
                tokens = tuple([EmittedToken(row.sequence_id, row.output_position, 7) for row in rows])
                result = StepResult(plan.step_id, tokens)
                self._to_router(self._scheduler.handle(events.StepFinished(result, 0.01), time.monotonic()))
        return time.process_time() - start_s, tracks

    def _to_worker(self, actions: list[DispatchAction]) -> None:
        for action in actions:
            if isinstance(action, SendToWorker) and isinstance(action.message, StartSequence):
                message = _TO_WORKER.decode(_ENCODER.encode(action.message))
                self._to_router(self._scheduler.handle(events.RouterMessageReceived(message), time.monotonic()))

    def _to_router(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, RunStep):
                self._plan = action.plan
            elif isinstance(action, SendToRouter):
                message = _TO_ROUTER.decode(_ENCODER.encode(action.message))
                event = WorkerMessageReceived(WORKER, INCARNATION, message)
                self._to_worker(self._dispatcher.handle(event, time.monotonic()))


async def front(timing: Timing, num_requests: int, text: ModelText, *, is_streamed: bool) -> float:
    """CPU seconds of one application, client included."""
    service = FakeGenerationService([ready(MODEL)], lambda request: Script((tuple(range(40, 40 + NUM_TOKENS)),)))
    with ThreadPoolExecutor(1) as threads:
        app = create_app(service, {MODEL: text}, text_threads=threads, timing=timing)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            body = {"model": MODEL, "prompt": list(range(5, 25)), "max_tokens": NUM_TOKENS, "stream": is_streamed}
            start_s = time.process_time()
            for _ in range(num_requests):
                await client.post("/v1/completions", json=body)
            return time.process_time() - start_s


class Pair:
    """Both sides of one comparison, by round."""

    def __init__(self) -> None:
        self.without_us: list[float] = []
        self.with_us: list[float] = []

    def add(self, measured: Callable[[bool], float], number: int, num_requests: int) -> None:
        """The side that goes first changes with the rounds."""
        for is_timed in (False, True) if number % 2 == 0 else (True, False):
            us = 1e6 * measured(is_timed) / num_requests
            (self.with_us if is_timed else self.without_us).append(us)

    def figures(self, name: str) -> dict[str, float]:
        without, with_ = statistics.median(self.without_us), statistics.median(self.with_us)
        ratios = [b / a for a, b in zip(self.without_us, self.with_us, strict=True)]
        ratio = statistics.median(ratios)
        print(f"{name:10} {without:8.1f} us a request without, {with_:8.1f} with: {ratio:.3f} times")
        added_us = statistics.median(b - a for a, b in zip(self.without_us, self.with_us, strict=True))
        found = {"without_us": without, "with_us": with_, "added_us": added_us, "ratio": ratio}
        return {f"{name}_{key}": round(value, 3) for key, value in found.items()}


def asked_us(tracks: list[RequestTrack]) -> tuple[float, int]:
    """Microseconds for one timeline, and bytes of its JSON."""
    start_s = time.process_time()
    written = [msgspec.json.encode(TimelineAnswer((lay_out(track),))) for track in tracks]
    return 1e6 * (time.process_time() - start_s) / len(tracks), len(written[0])


def trace_us(tracks: list[RequestTrack]) -> float:
    """Microseconds for the spans of one request."""
    timelines = [lay_out(track) for track in tracks]
    export = TraceExport(SimpleSpanProcessor(InMemorySpanExporter()))
    start_s = time.process_time()
    for timeline in timelines:
        export("/v1/completions", [timeline], {})
    return 1e6 * (time.process_time() - start_s) / len(timelines)


def measure(args: argparse.Namespace) -> dict[str, float]:
    num_requests = 64 if args.quick else 256
    decisions, pairs = Decisions(), {name: Pair() for name in ("decisions", "whole", "streamed")}
    decisions.run(num_requests, is_timed=True)
    tracks: list[RequestTrack] = []
    with tempfile.TemporaryDirectory() as folder:
        text = ModelText(load_tokenizer(write_tiny_tokenizer(Path(folder))))

        def decided(is_timed: bool) -> float:
            seconds, found = decisions.run(num_requests, is_timed=is_timed)
            tracks.extend(found)
            return seconds

        def served(is_timed: bool, is_streamed: bool) -> float:
            timing = Timing(256 if is_timed else 0, time.time)
            return asyncio.run(front(timing, num_requests, text, is_streamed=is_streamed))

        for number in range(args.rounds):
            pairs["decisions"].add(decided, number, num_requests)
            pairs["whole"].add(lambda is_timed: served(is_timed, False), number, num_requests)
            pairs["streamed"].add(lambda is_timed: served(is_timed, True), number, num_requests)
    figures: dict[str, float] = {}
    for name, pair in pairs.items():
        figures |= pair.figures(name)
    share = RATE * (figures["decisions_added_us"] + figures["streamed_added_us"]) / 1e6
    figures["share_of_a_core"] = round(share, 5)
    print(f"at {RATE} streamed requests/s of {NUM_TOKENS} tokens: {100 * share:.2f} % of a core")
    figures["asked_us"], figures["asked_bytes"] = asked_us(tracks)
    figures["trace_us"] = trace_us(tracks)
    print(f"asked      {figures['asked_us']:8.1f} us for a timeline of {figures['asked_bytes']} bytes")
    print(f"trace      {figures['trace_us']:8.1f} us for a request's spans")
    return figures


def main() -> None:
    args = harness.options(__doc__, rounds=9).parse_args()
    print(harness.heading(args))
    gc.disable()  # the router's looks at what is new only, and rarely
    before = harness.cpu_use()
    figures = measure(args)
    share = harness.foreign_share(before, harness.cpu_use())
    harness.warn_of_others(share)
    harness.report_json("timeline_cost", args, {**figures, "foreign_share": round(share, 3)})


if __name__ == "__main__":
    main()

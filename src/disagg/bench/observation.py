"""What a disagg server says of its workers while a load runs: how busy each is, what waits, how KV moved.

Of each answer the few families that are wanted are kept as bytes and read after the load: reading them meanwhile would
hold up the stamps of tokens, and whole answers of a long load would fill the memory.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec

from disagg.bench.http_client import HttpClient
from disagg.telemetry import metrics as table
from disagg.telemetry.metrics import Metric
from disagg.telemetry.reading import cut, read
from disagg.telemetry.timeline import RequestTimeline, TimelineAnswer

INTERVAL_S = 1.0
NUM_SMOOTHED = 5  # workers report about as often as they are asked: single intervals see no report, or two
ANSWER_TIMEOUT_S = 5.0
MAX_TIMELINES = 1000  # that are asked for; the server may keep fewer
WANTED: tuple[Metric, ...] = (table.STEP_SECONDS, table.SEQUENCES_WAITING, table.SEQUENCES_RUNNING, table.HANDOFF_BYTES)


class Sample(msgspec.Struct, frozen=True):
    """One worker at one moment. step_s: seconds in forward passes so far."""

    at_s: float
    worker: str
    role: str
    step_s: float
    num_waiting: float
    num_running: float


class Moved(msgspec.Struct, frozen=True):
    """KV bytes handed off during a load, by whether the wait for them was hidden behind the prompt's computing."""

    bytes_by_visibility: dict[str, float]

    @property
    def hidden_share(self) -> float:
        """NaN when nothing moved."""
        total = sum(self.bytes_by_visibility.values())
        return self.bytes_by_visibility.get("hidden", 0.0) / total if total else float("nan")


class Observation(msgspec.Struct, frozen=True):
    """Empty of a server that has no such metrics."""

    samples: tuple[Sample, ...] = ()
    moved: Moved = Moved({})
    timelines: tuple[RequestTimeline, ...] = ()  # of the last requests, oldest first

    def busy(self) -> dict[str, tuple[tuple[float, float], ...]]:
        """Worker -> (time, share of the NUM_SMOOTHED intervals before it that was spent in forward passes)."""
        found: dict[str, tuple[tuple[float, float], ...]] = {}
        for worker in dict.fromkeys(sample.worker for sample in self.samples):
            mine = [sample for sample in self.samples if sample.worker == worker]
            pairs = [(mine[max(0, place - NUM_SMOOTHED)], mine[place]) for place in range(1, len(mine))]
            shares = [(b.at_s, (b.step_s - a.step_s) / (b.at_s - a.at_s)) for a, b in pairs if b.at_s > a.at_s]
            found[worker] = tuple((at_s, min(1.0, max(0.0, share))) for at_s, share in shares)
        return found

    def busy_by_role(self) -> dict[str, float]:
        """Role -> mean share of its workers' time spent in forward passes, over the whole load."""
        shares: dict[str, list[float]] = {}
        for worker in dict.fromkeys(sample.worker for sample in self.samples):
            mine = [sample for sample in self.samples if sample.worker == worker]
            span_s = mine[-1].at_s - mine[0].at_s
            if span_s > 0:
                share = max(0.0, mine[-1].step_s - mine[0].step_s) / span_s
                shares.setdefault(mine[0].role, []).append(share)
        return {role: sum(each) / len(each) for role, each in shares.items()}

    def waiting_by_role(self) -> dict[str, float]:
        """Role -> mean number of sequences without blocks."""
        found: dict[str, list[float]] = {}
        for sample in self.samples:
            found.setdefault(sample.role, []).append(sample.num_waiting)
        return {role: sum(each) / len(each) for role, each in found.items()}


def joined(parts: Sequence[tuple[float, Observation]]) -> Observation:
    """Rounds of one load put end to end: (seconds by which its clock is set off, observation) each, in order.

    What workers did between two rounds, for other loads, is left out.
    """
    samples: list[Sample] = []
    moved: dict[str, float] = {}
    spent_s: dict[str, float] = {}  # worker -> seconds in forward passes in all rounds so far
    for offset_s, each in parts:
        began_s: dict[str, float] = {}
        so_far_s = dict(spent_s)
        for sample in each.samples:
            worker = sample.worker
            step_s = sample.step_s - began_s.setdefault(worker, sample.step_s) + so_far_s.get(worker, 0.0)
            spent_s[worker] = step_s
            samples.append(msgspec.structs.replace(sample, at_s=sample.at_s + offset_s, step_s=step_s))
        for key, value in each.moved.bytes_by_visibility.items():
            moved[key] = moved.get(key, 0.0) + value
    return Observation(tuple(samples), Moved(moved), tuple(one for _, each in parts for one in each.timelines))


class Observer:
    """Asks for /metrics now and then, and for timelines before and after. `async with` around the load."""

    def __init__(self, http: HttpClient, clock_start_s: Callable[[], float]) -> None:
        """clock_start_s: the reading of time.perf_counter() that is zero in the records, once the load has begun."""
        self._http = http
        self._start_s = clock_start_s
        self._answers: list[tuple[float, bytes]] = []
        self._task: asyncio.Task[None] | None = None
        self._known: frozenset[str] = frozenset()  # requests of before the load
        self._timelines: tuple[RequestTimeline, ...] = ()

    async def __aenter__(self) -> "Observer":
        await self._ask()
        self._known = frozenset(each.request_id for each in await self._ask_timelines())
        self._task = asyncio.create_task(self._go_on())
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._ask()
        found = await self._ask_timelines()
        self._timelines = tuple(each for each in reversed(found) if each.request_id not in self._known)

    def observation(self) -> Observation:
        """Of all answers so far."""
        found = read_observation([(at_s - self._start_s(), text) for at_s, text in self._answers])
        return msgspec.structs.replace(found, timelines=self._timelines)

    async def _go_on(self) -> None:
        while self._answers:  # a server without metrics is asked once
            await asyncio.sleep(INTERVAL_S)
            await self._ask()

    async def _ask(self) -> None:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                status, body = await self._http.get("/metrics")
        except (OSError, TimeoutError):
            return
        kept = cut(body, WANTED) if status == 200 else b""
        if kept:
            self._answers.append((time.perf_counter(), kept))

    async def _ask_timelines(self) -> tuple[RequestTimeline, ...]:
        """Newest first; none of a server that has no such thing."""
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                status, body = await self._http.get(f"/timeline?last={MAX_TIMELINES}")
            return msgspec.json.decode(body, type=TimelineAnswer).timelines if status == 200 else ()
        except (OSError, TimeoutError, msgspec.DecodeError):
            return ()


def read_observation(answers: Sequence[tuple[float, bytes]]) -> Observation:
    """(time, text of /metrics or of its WANTED families), in order."""
    samples: list[Sample] = []
    moved: list[dict[str, float]] = []
    for at_s, text in answers:
        found, now_moved = _read(at_s, text.decode(errors="replace"))
        samples += found
        moved.append(now_moved)
    first, last = (moved[0], moved[-1]) if moved else ({}, {})
    return Observation(tuple(samples), Moved({key: value - first.get(key, 0.0) for key, value in last.items()}))


def _read(at_s: float, text: str) -> tuple[list[Sample], dict[str, float]]:
    found = read(text, WANTED)
    of_workers = WANTED[:3]
    step_s, waiting, running = (found.by(metric, "worker") for metric in of_workers)
    every = [labels for metric in of_workers for labels, _ in found.series(metric)]
    roles = {labels["worker"]: labels.get("role", "") for labels in every if "worker" in labels}
    samples = [
        Sample(at_s, worker, role, step_s.get(worker, 0.0), waiting.get(worker, 0.0), running.get(worker, 0.0))
        for worker, role in roles.items()
    ]
    return samples, found.by(table.HANDOFF_BYTES, table.HANDOFF_BYTES.label)

"""Workers that compute nothing, all in one process: steps and reports as of busy ones."""

import asyncio
import time

from disagg.core.ids import WorkerId
from disagg.protocol.messages import CounterValue, LinkState, WorkerState
from disagg.telemetry.metrics import WORKER_METRICS, MetricKind
from fake_worker import FakeWorker
from harness import until

STEP_S = 0.02
REPORT_S = 0.25


class Fleet:
    """The workers: a token for every open sequence each STEP_S, a report of all counters each REPORT_S."""

    def __init__(self, workers: list[FakeWorker]) -> None:
        self.is_reporting = True
        self._workers = workers
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._step()), asyncio.create_task(self._report())]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in self._workers:
            await worker.close()

    async def _step(self) -> None:
        due_s = time.perf_counter()
        while True:
            for worker in self._workers:
                if worker.open:
                    worker.step()
                    worker.step_s.clear()
            due_s += STEP_S
            await until(due_s)

    async def _report(self) -> None:
        number, due_s = 0, time.perf_counter()
        while True:
            number += 1
            state = full_state(number, [worker.name for worker in self._workers])
            for worker in self._workers if self.is_reporting else ():
                worker.report(state)
            due_s += REPORT_S
            await until(due_s)


def full_state(number: int, peers: list[str]) -> WorkerState:
    """A snapshot with a value for every label that a worker can count under, growing with `number`."""
    counters = tuple(
        CounterValue(metric.name, value, float(number * (1 + place)))
        for metric in WORKER_METRICS
        if metric.kind is MetricKind.COUNTER
        for place, value in enumerate(metric.values or ("",))
    )
    links = tuple(LinkState(WorkerId(peer), 1e9) for peer in peers)
    return WorkerState(
        num_free_blocks=100,
        num_cached_blocks=50,
        num_held_blocks=300,
        num_waiting=3,
        num_running=8,
        num_handoffs=2,
        num_waiting_tokens=2048,
        counters=counters,
        step_costs=(0.01,) * 5,
        links=links,
        num_decoding=5,
    )

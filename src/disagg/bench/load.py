"""Drives a workload against a client in real time.

    next of the clock ─┐
                       ├─▶ wait until due ─▶ ask (a task each) ─▶ record ─▶ after_end() may cause more
    caused by an end  ─┘

Open loop: nothing waits for an answer, and every latency counts from the time a request was due. A request that this
client cannot send because max_open are open is recorded as not sent: it is never put off.
"""

import asyncio
import heapq
import math
import random
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec

from disagg.bench.record import Lapse, RequestRecord
from disagg.bench.workload import OpenStream, Workload, WorkRequest, WorkStream

SPIN_S = 0.0015  # the loop's timers are up to a millisecond late; the last bit is waited for by going round
SPARE_S = 0.02  # with this much time left the next bodies are made: traces have many requests at one moment
MAX_AHEAD = 64
MAX_WAIT_S = 1.0


class Client(Protocol):
    """Who asks."""

    def prepare(self, request: WorkRequest) -> bytes: ...

    async def ask(self, request: WorkRequest, content: bytes, start_s: float) -> RequestRecord: ...


class LoadLimits(msgspec.Struct, frozen=True):
    """warm_up_s: requests due before are answered but not counted. max_s: nothing is sent later."""

    warm_up_s: float = 0.0
    warm_up_requests: int = 0
    max_s: float = math.inf
    max_open: int = 2000


class LoadLoop:
    """One load. `on_record` is called as each request ends."""

    def __init__(
        self, client: Client, limits: LoadLimits, on_record: Callable[[RequestRecord], None] = lambda record: None
    ) -> None:
        self.num_open = 0
        self.start_s = 0.0  # reading of time.perf_counter()
        self._client = client
        self._limits = limits
        self._on_record = on_record
        self._stream: WorkStream = OpenStream(iter(()))
        self._has_more = True
        self._ahead: deque[tuple[WorkRequest, bytes]] = deque()  # due by the clock, with their bodies
        self._records: list[RequestRecord] = []
        self._caused: list[tuple[float, int, WorkRequest]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._fault: BaseException | None = None  # ours, of a task

    async def run(self, workload: Workload, rng: random.Random) -> list[RequestRecord]:
        """Until every request has ended; in order of number. Each ends by its client's deadline."""
        self._stream = stream = workload.start(rng)
        while self._look_ahead():
            pass
        self.start_s = time.perf_counter()
        try:
            while self._ahead or self._caused or self._tasks:
                if self._fault is not None:
                    raise self._fault
                is_caused = bool(self._caused) and not (self._ahead and self._ahead[0][0].due_s <= self._caused[0][0])
                request = self._caused[0][2] if is_caused else self._ahead[0][0] if self._ahead else None
                if request is None or request.due_s > self._limits.max_s:
                    self._has_more = False
                    self._ahead.clear()
                    self._caused.clear()
                    await self._wait_change(MAX_WAIT_S)
                    continue
                content = self._client.prepare(request) if is_caused else self._ahead[0][1]
                if not await self._reach(request.due_s):
                    continue
                if is_caused:
                    heapq.heappop(self._caused)
                else:
                    self._ahead.popleft()
                    if not self._ahead:
                        self._look_ahead()
                self._send(request, content, lambda r, now_s, ok: stream.after_end(r, now_s, is_whole=ok))
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._fault is not None:
            raise self._fault
        return sorted(self._records, key=lambda record: record.number)

    def _look_ahead(self) -> bool:
        """Prepare the body of one more; False when there is none, or enough are."""
        if not self._has_more or len(self._ahead) >= MAX_AHEAD:
            return False
        request = self._stream.next_request()
        self._has_more = request is not None
        if request is not None:
            self._ahead.append((request, self._client.prepare(request)))
        return self._has_more

    async def _reach(self, due_s: float) -> bool:
        """False when an end has caused a request that is due before this one. Spare time goes to what comes next."""
        while True:
            left_s = self.start_s + due_s - time.perf_counter()
            if self._caused and self._caused[0][0] < due_s:
                return False
            if left_s <= 0:
                return True
            if left_s <= SPIN_S or (left_s > SPARE_S and self._look_ahead()):
                await asyncio.sleep(0)
            else:
                await self._wait_change(left_s - SPIN_S)

    async def _wait_change(self, timeout_s: float) -> None:
        self._changed.clear()
        loop = asyncio.get_running_loop()
        timer = loop.call_later(timeout_s, self._changed.set)
        try:
            await self._changed.wait()
        finally:
            timer.cancel()

    def _send(
        self, request: WorkRequest, content: bytes, after_end: Callable[[WorkRequest, float, bool], WorkRequest | None]
    ) -> None:
        if self.num_open >= self._limits.max_open:
            detail = f"{self.num_open} requests are open: this client's limit"
            self._keep(self._unsent(request, detail))
            self._cause(after_end(request, request.due_s, False))
            return

        async def ask() -> None:
            try:
                record = await self._client.ask(request, content, self.start_s)
            finally:
                self.num_open -= 1
            self._keep(record)
            self._cause(after_end(request, time.perf_counter() - self.start_s, record.is_whole))

        self.num_open += 1
        task = asyncio.create_task(ask())
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._changed.set()
        if not task.cancelled():
            self._fault = self._fault or task.exception()

    def _unsent(self, request: WorkRequest, detail: str) -> RequestRecord:
        return RequestRecord(
            number=request.number,
            due_s=request.due_s,
            end_s=request.due_s,
            num_prompt_tokens=request.num_prompt_tokens,
            session=request.session,
            lapse=Lapse.NOT_SENT,
            detail=detail,
        )

    def _keep(self, record: RequestRecord) -> None:
        limits = self._limits
        if record.due_s < limits.warm_up_s or record.number < limits.warm_up_requests:
            record = msgspec.structs.replace(record, is_warm_up=True)
        self._records.append(record)
        self._on_record(record)

    def _cause(self, request: WorkRequest | None) -> None:
        if request is not None:
            heapq.heappush(self._caused, (request.due_s, request.number, request))
            self._changed.set()

    def check_invariants(self) -> None:
        assert 0 <= self.num_open <= self._limits.max_open
        assert len(self._ahead) <= MAX_AHEAD
        assert not self._caused or self._caused[0] == min(self._caused)

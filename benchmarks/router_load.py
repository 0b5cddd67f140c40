"""Clients of one router, in front of a worker that steps when it is told to; and what they measure.

paced    a step every 20 ms:  how late first tokens and each later one are
flat out the next step when the last one has been read by everybody: tokens/s per second of the router's CPU time
idle     streams that have had one token and wait: memory of the router
requests whole answers of one token, over connections that are kept
"""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from fake_worker import LIMIT_S, MODEL
from harness import percentile

PACE_S = 0.02
LEAVE_S = 0.5  # for a router to notice, before the next step

Figures = dict[str, float]


class Stepper(Protocol):
    """The worker behind the router. One step is one token for every stream that is open."""

    step_s: list[float]  # when each step was begun
    is_instant: bool  # answers each request with one token at once

    def forget(self) -> None:
        """Drop what was stamped so far."""

    def asked_s(self) -> list[float]:
        """When each open request came, in that order."""

    async def has_open(self, count: int) -> None: ...

    def step(self) -> None: ...


class Client(asyncio.Protocol):
    """One streamed completion. Token number k is stamped when the read that completes it returns."""

    def __init__(self, request: bytes, progress: "Progress") -> None:
        self.sent_s = 0.0
        self.token_s: list[float] = []
        self.transport: asyncio.Transport | None = None
        self._request = request
        self._progress = progress
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def ask(self) -> None:
        assert self.transport is not None
        self.sent_s = time.perf_counter()
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        data = self._tail + data
        num_tokens = data.count(b'"finish_reason":null')
        self._tail = data[data.rfind(b"}") + 1 :][-32:]
        self.token_s += [now_s] * num_tokens
        self._progress.add(num_tokens)


class Progress:
    """Tokens read by all clients; wakes whoever waits for a count."""

    def __init__(self) -> None:
        self._count = 0
        self._wanted = 0
        self._reached = asyncio.Event()

    def add(self, number: int) -> None:
        self._count += number
        if self._count >= self._wanted:
            self._reached.set()

    async def until(self, count: int) -> None:
        self._wanted = count
        self._reached.clear()
        if self._count < count:
            async with asyncio.timeout(LIMIT_S):
                await self._reached.wait()


def http_request(body: dict[str, object]) -> bytes:
    """Over a connection that is kept."""
    content = msgspec.json.encode({"model": MODEL, "prompt": "the quick brown fox", "temperature": 0, **body})
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


STREAMED = http_request({"max_tokens": 60_000, "stream": True, "ignore_eos": True})
WHOLE = http_request({"max_tokens": 1, "ignore_eos": True})


def cpu_s(pids: Sequence[int]) -> float:
    """Seconds of CPU time of these processes so far."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def resident_bytes(pids: Sequence[int]) -> int:
    """What these processes hold in memory."""
    total = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        total += int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) * 1024
    return total


class Bench:
    """A router, the worker behind it, and clients."""

    def __init__(self, worker: Stepper, pids: Sequence[int], port: int) -> None:
        """pids: all processes of the router. port: of its HTTP side, on loopback."""
        self.worker = worker
        self.pids = pids
        self.port = port

    @contextlib.asynccontextmanager
    async def streams(self, count: int) -> AsyncIterator[tuple[list[Client], Progress]]:
        """Connected clients that have not asked yet; all gone afterwards."""
        loop, progress = asyncio.get_running_loop(), Progress()
        self.worker.forget()
        clients: list[Client] = []
        try:
            for _ in range(count):
                _, client = await loop.create_connection(lambda: Client(STREAMED, progress), "127.0.0.1", self.port)
                clients.append(client)
            yield clients, progress
        finally:
            for client in clients:
                if client.transport is not None:
                    client.transport.abort()
            await self._all_gone()

    async def _all_gone(self) -> None:
        """Some routers look for their clients only when they have something for them: they are given it."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                self.worker.step()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LEAVE_S):
                        return await self.worker.has_open(0)

    async def paced(self, count: int, num_steps: int) -> Figures:
        """Seconds from request to worker and from worker to client for first tokens, and for each later one."""
        worker = self.worker
        async with self.streams(count) as (clients, progress):
            for client in clients:
                client.ask()
            await worker.has_open(count)
            asked = worker.asked_s()
            for number in range(num_steps):
                worker.step()
                await asyncio.sleep(PACE_S)
                await progress.until(count * (number + 1))
            # Sequences are told in the order of the requests, near enough: sums are compared, not pairs.
            inward = [start - client.sent_s for start, client in zip(asked, clients, strict=True)]
            first = [client.token_s[0] - worker.step_s[0] for client in clients]
            later = [
                seen - sent
                for client in clients
                for seen, sent in zip(client.token_s[1:], worker.step_s[1:], strict=True)
            ]
        ttft = [a + b for a, b in zip(inward, first, strict=True)]
        return percentiles("ttft", ttft) | percentiles("token", later)

    async def flat_out(self, count: int, num_tokens: int) -> Figures:
        """Tokens per second, of the clock and of the router's CPU time."""
        worker = self.worker
        async with self.streams(count) as (clients, progress):
            for client in clients:
                client.ask()
            await worker.has_open(count)
            num_steps = max(20, num_tokens // count)
            for warm in range(5):
                worker.step()
                await progress.until(count * (warm + 1))
            before, start = cpu_s(self.pids), time.perf_counter()
            for number in range(num_steps):
                worker.step()
                await progress.until(count * (5 + number))  # one step ahead of the slowest client
            await progress.until(count * (5 + num_steps))
            seconds, cpu = time.perf_counter() - start, cpu_s(self.pids) - before
        return {"tokens_per_s": num_steps * count / seconds, "tokens_per_cpu_s": num_steps * count / max(cpu, 0.01)}

    async def idle(self, count: int) -> Figures:
        """Memory of the router with this many streams open and waiting, and what they added to it."""
        before = resident_bytes(self.pids)
        async with self.streams(count) as (clients, progress):
            for client in clients:
                client.ask()
            await self.worker.has_open(count)
            self.worker.step()
            await progress.until(count)
            after = resident_bytes(self.pids)
        return {"idle_total_bytes": after, "idle_added_bytes": after - before}

    async def requests(self, num_connections: int, num_each: int) -> Figures:
        """Whole answers of one token over kept connections."""
        self.worker.is_instant = True

        async def live() -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            for _ in range(num_each):
                writer.write(WHOLE)
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                await reader.readexactly(length)
            writer.close()

        before, start = cpu_s(self.pids), time.perf_counter()
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(*(live() for _ in range(num_connections)))
        seconds, cpu = time.perf_counter() - start, cpu_s(self.pids) - before
        self.worker.is_instant = False
        total = num_connections * num_each
        return {"requests_per_s": total / seconds, "requests_per_cpu_s": total / max(cpu, 0.01)}


def percentiles(name: str, seconds: Sequence[float]) -> Figures:
    return {f"{name}_p50_s": percentile(seconds, 50), f"{name}_p99_s": percentile(seconds, 99)}

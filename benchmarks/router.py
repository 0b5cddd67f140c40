"""What the router adds: one router process between clients over HTTP and a fake worker over its control channel.

The worker here computes nothing: it sends one message per step with one token for every open sequence, and stamps it.
So a token's time from that stamp to the client's read is all the router's. The other side of every comparison is the
same worker asked directly: the same messages over the same kind of channel, without a router in between.

    paced    a step every 20 ms:  what the router adds to TTFT and to each token's time
    flat out the next step when the last one has been read by everybody: tokens/s per second of the router's CPU time
    idle     streams that have had one token and wait: memory of the router
    requests whole answers of one token, over connections that are kept

Worker and clients share one process. On a machine with few cores they compete with the router, which only makes the
router look slower.
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from disagg.channel.channel import Channel, dial
from disagg.channel.listening import listen
from disagg.core.ids import Incarnation, RequestId, SequenceId
from disagg.core.request import SamplingParams, SequenceSpec
from disagg.core.roles import Task
from disagg.modelfiles.tokenizer import load_tokenizer
from disagg.protocol.messages import Beat, StartSequence, WorkerToRouter
from disagg.router.config import decode_announcement
from disagg.testing.model_files import write_tiny_llama
from disagg.testing.processes import MarkedProcess
from fake_worker import LIMIT_S, MAX_CONTEXT, MODEL, TO_WORKER, FakeWorker
from harness import (
    MAX_FOREIGN_SHARE,
    cpu_use,
    foreign_share,
    heading,
    options,
    percentile,
    report_json,
    warn_of_others,
)

STREAMS = (1, 64, 512)
PACE_S = 0.02
TARGET_TOKENS_PER_CPU_S = 20_000
TARGET_ITL_MS = 2.0
TARGET_IDLE_MIB = 100

_TO_ROUTER: msgspec.msgpack.Decoder[WorkerToRouter] = msgspec.msgpack.Decoder(WorkerToRouter)


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


def http_request(body: dict[str, object], *, close: bool = True) -> bytes:
    content = msgspec.json.encode({"model": MODEL, "prompt": [3, 4, 5], "temperature": 0, **body})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
    return f"{head}{'Connection: close' if close else 'X-Keep: 1'}\r\n\r\n".encode() + content


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) * 1024


class Bench:
    """A router process, the fake worker at it, and clients."""

    def __init__(self, worker: FakeWorker, pid: int, port: int) -> None:
        self.worker = worker
        self.pid = pid
        self.port = port

    @contextlib.asynccontextmanager
    async def streams(self, count: int) -> AsyncIterator[tuple[list[Client], Progress]]:
        """Connected clients that have not asked yet; all gone afterwards."""
        request = http_request({"max_tokens": 60_000, "stream": True, "ignore_eos": True})
        loop, progress = asyncio.get_running_loop(), Progress()
        clients: list[Client] = []
        try:
            for _ in range(count):
                _, client = await loop.create_connection(lambda: Client(request, progress), "127.0.0.1", self.port)
                clients.append(client)
            yield clients, progress
        finally:
            for client in clients:
                if client.transport is not None:
                    client.transport.abort()
            await self.worker.has_open(0)

    async def paced(self, count: int, num_steps: int) -> dict[str, float]:
        """Seconds the router adds to first tokens and to each later one."""
        worker = self.worker
        worker.step_s, worker.started_s = [], {}
        async with self.streams(count) as (clients, progress):
            for client in clients:
                client.ask()
            await worker.has_open(count)
            asked = list(worker.started_s.values())
            for number in range(num_steps):
                worker.step()
                await asyncio.sleep(PACE_S)
                await progress.until(count * (number + 1))
            # Sequences are told in the order of the requests, near enough: sums are compared, not pairs.
            inward = [start - client.sent_s for start, client in zip(sorted(asked), clients, strict=True)]
            first = [client.token_s[0] - worker.step_s[0] for client in clients]
            later = [
                seen - sent
                for client in clients
                for seen, sent in zip(client.token_s[1:], worker.step_s[1:], strict=True)
            ]
        ttft = [a + b for a, b in zip(inward, first, strict=True)]
        return _figures("ttft", ttft) | _figures("token", later)

    async def flat_out(self, count: int, num_tokens: int) -> dict[str, float]:
        """Tokens per second, of the clock and of the router's CPU time."""
        worker = self.worker
        worker.step_s = []
        async with self.streams(count) as (clients, progress):
            for client in clients:
                client.ask()
            await worker.has_open(count)
            num_steps = max(20, num_tokens // count)
            for warm in range(5):
                worker.step()
                await progress.until(count * (warm + 1))
            before, start = cpu_s(self.pid), time.perf_counter()
            for number in range(num_steps):
                worker.step()
                await progress.until(count * (5 + number))  # one step ahead of the slowest client
            await progress.until(count * (5 + num_steps))
            seconds, cpu = time.perf_counter() - start, cpu_s(self.pid) - before
        return {"tokens_per_s": num_steps * count / seconds, "tokens_per_cpu_s": num_steps * count / max(cpu, 0.01)}

    async def idle(self, count: int) -> dict[str, float]:
        """Memory of the router with this many streams open and waiting, and what they added to it."""
        worker = self.worker
        worker.step_s = []
        before = resident_bytes(self.pid)
        async with self.streams(count) as (clients, progress):
            for client in clients:
                client.ask()
            await worker.has_open(count)
            worker.step()
            await progress.until(count)
            after = resident_bytes(self.pid)
        return {"idle_total_bytes": after, "idle_added_bytes": after - before}

    async def requests(self, num_connections: int, num_each: int) -> dict[str, float]:
        """Whole answers of one token over kept connections."""
        self.worker.is_instant = True
        request = http_request({"max_tokens": 1, "ignore_eos": True}, close=False)

        async def live() -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            for _ in range(num_each):
                writer.write(request)
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                await reader.readexactly(length)
            writer.close()

        before, start = cpu_s(self.pid), time.perf_counter()
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(*(live() for _ in range(num_connections)))
        seconds, cpu = time.perf_counter() - start, cpu_s(self.pid) - before
        self.worker.is_instant = False
        total = num_connections * num_each
        return {"requests_per_s": total / seconds, "requests_per_cpu_s": total / max(cpu, 0.01)}


async def direct(worker: FakeWorker, count: int, num_steps: int) -> dict[str, float]:
    """The same worker asked over a channel of its own: start to start, step to tokens in hand."""
    started: list[float] = []
    seen: list[float] = []
    here: asyncio.Future[Channel[WorkerToRouter]] = asyncio.get_running_loop().create_future()

    async def welcome(channel: Channel[WorkerToRouter]) -> None:
        here.set_result(channel)

    server = await listen("127.0.0.1", 0, _TO_ROUTER, welcome)
    worker.attach(await dial(server.address, TO_WORKER, timeout_s=LIMIT_S))
    channel = await here
    got = asyncio.Event()

    def take(message: WorkerToRouter) -> None:
        if not isinstance(message, Beat):
            seen.append(time.perf_counter())
            got.set()

    channel.start(beat_interval_s=2.5, on_message=take, on_lost=print)
    worker.step_s, worker.started_s, worker.open = [], {}, {}
    for number in range(count):
        started.append(time.perf_counter())
        spec = SequenceSpec(SequenceId(RequestId(Incarnation(2), number), 0), (3, 4, 5), SamplingParams(60_000))
        channel.send(StartSequence(spec, Task.WHOLE, 1))
    await worker.has_open(count)
    inward = [start - sent for start, sent in zip(worker.started_s.values(), started, strict=True)]
    for _ in range(num_steps):
        got.clear()
        worker.step()
        async with asyncio.timeout(LIMIT_S):
            await got.wait()
        await asyncio.sleep(PACE_S)
    outward = [a - b for a, b in zip(seen, worker.step_s, strict=True)]
    await channel.close()
    await worker.close()
    server.close()
    await server.wait_closed()
    return _figures("ttft", [each + outward[0] for each in inward]) | _figures("token", outward[1:])


def _figures(name: str, seconds: Sequence[float]) -> dict[str, float]:
    return {f"{name}_p50_s": percentile(seconds, 50), f"{name}_p99_s": percentile(seconds, 99)}


async def measure(args: argparse.Namespace, folder: Path, router: MarkedProcess) -> dict[str, Any]:
    announced = decode_announcement(await asyncio.to_thread(router.wait_line, r'^\{"http"', LIMIT_S))
    assert announced is not None
    tokenizer = load_tokenizer(folder)
    words = tokenizer.encode(" the quick brown fox jumps over the lazy dog once upon a time")
    worker, other = FakeWorker(words, tokenizer.digest), FakeWorker(words, tokenizer.digest)
    await worker.register(announced.control)
    bench = Bench(worker, router.pid, int(announced.http.rpartition(":")[2]))
    before = cpu_use()
    steps, tokens = (20, 4_000) if args.quick else (150, 60_000)
    figures: dict[str, Any] = {"idle": await bench.idle(512)}
    await bench.flat_out(16, 2_000)
    for count in STREAMS:
        rounds: list[tuple[dict[str, float], dict[str, float], dict[str, float]]] = []
        for _ in range(args.rounds):
            rounds.append(
                (
                    await bench.paced(count, steps),
                    await direct(other, count, steps),
                    await bench.flat_out(count, tokens if count > 1 else tokens // 10),
                )
            )
        through, straight, fast = (_medians([each[side] for each in rounds]) for side in range(3))
        added = {name: through[name] - straight[name] for name in through}
        figures[str(count)] = {"router": through, "direct": straight, "added": added, "flat_out": fast}
    figures["requests"] = await bench.requests(64, 10 if args.quick else 50)
    await worker.close()
    figures["foreign_share"] = foreign_share(before, cpu_use())
    return figures


def _medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def show(figures: dict[str, Any]) -> None:
    print("streams  side     TTFT p50   p99 ms   token p50   p99 ms   tokens/s   per CPU-s")
    for count in STREAMS:
        found = figures[str(count)]
        for side in ("router", "direct", "added"):
            times = found[side]
            names = ("ttft_p50_s", "ttft_p99_s", "token_p50_s", "token_p99_s")
            cells = "  ".join(f"{times[name] * 1e3:8.2f}" for name in names)
            speed = found["flat_out"] if side == "router" else None
            more = "" if speed is None else f"  {speed['tokens_per_s']:9.0f}  {speed['tokens_per_cpu_s']:10.0f}"
            print(f"{count:7d}  {side:6s}  {cells}{more}")
    idle, whole = figures["idle"], figures["requests"]
    print(f"requests/s {whole['requests_per_s']:.0f}, per CPU-second {whole['requests_per_cpu_s']:.0f}")
    whole_mib, added_mib = (idle[name] / 2**20 for name in ("idle_total_bytes", "idle_added_bytes"))
    print(f"512 idle streams: {whole_mib:.0f} MiB in all, {added_mib:.0f} of them added")
    warn_of_others(figures["foreign_share"])
    is_quiet = figures["foreign_share"] <= MAX_FOREIGN_SHARE
    speed = figures["64"]["flat_out"]["tokens_per_cpu_s"]
    late_ms = figures["64"]["added"]["token_p99_s"] * 1e3
    text = f"tokens per CPU-second at 64 streams: {speed:.0f} (target: {TARGET_TOKENS_PER_CPU_S} or more)"
    _verdict(text, speed >= TARGET_TOKENS_PER_CPU_S, is_quiet)
    text = f"added to a token's p99 at 64 streams: {late_ms:.2f} ms (target: {TARGET_ITL_MS:g} or less)"
    _verdict(text, late_ms <= TARGET_ITL_MS, is_quiet)
    text = f"memory added by 512 idle streams: {added_mib:.0f} MiB (target: less than {TARGET_IDLE_MIB})"
    _verdict(text, added_mib < TARGET_IDLE_MIB, True)


def _verdict(text: str, is_met: bool, is_quiet: bool) -> None:
    """A target that is met beside busy neighbours is met; one that is missed there says nothing."""
    print(f"{text}: {'met' if is_met else 'MISSED' if is_quiet else 'NO VERDICT'}")


def main() -> None:
    parser = options(__doc__, rounds=3)
    args = parser.parse_args()
    args.model, args.rounds = MODEL, 1 if args.quick else args.rounds
    print(heading(args), "router, worker and clients on loopback")
    with tempfile.TemporaryDirectory(prefix="disagg-bench-") as name:
        folder = write_tiny_llama(Path(name), seed=args.seed, max_context=MAX_CONTEXT)
        command = ("router", "--model", f"{MODEL}={folder}", "--port", "0", "--control-port", "0")
        with MarkedProcess((*command, "--max-open-requests", "2048")) as router:
            figures = asyncio.run(measure(args, folder, router))
    show(figures)
    report_json("router", args, figures)


if __name__ == "__main__":
    main()

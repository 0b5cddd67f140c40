"""What it costs to watch a cluster: scrapes and `disagg top` beside nobody looking, under one steady load.

usage: python benchmarks/observation_cost.py [--quick]

One router process; 10 workers that compute nothing, report their state four times a second with every counter they
could have, and write 50 answers a second. The router keeps no timelines, so that those of all requests are a side of
their own: each request then asks for its timeline, which is noted, laid out and written. Under that load the sides take
turns, in an order that changes with the rounds. The cost of a side is CPU time of the router beyond that of the side
where nobody looks, in the same round, plus that of the watching process where it is ours. Beside it stands what the
parts cost one by one, measured apart from the load: scrapes back to back, and batches of requests with and without
timelines in turn while no worker reports. Shares are of one core.
"""

import argparse
import asyncio
import contextlib
import os
import pty
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from disagg.bench.http_client import HttpClient
from disagg.channel.lifeline import ParentEnd
from disagg.modelfiles.tokenizer import load_tokenizer
from disagg.router.config import decode_announcement
from disagg.router.timing import TIMELINE_HEADER
from disagg.testing.model_files import write_tiny_llama
from disagg.testing.processes import MarkedProcess
from fake_fleet import REPORT_S, Fleet
from fake_worker import LIMIT_S, MAX_CONTEXT, MODEL, FakeWorker
from harness import cpu_use, foreign_share, heading, options, report_json, until, verdict, warn_of_others

NUM_WORKERS = 10
RATE = 50.0  # requests/s
ANSWER_TOKENS = 16
TOP_INTERVAL_S = 2.0  # its default
NUM_SCRAPES = 100  # back to back
NUM_BATCHES, BATCH = 40, 16  # requests at once, about as many as under the load
TARGET = 0.01  # of a core
ALL = "scrape every 5 s, top and timelines, from their parts, together"


def cpu_s(pid: int) -> float:
    """CPU seconds of a process, to the nanosecond: those of its threads that live."""
    total = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            total += int((thread / "schedstat").read_text().split()[0])
    return total / 1e9


class Load:
    """RATE answers a second, evenly, whatever becomes of the earlier ones."""

    def __init__(self, client: HttpClient) -> None:
        self.num_failed = 0
        self.client = client  # whose headers every request carries
        self._body = msgspec.json.encode(
            {"model": MODEL, "prompt": [3, 4, 5], "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "stream": True}
        )
        self._open: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until cancelled."""
        due_s = time.perf_counter()
        while True:
            task = asyncio.create_task(self.ask(self.client))
            self._open.add(task)
            task.add_done_callback(self._open.discard)
            due_s += 1 / RATE
            await until(due_s)

    async def drain(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(*self._open)

    async def ask(self, client: HttpClient) -> None:
        try:
            self.num_failed += await client.post("/v1/completions", self._body, lambda now_s, data: None) != 200
        except OSError:
            self.num_failed += 1


class Top:
    """`disagg top` on a terminal of its own, stopped while nobody is to look."""

    def __init__(self, url: str) -> None:
        self._terminal, inside = pty.openpty()
        command = [sys.executable, "-m", "disagg", "top", "--url", url, "--interval-s", str(TOP_INTERVAL_S)]
        self._lifeline = ParentEnd()  # it goes with us, however we go
        environment = {**os.environ, **self._lifeline.environment()}
        environment |= {"TERM": "xterm-256color", "COLUMNS": "200", "LINES": "40"}
        self._process = subprocess.Popen(
            command, stdin=inside, stdout=inside, stderr=inside, env=environment, pass_fds=(self._lifeline.fd,)
        )
        os.close(inside)
        self.num_bytes = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait_drawn(self) -> None:
        """Until it has drawn a few pictures: imports and first requests are no part of the cost."""
        async with asyncio.timeout(LIMIT_S):
            while self.num_bytes < 4000 and self._process.poll() is None:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        await asyncio.sleep(TOP_INTERVAL_S)
        if self._process.poll() is not None:
            raise SystemExit(f"disagg top ended with {self._process.returncode}")

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> int:
        """Its exit code once told to end."""
        self.resume()
        os.kill(self.pid, signal.SIGTERM)  # a shell that runs this in the background has its children ignore SIGINT
        try:
            return self._process.wait(10.0)
        finally:
            self._process.kill()
            self._lifeline.close()
            os.close(self._terminal)

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while data := os.read(self._terminal, 1 << 16):
                self.num_bytes += len(data)


class Watched:
    """What the sides have to do with."""

    def __init__(
        self, router_pid: int, fleet: Fleet, client: HttpClient, timed: HttpClient, load: Load, top: Top
    ) -> None:
        self.router_pid = router_pid
        self.fleet = fleet
        self.load = load  # a side may ask for more with each request
        self.client = client
        self.timed = timed  # whose requests ask for their timelines
        self.top = top

    async def scrape_every(self, interval_s: float, window_s: float) -> None:
        due_s = time.perf_counter()
        end_s = due_s + window_s
        while due_s < end_s:
            await until(due_s)
            await self.client.get("/metrics")
            due_s += interval_s
        await until(end_s)

    async def with_timelines(self, window_s: float) -> None:
        """Every request asks for its own."""
        plain, self.load.client = self.load.client, self.timed
        await asyncio.sleep(window_s)
        self.load.client = plain

    async def with_top(self, window_s: float) -> None:
        self.top.resume()
        await asyncio.sleep(window_s)
        self.top.pause()

    def cpu_s(self) -> float:
        """Of the router and of what is ours and watches."""
        return cpu_s(self.router_pid) + cpu_s(self.top.pid)


# A side is what happens during its window, of so many seconds. Another way of watching is one more of them.
Side = Callable[[Watched, float], Awaitable[None]]
NOBODY, SCRAPES, TOP, TIMELINES = "nobody looks", "scrape every 5 s", "top every 2 s", "timelines of all"
SIDES: dict[str, Side] = {
    NOBODY: lambda watched, window_s: asyncio.sleep(window_s),
    SCRAPES: lambda watched, window_s: watched.scrape_every(5.0, window_s),
    "scrape every 1 s": lambda watched, window_s: watched.scrape_every(1.0, window_s),
    TOP: lambda watched, window_s: watched.with_top(window_s),
    TIMELINES: lambda watched, window_s: watched.with_timelines(window_s),
}


async def rounds_of(watched: Watched, num_rounds: int, window_s: float) -> list[dict[str, float]]:
    """Side -> CPU share of a core, for each round."""
    found: list[dict[str, float]] = []
    names = list(SIDES)
    for number in range(num_rounds):
        turn = number % len(names)
        shares: dict[str, float] = {}
        for name in names[turn:] + names[:turn]:
            before, start_s = watched.cpu_s(), time.perf_counter()
            await SIDES[name](watched, window_s)
            shares[name] = (watched.cpu_s() - before) / (time.perf_counter() - start_s)
        found.append(shares)
    return found


async def apart(watched: Watched) -> dict[str, float]:
    """CPU milliseconds of the router for a scrape, a look at /cluster and a timeline, and of top for one picture."""
    found: dict[str, float] = {}
    for path in ("/metrics", "/cluster"):
        before = cpu_s(watched.router_pid)
        for _ in range(NUM_SCRAPES):
            _, body = await watched.client.get(path)
        found[f"{path}_ms"] = 1e3 * (cpu_s(watched.router_pid) - before) / NUM_SCRAPES
        found[f"{path}_bytes"] = len(body)
    before, window_s = cpu_s(watched.top.pid), 5 * TOP_INTERVAL_S
    await watched.with_top(window_s)
    found["top_ms"] = 1e3 * (cpu_s(watched.top.pid) - before) * TOP_INTERVAL_S / window_s
    found["timeline_ms"] = await timeline_ms(watched)
    return found


async def timeline_ms(watched: Watched) -> float:
    """CPU milliseconds of the router that a request's timeline adds to it."""
    added: list[float] = []
    watched.fleet.is_reporting = False
    for number in range(NUM_BATCHES):
        cost: dict[bool, float] = {}
        for is_timed in (False, True) if number % 2 == 0 else (True, False):
            client, before = watched.timed if is_timed else watched.client, cpu_s(watched.router_pid)
            await asyncio.gather(*(watched.load.ask(client) for _ in range(BATCH)))
            cost[is_timed] = cpu_s(watched.router_pid) - before
        added.append(cost[True] - cost[False])
    watched.fleet.is_reporting = True
    return 1e3 * statistics.median(added) / BATCH


def cost_apart(each: dict[str, float]) -> dict[str, float]:
    """Shares of a core, by side, from what the parts cost."""
    names = ("/metrics_ms", "/cluster_ms", "top_ms", "timeline_ms")
    scrape_s, cluster_s, top_s, timeline_s = (each[name] / 1e3 for name in names)
    return {
        SCRAPES: scrape_s / 5.0,
        "scrape every 1 s": scrape_s,
        TOP: (scrape_s + cluster_s + top_s) / TOP_INTERVAL_S,
        TIMELINES: timeline_s * RATE,
    }


async def measure(args: argparse.Namespace, folder: Path, router: MarkedProcess) -> dict[str, Any]:
    announced = decode_announcement(await asyncio.to_thread(router.wait_line, r'^\{"http"', LIMIT_S))
    assert announced is not None
    url, tokenizer = f"http://{announced.http}", load_tokenizer(folder)
    words = tokenizer.encode(" the quick brown fox jumps over the lazy dog once upon a time")
    workers = [FakeWorker(words, tokenizer.digest, f"mixed-{number}") for number in range(NUM_WORKERS)]
    for worker in workers:
        await worker.register(announced.control)
    fleet = Fleet(workers)
    fleet.start()
    async with HttpClient(url) as client, HttpClient(url, {TIMELINE_HEADER: "1"}) as timed:
        with watching(url) as top:
            load = Load(client)
            watched = Watched(router.pid, fleet, client, timed, load, top)
            await top.wait_drawn()
            top.pause()
            await asyncio.sleep(2 * REPORT_S)
            parts = await apart(watched)
            loading = asyncio.create_task(load.run())
            await asyncio.sleep(1.0)
            before = cpu_use()
            shares = await rounds_of(watched, args.rounds, 2.5 if args.quick else 10.0)
            foreign = foreign_share(before, cpu_use())
            loading.cancel()
            await load.drain()
    await fleet.stop()
    apart_costs = cost_apart(parts)
    costs = {name: statistics.median(each[name] - each[NOBODY] for each in shares) for name in SIDES if name != NOBODY}
    return {
        "parts": parts,
        "cost_apart": apart_costs,
        "cost_in_turns": costs,
        "cost_of_all": apart_costs[SCRAPES] + apart_costs[TOP] + apart_costs[TIMELINES],
        "nobody_looks": statistics.median(each[NOBODY] for each in shares),
        "num_failed": load.num_failed,
        "foreign_share": foreign,
    }


@contextlib.contextmanager
def watching(url: str) -> Iterator[Top]:
    top = Top(url)
    try:
        yield top
    finally:
        code = top.close()
    if code != 0:
        raise SystemExit(f"disagg top ended with {code} when it was told to")


def show(figures: dict[str, Any]) -> None:
    parts = figures["parts"]
    print(f"router under the load, nobody looks: {100 * figures['nobody_looks']:.1f} % of a core")
    for path in ("/metrics", "/cluster"):
        print(f"{path}: {parts[f'{path}_bytes']} bytes, {parts[f'{path}_ms']:.2f} ms of the router")
    print(f"one picture of top: {parts['top_ms']:.1f} ms of its own")
    print(f"the timeline of one request: {1e3 * parts['timeline_ms']:.0f} us of the router")
    print("side              in turns under load    from its parts   (% of a core)")
    for name, cost in figures["cost_in_turns"].items():
        print(f"{name:16s}  {100 * cost:19.2f}  {100 * figures['cost_apart'][name]:16.2f}")
    warn_of_others(figures["foreign_share"])
    if figures["num_failed"]:
        print(f"{figures['num_failed']} requests failed: the figures mean little")
    for name, cost in figures["cost_apart"].items():
        print(verdict(f"{name}, share of a core from its parts", cost, TARGET, figures["foreign_share"]))
    print(verdict(ALL, figures["cost_of_all"], TARGET, figures["foreign_share"]))


def main() -> None:
    parser = options(__doc__, rounds=4)
    args = parser.parse_args()
    args.model, args.rounds = MODEL, 1 if args.quick else args.rounds
    print(heading(args), f"{NUM_WORKERS} fake workers, {RATE:g} requests/s of {ANSWER_TOKENS} tokens")
    with tempfile.TemporaryDirectory(prefix="disagg-bench-") as name:
        folder = write_tiny_llama(Path(name), seed=args.seed, max_context=MAX_CONTEXT)
        command = (
            "router",
            "--model",
            f"{MODEL}={folder}",
            "--port",
            "0",
            "--control-port",
            "0",
            "--keep-timelines",
            "0",
        )
        with MarkedProcess(command) as router:
            figures = asyncio.run(measure(args, folder, router))
    show(figures)
    report_json("observation_cost", args, figures)


if __name__ == "__main__":
    main()

"""What the benchmarks of the served system share: servers, a streaming client that stamps tokens, prompts, figures.

Prompts are token ids: plain words drawn by a seed, so no two share a prefix, ending in a short cycle of words that the
model goes on with. So every token of an answer has text of its own, and the client sees each one when it is sent.
"""

import argparse
import asyncio
import contextlib
import functools
import itertools
import os
import platform
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, Self
from urllib.parse import urlsplit

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from disagg.cluster.local import PROGRAM
from disagg.modelfiles.config import ModelConfig, read_config
from disagg.modelfiles.fetch import resolve_model, served_name
from disagg.modelfiles.tokenizer import load_tokenizer
from disagg.testing.processes import Serve, wait_until

READY_TIMEOUT_S = 180.0
IDLE_TIMEOUT_S = 30.0
CYCLE_WORDS = 16
CYCLE_REPEATS = 4

Metrics = Mapping[tuple[str, str, str], float]  # (name, worker or "", own label or "") -> value


# ---- servers


@contextlib.contextmanager
def serving(model: str, *pools: str, program: Sequence[str] = PROGRAM) -> Iterator[Serve]:
    """`disagg serve MODEL POOLS...` on a free port, ready; gone afterwards whatever happened."""
    with Serve((model, *pools), ready_timeout_s=READY_TIMEOUT_S, program=program) as server:
        yield server


def cores_of(server: Serve, worker_id: str) -> tuple[int, ...]:
    """Cores on which the kernel lets this worker run."""
    return tuple(sorted(os.sched_getaffinity(server.pid_of(worker_id))))


def threads_of(server: Serve, worker_id: str) -> int:
    """Threads the worker was told to compute with."""
    command = server.family()[server.pid_of(worker_id)]
    found = re.search(r"--num-threads (\d+)", command)
    return int(found[1]) if found else len(cores_of(server, worker_id))


def check_pinned(server: Serve, worker_ids: Sequence[str]) -> str:
    """One line on cores and threads. Raises SystemExit when two workers share a core: no fair figures come of that."""
    cores = {name: cores_of(server, name) for name in worker_ids}
    if len({core for each in cores.values() for core in each}) < sum(map(len, cores.values())):
        raise SystemExit(f"the workers share cores {cores}: give this benchmark at least {len(cores)} cores")
    return ", ".join(f"{name} on core {_listed(cores[name])} x {threads_of(server, name)} threads" for name in cores)


class Server(Protocol):
    """Whatever runs behind it."""

    url: str  # "http://127.0.0.1:port"


def scrape(server: Server) -> Metrics:
    """Every counter and gauge of the router and, through it, of the workers."""
    text = httpx.get(f"{server.url}/metrics", timeout=10.0, trust_env=False).text
    found: dict[tuple[str, str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            worker = labels.pop("worker", "")
            own = [value for label, value in labels.items() if label not in ("role", "model")]
            found[sample.name, worker, own[0] if own else ""] = sample.value
    return found


async def wait_idle(server: Server) -> None:
    """Until the router has no open request. Raises InternalFault when it goes on having one."""

    def is_idle() -> bool:
        view = httpx.get(f"{server.url}/cluster", timeout=10.0, trust_env=False).json()
        return int(view["router"]["num_open_requests"]) == 0

    await asyncio.to_thread(wait_until, is_idle, IDLE_TIMEOUT_S, f"the end of all requests at {server.url}")


# ---- who else is here

MAX_FOREIGN_SHARE = 0.03  # of all cores; above this, figures say more of the neighbours than of us


class CpuUse(msgspec.Struct, frozen=True):
    """CPU seconds so far, of all cores together."""

    at_s: float
    ours: float  # this process and all it started, also what has ended and was waited for
    busy: float  # everybody, and what the hypervisor gave to others


def cpu_use() -> CpuUse:
    """From /proc; where there is none, nobody else is seen."""
    at_s = time.perf_counter()
    if not os.path.exists("/proc/stat"):
        return CpuUse(at_s, 0.0, 0.0)
    tick_s = 1.0 / os.sysconf("SC_CLK_TCK")
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for pid in (int(name) for name in os.listdir("/proc") if name.isdecimal()):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
            parents[pid], ticks[pid] = int(fields[1]), sum(map(int, fields[11:15]))
    ours, found = 0, [os.getpid()]
    while found:
        pid = found.pop()
        ours += ticks.get(pid, 0)
        found += [child for child, parent in parents.items() if parent == pid]
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, file.readline().split()[1:9])
    return CpuUse(at_s, ours * tick_s, (user + nice + system + irq + softirq + steal) * tick_s)


def foreign_share(before: CpuUse, after: CpuUse) -> float:
    """Part of all cores' time between two readings that went to processes not of this benchmark."""
    foreign_s = (after.busy - before.busy) - (after.ours - before.ours)
    return max(0.0, foreign_s / (after.at_s - before.at_s) / (os.cpu_count() or 1))


def warn_of_others(share: float) -> None:
    """One line when the machine was not quiet."""
    if share > MAX_FOREIGN_SHARE:
        print(f"NOT A QUIET MACHINE: others used {100 * share:.0f} % of the cores; the figures mean little")


# ---- client


class Usage(msgspec.Struct, frozen=True):
    completion_tokens: int
    prompt_tokens_details: dict[str, int]


class _Choice(msgspec.Struct, frozen=True):
    text: str


class _Chunk(msgspec.Struct, frozen=True):
    choices: list[_Choice]
    usage: Usage | None = None


class TokenStream(asyncio.Protocol):
    """One streamed completion over its own connection. sent_s and token_s are readings of time.perf_counter().

    The server writes one event per token; an event is stamped when the read that completes it returns, and is decoded
    only after the end. Use `open()`.
    """

    def __init__(self, request: bytes) -> None:
        self.sent_s = 0.0
        self.token_s: list[float] = []
        self.is_over = asyncio.get_running_loop().create_future()  # raises ConnectionError for a broken answer
        self._request = request
        self._rest = b""
        self._events: list[bytes] = []
        self._awaited: list[tuple[int, asyncio.Future[None]]] = []
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def open(cls, url: str, body: Mapping[str, object]) -> Self:
        """Connect, then send: the connection's set-up is not part of any time."""
        address = urlsplit(url)
        host, port = address.hostname or "127.0.0.1", address.port or 80
        content = msgspec.json.encode(body)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(content)}\r\nConnection: close\r\n\r\n".encode() + content
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(10.0):
            _, stream = await loop.create_connection(lambda: cls(request), host, port)
        return stream

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.sent_s = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            # The chunk that carries the finish reason and the one that carries usage have no text.
            if b'"text":"' in event and b'"text":""' not in event:
                self.token_s.append(now_s)
            self._events.append(event)
        for awaited, reached in self._awaited:
            if len(self.token_s) >= awaited and not reached.done():
                reached.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        is_whole = any(event.endswith(b"data: [DONE]") for event in self._events[-2:])
        failure = ConnectionError(f"the answer broke off ({error}): {(b''.join(self._events) + self._rest)[-600:]!r}")
        for future in (self.is_over, *(reached for _, reached in self._awaited)):
            if future.done():
                continue
            if is_whole or self._transport is None:
                future.set_result(None)
            else:
                future.set_exception(failure)

    async def reached(self, num_tokens: int, timeout_s: float) -> None:
        """Until that many tokens have come, or the answer is over. Raises TimeoutError, ConnectionError."""
        if len(self.token_s) < num_tokens and not self.is_over.done():
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._awaited.append((num_tokens, future))
            await asyncio.wait_for(future, timeout_s)

    async def finish(self, timeout_s: float) -> None:
        """Until the answer is over. Raises TimeoutError, ConnectionError."""
        try:
            await asyncio.wait_for(self.is_over, timeout_s)
        finally:
            self.abort()

    def abort(self) -> None:
        """Hang up; the router takes the request back. Idempotent."""
        if self._transport is not None:
            transport, self._transport = self._transport, None
            transport.abort()

    @property
    def text(self) -> str:
        return "".join(choice.text for chunk in self._chunks() for choice in chunk.choices)

    @property
    def usage(self) -> Usage:
        """What the server counted. Raises LookupError for an answer that is not over."""
        found = [chunk.usage for chunk in self._chunks() if chunk.usage is not None]
        if not found:
            raise LookupError("this answer has no usage: it did not end, or the request did not ask for it")
        return found[0]

    def _chunks(self) -> Iterator[_Chunk]:
        for event in self._events:
            payload = event.partition(b"data: ")[2]
            if payload and payload != b"[DONE]":
                yield msgspec.json.decode(payload, type=_Chunk)


class Writer:
    """One client that asks again as soon as its answer is over."""

    def __init__(self, url: str, body: Mapping[str, object], answer_timeout_s: float) -> None:
        self.streams: list[TokenStream] = []
        self._url = url
        self._body = body
        self._answer_timeout_s = answer_timeout_s

    async def start(self, num_tokens: int) -> None:
        """Ask for the first time; returns when that many tokens have come."""
        self.streams.append(await TokenStream.open(self._url, self._body))
        await self.streams[0].reached(num_tokens, self._answer_timeout_s)

    async def go_on(self) -> None:
        """Until cancelled. Raises ConnectionError, TimeoutError when an answer fails."""
        while True:
            await self.streams[-1].finish(self._answer_timeout_s)
            self.streams.append(await TokenStream.open(self._url, self._body))

    def stop(self) -> None:
        for stream in self.streams:
            stream.abort()

    def gaps(self, start_s: float, stop_s: float) -> Iterator[tuple[float, float]]:
        """(begin, end) of every gap that ends in the window."""
        for stream in self.streams:
            for begin_s, end_s in itertools.pairwise(stream.token_s):
                if start_s < end_s <= stop_s:
                    yield begin_s, end_s


async def until(at_s: float) -> None:
    """Until time.perf_counter() shows at_s."""
    await asyncio.sleep(max(0.0, at_s - time.perf_counter()))


# ---- prompts


class Prompts:
    """Token-id prompts and request bodies for one model."""

    def __init__(self, model: str) -> None:
        path = resolve_model(model, report=print)
        tokenizer = load_tokenizer(path)
        self.config: ModelConfig = read_config(path)
        self._model = served_name(model)
        word = re.compile(rb" [a-z]{3,10}")
        self._words = [i for i in range(tokenizer.vocab_size) if word.fullmatch(tokenizer.token_bytes(i))]
        if len(self._words) < 1000:
            raise SystemExit(f"{model}: {len(self._words)} plain words in its vocabulary, the prompts need 1000")

    def body(self, rng: random.Random, num_tokens: int, max_tokens: int) -> dict[str, object]:
        """A greedy streamed completion that writes exactly max_tokens tokens."""
        cycle = rng.sample(self._words, CYCLE_WORDS) * CYCLE_REPEATS
        ids = [*(rng.choice(self._words) for _ in range(num_tokens - len(cycle))), *cycle]
        return {
            "model": self._model,
            "prompt": ids[-num_tokens:],
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


# ---- figures


def percentile(values: Sequence[float], percent: float) -> float:
    """By linear interpolation; nan of nothing."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100.0
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def verdict(what: str, ratio: float, target: float, foreign: float) -> str:
    """One line. A ratio that is not a number has not met its target; a machine that was not quiet gives no verdict."""
    word = "met" if ratio <= target else "MISSED"
    return f"{what}: {ratio:.3f} (target <= {target:.2f}): {word if foreign <= MAX_FOREIGN_SHARE else 'NO VERDICT'}"


def hardware() -> str:
    name = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {os.cpu_count()} cores, {platform.system()} {platform.release()}"


@functools.cache
def commit() -> str:
    """Of the files as they were at the first call; marked when they are not all committed."""
    here = os.path.dirname(os.path.abspath(__file__))
    answers = [
        subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=False).stdout.strip()
        for words in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
    ]
    return (answers[0] or "none") + ("+changes" if answers[1] else "")


def options(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """Flags that all benchmarks of the served system have. Also: SIGTERM ends in order, with all that was started."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--quick", action="store_true", help="one short round: shows that it works, not how fast")
    parser.add_argument("--json", metavar="PATH", help="write the last line's JSON there too")
    return parser


def heading(args: argparse.Namespace) -> str:
    """The first lines of every benchmark."""
    return f"hardware: {hardware()}\nseed: {args.seed}  commit: {commit()}  rounds: {args.rounds},"


def report_json(name: str, args: argparse.Namespace, figures: Mapping[str, Any]) -> None:
    """The last line of every benchmark."""
    line = msgspec.json.encode(
        {
            "benchmark": name,
            "hardware": hardware(),
            "commit": commit(),
            "model": args.model,
            "seed": args.seed,
            "rounds": args.rounds,
            "quick": args.quick,
            **figures,
        }
    ).decode()
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            file.write(line + "\n")
    print(line, flush=True)


def _listed(cores: Sequence[int]) -> str:
    return ",".join(map(str, cores))

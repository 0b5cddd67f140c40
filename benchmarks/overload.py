"""Does throughput come back after an overload, and is everybody told the truth meanwhile?

One prefill and one decode worker with a small KV pool; prompts of 64 to 256 tokens, answers of 32 to 96.

  standard   as many clients as saturate it, each asks again when its answer is over
  overload   requests at 4 times the rate that standard reached, whatever becomes of them; of these clients 40 % leave
             after 5 s, 30 % after 20 s, the others stay; who is turned away does not ask again
  recovery   the clients of standard again, at once; those of the overload that are still waiting stay. Who is turned
             away asks again when Retry-After says so

Throughput is pieces of text per second as they reach clients, of all clients together: one for each output token, but
for tokens that are no whole text of their own. It is back when a window of 10 s
carries 95 % of standard; the time is that from the end of the overload to the begin of the first such window.

usage: python benchmarks/overload.py [--quick] [--model smollm2|tiny|PATH] [--seed N] [--json PATH]
"""

import argparse
import asyncio
import contextlib
import os
import random
import signal
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

import harness
from disagg.modelfiles.fetch import resolve_model, served_name
from disagg.modelfiles.tokenizer import load_tokenizer
from disagg.telemetry.metrics import PREEMPTIONS, REJECTIONS
from disagg.testing.model_files import write_tiny_llama
from disagg.testing.processes import Serve, wait_until

NUM_BLOCKS = 128  # of 16 tokens, per worker: about 9 sequences
PROMPT_TOKENS, ANSWER_TOKENS = (64, 256), (32, 96)  # least and most
FACTOR = 4.0
PATIENCE_S = ((0.4, 5.0), (0.3, 20.0), (0.3, None))  # (share, how long a client of the overload stays)
WINDOW_S, STEP_S = 5.0, 0.5
BACK_WINDOW_S = 10.0
TARGET, LIMIT_S = 0.95, 30.0
ANSWER_TIMEOUT_S = 300.0
FIRST_CLIENTS, MAX_CLIENTS = 8, 64


class Lengths(msgspec.Struct, frozen=True):
    """Seconds of each phase."""

    ramp: float = 8.0
    standard: float = 30.0
    overload: float = 60.0
    recovery: float = 40.0


QUICK = Lengths(ramp=4.0, standard=12.0, overload=15.0, recovery=20.0)


class Asked(msgspec.Struct, frozen=True):
    """How one request ended: whole, left, broken, or the HTTP status that turned it away."""

    outcome: str
    retry_after_s: float | None = None


class Crowd:
    """All clients. arrivals: when each token came to any of them."""

    def __init__(self, url: str, model: str, vocab_size: int, seed: int) -> None:
        self.arrivals: list[float] = []
        self.outcomes: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.untold = 0  # turned away without Retry-After
        self.retry_after_s: list[float] = []
        self.num_tokens = 0  # as the server counts them, of whole answers
        self.num_pieces = 0  # as they were seen, of the same answers
        self.refused: dict[str, str] = {}  # one message per status
        self._address = urlsplit(url)
        self._model = model
        self._random = random.Random(seed)
        self._top_id = min(vocab_size, 40_000)

    def _request(self) -> bytes:
        rng = self._random
        body = {
            "model": self._model,
            "prompt": [rng.randrange(100, self._top_id) for _ in range(rng.randint(*PROMPT_TOKENS))],
            "max_tokens": rng.randint(*ANSWER_TOKENS),
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        content = msgspec.json.encode(body)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._address.netloc}\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(content)}\r\nConnection: close\r\n\r\n".encode() + content

    async def ask(self, phase: str, patience_s: float | None = None) -> Asked:
        """One request, one connection; never raises for what the server does."""
        try:
            async with asyncio.timeout(patience_s or ANSWER_TIMEOUT_S):
                asked = await self._ask()
        except TimeoutError:
            asked = Asked("left" if patience_s else "broken")
        except (OSError, asyncio.IncompleteReadError, ValueError):
            asked = Asked("broken")
        self.outcomes[phase][asked.outcome] += 1
        if asked.outcome in ("429", "503"):
            self.untold += asked.retry_after_s is None
            self.retry_after_s += [] if asked.retry_after_s is None else [asked.retry_after_s]
        return asked

    async def _ask(self) -> Asked:
        host, port = self._address.hostname or "127.0.0.1", self._address.port or 80
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(self._request())
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            status = head.split(" ", 2)[1]
            if status != "200":
                found = [line for line in head.splitlines() if line.lower().startswith("retry-after:")]
                self.refused.setdefault(status, (await reader.read()).decode(errors="replace"))
                return Asked(status, float(found[0].partition(":")[2]) if found else None)
            return Asked("whole" if await self._read_answer(reader) else "broken")
        finally:
            writer.transport.abort()

    async def _read_answer(self, reader: asyncio.StreamReader) -> bool:
        num_pieces = 0
        async for line in reader:
            if line.startswith(b"data: {"):
                if b'"text":"' in line and b'"text":""' not in line:
                    self.arrivals.append(time.perf_counter())
                    num_pieces += 1
                elif b'"completion_tokens":' in line:
                    self.num_tokens += int(line.partition(b'"completion_tokens":')[2].partition(b",")[0])
                    self.num_pieces += num_pieces
            elif line.startswith(b"data: [DONE]"):
                return True
        return False

    async def ask_again_and_again(self, phase: str) -> None:
        """Until cancelled."""
        while True:
            asked = await self.ask(phase)
            if asked.outcome != "whole":
                await asyncio.sleep(asked.retry_after_s or 1.0)

    @contextlib.asynccontextmanager
    async def closed_loop(self, phase: str, num_clients: int) -> AsyncIterator[None]:
        """Clients that ask again as long as the context lasts."""
        tasks = [asyncio.create_task(self.ask_again_and_again(phase)) for _ in range(num_clients)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def rate(self, start_s: float, stop_s: float) -> float:
        """Tokens/s between two readings of the clock."""
        return sum(start_s < at_s <= stop_s for at_s in self.arrivals) / (stop_s - start_s)


class Figures(msgspec.Struct, frozen=True):
    """Of one run; times in seconds, rates in tokens/s."""

    num_clients: int
    standard: float
    standard_requests: float  # per second
    asked_in_overload: int
    during: float
    windows: tuple[float, ...]  # of WINDOW_S, from the end of the overload
    back_after_s: float  # inf when it did not come back
    ratio: float  # first LIMIT_S of recovery over standard
    cpu_ratio: float  # the same in tokens per CPU second of server and clients: what neighbours disturb less


async def run(crowd: Crowd, lengths: Lengths, server: Serve) -> Figures:
    """The three phases, one after the other."""
    num_clients = await saturate(crowd, lengths.ramp)
    async with crowd.closed_loop("standard", num_clients):
        await asyncio.sleep(lengths.ramp)
        start_s, start = time.perf_counter(), harness.cpu_use()
        await asyncio.sleep(lengths.standard)
        seconds, stop = time.perf_counter() - start_s, harness.cpu_use()
        standard = crowd.rate(start_s, start_s + seconds)
        # Steadier than to count the few that began and ended within the time.
        tokens_each = sum(ANSWER_TOKENS) / 2 * (crowd.num_pieces / crowd.num_tokens if crowd.num_tokens else 1.0)
        requests = standard / tokens_each
    if not requests:
        raise SystemExit(f"no answer in standard: {dict(crowd.outcomes['standard'])} {crowd.refused}")
    print(f"standard: {num_clients} clients, {standard:.1f} tokens/s, {requests:.2f} requests/s", flush=True)
    await harness.wait_idle(server)
    crowding = await overload(crowd, FACTOR * requests, lengths.overload)
    end_s, first_s, begin = time.perf_counter(), min(LIMIT_S, lengths.recovery), harness.cpu_use()
    during = crowd.rate(end_s - lengths.overload, end_s)
    async with crowd.closed_loop("recovery", num_clients):
        await harness.until(end_s + first_s)
        end = harness.cpu_use()
        await harness.until(end_s + lengths.recovery)
    for task in crowding:
        task.cancel()
    await asyncio.gather(*crowding, return_exceptions=True)
    starts = [end_s + STEP_S * step for step in range(int((lengths.recovery - BACK_WINDOW_S) / STEP_S) + 1)]
    back = [at_s - end_s for at_s in starts if crowd.rate(at_s, at_s + BACK_WINDOW_S) >= TARGET * standard]
    windows = [crowd.rate(at_s, at_s + WINDOW_S) for at_s in spans(end_s, lengths.recovery, WINDOW_S)]
    ratio = crowd.rate(end_s, end_s + first_s) / standard
    cpu_ratio = ratio * ((stop.ours - start.ours) / seconds) / ((end.ours - begin.ours) / first_s)
    return Figures(
        num_clients=num_clients,
        standard=standard,
        standard_requests=requests,
        asked_in_overload=len(crowding),
        during=during,
        windows=tuple(windows),
        back_after_s=min(back, default=float("inf")),
        ratio=ratio,
        cpu_ratio=cpu_ratio,
    )


async def saturate(crowd: Crowd, seconds: float) -> int:
    """Twice as many clients until that adds less than 5 %: how many it takes."""
    num_clients, best = FIRST_CLIENTS, 0.0
    while num_clients < MAX_CLIENTS:
        async with crowd.closed_loop("ramp", num_clients):
            await asyncio.sleep(seconds)
            start_s = time.perf_counter()
            await asyncio.sleep(2 * seconds)
            rate = crowd.rate(start_s, time.perf_counter())
        print(f"ramp: {num_clients} clients, {rate:.1f} tokens/s", flush=True)
        if rate < 1.05 * best:
            break
        num_clients, best = 2 * num_clients, rate
    return num_clients


async def overload(crowd: Crowd, requests_per_s: float, seconds: float) -> list[asyncio.Task[Asked]]:
    """Ask at that rate, evenly, without waiting for answers. Gives back all clients, some still there."""
    rng = random.Random(int(requests_per_s * 1000))
    shares, patiences = [share for share, _ in PATIENCE_S], [patience_s for _, patience_s in PATIENCE_S]
    tasks = []
    start_s = time.perf_counter()
    for number in range(int(requests_per_s * seconds)):
        await harness.until(start_s + number / requests_per_s)
        tasks.append(asyncio.create_task(crowd.ask("overload", rng.choices(patiences, shares)[0])))
    await harness.until(start_s + seconds)
    return tasks


def spans(start_s: float, seconds: float, each_s: float) -> Iterator[float]:
    """Begins of consecutive windows."""
    return (start_s + each_s * index for index in range(int(seconds / each_s)))


def leaked(server: Serve) -> dict[str, float]:
    """Blocks that nobody should use any more, by worker and state; waits for the end of all work first."""

    def held() -> dict[str, float]:
        metrics = harness.scrape(server)
        return {
            f"{worker} {state}": value
            for (name, worker, state), value in metrics.items()
            if name == "disagg_blocks" and state in ("held", "reserved", "quarantined") and value
        }

    with contextlib.suppress(Exception):  # what is left is the answer
        wait_until(lambda: not held(), harness.IDLE_TIMEOUT_S, "the end of all work")
    return held()


def total(metrics: harness.Metrics, wanted: str) -> float:
    return sum(value for (name, _, _), value in metrics.items() if name == wanted)


def memory_of(server: Serve) -> dict[str, float]:
    """Resident MiB by process."""
    found = {}
    for name in ("router", "prefill-0", "decode-0"):
        status = Path(f"/proc/{server.pid_of(name)}/status")
        lines = status.read_text(encoding="ascii").splitlines() if status.exists() else []
        found[name] = next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS")), float("nan"))
    return found


def print_figures(figures: Figures, crowd: Crowd, foreign: float) -> None:
    print(f"overload: {figures.asked_in_overload} requests, {figures.during:.1f} tokens/s")
    print("recovery: " + " ".join(f"{rate:.1f}" for rate in figures.windows) + f" tokens/s, each {WINDOW_S:g} s")
    print(harness.verdict(f"seconds until {100 * TARGET:.0f} % are back", figures.back_after_s, LIMIT_S, foreign))
    print(f"first {LIMIT_S:g} s of recovery over standard: {figures.ratio:.3f}; per CPU second {figures.cpu_ratio:.3f}")
    for phase, outcomes in crowd.outcomes.items():
        print(f"{phase}: " + ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())))
    for status, message in sorted(crowd.refused.items()):
        print(f"{status}: {message.strip()}")
    least, most = min(crowd.retry_after_s, default=0.0), max(crowd.retry_after_s, default=0.0)
    print(f"turned away without Retry-After: {crowd.untold}; Retry-After {least:g} .. {most:g} s")


def measure(args: argparse.Namespace, path: str, name: str) -> None:
    lengths = QUICK if args.quick else Lengths()
    pools = ("--prefill", "1", "--decode", "1", "--local-prefill-tokens", "0", "--num-blocks", str(NUM_BLOCKS))
    with Serve((path, *pools, "--served-name", name)) as server:
        vocab_size = load_tokenizer(resolve_model(path)).vocab_size
        crowd = Crowd(server.url, name, vocab_size, args.seed)
        before, cpu_before = memory_of(server), harness.cpu_use()
        preempted_before = total(harness.scrape(server), PREEMPTIONS.name)
        figures = asyncio.run(run(crowd, lengths, server))
        cpu_after = harness.cpu_use()
        left, metrics, after = leaked(server), harness.scrape(server), memory_of(server)
        server.send_signal(signal.SIGINT)
        server.wait(60.0)
    foreign = harness.foreign_share(cpu_before, cpu_after)
    print_figures(figures, crowd, foreign)
    preempted = total(metrics, PREEMPTIONS.name) - preempted_before
    rejections = {reason: n for (metric, _, reason), n in metrics.items() if n and metric == REJECTIONS.name}
    memory = {name: (round(before[name], 1), round(after[name], 1)) for name in before}
    print(f"preemptions: {preempted:.0f}; turned away by reason: {rejections}; leaked blocks: {left or 0}")
    print("memory, MiB: " + ", ".join(f"{name} {old} -> {new}" for name, (old, new) in memory.items()))
    harness.warn_of_others(foreign)
    extra = {
        "figures": msgspec.to_builtins(figures),
        "outcomes": {phase: dict(outcomes) for phase, outcomes in crowd.outcomes.items()},
        "without_retry_after": crowd.untold,
        "pieces_per_token": round(crowd.num_pieces / max(1, crowd.num_tokens), 3),
        "preemptions": preempted,
        "rejections": rejections,
        "leaked_blocks": left,
        "memory_mib": memory,
        "foreign_share": round(foreign, 3),
    }
    harness.report_json("overload", args, extra)


def main() -> None:
    args = harness.options(__doc__, rounds=1).parse_args()
    print(harness.heading(args), f"model: {args.model}, {NUM_BLOCKS} KV blocks of 16 tokens per worker")
    if args.model != "tiny":
        measure(args, args.model, served_name(args.model))
        return
    with tempfile.TemporaryDirectory() as folder:
        measure(args, os.fspath(write_tiny_llama(Path(folder) / "tiny")), "tiny")


if __name__ == "__main__":
    main()

"""Bad clients at a real router: what they cost while they are there, what is left of them, and what others notice.

A thousand connections of four kinds at once: half a request's headers, half a body, a stream that is never read, and
one that is reset. Meanwhile one good client reads a stream. Printed: memory and descriptors of the router before,
during and after, and the longest time between two tokens of the good client.
"""

import asyncio
import itertools
import os
import tempfile
import time
from pathlib import Path

from disagg.modelfiles.tokenizer import load_tokenizer
from disagg.router.config import decode_announcement
from disagg.testing.model_files import write_tiny_llama
from disagg.testing.processes import MarkedProcess
from fake_worker import LIMIT_S, MAX_CONTEXT, MODEL, FakeWorker
from harness import cpu_use, foreign_share, heading, options, report_json, verdict, warn_of_others
from router_load import STREAMED, Client, Progress, resident_bytes

NUM_CLIENTS = 1000
HEADER_TIMEOUT_S = 2.0
SETTLE_S = 3.0
PACE_S = 0.25
MAX_GROWTH = 1.05  # of memory, from the end of the first round to the end of the second
MAX_GAP = 1.5  # of the good client, in paces
HALF_HEADERS = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Le"
HALF_BODY = b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n{"model": "tiny", '


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


async def connect(port: int, count: int) -> list[asyncio.StreamWriter]:
    kinds = itertools.cycle((HALF_HEADERS, HALF_BODY, STREAMED, STREAMED))
    writers = []
    for sent in itertools.islice(kinds, count):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        del reader  # nobody reads: its buffer fills, and then the kernel's
        writer.write(sent)
        writers.append(writer)
    return writers


async def measure(folder: Path, router: MarkedProcess, count: int) -> dict[str, float]:
    announced = decode_announcement(await asyncio.to_thread(router.wait_line, r'^\{"http"', LIMIT_S))
    assert announced is not None
    tokenizer = load_tokenizer(folder)
    worker = FakeWorker(tokenizer.encode(" the quick brown fox jumps over"), tokenizer.digest)
    await worker.register(announced.control)
    port = int(announced.http.rpartition(":")[2])
    loop, progress = asyncio.get_running_loop(), Progress()
    _, good = await loop.create_connection(lambda: Client(STREAMED, progress), "127.0.0.1", port)
    good.ask()
    await worker.has_open(1)

    async def pace() -> None:
        while True:
            worker.step()
            await asyncio.sleep(PACE_S)

    pacing = asyncio.create_task(pace())
    figures: dict[str, float] = {}
    for number in range(2):  # the second round shows whether the first has left anything
        figures[f"fds_before_{number}"] = descriptors(router.pid)
        figures[f"bytes_before_{number}"] = resident_bytes((router.pid,))
        writers = await connect(port, count)
        await worker.has_open(1 + count // 2)
        figures[f"fds_during_{number}"] = descriptors(router.pid)
        for writer in writers[3::4]:
            writer.transport.abort()
        await worker.has_open(1 + count // 4)
        await asyncio.sleep(HEADER_TIMEOUT_S + 1.0)  # those with half a request are cut off by the router
        figures[f"fds_cut_{number}"] = descriptors(router.pid)
        figures[f"bytes_during_{number}"] = resident_bytes((router.pid,))
        for writer in writers:
            writer.transport.abort()
        await worker.has_open(1)
        await asyncio.sleep(SETTLE_S)
        figures[f"fds_after_{number}"] = descriptors(router.pid)
        figures[f"bytes_after_{number}"] = resident_bytes((router.pid,))
    pacing.cancel()
    gaps = [later - sooner for sooner, later in itertools.pairwise(good.token_s)]
    figures["longest_gap_s"] = max(gaps)
    assert good.transport is not None
    good.transport.abort()
    await worker.close()
    return figures


def show_verdicts(figures: dict[str, float]) -> None:
    """Descriptors and memory mean the same beside busy neighbours; times do not."""
    left = figures["fds_after_1"] / figures["fds_before_0"]
    print(verdict("descriptors at the end over those before", left, 1.0, 0.0))
    growth = figures["bytes_after_1"] / figures["bytes_after_0"]
    print(verdict("memory after the second round over that after the first", growth, MAX_GROWTH, 0.0))
    gap = figures["longest_gap_s"] / PACE_S
    print(verdict("the good client's longest gap over the pace", gap, MAX_GAP, figures["foreign_share"]))


def main() -> None:
    args = options(__doc__, rounds=2).parse_args()
    args.model = MODEL
    print(heading(args), "router, worker and clients on loopback")
    count = 200 if args.quick else NUM_CLIENTS
    start, started_s = cpu_use(), time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="disagg-bench-") as name:
        folder = write_tiny_llama(Path(name), seed=args.seed, max_context=MAX_CONTEXT)
        command = ("router", "--model", f"{MODEL}={folder}", "--port", "0", "--control-port", "0")
        timeouts = ("--header-timeout-s", str(HEADER_TIMEOUT_S), "--body-timeout-s", str(HEADER_TIMEOUT_S))
        with MarkedProcess((*command, *timeouts, "--max-open-requests", "2048")) as router:
            figures = asyncio.run(measure(folder, router, count))
    figures["foreign_share"] = foreign_share(start, cpu_use())
    for number in range(2):
        mib = [figures[f"bytes_{when}_{number}"] / 2**20 for when in ("before", "during", "after")]
        fds = [figures[f"fds_{when}_{number}"] for when in ("before", "during", "cut", "after")]
        print(f"round {number}: memory before, during, after {mib[0]:.0f}, {mib[1]:.0f}, {mib[2]:.0f} MiB", end="; ")
        print(f"descriptors {fds[0]:.0f}, {fds[1]:.0f}, after the deadline {fds[2]:.0f}, at the end {fds[3]:.0f}")
    warn_of_others(figures["foreign_share"])
    print(f"{count} clients, {time.perf_counter() - started_s:.0f} s; the good client's longest gap", end=" ")
    print(f"{figures['longest_gap_s'] * 1e3:.0f} ms at a pace of {PACE_S * 1e3:.0f} ms")
    show_verdicts(figures)
    report_json("router_clients", args, figures)


if __name__ == "__main__":
    main()

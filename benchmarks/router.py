"""What the router adds: one router process between clients over HTTP and a fake worker.

The worker here computes nothing: it sends one message per step with one token for every open sequence, and stamps it.
So a token's time from that stamp to the client's read is all the router's. The other side of every comparison is the
same worker asked directly: the same messages over the same kind of connection, without a router in between. What is
measured, and how, is in `router_load.py`.

With --peers (vllm-router, sglang-router), routers of other projects stand beside ours, in front of a worker that speaks
HTTP as theirs do. They pass its events on as they come; ours is given token ids, and makes the text and the events.
One that cannot be installed is left out, with the reason.

Worker and clients share one process. On a machine with few cores they compete with the router, which only makes the
router look slower.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

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
from fake_http_worker import HttpFakeWorker
from fake_worker import LIMIT_S, MAX_CONTEXT, MODEL, TO_WORKER, FakeWorker
from harness import MAX_FOREIGN_SHARE, cpu_use, foreign_share, heading, options, report_json, warn_of_others
from peers.environments import Unavailable
from peers.routers import RouterPeer, RunningRouter, chosen_routers, python_for, running
from router_load import PACE_S, WHOLE, Bench, Figures, percentiles

OURS: Final = "disagg"
STREAMS: Final = (1, 64, 512)
WORDS: Final = " the quick brown fox jumps over the lazy dog once upon a time"
TARGET_TOKENS_PER_CPU_S: Final = 20_000
TARGET_ITL_MS: Final = 2.0
TARGET_IDLE_MIB: Final = 100

_TO_ROUTER: msgspec.msgpack.Decoder[WorkerToRouter] = msgspec.msgpack.Decoder(WorkerToRouter)


class Side(NamedTuple):
    """One router, and its worker asked directly."""

    name: str
    bench: Bench
    straight: Callable[[int, int], Awaitable[Figures]]


async def direct(worker: FakeWorker, count: int, num_steps: int) -> Figures:
    """Our worker asked over a channel of its own: start to start, step to tokens in hand."""
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
    worker.forget()
    worker.open = {}
    for number in range(count):
        started.append(time.perf_counter())
        spec = SequenceSpec(SequenceId(RequestId(Incarnation(2), number), 0), (3, 4, 5), SamplingParams(60_000))
        channel.send(StartSequence(spec, Task.WHOLE, 1))
    await worker.has_open(count)
    inward = [start - sent for start, sent in zip(worker.asked_s(), started, strict=True)]
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
    return percentiles("ttft", [each + outward[0] for each in inward]) | percentiles("token", outward[1:])


async def our_side(folder: Path, router: MarkedProcess) -> Side:
    announced = decode_announcement(await asyncio.to_thread(router.wait_line, r'^\{"http"', LIMIT_S))
    assert announced is not None
    tokenizer = load_tokenizer(folder)
    words = tokenizer.encode(WORDS)
    worker, other = FakeWorker(words, tokenizer.digest), FakeWorker(words, tokenizer.digest)
    await worker.register(announced.control)
    bench = Bench(worker, (router.pid,), int(announced.http.rpartition(":")[2]))
    return Side(OURS, bench, lambda count, steps: direct(other, count, steps))


async def their_side(peer: RouterPeer, stack: ExitStack) -> Side | None:
    """None, with the reason printed, for one that cannot be had here."""
    worker = HttpFakeWorker([f" {word}" for word in WORDS.split()])
    await worker.listen()
    stack.callback(worker.close)

    def start() -> RunningRouter:
        return stack.enter_context(running(peer, python_for(peer), worker.port, WHOLE))

    try:
        found = await asyncio.to_thread(start)
    except Unavailable as error:
        print(f"{peer.name} is left out: {error}")
        return None
    straight = Bench(worker, (os.getpid(),), worker.port)
    return Side(peer.name, Bench(worker, found.pids, found.port), straight.paced)


async def measure(args: argparse.Namespace, folder: Path, router: MarkedProcess, stack: ExitStack) -> dict[str, Any]:
    ours = await our_side(folder, router)
    theirs = [await their_side(peer, stack) for peer in chosen_routers(args.peers)]
    sides = [ours, *(side for side in theirs if side is not None)]
    before = cpu_use()
    steps, tokens = (20, 4_000) if args.quick else (150, 60_000)
    figures: dict[str, Any] = {side.name: {"idle": await side.bench.idle(512)} for side in sides}
    for side in sides:
        await side.bench.flat_out(16, 2_000)
    for count in STREAMS:
        rounds: dict[str, list[tuple[Figures, Figures, Figures]]] = {side.name: [] for side in sides}
        for _ in range(args.rounds):
            for side in sides:
                through, straight = await side.bench.paced(count, steps), await side.straight(count, steps)
                fast = await side.bench.flat_out(count, tokens if count > 1 else tokens // 10)
                rounds[side.name].append((through, straight, fast))
        for side in sides:
            through, straight, fast = (_medians([each[part] for each in rounds[side.name]]) for part in range(3))
            added = {name: through[name] - straight[name] for name in through}
            found = {"router": through, "direct": straight, "added": added, "flat_out": fast}
            figures[side.name][str(count)] = found
    for side in sides:
        figures[side.name]["requests"] = await side.bench.requests(64, 10 if args.quick else 50)
    figures["foreign_share"] = foreign_share(before, cpu_use())
    return figures


def _medians(rounds: Sequence[Figures]) -> Figures:
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def show(figures: dict[str, Any]) -> None:
    names = [name for name in figures if name != "foreign_share"]
    print("streams  side            TTFT p50   p99 ms   token p50   p99 ms   tokens/s   per CPU-s")
    for count in STREAMS:
        for name in names:
            found = figures[name][str(count)]
            for row, times in (
                (name, found["router"]),
                ("  asked directly", found["direct"]),
                ("  added", found["added"]),
            ):
                keys = ("ttft_p50_s", "ttft_p99_s", "token_p50_s", "token_p99_s")
                cells = "  ".join(f"{times[key] * 1e3:8.2f}" for key in keys)
                speed = found["flat_out"] if row == name else None
                more = "" if speed is None else f"  {speed['tokens_per_s']:9.0f}  {speed['tokens_per_cpu_s']:10.0f}"
                print(f"{count:7d}  {row:16s}{cells}{more}")
    for name in names:
        idle, whole = figures[name]["idle"], figures[name]["requests"]
        whole_mib, added_mib = (idle[key] / 2**20 for key in ("idle_total_bytes", "idle_added_bytes"))
        print(
            f"{name}: requests/s {whole['requests_per_s']:.0f}, per CPU-second {whole['requests_per_cpu_s']:.0f};",
            end=" ",
        )
        print(f"512 idle streams: {whole_mib:.0f} MiB in all, {added_mib:.0f} of them added")
    show_ratios(figures, [name for name in names if name != OURS])
    warn_of_others(figures["foreign_share"])
    show_verdicts(figures[OURS], figures["foreign_share"] <= MAX_FOREIGN_SHARE)


def show_ratios(figures: dict[str, Any], peers: Sequence[str]) -> None:
    """Ours over theirs."""
    for name in peers:
        ratios = [
            figures[OURS][str(count)]["flat_out"]["tokens_per_cpu_s"]
            / figures[name][str(count)]["flat_out"]["tokens_per_cpu_s"]
            for count in STREAMS
        ]
        listed = ", ".join(f"{ratio:.2f} at {count}" for ratio, count in zip(ratios, STREAMS, strict=True))
        print(f"tokens per CPU-second over those of {name}, which only passes bytes on: {listed} streams")


def show_verdicts(ours: dict[str, Any], is_quiet: bool) -> None:
    speed = ours["64"]["flat_out"]["tokens_per_cpu_s"]
    late_ms = ours["64"]["added"]["token_p99_s"] * 1e3
    added_mib = ours["idle"]["idle_added_bytes"] / 2**20
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
    parser.add_argument("--peers", default="vllm-router", help="routers beside ours, with commas between; '': none")
    args = parser.parse_args()
    args.model, args.rounds = MODEL, 1 if args.quick else args.rounds
    print(heading(args), "router, worker and clients on loopback")
    with tempfile.TemporaryDirectory(prefix="disagg-bench-") as name, ExitStack() as stack:
        folder = write_tiny_llama(Path(name), seed=args.seed, max_context=MAX_CONTEXT)
        command = ("router", "--model", f"{MODEL}={folder}", "--port", "0", "--control-port", "0")
        router = stack.enter_context(MarkedProcess((*command, "--max-open-requests", "2048")))
        figures = asyncio.run(measure(args, folder, router, stack))
    show(figures)
    report_json("router", args, figures)


if __name__ == "__main__":
    main()

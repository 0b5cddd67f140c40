"""Timelines and the metric of TTFT beside an outside client: real HTTP, answers moved and given up among them.

The clients reach the router through sockets and know nothing of it but bytes and when they came. They share its loop:
with a thread of their own, on a busy machine, they would see mostly how late they are woken. Engines sleep on others.
"""

import asyncio
import math
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from tests.e2e.test_timelines import SteadyEngine
from tests.faults.loopback import MODEL, live_router, live_worker, paired, settled
from tests.unit.router.site import listening
from tests.unit.worker.rigs import Site, until

from disagg.bench.http_client import HttpClient
from disagg.bench.sse import EventParser
from disagg.core.roles import Role
from disagg.modelfiles.tokenizer import load_tokenizer
from disagg.router.app import create_app
from disagg.router.connection import DEFAULT_CONNECTION_LIMITS
from disagg.router.text import ModelText
from disagg.router.timing import Timing
from disagg.telemetry.metrics import TTFT_SECONDS
from disagg.telemetry.timeline import ChoiceTimeline, Part, TimelineAnswer
from disagg.testing.tokenizer_files import write_tiny_tokenizer

NUM_REQUESTS = 56
SPACING_S = 0.15
LEAVE_S = 0.05  # before the first token: reading any prompt takes two steps
LEAVE_TOKENS = 3
LIMIT = 0.02
FLOOR_S = 0.003  # turns of the loop between a byte's way into a socket and out of it: no stage's
DEADLINE_S = 90.0


class Seen(msgspec.Struct):
    """One request by its client's clock. num_prompt: nobody else's is as long, so it names the request."""

    num_prompt: int
    sent_s: float = 0.0
    token_s: list[float] = []
    left_s: float | None = None

    @property
    def is_early(self) -> bool:
        """Whether it leaves before the first token."""
        return self.num_prompt % 7 == 3

    @property
    def leaves_midway(self) -> bool:
        return self.num_prompt % 7 == 5


async def ask(client: HttpClient, seen: Seen) -> None:
    prompt = [3 + (7 * seen.num_prompt + index * (seen.num_prompt + 1)) % 90 for index in range(seen.num_prompt)]
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "ignore_eos": True, "stream": True}
    parser, enough = EventParser(), asyncio.Event()

    def read(now_s: float, data: bytes) -> None:
        texts = [event for event in parser.feed(data) if b'"text":"' in event and b'"text":""' not in event]
        seen.token_s += [now_s] * len(texts)
        if seen.leaves_midway and len(seen.token_s) >= LEAVE_TOKENS:
            enough.set()

    seen.sent_s = time.perf_counter()
    asking = asyncio.create_task(client.post("/v1/completions", msgspec.json.encode(body), read))
    leaving = asyncio.create_task(asyncio.sleep(LEAVE_S) if seen.is_early else enough.wait())
    await asyncio.wait((asking, leaving), return_when=asyncio.FIRST_COMPLETED)
    if not asking.done():
        seen.left_s = time.perf_counter()
        asking.cancel()
    leaving.cancel()
    found = await asyncio.gather(asking, leaving, return_exceptions=True)
    assert seen.left_s is not None or found[0] == 200, found


async def load(url: str, all_seen: Sequence[Seen]) -> None:
    async with asyncio.timeout(DEADLINE_S), HttpClient(url) as client, asyncio.TaskGroup() as group:
        for seen in all_seen:
            group.create_task(ask(client, seen))
            await asyncio.sleep(SPACING_S)


def is_near(ours_s: float, clients_s: float) -> bool:
    return abs(ours_s - clients_s) <= max(LIMIT * clients_s, FLOOR_S)


def pairs_of(seen: Seen, choice: ChoiceTimeline) -> list[tuple[float, float]]:
    """(the sum of the stages, what the client waited) for all that both know."""
    if not seen.token_s:
        assert choice.ttft_s is None
        assert seen.left_s is not None
        return [(choice.total_s, seen.left_s - seen.sent_s)]
    found = [(choice.seconds(Part.TTFT), seen.token_s[0] - seen.sent_s)]
    if len(seen.token_s) > 1:
        found.append((choice.seconds(Part.FIRST_GAP), seen.token_s[1] - seen.token_s[0]))
    return found


def metric_sum(text: str) -> tuple[float, float]:
    """How often TTFT was observed, and the seconds."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    count, total = (sum(s.value for s in samples if s.name == TTFT_SECONDS.name + end) for end in ("_count", "_sum"))
    return count, total


async def kill_while_it_works(site: Site, stack: AsyncExitStack) -> None:
    await until(lambda: site.worker.scheduler.snapshot().num_running > 0)
    await stack.aclose()


async def test_stages_and_metric_are_what_an_outside_client_waits(tmp_path: Path) -> None:
    text = ModelText(load_tokenizer(write_tiny_tokenizer(tmp_path)))
    all_seen = [Seen(17 + number) for number in range(NUM_REQUESTS)]
    async with asyncio.timeout(DEADLINE_S), AsyncExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(1))
        service, address = await stack.enter_async_context(live_router())
        app = create_app(service, {MODEL: text}, text_threads=threads, timing=Timing(NUM_REQUESTS, time.time))
        port = await stack.enter_async_context(listening(app, DEFAULT_CONNECTION_LIMITS))
        roles = (("p0", Role.PREFILL), ("d0", Role.DECODE), ("p1", Role.PREFILL), ("d1", Role.DECODE))
        lives = [await stack.enter_async_context(AsyncExitStack()) for _ in roles]
        sites = [
            await life.enter_async_context(live_worker(name, role, address, SteadyEngine()))
            for life, (name, role) in zip(lives, roles, strict=True)
        ]
        await paired(service, 4)
        url = f"http://127.0.0.1:{port}"
        loading = asyncio.create_task(load(url, all_seen))
        await until(lambda: sum(len(seen.token_s) >= 2 for seen in all_seen) >= NUM_REQUESTS // 4)
        await kill_while_it_works(sites[2], lives[2])
        await until(lambda: sum(len(seen.token_s) >= 2 for seen in all_seen) >= NUM_REQUESTS // 2)
        await kill_while_it_works(sites[3], lives[3])
        await loading
        await settled(*sites[:2])
        async with HttpClient(url) as client:
            _, answer = await client.get(f"/timeline?last={NUM_REQUESTS}")
            _, metrics = await client.get("/metrics")
    timelines = msgspec.json.decode(answer, type=TimelineAnswer).timelines
    choices = {timeline.num_prompt_tokens: timeline.choices[0] for timeline in timelines}
    # On a busy machine one may leave before its prompt is in tokens; such a request has no timeline.
    known = [seen for seen in all_seen if seen.num_prompt in choices or not seen.is_early]
    assert len(known) >= NUM_REQUESTS - 2
    check_kinds(known, choices)
    pairs = [pair for seen in known for pair in pairs_of(seen, choices[seen.num_prompt])]
    far = [pair for pair in pairs if not is_near(*pair)]
    shares = [abs(ours_s / clients_s - 1) for ours_s, clients_s in pairs]
    # A machine that others use too may stop the process between two readings of the clock.
    assert len(far) <= 0.1 * len(pairs), (len(pairs), far)
    assert statistics.median(shares) <= LIMIT / 2, sorted(shares)
    ours_s, clients_s = (math.fsum(each) for each in zip(*pairs, strict=True))
    assert abs(ours_s / clients_s - 1) <= LIMIT, (ours_s, clients_s)
    waits = [seen.token_s[0] - seen.sent_s for seen in all_seen if seen.token_s]
    count, total_s = metric_sum(metrics.decode())
    assert count == len(waits)
    assert is_near(total_s / count, sum(waits) / count)


def check_kinds(all_seen: Sequence[Seen], choices: dict[int, ChoiceTimeline]) -> None:
    """All kinds were among them: whole, left early and midway, and moved before the second token."""
    for seen in all_seen:
        assert choices[seen.num_prompt].outcome == ("finished" if seen.left_s is None else "aborted")
    assert sum(not seen.token_s for seen in all_seen) >= NUM_REQUESTS // 10
    assert sum(seen.left_s is not None and len(seen.token_s) > 1 for seen in all_seen) >= NUM_REQUESTS // 10
    assert any(each.num_attempts > 1 and each.first_gap_s is not None for each in choices.values())

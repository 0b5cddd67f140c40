"""Timelines and the metric of TTFT beside an outside client: real HTTP, answers moved and given up among them.

The clients reach the router through sockets and measure bytes and when they came, nothing else. They share its loop:
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
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.e2e.test_timelines import SteadyEngine
from tests.faults.loopback import MODEL, live_router, live_worker, paired, settled
from tests.unit.router.site import listening
from tests.unit.worker.rigs import Site, until

from disagg.bench.http_client import HttpClient
from disagg.bench.sse import EventParser
from disagg.core.roles import Role
from disagg.dispatch.stream import GenerateRequest, TokenStream
from disagg.modelfiles.tokenizer import load_tokenizer
from disagg.router.app import create_app
from disagg.router.connection import DEFAULT_CONNECTION_LIMITS
from disagg.router.service import LiveService
from disagg.router.text import ModelText
from disagg.router.timing import Timing
from disagg.telemetry.metrics import TTFT_SECONDS
from disagg.telemetry.stages import Stage
from disagg.telemetry.timeline import ChoiceTimeline, Part, TimelineAnswer
from disagg.testing.tokenizer_files import write_tiny_tokenizer

NUM_REQUESTS = 56
SPACING_S = 0.15
LEAVE_S = 0.02  # after it was let in, and before the first token: reading any prompt takes two steps
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


async def leave_early(seen: Seen, let_in: set[int]) -> None:
    """How long it takes to be let in is the machine's affair; one that has not been has no timeline."""
    await until(lambda: seen.num_prompt in let_in)
    await asyncio.sleep(LEAVE_S)


async def ask(client: HttpClient, seen: Seen, let_in: set[int]) -> None:
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
    leaving: asyncio.Task[object] = asyncio.create_task(leave_early(seen, let_in) if seen.is_early else enough.wait())
    await asyncio.wait((asking, leaving), return_when=asyncio.FIRST_COMPLETED)
    if not asking.done():
        seen.left_s = time.perf_counter()
        asking.cancel()
    leaving.cancel()
    found = await asyncio.gather(asking, leaving, return_exceptions=True)
    assert seen.left_s is not None or found[0] == 200, found


async def load(url: str, all_seen: Sequence[Seen], let_in: set[int]) -> None:
    async with asyncio.timeout(DEADLINE_S), HttpClient(url) as client, asyncio.TaskGroup() as group:
        for seen in all_seen:
            group.create_task(ask(client, seen, let_in))
            await asyncio.sleep(SPACING_S)


def is_near(ours_s: float, clients_s: float) -> bool:
    return abs(ours_s - clients_s) <= max(LIMIT * clients_s, FLOOR_S)


def pairs_of(seen: Seen, choice: ChoiceTimeline) -> dict[str, tuple[float, float]]:
    """(the sum of the stages, what the client waited) for all that both know, by what it is."""
    if not seen.token_s:
        assert seen.left_s is not None
        # The first token may have been on its way to one who has left.
        return {"left early": (choice.total_s, seen.left_s - seen.sent_s)} if choice.ttft_s is None else {}
    found = {"ttft": (choice.seconds(Part.TTFT), seen.token_s[0] - seen.sent_s)}
    if len(seen.token_s) > 1:
        found["first gap"] = (choice.seconds(Part.FIRST_GAP), seen.token_s[1] - seen.token_s[0])
    return found


def check_pairs(pairs: Sequence[tuple[float, float]], what: str, most_far: float) -> None:
    """A machine that others use too may stop the process between two readings of the clock: of some, never of most."""
    far = [pair for pair in pairs if not is_near(*pair)]
    assert len(far) <= most_far * len(pairs), (what, len(pairs), far)


def metric_sum(text: str) -> tuple[float, float]:
    """How often TTFT was observed, and the seconds."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    count, total = (sum(s.value for s in samples if s.name == TTFT_SECONDS.name + end) for end in ("_count", "_sum"))
    return count, total


def until_arrival_s(choice: ChoiceTimeline) -> float:
    """Of its first token at the router, which the metric takes: its text may have to wait, and is written later."""
    after = (Stage.HELD, Stage.WRITE)
    return choice.seconds(Part.TTFT) - math.fsum(choice.seconds(Part.TTFT, stage) for stage in after)


def noted(service: LiveService) -> set[int]:
    """Lengths of the prompts that it has let in, from now on."""
    let_in: set[int] = set()
    submit = service.submit

    def noting(request: GenerateRequest, *more: Any, **named: Any) -> TokenStream:
        let_in.add(len(request.prompt_ids))
        return submit(request, *more, **named)

    service.submit = noting  # type: ignore[method-assign]
    return let_in


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
        loading = asyncio.create_task(load(url, all_seen, noted(service)))
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
    assert len(choices) == NUM_REQUESTS
    check_kinds(all_seen, choices)
    pairs: dict[str, list[tuple[float, float]]] = {}
    for seen in all_seen:
        for what, pair in pairs_of(seen, choices[seen.num_prompt]).items():
            pairs.setdefault(what, []).append(pair)
    for what, found in pairs.items():
        check_pairs(found, what, 1 / 2)
    whole = [pair for found in pairs.values() for pair in found]
    check_pairs(whole, "all", 1 / 3)
    shares = sorted(abs(ours_s - clients_s) / max(clients_s, FLOOR_S) for ours_s, clients_s in whole)
    assert statistics.median(shares) <= LIMIT / 2, shares
    # The metric is of the router's own clock, as timelines are.
    begun = [choice for choice in choices.values() if choice.ttft_s is not None]
    count, total_s = metric_sum(metrics.decode())
    assert count == len(begun) >= sum(bool(seen.token_s) for seen in all_seen)
    assert total_s == pytest.approx(math.fsum(map(until_arrival_s, begun)), abs=1e-3)


def check_kinds(all_seen: Sequence[Seen], choices: dict[int, ChoiceTimeline]) -> None:
    """All kinds were among them: whole, left early and midway, and moved before the second token."""
    for seen in all_seen:
        assert choices[seen.num_prompt].outcome == ("finished" if seen.left_s is None else "aborted")
    assert sum(not seen.token_s for seen in all_seen) >= NUM_REQUESTS // 10
    assert sum(seen.left_s is not None and len(seen.token_s) > 1 for seen in all_seen) >= NUM_REQUESTS // 10
    assert any(each.num_attempts > 1 and each.first_gap_s is not None for each in choices.values())

"""Timelines on real time: a router's whole front over real connections, beside a probe that stands outside of it."""

import asyncio
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from tests.faults.loopback import MODEL, NUM_BLOCKS, live_router, live_worker, paired, settled
from tests.unit.worker.rigs import layout

from disagg.core.roles import Role
from disagg.modelfiles.tokenizer import load_tokenizer
from disagg.router.app import create_app
from disagg.router.text import ModelText
from disagg.router.timing import Timing
from disagg.scheduler.engine import OnLayers, StepPlan, StepResult
from disagg.telemetry.stages import Stage
from disagg.telemetry.timeline import ChoiceTimeline, Part, TimelineAnswer
from disagg.testing.engine import FakeEngine
from disagg.testing.tokenizer_files import write_tiny_tokenizer

STEP_S = 0.05
NUM_REQUESTS = 24
LIMIT = 0.02
DEADLINE_S = 60.0


class SteadyEngine(FakeEngine):
    """Each step takes its time, and each token has a letter of its own."""

    def __init__(self) -> None:
        super().__init__(layout(), NUM_BLOCKS)

    def run_step(self, plan: StepPlan, on_layers: OnLayers) -> StepResult:
        def late(num_layers: int) -> None:
            time.sleep(STEP_S / layout().num_layers)
            on_layers(num_layers)

        result = super().run_step(plan, late)
        letters = tuple(msgspec.structs.replace(each, token_id=10 + each.token_id % 80) for each in result.tokens)
        return msgspec.structs.replace(result, tokens=letters)


class Probe:
    """When a request came in and when text had gone out, by the answer's id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.times: dict[str, list[float]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        times = [time.monotonic()]

        async def watched(message: Message) -> None:
            await send(message)
            body = message.get("body", b"")
            if b'"text":"' in body and b'"text":""' not in body:
                times.append(time.monotonic())
                self.times[msgspec.json.decode(body.split(b"\n")[0][6:])["id"]] = times

        await self._app(scope, receive, watched)


async def ask(client: httpx.AsyncClient, number: int) -> None:
    prompt = [3 + (7 * number + index * (number + 1)) % 90 for index in range(20 + 3 * number % 40)]
    body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "ignore_eos": True, "stream": True}
    response = await client.post("/v1/completions", json=body)
    assert response.text.endswith("data: [DONE]\n\n"), response.text


def off(choice: ChoiceTimeline, times: list[float]) -> tuple[float, float]:
    """By what share the stages differ from what the probe saw: of TTFT, of the first gap."""
    received_s, first_s, second_s = times[:3]
    ttft = abs(choice.seconds(Part.TTFT) / (first_s - received_s) - 1)
    return ttft, abs(choice.seconds(Part.FIRST_GAP) / (second_s - first_s) - 1)


async def test_stages_add_up_to_what_a_probe_at_the_front_sees(tmp_path: Path) -> None:
    text = ModelText(load_tokenizer(write_tiny_tokenizer(tmp_path)))
    async with asyncio.timeout(DEADLINE_S), AsyncExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(1))
        served, address = await stack.enter_async_context(live_router())
        timing = Timing(NUM_REQUESTS, time.time)
        probe = Probe(create_app(served, {MODEL: text}, text_threads=threads, timing=timing))
        transport = httpx.ASGITransport(app=probe)
        client = await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://test"))
        roles = (("p", Role.PREFILL), ("d", Role.DECODE))
        sites = [
            await stack.enter_async_context(live_worker(name, role, address, SteadyEngine())) for name, role in roles
        ]
        await paired(served)
        for first in range(0, NUM_REQUESTS, 3):  # three at once, so that some queue
            await asyncio.gather(*(ask(client, number) for number in range(first, first + 3)))
        await settled(*sites)
        answer = await client.get("/timeline", params={"last": NUM_REQUESTS})
    found = msgspec.json.decode(answer.content, type=TimelineAnswer).timelines
    assert len(found) == NUM_REQUESTS
    choices = [(timeline.choices[0], probe.times[f"cmpl-{timeline.request_id}"]) for timeline in found]
    parts = list(zip(*(off(choice, times) for choice, times in choices), strict=True))  # of TTFT, of the first gap
    for shares in map(sorted, parts):
        # A machine that others use too may stop this process between two readings of the clock: of some, never of most.
        assert shares[2 * len(shares) // 3] <= LIMIT, shares
        assert statistics.median(shares) <= LIMIT / 2, shares
    for choice, _ in choices:
        check(choice)


def check(choice: ChoiceTimeline) -> None:
    """Each stage has about what it must have."""
    choice.check_invariants()
    assert (choice.outcome, choice.path, choice.transport) == ("finished", "remote", "tcp")
    num_steps = sum(1 for each in choice.stages if each.stage is Stage.PREFILL)
    assert num_steps >= 2  # chunks of 16 tokens
    assert choice.seconds(Part.TTFT, Stage.PREFILL) >= num_steps * STEP_S
    assert choice.seconds(Part.FIRST_GAP, Stage.FIRST_STEP) + choice.overlap_s >= STEP_S * 0.9
    assert all(each.stage is not Stage.UNREPORTED for each in choice.stages)
    assert 0 < choice.hidden_bytes <= choice.handoff_bytes
    assert choice.hidden_transfer_s > 0

"""Hundreds of clients, many of which go away at a random moment: nothing stays open, held or uncounted."""

import asyncio
import enum
import json
import random
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from tests.e2e.api_paths import PATHS
from tests.e2e.cluster import FAST_BEATS, Front, completion, standing_still

from disagg.telemetry import metrics as table
from disagg.testing.processes import Serve, wait_until

MODEL = "tiny-llama"
NUM_REQUESTS = 500
NUM_AT_ONCE = 16
SEED = 11
# Small enough that requests must wait for blocks: refused reservations are part of this.
ARGUMENTS = ("--prefill", "1", "--decode", "1", "--local-prefill-tokens", "0", "--num-blocks", "120")


class Kind(enum.Enum):
    """How one client behaves."""

    WHOLE = enum.auto()
    STREAM = enum.auto()
    GONE_BEFORE_FIRST_TOKEN = enum.auto()
    GONE_MID_STREAM = enum.auto()
    GONE_WITHOUT_STREAM = enum.auto()


class Script(NamedTuple):
    """One client's life, drawn in advance."""

    kind: Kind
    prompt: list[int]
    max_tokens: int
    after_s: float
    after_chunks: int


def draw(chance: random.Random) -> Script:
    start = chance.randrange(200)
    prompt = [3 + (start + index) % 300 for index in range(chance.choice([1, 15, 16, 17, 40, 130, 300]))]
    kind = chance.choice(list(Kind))
    # Answers that are to be left are long: they do not end first.
    max_tokens = chance.randint(1, 40) + (0 if kind in (Kind.WHOLE, Kind.STREAM) else 120)
    return Script(kind, prompt, max_tokens, chance.uniform(0.0, 0.15), chance.randint(1, 10))


async def live(client: httpx.AsyncClient, script: Script) -> tuple[str, ...] | None:
    """The tokens of a whole answer; None for a client that went away."""
    is_streamed = script.kind not in (Kind.WHOLE, Kind.GONE_WITHOUT_STREAM)
    body = completion(MODEL, script.prompt, script.max_tokens, stream=is_streamed)
    if script.kind in (Kind.GONE_BEFORE_FIRST_TOKEN, Kind.GONE_WITHOUT_STREAM):
        try:
            async with asyncio.timeout(script.after_s):
                await client.post("/v1/completions", json=body)
        except TimeoutError:
            pass
        return None
    if script.kind is Kind.WHOLE:
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == httpx.codes.OK, response.text
        return tuple(response.json()["choices"][0]["logprobs"]["tokens"])
    tokens: list[str] = []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == httpx.codes.OK, await response.aread()
        async for line in response.aiter_lines():
            if not line or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            tokens += (chunk["choices"][0]["logprobs"] or {"tokens": []})["tokens"]
            if script.kind is Kind.GONE_MID_STREAM and len(tokens) >= script.after_chunks:
                return None
    return tuple(tokens)


async def live_all(url: str, scripts: list[Script], num_at_once: int = NUM_AT_ONCE) -> list[tuple[str, ...] | None]:
    gate = asyncio.Semaphore(num_at_once)

    async def one(client: httpx.AsyncClient, script: Script) -> tuple[str, ...] | None:
        async with gate:
            return await live(client, script)

    async with httpx.AsyncClient(base_url=url, timeout=60.0, trust_env=False) as client, asyncio.timeout(200.0):
        return await asyncio.gather(*(one(client, script) for script in scripts))


@pytest.mark.timeout(300)
def test_clients_that_go_away_cost_nothing(tiny_llama: Path) -> None:
    chance = random.Random(SEED)
    scripts = [draw(chance) for _ in range(NUM_REQUESTS)]
    with (
        Serve((str(tiny_llama), *ARGUMENTS, "--num-threads", "1", *FAST_BEATS)) as serve,
        Front(serve.url) as front,
    ):
        front.wait_idle(2)
        before = front.readings()
        answers = asyncio.run(live_all(serve.url, scripts))
        check_answers(scripts, answers)
        front.wait_idle(2)  # what is on its way to the router has come, too
        placed = front.readings().since(before).total(table.PLACEMENTS)
        seen = front.settled({"decode": placed, "prefill": placed}, before)
        front.wait_idle(2)
        ended = {outcome: seen.total(table.REQUESTS, outcome=outcome) for outcome in ("finished", "aborted", "failed")}
        handed = {
            outcome: seen.total(table.HANDOFFS, outcome=outcome)
            for outcome in ("sent", "received", "send_cancelled", "receive_cancelled")
        }
        refused = seen.total(table.RESERVATIONS_REFUSED)
        print(f"{placed} placed: {ended}, hand-offs {handed}, reservations refused {refused}")
        num_whole = sum(answer is not None for answer in answers)
        assert sum(ended.values()) == placed <= NUM_REQUESTS
        assert ended["failed"] == 0
        assert ended["finished"] >= num_whole
        assert ended["aborted"] > NUM_REQUESTS // 10, "too few went away in time to prove anything"
        # Each sequence ended once at each end; a finished answer is a hand-off that was received.
        for role in ("prefill", "decode"):
            assert seen.total(table.SEQUENCES, role=role) == placed
        assert handed["received"] >= ended["finished"]
        assert handed["received"] + handed["receive_cancelled"] <= placed
        assert seen.total(table.PROMPT_TOKENS_COMPUTED, role="decode") == 0
        # And it goes on as if nothing had been.
        assert len(front.complete(MODEL, [5, 6, 7], 5)[0].tokens) == 5
        assert "Traceback" not in serve.output


def check_answers(scripts: list[Script], answers: list[tuple[str, ...] | None]) -> None:
    """Whole answers are as long as asked, and of one prompt one begins like the other."""
    longest: dict[tuple[int, ...], tuple[str, ...]] = {}
    for script, answer in zip(scripts, answers, strict=True):
        if answer is None:
            assert script.kind not in (Kind.WHOLE, Kind.STREAM)
            continue
        # A streamed client that would have gone later than the answer was long has read all of it.
        assert len(answer) == script.max_tokens
        known = longest.get(tuple(script.prompt), ())
        num_common = min(len(known), len(answer))
        assert known[:num_common] == answer[:num_common]
        longest[tuple(script.prompt)] = max(known, answer, key=len)
    kinds = Counter(script.kind for script, answer in zip(scripts, answers, strict=True) if answer is not None)
    assert kinds[Kind.WHOLE] > NUM_REQUESTS // 10
    assert kinds[Kind.STREAM] > NUM_REQUESTS // 10


# --- hundreds at once -----------------------------------------------------------------------------------------------

NUM_CROWD = 400
CROWD_PROMPT, CROWD_ANSWER = 300, 60  # tokens
CROWD_LEAVES_EVERY_S = 0.005
# Blocks for a sixth of them. Nothing is computed until all are open, and who stands still meanwhile is not lost.
CROWD_ARGUMENTS = ("--num-blocks", "1600", "--num-threads", "1", "--beat-interval-s", "20")


def crowd_script(number: int) -> Script:
    """Every second client reads to the end, every fourth leaves after some tokens, the others when they are told to."""
    prompt = [3 + (number * 7 + index * (1 + number % 11)) % 300 for index in range(CROWD_PROMPT)]
    kind = Kind.GONE_MID_STREAM if number % 4 == 2 else Kind.STREAM
    return Script(kind, prompt, CROWD_ANSWER, 0.0, 1 + number % 10)


async def crowd(serve: Serve, front: Front, first_to_work: str) -> list[tuple[str, ...] | None]:
    """What each of the clients has read, None for those that left."""
    all_open = asyncio.Event()

    async def one(client: httpx.AsyncClient, number: int) -> tuple[str, ...] | None:
        living = asyncio.create_task(live(client, crowd_script(number)))
        if number % 4:
            return await living
        await all_open.wait()
        await asyncio.sleep(number * CROWD_LEAVES_EVERY_S)  # while it waits, is read, handed over or written
        living.cancel()
        await asyncio.wait({living})
        return None

    def are_open() -> bool:
        return front.cluster().router.num_open_requests == NUM_CROWD

    unlimited = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=serve.url, timeout=120.0, trust_env=False, limits=unlimited) as client,
        asyncio.timeout(200.0),
        asyncio.TaskGroup() as group,
    ):
        with standing_still(serve.pid_of(first_to_work)):
            asked = [group.create_task(one(client, number)) for number in range(NUM_CROWD)]
            await asyncio.to_thread(wait_until, are_open, 60.0, f"{NUM_CROWD} requests to be open at once")
        all_open.set()
    return [each.result() for each in asked]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["mixed", "disaggregated"])
def test_case_45_four_hundred_long_requests_at_once_of_whom_half_go(tiny_llama: Path, name: str) -> None:
    num_workers, first_to_work = (1, "mixed-0") if name == "mixed" else (2, "prefill-0")
    with Serve((str(tiny_llama), *PATHS[name], *CROWD_ARGUMENTS)) as serve, Front(serve.url) as front:
        front.wait_idle(num_workers)
        before = front.readings()
        answers = asyncio.run(crowd(serve, front, first_to_work))
        front.wait_idle(num_workers)
        seen = front.readings().since(before)
        ended = {outcome: seen.total(table.REQUESTS, outcome=outcome) for outcome in ("finished", "aborted", "failed")}
        print(f"{name}: {ended}")
        assert sum(ended.values()) == NUM_CROWD
        assert ended["failed"] == 0
        assert ended["aborted"] > NUM_CROWD // 5
        assert all(answers[1::2])
        for number in range(1, NUM_CROWD, NUM_CROWD // 4):  # what one reads does not depend on the crowd
            (alone,) = front.complete(MODEL, crowd_script(number).prompt, CROWD_ANSWER)
            assert answers[number] == alone.tokens
        front.wait_idle(num_workers)
        assert "Traceback" not in serve.output

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
from tests.e2e.cluster import FAST_BEATS, Front, completion

from disagg.telemetry import metrics as table
from disagg.testing.processes import Serve

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

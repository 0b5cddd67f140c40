"""Bodies in memory: large ones wait for nobody and are bounded together, small ones always have room."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message
from tests.unit.router.site import MakeSite

from disagg.router.body import FREE_BYTES, Bodies, BodyLimits
from disagg.router.http_errors import Refused
from disagg.testing.generation import Script

DEADLINE_S = 10.0
LARGE = 600_000
LIMITS = BodyLimits(max_bytes=1 << 20, timeout_s=0.1, max_held_bytes=1 << 20)


def request_of(*parts: bytes, then: str = "") -> Request:
    """The parts, and then their end, a disconnect, or nothing at all."""
    messages: list[Message] = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    if then != "nothing":
        messages.append({"type": "http.disconnect"} if then == "disconnect" else {"type": "http.request", "body": b""})

    async def receive() -> Message:
        return messages.pop(0) if messages else await asyncio.Future()

    return Request({"type": "http", "method": "POST", "path": "/", "headers": []}, receive)


@pytest.fixture
async def bodies() -> AsyncIterator[Bodies]:
    made = Bodies(LIMITS)
    yield made
    made.check_invariants()
    assert made.num_held_bytes == 0


async def test_large_bodies_are_bounded_together_and_small_ones_pass(bodies: Bodies) -> None:
    held = await bodies.read(request_of(b"x" * LARGE))
    assert bodies.num_held_bytes == LARGE - FREE_BYTES
    with pytest.raises(Refused) as refused:
        await bodies.read(request_of(*[b"y" * 10_000] * (LARGE // 10_000)))
    assert (refused.value.error.status, refused.value.error.body.code) == (429, "server_overloaded")
    assert str(1 << 20) in str(refused.value)
    headers = refused.value.error.response().headers
    assert (headers["retry-after"], headers["connection"]) == ("1", "close")
    assert bodies.num_held_bytes == LARGE - FREE_BYTES  # nothing of the refused one
    small = await bodies.read(request_of(b"z" * FREE_BYTES))
    assert len(small.content) == FREE_BYTES
    held.release()
    held.release()
    (await bodies.read(request_of(b"y" * LARGE))).release()
    small.release()


@pytest.mark.parametrize("then", ["nothing", "disconnect"])
async def test_what_does_not_come_holds_nothing(bodies: Bodies, then: str) -> None:
    with pytest.raises(Refused if then == "nothing" else ClientDisconnect):
        await bodies.read(request_of(b"x" * LARGE, then=then))


async def test_one_alone_has_room_whatever_the_bound() -> None:
    bodies = Bodies(BodyLimits(max_bytes=1 << 20, max_held_bytes=1))
    body = await bodies.read(request_of(b"x" * (1 << 20)))
    assert len(body.content) == 1 << 20
    body.release()
    bodies.check_invariants()


async def test_a_body_is_not_kept_while_its_answer_is_written(make_site: MakeSite) -> None:
    site = make_site(lambda request: Script(held_after=0 if request.sampling.seed == 1 else None), limits=LIMITS)
    junk = "x" * LARGE
    asking = asyncio.create_task(site.complete(seed=1, junk=junk))
    await asyncio.wait_for(site.service.submitted.wait(), DEADLINE_S)
    assert (await site.complete(junk=junk)).status_code == 200
    tokens = {"model": "tiny", "prompt": "hi", "junk": junk}
    assert (await site.client.post("/tokenize", json=tokens)).status_code == 200
    site.service.streams[0].release()
    assert (await asking).status_code == 200

"""A worker that is told to end: by an operator through its router, by itself, by a fault of its own."""

import asyncio
import json

import pytest
from tests.unit.worker.rigs import DEADLINE_S, gone, site, until
from tests.unit.worker.router_rigs import DECODER, ask, is_ready, linked, mixed_card, read, register, service

from disagg.channel.channel import dial
from disagg.core.errors import Failure, FailureKind, InternalFault
from disagg.core.ids import WorkerId
from disagg.core.roles import Role
from disagg.dispatch.stream import TokensDelivered
from disagg.protocol.messages import (
    AnswerDrain,
    RequestDrain,
)

pytestmark = pytest.mark.usefixtures("no_socket_left")


async def ask_drain(address: str, name: str) -> Failure | None:
    """As an operator does."""
    channel = await dial(address, DECODER, timeout_s=DEADLINE_S)
    channel.send(RequestDrain(WorkerId(name)))
    answer = await channel.receive(DEADLINE_S)
    assert isinstance(answer, AnswerDrain)
    await gone(channel)
    await channel.close()
    return answer.failure


async def test_an_operators_drain_reaches_the_worker_and_ends_it_when_it_is_idle() -> None:
    async with service() as (served, address), site("m", Role.MIXED) as made, linked(made, address):
        await until(lambda: is_ready(served))
        stream = ask(served, max_tokens=20)
        ending = asyncio.create_task(made.worker.ended())
        assert await ask_drain(address, "m") is None
        answers = [event for event in await read(stream) if isinstance(event, TokensDelivered)]
        assert sum(len(event.tokens) for event in answers) == 20
        async with asyncio.timeout(DEADLINE_S):
            await ending
        assert made.worker.scheduler.is_idle
        (worker,) = json.loads(served.cluster_json())["workers"]
        assert (worker["worker_id"], worker["draining"]) == ("m", True)


async def test_a_drain_of_nobody_names_those_who_are_there() -> None:
    async with service() as (_, address):
        failure = await ask_drain(address, "x")
        assert failure is not None
        assert failure.message == "no worker x is registered here; there is none"
        channel, _ = await register(address, mixed_card())
        failure = await ask_drain(address, "x")
        assert failure is not None
        assert failure.message == "no worker x is registered here; there is m0"
        assert failure.kind is FailureKind.INVALID_REQUEST
        await channel.close()


async def test_a_worker_that_is_told_to_end_lets_its_router_know() -> None:
    async with service() as (served, address), site("m", Role.MIXED) as made, linked(made, address):
        await until(lambda: is_ready(served))
        assert not made.worker.scheduler.is_draining
        made.worker.drain()
        made.worker.drain()
        await until(lambda: not is_ready(served))
        async with asyncio.timeout(DEADLINE_S):
            await made.worker.ended()
        waiting = ask(served)  # another worker may come
        waiting.abort()


async def test_a_fault_of_the_workers_own_ends_it_with_the_reason() -> None:
    async with site("m", Role.MIXED) as made:
        made.worker.handle(object())  # type: ignore[arg-type]
        with pytest.raises(InternalFault, match="object could not be handled"):
            async with asyncio.timeout(DEADLINE_S):
                await made.worker.ended()
        made.worker.drain()  # it hears no more
        assert not made.worker.scheduler.is_draining

"""A router as workers see it, and workers that a test plays towards it."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator

import msgspec
from tests.unit.worker.rigs import DEADLINE_S, VOCAB, Site, layout

from disagg.channel.channel import Channel, dial
from disagg.core.endpoints import Endpoint, TransportKind
from disagg.core.ids import Incarnation, SequenceId, WorkerId
from disagg.core.request import EmittedToken, SamplingParams
from disagg.core.roles import Numerics, Role
from disagg.dispatch.config import DispatcherConfig
from disagg.dispatch.dispatcher import Dispatcher
from disagg.dispatch.stream import GenerateRequest, StreamEvent, TokenStream
from disagg.policy.recovery import RecoveryLimits
from disagg.protocol.cards import PoolCard, WorkerCard
from disagg.protocol.messages import (
    AnswerRegistration,
    RegisterWorker,
    RouterToWorker,
)
from disagg.router.service import LiveService
from disagg.worker.links import RouterLink

DECODER: msgspec.msgpack.Decoder[RouterToWorker] = msgspec.msgpack.Decoder(RouterToWorker)
NUMBERS = itertools.count(5)


@contextlib.asynccontextmanager
async def service(
    port: int = 0, *, max_unplaced_s: float = 30.0, beat_interval_s: float = 2.5
) -> AsyncIterator[tuple[LiveService, str]]:
    config = DispatcherConfig(
        incarnation=Incarnation(next(NUMBERS)),  # as every process start has its own
        tokenizer_digests={"fake": "tok"},
        local_prefill_tokens=0,
        recovery=RecoveryLimits(max_unplaced_s=max_unplaced_s),
    )
    made = LiveService(Dispatcher(config), beat_interval_s=beat_interval_s)
    address = await made.listen("127.0.0.1", port)
    try:
        yield made, address
    finally:
        made.check_invariants()
        await made.close()


def is_ready(served: LiveService) -> bool:
    return served.models()[0].is_ready


def mixed_card(incarnation: int = 1, tokenizer: str = "tok", name: str = "m0") -> WorkerCard:
    return WorkerCard(
        worker_id=WorkerId(name),
        incarnation=Incarnation(incarnation),
        role=Role.MIXED,
        pool=PoolCard("fake", "weights", tokenizer, Numerics.EXACT, VOCAB, max_context=256),
        layout=layout(),
        num_blocks=64,
        control_address="127.0.0.1:1",
        data_endpoints=(Endpoint(TransportKind.TCP, "127.0.0.1:1"),),
    )


async def register(address: str, card: WorkerCard) -> tuple[Channel[RouterToWorker], AnswerRegistration]:
    """A worker that the test plays."""
    channel = await dial(address, DECODER, timeout_s=DEADLINE_S)
    channel.send(RegisterWorker(card))
    answer = await channel.receive(DEADLINE_S)
    assert isinstance(answer, AnswerRegistration), answer
    return channel, answer


async def receive(channel: Channel[RouterToWorker], kind: type) -> RouterToWorker:
    while True:
        message = await channel.receive(DEADLINE_S)
        if isinstance(message, kind):
            return message


def ask(served: LiveService, max_tokens: int = 3, num_choices: int = 1) -> TokenStream:
    return served.submit(GenerateRequest("fake", (1, 2, 3), SamplingParams(max_tokens, temperature=0.0), num_choices))


async def read(stream: TokenStream) -> list[StreamEvent]:
    async with asyncio.timeout(DEADLINE_S):
        return [event async for event in stream.events()]


def token(stream: TokenStream, position: int, choice: int = 0) -> EmittedToken:
    return EmittedToken(SequenceId(stream.request_id, choice), position, 9)


@contextlib.asynccontextmanager
async def linked(made: Site, address: str) -> AsyncIterator[asyncio.Task[None]]:
    """A real worker that keeps up its connection to a router."""
    link = RouterLink(made.worker, made.peers, address, 2.5)
    task = asyncio.create_task(link.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])
        await link.close()

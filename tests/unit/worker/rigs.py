"""Real workers with fake engines in one event loop: real control connections, real data connections, no router."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from tests.unit.transport.rigs import open_descriptors

from disagg.channel.channel import Channel
from disagg.core.errors import Failure, PeerLost
from disagg.core.ids import Incarnation, RequestId, SequenceId, WorkerId
from disagg.core.request import EmittedToken, SamplingParams, SequenceSpec, finish_reason
from disagg.core.roles import Numerics, Role, Task
from disagg.core.spans import KvLayout
from disagg.protocol.cards import PoolCard
from disagg.protocol.messages import (
    AbortSequence,
    EmitTokens,
    ReportFailure,
    ReportPairing,
    StartSequence,
    WorkerToRouter,
)
from disagg.scheduler.events import RouterMessageReceived
from disagg.testing.engine import FakeEngine
from disagg.worker.config import WorkerConfig
from disagg.worker.engines import LoadedEngine
from disagg.worker.process import start_worker

DEADLINE_S = 25.0
VOCAB = 1000


def layout(block_size: int = 4, dtype: str = "float32") -> KvLayout:
    return KvLayout(num_layers=3, num_kv_heads=1, head_dim=8, dtype=dtype, block_size=block_size)


class Site:
    """One worker and everything it has told its router, which is a list."""

    def __init__(self, name: str, role: Role, kv: KvLayout, num_blocks: int, keys: str = "") -> None:
        self.name = name
        self.engine = FakeEngine(kv, num_blocks, VOCAB)
        self.config = WorkerConfig(
            model="fake",
            served_name="fake",
            role=role,
            worker_id=name,
            router_address="127.0.0.1:1",
            chunk_tokens=16,
            mixed_chunk_tokens=8,
            min_push_bytes=0,
            beat_interval_s=2.5,
            probe_s=0.0,
            keys=keys,
        )
        self.told: list[WorkerToRouter] = []
        self._asked: dict[int, SamplingParams] = {}
        self._changed = asyncio.Event()

    async def open(self) -> None:
        pool = PoolCard("fake", "weights", "tok", Numerics.EXACT, VOCAB, max_context=256)
        self.worker, self.peers = await start_worker(self.config, LoadedEngine(self.engine, pool))
        self.worker.attach_router(self.tell)
        self.peers.report = self.tell

    async def close(self) -> None:
        await self.peers.close()
        await self.worker.close()

    def tell(self, message: WorkerToRouter) -> None:
        self.told.append(message)
        self._changed.set()

    def start(self, number: int, task: Task, peer: "Site", prompt: tuple[int, ...], sampling: SamplingParams) -> None:
        self._asked[number] = sampling
        spec = SequenceSpec(sequence_id(number), prompt, sampling)
        card = peer.peers.card
        message = StartSequence(spec, task, 1, (), card.worker_id, card.incarnation)
        self.worker.handle(RouterMessageReceived(message))

    def abort(self, number: int) -> None:
        self.worker.handle(RouterMessageReceived(AbortSequence(sequence_id(number), 1, "scripted")))

    # --- what was told -----------------------------------------------------------------------------------------

    def tokens(self, number: int) -> list[EmittedToken]:
        messages = [message for message in self.told if isinstance(message, EmitTokens)]
        return [t for message in messages for t in message.tokens if t.sequence_id == sequence_id(number)]

    def has_answered(self, number: int) -> bool:
        """Whether the last token of an answer, asked for with start(), has been told."""
        tokens = self.tokens(number)
        return bool(tokens) and finish_reason(self._asked[number], tokens[-1].token_id, len(tokens)) is not None

    @property
    def failures(self) -> list[ReportFailure]:
        return [message for message in self.told if isinstance(message, ReportFailure)]

    @property
    def pairings(self) -> list[Failure | None]:
        return [message.failure for message in self.told if isinstance(message, ReportPairing)]

    async def until(self, condition: Callable[[], bool], timeout_s: float = DEADLINE_S) -> None:
        """Look again whenever something is told."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def settled(self) -> None:
        """Until nothing is under way: every block free or cached."""
        await until(lambda: self.worker.scheduler.is_idle)
        state = self.worker.scheduler.snapshot()
        assert state.num_free_blocks + state.num_cached_blocks == self.engine.num_blocks
        self.worker.check_invariants()


def sequence_id(number: int) -> SequenceId:
    return SequenceId(RequestId(Incarnation(5), number), 0)


async def until(condition: Callable[[], bool]) -> None:
    """For conditions that nothing signals; fails after DEADLINE_S."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.fixture
async def no_socket_left() -> AsyncIterator[None]:
    """What a test opens in this process is closed soon after it."""
    before = open_descriptors()
    yield
    await until(lambda: open_descriptors() <= before)


async def gone(channel: Channel[Any]) -> None:
    """Read until the other side has ended the connection."""
    with contextlib.suppress(PeerLost):
        async with asyncio.timeout(DEADLINE_S):
            while True:
                await channel.receive(2 * DEADLINE_S)


@contextlib.asynccontextmanager
async def site(name: str, role: Role, *, kv: KvLayout | None = None, num_blocks: int = 64) -> AsyncIterator[Site]:
    made = Site(name, role, kv or layout(), num_blocks)
    await made.open()
    try:
        yield made
    finally:
        await made.close()


async def meet(source: Site, target: Site) -> None:
    """What a router does: tell the source side whom to meet; wait until both ends know each other."""
    before = source.pairings.count(None)
    source.peers.announce((target.peers.card,))
    await source.until(lambda: source.pairings.count(None) > before)


def peer_of(target: Site) -> WorkerId:
    return WorkerId(target.name)

"""A worker that computes nothing: it registers, and sends a token for every open sequence whenever it is told to."""

import asyncio
import time
from collections.abc import Sequence

import msgspec

from disagg.channel.channel import Channel, dial
from disagg.core.endpoints import Endpoint, TransportKind
from disagg.core.ids import Incarnation, SequenceId, WorkerId
from disagg.core.request import EmittedToken
from disagg.core.roles import Numerics, Role
from disagg.core.spans import KvLayout
from disagg.protocol.cards import PoolCard, WorkerCard
from disagg.protocol.messages import (
    AbortSequence,
    EmitTokens,
    RegisterWorker,
    ReportState,
    RouterToWorker,
    StartSequence,
    WorkerState,
)
from disagg.testing.model_files import VOCAB_SIZE

MODEL = "tiny"
LIMIT_S = 60.0
MAX_CONTEXT = 1 << 16

TO_WORKER: msgspec.msgpack.Decoder[RouterToWorker] = msgspec.msgpack.Decoder(RouterToWorker)


class FakeWorker:
    """Registers as a mixed worker. Sends a token for every open sequence whenever it is told to step."""

    def __init__(self, tokens: Sequence[int], digest: str, name: str = "fake") -> None:
        self.open: dict[SequenceId, int] = {}  # tokens sent so far
        self.started_s: dict[SequenceId, float] = {}
        self.step_s: list[float] = []
        self.is_instant = False  # answers each sequence with one token at once
        self.name = name
        self._limits: dict[SequenceId, int] = {}
        self._tokens = tokens
        self._digest = digest
        self._channel: Channel[RouterToWorker] | None = None
        self._changed = asyncio.Event()

    def forget(self) -> None:
        self.step_s, self.started_s = [], {}

    def asked_s(self) -> list[float]:
        return sorted(self.started_s.values())

    async def register(self, address: str) -> None:
        channel = await dial(address, TO_WORKER, timeout_s=LIMIT_S)
        pool = PoolCard(MODEL, "weights", self._digest, Numerics.EXACT, VOCAB_SIZE, MAX_CONTEXT)
        card = WorkerCard(
            worker_id=WorkerId(self.name),
            incarnation=Incarnation(1),
            role=Role.MIXED,
            pool=pool,
            layout=KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", block_size=16),
            num_blocks=1 << 24,
            control_address="127.0.0.1:1",
            data_endpoints=(Endpoint(TransportKind.TCP, "127.0.0.1:1"),),
        )
        channel.send(RegisterWorker(card))
        await channel.receive(LIMIT_S)
        self.attach(channel)

    def attach(self, channel: Channel[RouterToWorker]) -> None:
        self._channel = channel
        channel.start(beat_interval_s=2.5, on_message=self._take, on_lost=print)

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()

    async def has_open(self, count: int) -> None:
        async with asyncio.timeout(LIMIT_S):
            while len(self.open) != count:
                self._changed.clear()
                await self._changed.wait()

    def step(self) -> None:
        """One token for every open sequence, in one message."""
        assert self._channel is not None
        number = len(self.step_s)
        token_id = self._tokens[number % len(self._tokens)]
        tokens = tuple(EmittedToken(each, position, token_id) for each, position in self.open.items())
        for each in tuple(self.open):
            self.open[each] += 1
            if self.open[each] >= self._limits[each]:
                del self.open[each], self._limits[each]
        self.step_s.append(time.perf_counter())
        self._channel.send(EmitTokens(tokens))

    def report(self, state: WorkerState) -> None:
        """As a worker does with every beat."""
        assert self._channel is not None
        self._channel.send(ReportState(state))

    def _take(self, message: RouterToWorker) -> None:
        if isinstance(message, StartSequence):
            sequence_id = message.spec.sequence_id
            self.started_s[sequence_id] = time.perf_counter()
            if self.is_instant:
                assert self._channel is not None
                self._channel.send(EmitTokens((EmittedToken(sequence_id, 0, self._tokens[0]),)))
            else:
                self.open[sequence_id] = 0
                self._limits[sequence_id] = message.spec.sampling.max_tokens
        elif isinstance(message, AbortSequence):
            self.open.pop(message.sequence_id, None)
            self._limits.pop(message.sequence_id, None)
        self._changed.set()

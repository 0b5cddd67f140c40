"""Workers whose KV lies in other orders and on several ranks: fake engines whose arenas can be turned."""

import contextlib
from collections.abc import AsyncIterator

import msgspec
import torch
from tests.unit.worker.rigs import VOCAB, Site

from disagg.core.formats import KvWire
from disagg.core.roles import Numerics, Role
from disagg.core.spans import KvLayout, KvOrder
from disagg.engine.span_conversion import ArenaRows, CodedArena, OutgoingSpans
from disagg.kvcache.memory import Segment
from disagg.protocol.cards import PoolCard
from disagg.testing.engine import FakeEngine
from disagg.testing.memory import BytesMemory
from disagg.worker.engines import LoadedEngine, RankMemory
from disagg.worker.process import start_worker

NUM_LAYERS, NUM_HEADS, HEAD_DIM = 4, 4, 2


def unlike(
    block_size: int = 4,
    order: KvOrder = KvOrder.PLANES,
    heads: int = 1,
    layers: int = 1,
    *,
    is_latent: bool = False,
    dtype: str = "float32",
) -> KvLayout:
    """heads, layers: over how many ranks they are spread."""
    num_heads = 1 if is_latent else NUM_HEADS
    return KvLayout(NUM_LAYERS, num_heads, HEAD_DIM, dtype, block_size, order.value, heads, layers, is_latent)


def rows_of(memory: BytesMemory, layout: KvLayout, num_blocks: int) -> ArenaRows:
    """The bytes of a fake arena as an engine's."""
    (view,) = memory.gather([Segment(0, memory.num_bytes)])
    return ArenaRows(torch.frombuffer(view, dtype=torch.uint8), layout, num_blocks)


def rank_memories(engine: FakeEngine, wire: KvWire) -> tuple[RankMemory, ...]:
    """What the transports of each rank read and land in."""
    memories = []
    for rank, memory in enumerate(engine.memories):
        rows = rows_of(memory, engine.layout.rank_layout(rank), engine.num_blocks)
        coded = None if wire is KvWire.NATIVE else CodedArena(memory, rows, wire)
        memories.append(RankMemory(memory, OutgoingSpans(memory, rows), coded))
    return tuple(memories)


class UnlikeSite(Site):
    """A worker of as many ranks as its layout says; all of them in this process."""

    wire = KvWire.NATIVE

    async def open(self) -> None:
        numerics = Numerics.EXACT if self.wire is KvWire.NATIVE else Numerics.BOUNDED
        self.config = msgspec.structs.replace(self.config, numerics=numerics, kv_wire=self.wire)
        pool = PoolCard("fake", "weights", "tok", numerics, VOCAB, max_context=256)
        self.memories = rank_memories(self.engine, self.wire)
        loaded = LoadedEngine(self.engine, pool, self.memories)
        self.worker, self.peers = await start_worker(self.config, loaded)
        self.worker.attach_router(self.tell)
        self.peers.report = self.tell

    @property
    def num_reads(self) -> int:
        """Converted reads that are open."""
        return sum(each.outgoing.num_reads for each in self.memories if isinstance(each.outgoing, OutgoingSpans))


@contextlib.asynccontextmanager
async def unlike_site(
    name: str, role: Role, kv: KvLayout, num_blocks: int = 64, wire: KvWire = KvWire.NATIVE
) -> AsyncIterator[UnlikeSite]:
    made = UnlikeSite(name, role, kv, num_blocks)
    made.wire = wire
    await made.open()
    try:
        yield made
    finally:
        await made.close()

"""Which transport two workers take: shared memory under one supervisor, TCP for everybody else."""

import contextlib
from collections.abc import AsyncIterator

import msgspec
import pytest
from tests.unit.transport.rigs import open_descriptors
from tests.unit.worker.rigs import VOCAB, Site, layout, meet, peer_of, until
from tests.unit.worker.test_links import hand_over

from disagg.core.endpoints import TransportChoice, TransportKind
from disagg.core.roles import Numerics, Role
from disagg.protocol.messages import PoolCard
from disagg.testing.memory import BytesMemory, SealedBytesMemory
from disagg.transport.sharing import SharingDomain, draw_domain
from disagg.worker.engines import LoadedEngine
from disagg.worker.process import start_worker

NUM_BLOCKS = 64
ARENA_BYTES = layout().arena_bytes(NUM_BLOCKS)


@pytest.fixture(autouse=True)
async def no_socket_left() -> AsyncIterator[None]:
    before = open_descriptors()
    yield
    await until(lambda: open_descriptors() <= before)


class Neighbour(Site):
    """A worker as a supervisor starts it."""

    def __init__(
        self, name: str, role: Role, domain: SharingDomain | None, memory: BytesMemory, choice: TransportChoice
    ) -> None:
        super().__init__(name, role, layout(), NUM_BLOCKS)
        self.engine.memories = (memory,)
        self.config = msgspec.structs.replace(self.config, transport=choice)
        self.domain = domain

    async def open(self) -> None:
        pool = PoolCard("fake", "weights", "tok", Numerics.EXACT, VOCAB, max_context=256)
        loaded = LoadedEngine(self.engine, pool)
        self.worker, self.peers = await start_worker(self.config, loaded, domain=self.domain)
        self.worker.attach_router(self.tell)
        self.peers.report = self.tell

    @property
    def kinds(self) -> list[TransportKind]:
        return [endpoint.kind for endpoint in self.peers.card.data_endpoints]


@contextlib.asynccontextmanager
async def neighbour(
    name: str,
    role: Role,
    domain: SharingDomain | None,
    *,
    is_mappable: bool = True,
    choice: TransportChoice = TransportChoice.AUTO,
) -> AsyncIterator[Neighbour]:
    memory = SealedBytesMemory(ARENA_BYTES) if is_mappable else BytesMemory(ARENA_BYTES)
    made = Neighbour(name, role, domain, memory, choice)
    await made.open()
    try:
        yield made
    finally:
        await made.close()


async def test_neighbours_hand_over_in_shared_memory(caplog: pytest.LogCaptureFixture) -> None:
    domain = draw_domain()
    caplog.set_level("INFO", "disagg.worker.courier")
    async with neighbour("p", Role.PREFILL, domain) as source, neighbour("d", Role.DECODE, domain) as target:
        assert source.kinds == target.kinds == [TransportKind.TCP, TransportKind.SHARED_MEMORY]
        await meet(source, target)
        await hand_over(source, target, range(8))
        assert f"KV to {peer_of(target)} goes over shared_memory" in caplog.messages


@pytest.mark.parametrize("case", ["told", "by hand", "not mappable", "other supervisors"])
async def test_everybody_else_takes_tcp(caplog: pytest.LogCaptureFixture, case: str) -> None:
    domain = None if case == "by hand" else draw_domain()
    theirs = draw_domain() if case == "other supervisors" else domain
    choice = TransportChoice.TCP if case == "told" else TransportChoice.AUTO
    caplog.set_level("INFO", "disagg.worker.courier")
    async with (
        neighbour("p", Role.PREFILL, domain, choice=choice) as source,
        neighbour("d", Role.DECODE, theirs, is_mappable=case != "not mappable") as target,
    ):
        await meet(source, target)
        await hand_over(source, target, range(4))
        assert f"KV to {peer_of(target)} goes over tcp" in caplog.messages

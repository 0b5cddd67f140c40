"""Which transport two workers take: shared memory under one supervisor, TCP for everybody else."""

import contextlib
import threading
from collections.abc import AsyncIterator

import msgspec
import pytest
from tests.unit.worker.rigs import DEADLINE_S, VOCAB, Site, layout, meet, peer_of, until
from tests.unit.worker.test_links import hand_over

from disagg.core.endpoints import TransportChoice, TransportKind
from disagg.core.errors import PeerLost
from disagg.core.roles import Numerics, Role
from disagg.policy.transport_choice import ChoiceReason, TransportDecision, choose_transport
from disagg.protocol.cards import PoolCard, WorkerCard
from disagg.protocol.messages import ReportState
from disagg.telemetry.metrics import SLOW_LINKS, TRANSPORTS_CHOSEN
from disagg.testing.memory import BytesMemory, SealedBytesMemory
from disagg.transport.probe import Measured
from disagg.transport.sharing import SharingDomain, draw_domain
from disagg.worker import survey
from disagg.worker.engines import LoadedEngine
from disagg.worker.process import start_worker
from disagg.worker.survey import Way

pytestmark = pytest.mark.usefixtures("no_socket_left")

NUM_BLOCKS = 64
ARENA_BYTES = layout().arena_bytes(NUM_BLOCKS)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second is soon over on a machine with much to do, and then nothing was measured."""
    monkeypatch.setattr(survey, "CHOICE_TIMEOUT_S", DEADLINE_S)


class Neighbour(Site):
    """A worker as a supervisor starts it."""

    def __init__(
        self,
        name: str,
        role: Role,
        domain: SharingDomain | None,
        memory: BytesMemory,
        choice: TransportChoice,
        probe_s: float,
    ) -> None:
        super().__init__(name, role, layout(), NUM_BLOCKS)
        self.engine.memories = (memory,)
        self.config = msgspec.structs.replace(self.config, transport=choice, probe_s=probe_s)
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
    probe_s: float = 0.0,
) -> AsyncIterator[Neighbour]:
    memory = SealedBytesMemory(ARENA_BYTES) if is_mappable else BytesMemory(ARENA_BYTES)
    made = Neighbour(name, role, domain, memory, choice, probe_s)
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


# --- which of two is taken -----------------------------------------------------------------------------------------

TCP, SHARED = TransportKind.TCP, TransportKind.SHARED_MEMORY
FAST, SLOW = Measured(8e9, 1e-4), Measured(2e9, 1e-4)


def script(site: Neighbour, rates: dict[TransportKind, Measured | Exception]) -> list[TransportKind]:
    """What this worker finds when it measures; returns the list of what it has measured."""
    asked: list[TransportKind] = []

    def measure(card: WorkerCard, kind: TransportKind, budget_s: float) -> Measured:
        asked.append(kind)
        found = rates[kind]
        if isinstance(found, Exception):
            raise found
        return found

    site.worker.courier.measure = measure  # type: ignore[method-assign]
    return asked


def way_to(source: Neighbour, target: Neighbour) -> Way:
    return source.peers._links[peer_of(target)].way


@contextlib.asynccontextmanager
async def measuring_pair() -> AsyncIterator[tuple[Neighbour, Neighbour]]:
    domain = draw_domain()
    async with (
        neighbour("p", Role.PREFILL, domain, probe_s=0.05) as source,
        neighbour("d", Role.DECODE, domain, probe_s=0.05) as target,
    ):
        yield source, target


async def test_neighbours_are_measured_once_and_what_was_found_is_told() -> None:
    async with measuring_pair() as (source, target):
        await meet(source, target)
        way = way_to(source, target)
        assert [rate.kind for rate in way.report.rates] == [TCP, SHARED]
        assert all(rate.bytes_per_s > 0 and rate.expected_bytes_per_s > 0 for rate in way.report.rates)
        assert way.decision == choose_transport(way.report.rates)
        link = source.worker.scheduler._state.links[peer_of(target)]
        assert link.likely_bytes_per_s == way.report.bytes_per_s  # before the first push
        assert source.worker.scheduler.counters.get(TRANSPORTS_CHOSEN, way.decision.reason.value) == 1
        await hand_over(source, target, range(4))
        source.worker.report_state()
        reported = [message for message in source.told if isinstance(message, ReportState)][-1]
        (told,) = reported.state.links
        assert (told.peer, told.transport) == (peer_of(target), way.kind.value)
        assert told.measured_bytes_per_s == way.report.bytes_per_s
        assert told.bytes_per_s == link.likely_bytes_per_s > 0  # learned
        await source.peers.examine()
        assert way_to(source, target).kind is way.kind
        assert source.worker.scheduler.counters.get(TRANSPORTS_CHOSEN, way.decision.reason.value) == 1


@pytest.mark.parametrize(
    ("rates", "kind", "reason"),
    [
        ({TCP: FAST, SHARED: SLOW}, TCP, ChoiceReason.FASTEST),
        ({TCP: SLOW, SHARED: FAST}, SHARED, ChoiceReason.FASTEST),
        ({TCP: FAST, SHARED: FAST}, SHARED, ChoiceReason.TIE),
        ({TCP: SLOW, SHARED: PeerLost("it is silent")}, TCP, ChoiceReason.FASTEST),
        ({TCP: OSError("refused"), SHARED: PeerLost("it is silent")}, SHARED, ChoiceReason.NOT_MEASURED),
    ],
)
async def test_each_end_takes_what_it_has_found_to_be_fastest(
    rates: dict[TransportKind, Measured | Exception], kind: TransportKind, reason: ChoiceReason
) -> None:
    """The other end grants what is written over either, and may itself have found something else."""
    async with measuring_pair() as (source, target):
        asked = script(source, rates)
        script(target, {TCP: SLOW, SHARED: FAST})
        await meet(source, target)
        assert asked == [TCP, SHARED]
        assert way_to(source, target).decision == TransportDecision(kind, reason)
        await until(lambda: peer_of(source) in target.peers._links)
        assert way_to(target, source).kind is SHARED
        await hand_over(source, target, range(4))


async def test_a_probe_that_does_not_end_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "CHOICE_TIMEOUT_S", 0.05)
    async with measuring_pair() as (source, target):
        done = threading.Event()
        source.worker.courier.measure = lambda card, kind, budget_s: done.wait(5.0) and None  # type: ignore[assignment,method-assign,return-value]
        await meet(source, target)
        assert way_to(source, target).decision == TransportDecision(SHARED, ChoiceReason.NOT_MEASURED)
        assert "not measured within" in str(way_to(source, target).report.failure)
        done.set()
        await hand_over(source, target, range(2))


async def test_memory_that_is_far_too_slow_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(survey, "copied_bytes_per_s", lambda: 1e12)
    async with measuring_pair() as (source, target):
        script(source, {TCP: SLOW, SHARED: FAST})
        await meet(source, target)
        assert source.worker.scheduler.counters.get(SLOW_LINKS, "shared_memory") == 1
        assert "d: shared_memory gives only 64 Gbit/s, 1% of the 8e+03 Gbit/s" in caplog.text

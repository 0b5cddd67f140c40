"""Class I: whatever starts first, requests are answered, or told when to come again; none is stranded.

==== ==============================================================================================================
All  Router, prefill and decode workers in any order, up to half a minute apart, some blocked for as long after they
     have registered: the router is ready when, and only when, two of them can hand over to each other.
I1   A decode worker that hears of a prefill worker it has not met answers so. It is asked again; nothing breaks.
I2   A worker registers once everything of it listens: whoever learns its addresses can use them.
I3   On a fresh deployment a request is turned away with what is missing until there is a pair; no worker sees it.
I4   A worker that is blocked at its start (pinning memory, loading) blocks nobody who has a usable pair.
I5   Memory is taken and the transport is up before a worker registers: nothing is set up later that could fail.
I6   The front may come last, or come again: workers dial until it is there.
I7   No worker needs another to start: there is no warm-up across workers, only a handshake.
==== ==============================================================================================================
"""

import asyncio
import itertools
import random
from contextlib import AsyncExitStack
from functools import partial

import msgspec
import pytest
from tests.e2e.cluster import reserved_ports
from tests.faults import loopback
from tests.faults.loopback import LateEngine, delay_every_await, live_router, live_worker, paired
from tests.faults.virtual_rigs import TIMES, WatchedCluster, any_mode, ask, check_answers, finish, submit_over
from tests.unit.scheduler.rigs import PEER, PEER_INCARNATION, Solo, handoff, to_peer
from tests.unit.worker.rigs import DEADLINE_S, until

from disagg.channel.channel import Channel
from disagg.channel.listening import listen
from disagg.core.errors import FailureKind, Unavailable
from disagg.core.ids import Incarnation
from disagg.core.roles import HandoffMode, Role, Task
from disagg.dispatch.stream import GenerateRequest
from disagg.protocol.cards import WorkerCard
from disagg.protocol.messages import (
    AnswerRegistration,
    AnswerReservation,
    RegisterWorker,
    RequestReservation,
    WorkerToRouter,
)
from disagg.telemetry import metrics as table
from disagg.testing.virtual_worker import VirtualWorker

pytestmark = pytest.mark.usefixtures("no_socket_left")

FROM_WORKER: msgspec.msgpack.Decoder[WorkerToRouter] = msgspec.msgpack.Decoder(WorkerToRouter)
PARTS = ("router", "p", "p", "d", "d")
ORDERS = sorted(set(itertools.permutations(PARTS)))  # workers of one role are alike
LATEST_S = 30.0


# --- every order -------------------------------------------------------------------------------------------------


class StartingCluster(WatchedCluster):
    """Clients that come again when they are told to; readiness is compared with what is connected."""

    def __init__(self, seed: int, router_starts_s: float) -> None:
        super().__init__(seed, router_starts_s=router_starts_s)
        self.usable_since_s = float("inf")  # some pair has known each other, unpaused, for as long
        self.ready_since_s = float("inf")
        self.num_refused = 0

    def come(self, request: GenerateRequest) -> None:
        """One client: until it is let in."""
        if self.time.now_s < self.router_starts_s:  # its connection is refused
            self.time.after(1.0, partial(self.come, request))
            return
        refusal = None
        try:
            self.submit(request)
        except Unavailable as error:
            refusal = error
        if refusal is not None:
            assert not self.is_ready, refusal
            assert 0 < refusal.retry_after_s <= 10
            self.num_refused += 1
            self.time.after(refusal.retry_after_s, partial(self.come, request))

    def _check(self) -> None:
        super()._check()
        pairs = [
            (source, peer)
            for source in self.workers.values()
            if source.card.role is Role.PREFILL
            for peer in source.peers.values()
            if source.worker_id in peer.peers
        ]
        now_s = self.time.now_s
        if pairs:
            self.usable_since_s = min(self.usable_since_s, now_s)
        if self.time.now_s >= self.router_starts_s and self.is_ready:
            assert pairs, f"ready without a pair that has met\n{self.time.story()}"
            self.ready_since_s = min(self.ready_since_s, now_s)


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_i_any_order_with_any_delays_is_ready_with_the_first_pair_and_strands_nobody(order: tuple[str, ...]) -> None:
    for seed in range(TIMES):
        rng = random.Random(f"{order}{seed}")
        starts_s = [0.0]
        for _ in order[1:]:
            starts_s.append(starts_s[-1] + rng.choice([0.0, rng.uniform(0, LATEST_S / 10), rng.uniform(0, LATEST_S)]))
        cluster = StartingCluster(seed, starts_s[order.index("router")])
        counts = {"p": itertools.count(), "d": itertools.count()}
        for part, when_s in zip(order, starts_s, strict=True):
            if part != "router":
                name = f"{part}{next(counts[part])}"
                is_slow = rng.random() < 0.3
                cluster.time.at(when_s, partial(start, cluster, name, LATEST_S if is_slow else 0.0))
        last_s = starts_s[-1] + LATEST_S
        for salt in range(12):
            cluster.time.at(rng.uniform(0, last_s), partial(cluster.come, ask(20, 4, salt=salt)))
        finish(cluster, 12, limit_s=last_s + 20.0)
        # The word of it goes to the router in a message; a router that comes last is dialled every 2 s.
        since_s = max(cluster.usable_since_s, cluster.router_starts_s)
        assert cluster.ready_since_s - since_s < 3.0
        cluster.time.run(until=lambda cluster=cluster: cluster.num_pairs == 4)  # type: ignore[misc]


def start(cluster: WatchedCluster, name: str, blocked_s: float) -> None:
    """A worker; blocked for so long soon after it has registered."""
    cluster.start_worker(name, Role.PREFILL if name.startswith("p") else Role.DECODE, mode=any_mode(cluster.rng))
    if blocked_s:
        cluster.time.after(0.0005, partial(cluster.pause, name, blocked_s, is_noticed=False))


async def test_i_any_order_on_real_connections_with_delays_at_every_await() -> None:
    """Ten clusters at once in one loop, each in an order of its own."""

    async def live(number: int, rng: random.Random) -> None:
        order = rng.sample(PARTS, len(PARTS))
        async with AsyncExitStack() as stack:
            (port,) = stack.enter_context(reserved_ports(1))
            sites, served = [], None
            for index, part in enumerate(order):
                if part == "router":
                    served, _ = await stack.enter_async_context(live_router(port, 100 + number))
                else:
                    role = Role.PREFILL if part == "p" else Role.DECODE
                    engine = LateEngine(10 * number + index)
                    address = f"127.0.0.1:{port}"
                    sites.append(await stack.enter_async_context(live_worker(f"{part}{index}", role, address, engine)))
                await asyncio.sleep(rng.uniform(0.0, 0.1))
            assert served is not None
            waiting = served
            await until(lambda: waiting.models()[0].is_ready)
            for salt in range(4):
                await loopback.read_whole(*loopback.ask(served, salt))
            await paired(served, 4)
            await loopback.settled(*sites)

    with delay_every_await(1) as rng:
        async with asyncio.timeout(4 * DEADLINE_S):
            await asyncio.gather(*(live(number, random.Random(rng.random())) for number in range(10)))


# --- one by one --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("role", "task"), [(Role.DECODE, Task.DECODE), (Role.PREFILL, Task.PREFILL)])
def test_i1_work_with_a_peer_that_has_not_been_met_is_answered_and_works_once_it_has(role: Role, task: Task) -> None:
    solo = Solo(role)
    solo.start(0, task, (1, 2, 3))
    (report,) = solo.failures
    assert report.failure.kind is FailureKind.WORKER_LOST
    assert f"not paired with {PEER} ({PEER_INCARNATION})" in report.failure.message
    solo.meet(Role.PREFILL if role is Role.DECODE else Role.DECODE)
    solo.start(1, task, (1, 2, 3))
    assert len(solo.failures) == 1
    if role is Role.DECODE:
        # A question about a sequence that the router has not announced yet is refused and may be asked again.
        for number, kind in ((2, FailureKind.CANCELLED), (1, None)):
            request = RequestReservation(handoff(number), solo.fence(), 3)
            (answer,) = to_peer(AnswerReservation, solo.hear(request))
            assert (answer.failure and answer.failure.kind) == kind


@pytest.mark.parametrize("role", Role)
async def test_i2_i5_a_worker_registers_when_everything_of_it_can_be_used(role: Role) -> None:
    """Control and data addresses take connections at the very moment when the router learns of them."""
    seen: list[WorkerCard] = []
    channels: list[Channel[WorkerToRouter]] = []

    async def look(channel: Channel[WorkerToRouter]) -> None:
        message = await channel.receive(DEADLINE_S)
        assert isinstance(message, RegisterWorker)
        card = message.card
        for address in (card.control_address, *(end.address for end in card.data_endpoints)):
            host, _, port = address.rpartition(":")
            _, writer = await asyncio.open_connection(host, int(port))
            writer.close()
        channel.send(AnswerRegistration(Incarnation(1)))
        channels.append(channel)
        seen.append(card)

    server = await listen("127.0.0.1", 0, FROM_WORKER, look)
    async with live_worker("w", role, server.address) as made:
        await until(lambda: bool(seen))
        assert seen[0].data_endpoints
        assert made.engine.memory.num_bytes == seen[0].layout.arena_bytes(seen[0].num_blocks)
        server.close()
        for channel in channels:
            await channel.close()


@pytest.mark.parametrize("alone", ["p0", "d0"])
def test_i3_a_request_before_there_is_a_pair_is_turned_away_and_reaches_no_worker(alone: str) -> None:
    cluster = WatchedCluster(0)
    start(cluster, alone, 0.0)
    cluster.time.run_for(1.0)
    for _ in range(3):
        with pytest.raises(Unavailable) as refused:
            cluster.submit(ask(20))
        assert refused.value.retry_after_s > 0
        assert "worker has registered" in str(refused.value)
    cluster.time.run_for(1.0)
    assert cluster.total(table.SEQUENCES) == 0
    assert not cluster.failures
    start(cluster, "d0" if alone == "p0" else "p0", 0.0)
    cluster.time.run(until=lambda: cluster.is_ready)
    cluster.submit(ask(20))
    finish(cluster, 1)
    assert cluster.total(table.HANDOFFS, "d0", "received") == 1


@pytest.mark.parametrize("blocked", ["p1", "d1"])
@pytest.mark.parametrize("seed", range(2 * TIMES))
def test_i4_a_worker_that_is_blocked_at_its_start_holds_up_nobody_who_has_a_pair(seed: int, blocked: str) -> None:
    cluster = WatchedCluster(seed)
    cluster.start(1, 1)
    start(cluster, blocked, LATEST_S)
    cluster.time.run_for(0.1)
    began_s = cluster.time.now_s
    submit_over(cluster, 15, 1.0)
    cluster.time.run(until=lambda: len(cluster.answers) == 15 and cluster.are_all_over)
    check_answers(cluster)
    assert cluster.time.now_s - began_s < 10.0
    cluster.time.run(until=lambda: cluster.num_pairs == 2)  # and it is used once it is there
    for salt in range(40, 52):
        cluster.submit(ask(40, salt=salt))
    finish(cluster, 27)
    assert cluster.total(table.SEQUENCES, blocked, "finished") > 0


async def test_i6_a_router_that_comes_last_and_comes_again_finds_its_workers(free_port: int) -> None:
    address = f"127.0.0.1:{free_port}"
    async with (
        live_worker("p", Role.PREFILL, address) as prefill,
        live_worker("d", Role.DECODE, address) as decode,
    ):
        for number in range(3):
            async with live_router(free_port, 10 + number) as (served, _):
                await paired(served)
                await loopback.read_whole(*loopback.ask(served, number))
                await loopback.settled(prefill, decode)


@pytest.mark.parametrize("alone", ["p0", "d0"])
def test_i7_a_worker_starts_without_another_and_asks_nobody_for_anything(alone: str) -> None:
    cluster = WatchedCluster(0)
    start(cluster, alone, 0.0)
    cluster.time.run_for(60.0)
    (worker,) = cluster.workers.values()
    assert cluster.dispatcher.registry.get(worker.worker_id) is not None
    assert worker.engine.num_steps == 0
    assert worker.scheduler.is_idle
    assert worker.scheduler.next_wake_s() == float("inf")


def test_i7_meeting_is_all_that_two_workers_do_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[object] = []
    monkeypatch.setattr(VirtualWorker, "_to_peer", lambda self, peer, link, message: sent.append(message))
    cluster = WatchedCluster(0)
    cluster.start(2, 2, mode=HandoffMode.LAYERWISE)
    cluster.time.run_for(60.0)
    assert not sent
    assert sum(worker.engine.num_steps for worker in cluster.workers.values()) == 0
    cluster.submit(ask(20))
    cluster.time.run_for(0.1)
    assert sent  # or this would have seen nothing

"""Links that are slow, silent, cut or lie, and slow workers, as real processes: every answer is whole and the same.

One prefill and two decode workers behind faulty links. What is asked under a fault is asked undisturbed as well; text,
finish reasons, every log-probability and usage are equal.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
import pytest
import pytest_asyncio
from tests.e2e.cluster import completion
from tests.faults.strikes import MAX_TRIES, WRITING, Aim

from disagg.cluster.plan import PoolSizes, plan_local
from disagg.cluster.view import ClusterView
from disagg.core.roles import Role
from disagg.router.config import RouterConfig
from disagg.telemetry import metrics as table
from disagg.telemetry.metrics import Metric
from disagg.testing.chaos_cluster import LinkedCluster
from disagg.testing.chaos_counters import CounterWatch
from disagg.testing.chaos_workload import Outcome, Question, ask, draw_questions, is_same
from disagg.testing.fault_script import Fault, FaultKind, FaultPlayer, Target
from disagg.testing.faulty_link import WORKS, LinkFaults
from disagg.testing.model_files import VOCAB_SIZE, write_tiny_llama
from disagg.worker.config import WorkerConfig

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

MODEL = "tiny"
BEAT_INTERVAL_S = 1.0
LOST_AFTER_S = 2 * BEAT_INTERVAL_S
TIMEOUT_S = 60.0
AT_ONCE_S = 25.0  # no lease, of 30 s, has to run out
PREFILL, DECODES = "prefill-0", ("decode-0", "decode-1")
BETWEEN = [(PREFILL, decode) for decode in DECODES]
POLL_S = 0.02

T = TypeVar("T")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("faulty") / MODEL)


def plan_of(model: Path, sizes: PoolSizes, num_blocks: int | None = None) -> Any:
    """A few prompt tokens a step: a long prompt takes long enough to be interrupted."""
    router = RouterConfig(
        models=((MODEL, str(model)),), port=0, control_port=0, local_prefill_tokens=0, beat_interval_s=BEAT_INTERVAL_S
    )
    template = WorkerConfig(
        model=str(model),
        served_name=MODEL,
        role=Role.MIXED,
        worker_id="-",
        router_address="",
        num_threads=1,
        kv_memory_bytes=16 << 20,
        num_blocks=num_blocks,
        chunk_tokens=8,
        beat_interval_s=BEAT_INTERVAL_S,
        probe_s=0.0,  # what is broken or damaged on the way is to be a push
    )
    return plan_local(router, template, sizes)


class Site:
    """A linked cluster and one client of it."""

    def __init__(self, cluster: LinkedCluster, client: httpx.AsyncClient) -> None:
        self.cluster = cluster
        self._client = client

    async def ask(self, body: dict[str, Any], after: int = -1, act: Callable[[], None] = lambda: None) -> Outcome:
        """All of an answer; `act` is called once the stream has given `after` pieces."""
        outcome = await ask(
            self._client, Question(body, ""), on_piece=lambda num_pieces: act() if num_pieces == after else None
        )
        assert outcome.error is None, outcome.error
        return outcome

    async def view(self) -> ClusterView:
        return msgspec.json.decode((await self._client.get("/cluster")).content, type=ClusterView)

    async def total(self, metric: Metric) -> int:
        watch = CounterWatch()
        watch.read((await self._client.get("/metrics")).text)
        return watch.total(metric)

    async def counted(self, metric: Metric, least: int) -> int:
        """The total once it is at least this: workers report a few times a second."""
        totals: list[int] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TIMEOUT_S):
                while not totals or totals[-1] < least:
                    totals.append(await self.total(metric))
        return totals[-1]

    async def until(self, condition: Callable[[ClusterView], bool], what: str) -> None:
        """What /cluster must say within TIMEOUT_S."""
        end_s = time.monotonic() + TIMEOUT_S
        while not condition(view := await self.view()):
            assert time.monotonic() < end_s, f"waited {TIMEOUT_S:g} s for {what}: {view}"
            await asyncio.sleep(POLL_S)

    async def disturbed(self, body: dict[str, Any], act: Callable[[str], Awaitable[None]]) -> tuple[str, list[Outcome]]:
        """Ask until something was done to the worker at work in the middle of the answer, and the sequence moved.

        `act` is called with its name while all decode workers stand still. The name, and all answers.
        """
        outcomes: list[Outcome] = []
        for _ in range(MAX_TRIES):
            await self.settle()
            moves = await self.total(table.MOVES)
            aim = Aim({name: self.cluster.pid_of(name) for name in DECODES}, self.cluster.url, WRITING)
            acting: list[asyncio.Task[str | None]] = []
            outcomes.append(await self.ask(body, 5, partial(begin, partial(_act, aim, act), acting)))
            name = await acting[0]
            if name is not None and await self.total(table.MOVES) > moves:
                return name, outcomes
        raise AssertionError(f"{MAX_TRIES} answers were over before anything was done to their writers")

    def heal(self) -> None:
        for pair in self.cluster.pairs():
            self.cluster.set_link(*pair, WORKS)

    async def settle(self) -> None:
        """Everything is connected and no block is in use."""
        self.heal()
        await self.cluster.wait_whole(TIMEOUT_S)
        await self.until(_is_idle, "every block to be free or cached")
        self.cluster.check_invariants()


async def _act(aim: Aim, act: Callable[[str], Awaitable[None]]) -> str | None:
    with ThreadPoolExecutor(1) as threads:
        name = await asyncio.get_running_loop().run_in_executor(threads, aim.hold)
    try:
        if name is not None:
            await act(name)
    finally:
        aim.let_go()
    return name


def _is_idle(view: ClusterView) -> bool:
    states = [worker.state for worker in view.workers]
    used = [s.num_held_blocks + s.num_reserved_blocks + s.num_quarantined_blocks + s.num_handoffs for s in states]
    return not any(used) and not view.router.num_open_requests


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tiny: Path) -> AsyncIterator[LinkedCluster]:
    async with LinkedCluster(plan_of(tiny, PoolSizes(num_prefill=1, num_decode=2))) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def site(cluster: LinkedCluster) -> AsyncIterator[Site]:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=TIMEOUT_S, trust_env=False) as client:
        site = Site(cluster, client)
        await site.settle()
        pids = {name: cluster.pid_of(name) for name in cluster.worker_ids}
        yield site
        await site.settle()
        # No fault of a link, and no slowness, may cost a process.
        assert {name: cluster.pid_of(name) for name in cluster.worker_ids} == pids
        assert "Traceback" not in cluster.output, cluster.output


def question(prompt: list[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    options = {"stream": True, "stream_options": {"include_usage": True}, "logprobs": 1, "temperature": 0.8, "seed": 7}
    return completion(MODEL, prompt, max_tokens, **options, **more)


def begin(work: Callable[[], Coroutine[None, None, T]], tasks: list[asyncio.Task[T]]) -> None:
    tasks.append(asyncio.create_task(work()))


SHORT_PROMPT = [7, 8, 9, 10, 11]
LONG_ANSWER = 400  # tokens: most of them are still to come when something is done to its writer


def long_prompt(salt: int) -> list[int]:
    """Another start for each, or the prefix index would know it."""
    return [3 + salt, *(3 + index % 300 for index in range(600))]


async def same(site: Site, outcome: Outcome, body: dict[str, Any]) -> None:
    """As it is undisturbed."""
    await site.settle()
    reference = await site.ask(body)
    assert is_same(outcome, reference), (outcome.answer, reference.answer)


# --- a slow worker ----------------------------------------------------------------------------------------------


async def test_a_slow_worker_under_load(site: Site) -> None:
    """Stopped for 80 % of the time, in slices far below the heartbeat's limit."""
    questions = draw_questions(random.Random(3), MODEL, 8, 200, VOCAB_SIZE - 100)
    reference = [await site.ask(each.body) for each in questions]
    player = FaultPlayer(site.cluster, [Fault(0.0, FaultKind.SLOW_WORKER, Target(name), 3.0) for name in DECODES])
    slowing = asyncio.create_task(player.play())
    while not slowing.done():
        answers = await asyncio.gather(*(site.ask(each.body) for each in questions))
        assert all(is_same(one, other) for one, other in zip(answers, reference, strict=True))
    await slowing
    assert player.played[FaultKind.SLOW_WORKER] == 2


# --- links to the router ----------------------------------------------------------------------------------------


async def test_a_writer_whose_link_falls_silent_mid_stream(site: Site) -> None:
    """Half-open: no data and no end. The stream goes on elsewhere; the worker comes back when the link heals."""
    body = question(SHORT_PROMPT, LONG_ANSWER, n=2)

    async def silence(name: str) -> None:
        site.cluster.set_link(name, "router", LinkFaults(is_silent=True))

    silent, outcomes = await site.disturbed(body, silence)
    assert silent not in {worker.worker_id for worker in (await site.view()).workers}
    for outcome in outcomes:
        await same(site, outcome, body)
    assert silent in {worker.worker_id for worker in (await site.view()).workers}


async def test_half_open_links_after_idle(site: Site) -> None:
    """Nobody was speaking when it fell silent; a request after two timeouts is served by another path, at once."""
    site.cluster.set_link(DECODES[0], "router", LinkFaults(is_silent=True))
    site.cluster.set_link(PREFILL, DECODES[0], LinkFaults(is_silent=True))
    await site.until(lambda view: len(view.workers) == 2, "the silent worker to be lost")
    body = question(long_prompt(1), 8)
    async with asyncio.timeout(AT_ONCE_S):
        outcome = await site.ask(body)
    await same(site, outcome, body)


async def test_half_open_links_before_anybody_knows(site: Site) -> None:
    """Requests go to a worker that cannot be heard any more: they move once its heartbeat is missed."""
    bodies = [question([5 + number, *SHORT_PROMPT], 20) for number in range(4)]
    for pair in ((DECODES[1], "router"), (PREFILL, DECODES[1])):
        site.cluster.set_link(*pair, LinkFaults(is_silent=True))
    async with asyncio.timeout(LOST_AFTER_S + AT_ONCE_S):
        outcomes = await asyncio.gather(*(site.ask(body) for body in bodies))
    for body, outcome in zip(bodies, outcomes, strict=True):
        await same(site, outcome, body)


async def test_a_prefill_worker_that_cannot_be_told_to_begin(site: Site) -> None:
    """Its link to the router is half-open, that to the decode worker works: nobody waits for a lease to run out."""
    body = question(long_prompt(2), 8)
    site.cluster.set_link(PREFILL, "router", LinkFaults(is_silent=True))
    async with asyncio.timeout(LOST_AFTER_S + AT_ONCE_S):
        outcome = await site.ask(body)
    await same(site, outcome, body)


NOISE = {
    "repeated": LinkFaults(duplicate_share=0.5),
    "delayed": LinkFaults(delay_s=0.05),
    "repeated and delayed": LinkFaults(duplicate_share=0.5, delay_s=0.02),
}


@pytest.mark.parametrize("noise", NOISE)
async def test_messages_on_every_link(site: Site, noise: str) -> None:
    """No effect but a counter: nothing moves."""
    bodies = [question(long_prompt(10 + number), 40, n=2) for number in range(2)]
    before, moves = site.cluster.links.counts(), await site.total(table.MOVES)
    ignored = await site.total(table.MESSAGES_IGNORED)
    for pair in site.cluster.pairs():
        site.cluster.set_link(*pair, NOISE[noise])
    outcomes = await asyncio.gather(*(site.ask(body) for body in bodies))
    assert await site.total(table.MOVES) == moves
    if NOISE[noise].duplicate_share:
        assert site.cluster.links.counts().num_duplicated > before.num_duplicated
        await site.settle()
        assert await site.counted(table.MESSAGES_IGNORED, ignored + 1) > ignored
    for body, outcome in zip(bodies, outcomes, strict=True):
        await same(site, outcome, body)


LIES = {"lost": LinkFaults(drop_share=1.0), "damaged": LinkFaults(corrupt_share=1.0)}


@pytest.mark.parametrize("lie", LIES)
async def test_one_message_mid_stream_does_not_arrive_as_sent(site: Site, lie: str) -> None:
    """Found at the next frame's checksum: the connection ends and the sequence moves, with no hole and no lie."""
    body = question(SHORT_PROMPT, LONG_ANSWER)
    reference = await site.ask(body)
    hits: list[asyncio.Task[None]] = []

    async def hit(name: str) -> None:
        begin(partial(hit_once, site, [(name, "router")], LIES[lie]), hits)
        await asyncio.sleep(0)  # the link lies from now on

    for _ in range(4):
        _, outcomes = await site.disturbed(body, hit)
        await asyncio.gather(*hits)
        assert all(is_same(outcome, reference) for outcome in outcomes)


@pytest.mark.parametrize("lie", LIES)
async def test_a_message_between_workers_does_not_arrive_as_sent(site: Site, lie: str) -> None:
    bodies = [question(long_prompt(20 + number + 10 * (lie == "lost")), 30) for number in range(4)]
    hitting = asyncio.create_task(hit_once(site, BETWEEN, LIES[lie]))
    outcomes = await asyncio.gather(*(site.ask(body) for body in bodies))
    await hitting
    for body, outcome in zip(bodies, outcomes, strict=True):
        await same(site, outcome, body)


async def hit_once(site: Site, pairs: list[tuple[str, str]], fault: LinkFaults) -> None:
    """The next message on one of these links, and then no more."""

    def num_hit() -> int:
        counts = site.cluster.links.counts()
        return counts.num_dropped + counts.num_corrupted

    before, end_s = num_hit(), time.monotonic() + TIMEOUT_S
    for pair in pairs:
        site.cluster.set_link(*pair, fault)
    while num_hit() == before:
        assert time.monotonic() < end_s, "no message came"
        await asyncio.sleep(0)
    for pair in pairs:
        site.cluster.set_link(*pair, WORKS)


# --- links between workers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [LinkFaults(is_cut=True), LinkFaults(is_silent=True)], ids=["cut", "silent"])
async def test_the_link_of_a_hand_off_breaks_during_it(site: Site, fault: LinkFaults) -> None:
    body = question(long_prompt(60 + fault.is_cut), 12)
    data = [site.cluster.links.between(*pair).data for pair in BETWEEN]
    before = [link.counts.num_units for link in data]
    moves = await site.total(table.MOVES)
    answer = asyncio.create_task(site.ask(body))
    async with asyncio.timeout(TIMEOUT_S):
        while all(link.counts.num_units == count for link, count in zip(data, before, strict=True)):
            assert not answer.done(), "it ended before it could be interrupted"
            await asyncio.sleep(0.001)
    assert not answer.done()
    for pair in BETWEEN:
        site.cluster.set_link(*pair, fault)
    outcome = await answer
    assert await site.total(table.MOVES) > moves
    await same(site, outcome, body)


async def test_kv_that_arrives_damaged_once_is_sent_again(site: Site) -> None:
    body = question(long_prompt(40), 12)
    rejected, retries = await site.total(table.LANDINGS_REJECTED), await site.total(table.PUSH_RETRIES)
    moves = await site.total(table.MOVES)
    for pair in BETWEEN:
        site.cluster.set_link(*pair, LinkFaults(num_corrupt_pushes=1))
    outcome = await site.ask(body)
    await site.settle()
    assert await site.counted(table.LANDINGS_REJECTED, rejected + 1) == rejected + 1
    assert await site.counted(table.PUSH_RETRIES, retries + 1) == retries + 1
    assert await site.total(table.MOVES) == moves
    await same(site, outcome, body)


async def test_kv_that_always_arrives_damaged_is_never_used(site: Site) -> None:
    """The decode worker reads the prompt itself in the end."""
    body = question(long_prompt(50), 12)
    rejected, moves = await site.total(table.LANDINGS_REJECTED), await site.total(table.MOVES)
    for pair in BETWEEN:
        site.cluster.set_link(*pair, LinkFaults(corrupt_push_share=1.0))
    outcome = await site.ask(body)
    assert await site.total(table.MOVES) > moves
    await site.settle()
    assert await site.counted(table.LANDINGS_REJECTED, rejected + 2) >= rejected + 2
    await same(site, outcome, body)


async def test_a_narrow_link_delays_and_changes_nothing(site: Site) -> None:
    body = question(long_prompt(70), 12)
    moves = await site.total(table.MOVES)
    for pair in BETWEEN:
        site.cluster.set_link(*pair, LinkFaults(bytes_per_s=300e3))
    outcome = await site.ask(body)
    assert await site.total(table.MOVES) == moves
    await same(site, outcome, body)

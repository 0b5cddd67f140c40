"""Main of a worker process: load, listen, register, serve until told to stop."""

import asyncio
import logging
import os
import secrets
import signal
import sys
from collections.abc import Callable

from disagg.channel.garbage import collect_rarely, loading
from disagg.channel.keys import Keys, load_keys
from disagg.channel.lifeline import watch_parent
from disagg.core.endpoints import TransportChoice, TransportKind
from disagg.core.errors import ConfigurationError
from disagg.core.ids import MAX_INCARNATION, Incarnation, WorkerId
from disagg.core.roles import PartialStart
from disagg.kvcache.memory import MappableMemory
from disagg.modelfiles.fetch import resolve_model
from disagg.policy.batching import StepBudget
from disagg.protocol.cards import WorkerCard
from disagg.protocol.state_metrics import worker_exposition
from disagg.scheduler.config import SchedulerConfig
from disagg.transport.api import Post
from disagg.transport.shared_memory_receiver import SharedMemoryReceiver
from disagg.transport.shared_memory_sender import SharedMemorySender
from disagg.transport.sharing import SharingDomain, take_domain
from disagg.transport.tcp_connection import TcpSenderConfig
from disagg.transport.tcp_receiver import TcpReceiver
from disagg.transport.tcp_sender import TcpSender
from disagg.worker.config import WorkerConfig
from disagg.worker.courier import Courier, MakeMovers, Mover, rank_names
from disagg.worker.engines import LoadedEngine, RankMemory, load_engine
from disagg.worker.links import PeerLinks, RouterLink
from disagg.worker.metrics_page import PATH, MetricsPage
from disagg.worker.watchdog import Watchdog
from disagg.worker.worker import Worker

_log = logging.getLogger(__name__)

GRANT_SEED_BYTES = 32
# A step is hundreds of calls that let other threads run. Python makes whoever comes back from one wait for so long, by
# default ten times as much, while another thread computes.
SWITCH_INTERVAL_S = 5e-4
QUIET_S = 2.0  # how often a new worker looks whether it is idle


def run_worker(config: WorkerConfig) -> int:
    """Blocking; 0 when told to stop. Raises ConfigurationError when the configuration cannot work."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    lifeline = watch_parent()
    domain = take_domain()
    try:
        if config.cores:
            _pin(config.cores)
        with loading():
            loaded = load_engine(config, resolve_model(config.model))
        collect_rarely()
        os.nice(config.niceness)  # not before: all load at once. Threads that are started from here on inherit it
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        asyncio.run(_serve(config, loaded, domain))
    finally:
        if lifeline is not None:
            lifeline.close()
    return 0


async def _serve(config: WorkerConfig, loaded: LoadedEngine, domain: SharingDomain | None) -> None:
    worker, peers = await start_worker(config, loaded, Watchdog(config.progress_timeout_s), domain)
    router = RouterLink(worker, peers, config.router_address, config.beat_interval_s, load_keys(config.keys))
    page = MetricsPage(lambda: worker_exposition(peers.card, worker.state()))
    tasks: list[asyncio.Task[None]] = []
    preparing = asyncio.create_task(prepare_when_idle(loaded.prepare, lambda: worker.scheduler.is_idle, QUIET_S))
    try:
        if config.metrics_port is not None:
            address = await page.listen(config.metrics_host, config.metrics_port)
            _log.info("metrics at http://%s%s", address, PATH)
        work = (router.run(), router.report_states(), _ending(worker, config.drain_timeout_s))
        tasks += map(asyncio.create_task, work)
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:  # a refusal by the router, or a fault of ours, ends the process with its reason
            task.result()
    finally:
        for task in (preparing, *tasks):
            task.cancel()
        await page.close()
        await router.close()
        await peers.close()
        await worker.close()


async def prepare_when_idle(prepare: Callable[[], None], is_idle: Callable[[], bool], interval_s: float) -> None:
    """Looks every interval_s, not at once: beside the first requests it would stand in their way."""
    while True:
        await asyncio.sleep(interval_s)
        if is_idle():
            prepare()
            return


async def _ending(worker: Worker, drain_timeout_s: float) -> None:
    """Returns when this process is to end: drained after a first signal or the router's word, or at a second signal.

    Raises InternalFault when the worker has stopped by a fault of ours.
    """
    signals: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    drained = asyncio.create_task(worker.ended())
    first = asyncio.create_task(signals.get())
    await asyncio.wait({drained, first}, return_when=asyncio.FIRST_COMPLETED)
    if drained.done():
        drained.result()  # raises what ended it, if it was no drain
        _log.info("drained")
        return
    worker.drain()
    second = asyncio.create_task(signals.get())
    await asyncio.wait({drained, second}, timeout=drain_timeout_s, return_when=asyncio.FIRST_COMPLETED)
    if not drained.done():
        reason = "a second signal came" if second.done() else f"it took more than {drain_timeout_s:g} s"
        _log.warning("not drained: %s; %d sequences are dropped", reason, worker.scheduler.snapshot().num_running)


async def start_worker(
    config: WorkerConfig,
    loaded: LoadedEngine,
    watchdog: Watchdog | None = None,
    domain: SharingDomain | None = None,
) -> tuple[Worker, PeerLinks]:
    """A worker that listens for peers and knows no router yet. `domain`: of the supervisor that started it, if any.

    Raises ConfigurationError where it cannot listen.
    """
    engine = loaded.engine
    incarnation = Incarnation(secrets.randbelow(MAX_INCARNATION))
    worker_id = WorkerId(config.worker_id)
    card = WorkerCard(
        worker_id=worker_id,
        incarnation=incarnation,
        role=config.role,
        pool=loaded.pool,
        layout=engine.layout,
        num_blocks=engine.num_blocks,
        control_address="",
        data_endpoints=(),
        kv_wire=config.kv_wire,
    )
    keys = load_keys(config.keys)
    memories = zip(rank_names(card), loaded.rank_memories, strict=True)
    make_movers = [_movers(config, memory, name, incarnation, keys, domain) for name, memory in memories]
    try:
        courier = Courier(card, *make_movers)
        worker = Worker(scheduler_config(config, loaded, incarnation), engine, courier, watchdog)
        peers = PeerLinks(
            worker,
            courier.card,
            config.beat_interval_s,
            keys=keys,
            probe_s=config.probe_s,
            link_gbits=config.link_gbits,
        )
        await peers.listen(config.host)
    except (OSError, UnicodeError) as error:  # the latter for what no host can be called
        text = f"cannot listen on {config.host}: {error}; give --host an address of this machine"
        raise ConfigurationError(text) from None
    courier.card = peers.card
    return worker, peers


def scheduler_config(config: WorkerConfig, loaded: LoadedEngine, incarnation: Incarnation) -> SchedulerConfig:
    """The pure part of a worker's configuration."""
    return SchedulerConfig(
        worker_id=WorkerId(config.worker_id),
        incarnation=incarnation,
        role=config.role,
        model_digest=loaded.pool.model_digest,
        numerics=loaded.pool.numerics,
        layout=loaded.engine.layout,
        num_blocks=loaded.engine.num_blocks,
        max_context=loaded.pool.max_context,
        vocab_size=loaded.pool.vocab_size,
        budget=StepBudget(config.chunk_tokens, config.mixed_chunk_tokens, config.max_running, config.itl_target_s),
        handoff_mode=config.handoff,
        partial_start=config.partial_start if loaded.runs_layers_apart else PartialStart.OFF,
        first_token=config.first_token,
        min_push_bytes=config.min_push_bytes,
        lease_s=config.lease_s,
        grant_seed=secrets.token_bytes(GRANT_SEED_BYTES),
    )


def _movers(
    config: WorkerConfig,
    memory: RankMemory,
    name: WorkerId,
    incarnation: Incarnation,
    keys: Keys | None,
    domain: SharingDomain | None,
) -> MakeMovers:
    """Transports of one rank."""
    reads, lands_in = memory.outgoing or memory.arena, memory.incoming or memory.arena
    shared = memory.arena if isinstance(memory.arena, MappableMemory) and memory.arena.descriptor is not None else None

    def tcp(post: Post) -> Mover:
        receiver = TcpReceiver(lands_in, incarnation, post, host=config.host, tls=keys.accepting if keys else None)
        lanes = TcpSenderConfig(num_lanes=config.data_connections)
        tls = keys.dialling if keys else None
        sender = TcpSender(name, incarnation, reads, post, lanes, tls=tls, arena=shared)
        return Mover(sender, receiver, memory.outgoing, sender.measure, receiver.refused)

    def make(post: Post) -> dict[TransportKind, Mover]:
        movers = {TransportKind.TCP: tcp(post)}
        if domain is not None and shared is not None and config.transport is TransportChoice.AUTO:
            # A neighbour that may still write when the lease has ended is ended by force.
            receiver = SharedMemoryReceiver(shared, incarnation, post, domain, fence_timeout_s=config.lease_s)
            sender = SharedMemorySender(name, reads, post, domain, arena=shared)
            movers[TransportKind.SHARED_MEMORY] = Mover(sender, receiver, memory.outgoing, sender.measure)
        return movers

    return make


def _pin(cores: tuple[int, ...]) -> None:
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        usable = sorted(os.sched_getaffinity(0))
        text = f"cannot run on cores {list(cores)}: {error.strerror}; this process may use {usable}"
        raise ConfigurationError(text) from None

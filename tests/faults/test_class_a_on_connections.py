"""Class A on real connections: held landings (A7), delays at every await (A12), health (A13), pieces (A14)."""

import asyncio
import os
import signal
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import msgspec
import pytest
from tests.e2e.cluster import Front, announced, is_ready, router, worker
from tests.faults import loopback
from tests.faults.loopback import GatedEngine, LateEngine, delay_every_await, live_router, live_worker, paired
from tests.faults.virtual_rigs import (
    TIMES,
)
from tests.unit.worker.rigs import DEADLINE_S, until

from disagg.channel.channel import dial
from disagg.core.endpoints import TransportKind
from disagg.core.ids import WorkerId
from disagg.core.roles import Role
from disagg.modelfiles.tokenizer import load_tokenizer
from disagg.protocol.messages import RegisterWorker, RouterToWorker, WorkerState
from disagg.router.app import create_app
from disagg.router.text import ModelText
from disagg.telemetry import metrics as table
from disagg.testing.processes import wait_until
from disagg.testing.tokenizer_files import write_tiny_tokenizer
from disagg.transport.tcp_sender import TcpSender

pytestmark = pytest.mark.usefixtures("no_socket_left")

FROM_ROUTER: msgspec.msgpack.Decoder[RouterToWorker] = msgspec.msgpack.Decoder(RouterToWorker)


async def test_a7_on_real_connections_a_held_landing_holds_up_no_other_stream() -> None:
    """The receiving thread of one sender waits inside its frame; streams that are here go on, new ones come in."""
    engine = GatedEngine()
    async with AsyncExitStack() as stack:
        served, address = await stack.enter_async_context(live_router())
        decode = await stack.enter_async_context(live_worker("d", Role.DECODE, address, engine))
        prefill = await stack.enter_async_context(live_worker("p", Role.PREFILL, address))
        await paired(served)
        running = loopback.ask(served, 0, max_tokens=150)
        await until(lambda: decode.worker.scheduler.snapshot().num_held_blocks > 0 and engine.num_steps > 1)
        engine.gate.clear()
        try:
            held = [loopback.ask(served, number) for number in (1, 2)]
            await until(lambda: engine.num_waiting > 0)
            await loopback.read_whole(*running)
            await until(lambda: decode.worker.scheduler.snapshot().num_handoffs == 2)
        finally:
            engine.gate.set()
        for request, stream in held:
            await loopback.read_whole(request, stream)
        await loopback.settled(prefill, decode)


@pytest.mark.parametrize("seed", range(6 * TIMES))
async def test_a12_delays_at_every_await_of_the_real_code_leave_no_request_behind(seed: int) -> None:
    with delay_every_await(seed) as rng:
        async with AsyncExitStack() as stack:
            served, address = await stack.enter_async_context(live_router())
            sites = [
                await stack.enter_async_context(live_worker(name, role, address, LateEngine(seed + index)))
                for index, (name, role) in enumerate(
                    [("p0", Role.PREFILL), ("d0", Role.DECODE), ("p1", Role.PREFILL), ("d1", Role.DECODE)]
                )
            ]
            await paired(served, 4)
            reading = []
            for number in range(24):
                asked = loopback.ask(served, number, rng.randint(1, 60), rng.randint(1, 8))
                reading.append(asyncio.create_task(loopback.read_whole(*asked)))
                await asyncio.sleep(rng.choice([0.0, 0.005]))
            await asyncio.gather(*reading)
            await loopback.settled(*sites)


# --- health ------------------------------------------------------------------------------------------------------


async def test_a13_health_is_quick_and_truthful_while_all_work_is_parked_in_transfer(tmp_path: Path) -> None:
    """And never enters the KV path: no probe changes a counter of any worker."""
    text = ModelText(load_tokenizer(write_tiny_tokenizer(tmp_path)))
    engine = GatedEngine()
    async with AsyncExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(1))
        served, address = await stack.enter_async_context(live_router())
        app = create_app(served, {loopback.MODEL: text}, text_threads=threads)
        transport = httpx.ASGITransport(app=app)
        client = await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://test"))
        assert (await client.get("/ready")).status_code == httpx.codes.SERVICE_UNAVAILABLE
        async with (
            live_worker("d", Role.DECODE, address, engine) as decode,
            live_worker("p", Role.PREFILL, address) as prefill,
        ):
            await paired(served)
            engine.gate.clear()
            try:
                parked = [loopback.ask(served, number) for number in range(6)]

                def states() -> list[WorkerState]:
                    return [made.worker.scheduler.snapshot() for made in (prefill, decode)]

                def is_parked() -> bool:
                    """Every prompt is computed, and no step runs; no byte has landed."""
                    state = states()[0]
                    is_busy = any(made.worker.scheduler._steps.is_running for made in (prefill, decode))
                    return not is_busy and state.num_waiting_tokens == 0 and state.num_handoffs == 6

                await until(is_parked)
                before = states()
                took_s = []
                for _ in range(30):
                    began_s = time.monotonic()
                    response = await client.get("/ready")
                    assert response.status_code == httpx.codes.OK
                    took_s.append(time.monotonic() - began_s)
                assert statistics.median(took_s) < 0.5  # a busy machine may hold up one of them
                assert states() == before
            finally:
                engine.gate.set()
            for request, stream in parked:
                await loopback.read_whole(request, stream)
        await until(lambda: not served.models()[0].is_ready)
        gone = await client.get("/ready")
        assert gone.status_code == httpx.codes.SERVICE_UNAVAILABLE
        assert "no worker has registered" in gone.json()["missing"]


async def test_a13_a_worker_that_is_connected_and_silent_is_not_reported_as_serving() -> None:
    async with (
        live_router(beat_interval_s=0.1) as (served, address),
        live_worker("p", Role.PREFILL, address) as prefill,
    ):
        await until(lambda: "prefill worker is here" in served.models()[0].missing)
        card = msgspec.structs.replace(prefill.peers.card, worker_id=WorkerId("m"), role=Role.MIXED)
        channel = await dial(address, FROM_ROUTER, timeout_s=DEADLINE_S)
        try:
            channel.send(RegisterWorker(card))
            await until(lambda: served.models()[0].is_ready)
            began_s = time.monotonic()
            await until(lambda: not served.models()[0].is_ready)
            assert time.monotonic() - began_s < 5.0  # it should be 0.2 s
        finally:
            await channel.close()


@pytest.mark.slow
def test_a13_wedged_workers_are_reported_and_a_wedged_router_does_not_answer(tiny_llama: Path) -> None:
    """Stopped processes: connected, silent, alive."""
    beats = ("--beat-interval-s", "0.7")
    with router({"tiny-llama": tiny_llama}, *beats) as front_process:
        where = announced(front_process)
        more = ("--served-name", "tiny-llama", *beats)
        with (
            worker(tiny_llama, "prefill", "p0", where.control, *more) as prefill,
            worker(tiny_llama, "decode", "d0", where.control, *more) as decode,
            Front(f"http://{where.http}", timeout_s=1.0) as front,
        ):
            wait_until(lambda: is_ready(front), 60.0, "the cluster to be ready")
            os.kill(decode.pid, signal.SIGSTOP)
            try:
                wait_until(lambda: not is_ready(front), 10.0, "health to tell of the decode worker")
                assert "no decode worker has registered" in front.health().text
                os.kill(prefill.pid, signal.SIGSTOP)
                wait_until(lambda: "no worker has registered" in front.health().text, 10.0, "health to tell of both")
            finally:
                os.kill(decode.pid, signal.SIGCONT)
                os.kill(prefill.pid, signal.SIGCONT)
            wait_until(lambda: is_ready(front), 20.0, "both workers to be back")
            os.kill(front_process.pid, signal.SIGSTOP)
            try:
                with pytest.raises(httpx.TimeoutException):
                    front.health()
            finally:
                os.kill(front_process.pid, signal.SIGCONT)
            wait_until(lambda: is_ready(front), 20.0, "the router to be back")


# --- buffers -----------------------------------------------------------------------------------------------------


async def test_a14_kv_larger_than_the_transport_takes_at_once_goes_through_in_pieces() -> None:
    """100 prompts, up to 4 at once, each of 12 kB; 1 kB may be under way between the two workers."""
    most = 1024
    async with AsyncExitStack() as stack:
        served, address = await stack.enter_async_context(live_router())
        decode = await stack.enter_async_context(live_worker("d", Role.DECODE, address))
        prefill = await stack.enter_async_context(live_worker("p", Role.PREFILL, address))
        sender = prefill.worker.courier._ranks[0][TransportKind.TCP].sender
        assert isinstance(sender, TcpSender)
        sender._config = msgspec.structs.replace(sender._config, max_inflight_bytes=most)
        await paired(served)
        turns = asyncio.Semaphore(4)

        async def one(number: int) -> None:
            async with turns:
                await loopback.read_whole(*loopback.ask(served, number, num_prompt=63, max_tokens=2))

        async with asyncio.timeout(3 * DEADLINE_S):
            await asyncio.gather(*(one(number) for number in range(100)))
        await loopback.settled(prefill, decode)
        counters = prefill.worker.scheduler.counters
        sent = sum(counters.get(table.HANDOFF_BYTES, label) for label in ("hidden", "visible"))
        assert sent == decode.worker.scheduler.counters.get(table.PROMPT_TOKENS_RECEIVED) * 3 * 64
        assert sent / 100 > 10 * most
        links = sender._links[WorkerId("d")]
        sender.check_invariants()
        assert all(link._queue.is_empty for link in links)
        assert counters.get(table.PUSH_RETRIES) == 0

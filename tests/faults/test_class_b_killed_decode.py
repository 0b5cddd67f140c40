"""Class B, B4: a decode worker killed between any two messages or bytes of a hand-off gives prefill its blocks back."""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from tests.faults.leaks import (
    ENDLESS_S,
    PROMPT,
    SLOW_LINK,
    check_clean,
    check_solo_clean,
    every_moment,
    scene,
)
from tests.faults.outputs import KV
from tests.unit.scheduler.rigs import PEER, PEER_INCARNATION, Solo, handoff, of
from tests.unit.transport.relays import Relay
from tests.unit.worker.rigs import DEADLINE_S, Site, sequence_id, until

from disagg.core.endpoints import Endpoint, TransportKind
from disagg.core.errors import FailureKind
from disagg.core.ids import Incarnation, WorkerId
from disagg.core.request import SamplingParams
from disagg.core.roles import Role, Task
from disagg.policy.batching import StepBudget
from disagg.protocol.cards import WorkerCard
from disagg.protocol.messages import StartSequence
from disagg.scheduler import events
from disagg.scheduler.actions import StopPushes
from disagg.telemetry import metrics as table
from disagg.testing.virtual_time import Timing


@pytest.mark.parametrize("timing", [Timing(), SLOW_LINK], ids=["fast", "slow"])
@pytest.mark.parametrize("is_seen", [True, False], ids=["end of connection", "silence"])
def test_b4_decode_killed_at_every_moment_gives_prefill_its_blocks_back(timing: Timing, is_seen: bool) -> None:
    """Seen: the end of the connection is enough, leases are endless. Unseen: the lease of 2 s ends it."""
    lease_s = ENDLESS_S if is_seen else 2.0
    for _, made in every_moment(lambda: scene(4, num_decode=2, timing=timing, lease_s=lease_s), 2 if is_seen else 5):
        cluster = made.cluster
        opened = cluster.dispatcher.open_request(made.victim)
        placement = opened.choices[0].placement if opened is not None else None
        writer = str(placement.decode) if placement is not None else "decode-0"
        if is_seen:
            cluster.kill(writer)
        else:
            cluster.pause(writer, 30.0, is_noticed=False)
        cluster.time.run_for(4.0)  # the answer may be on its way again, on the other one
        opened = cluster.dispatcher.open_request(made.victim)
        if opened is not None:  # a silent writer of tokens is the heartbeat's to find, not the lease's
            assert not is_seen
            cluster.abort(made.victim)
            cluster.time.run_for(1.0)
        check_clean(made.worker["prefill-0"])
        made.check_answers()


@pytest.mark.parametrize("num_turns", range(6))
def test_b4_the_end_of_the_connection_alone_frees_a_source_at_every_stage(num_turns: int) -> None:
    """The router, which would tell it too, is silent here."""
    solo = Solo(Role.PREFILL, budget=StepBudget(chunk_tokens=6, mixed_chunk_tokens=6, max_running=8))
    solo.meet(Role.DECODE)
    turns: tuple[Callable[[], object], ...] = (
        lambda: solo.start(0, Task.PREFILL, PROMPT),
        lambda: solo.hear(solo.answer(0)),
        lambda: solo.layers(1),
        solo.finish_step,
        solo.finish_step,
    )
    for turn in turns[:num_turns]:
        turn()
    stops = of(StopPushes, solo.handle(events.PeerLost(PEER, PEER_INCARNATION, "killed")))
    for _ in stops:
        solo.handle(events.WritesStopped(handoff(0)))
    if solo.plan is not None:
        solo.finish_step()
    check_solo_clean(solo)
    assert len(solo.failures) == (num_turns > 0)


def die_as_decode() -> None:
    """Runs in a process of its own until it is killed: a decode worker whose data comes through the test's relay."""

    async def run() -> None:
        site = Site("decode-0", Role.DECODE, KV, 20)
        await site.open()
        loop = asyncio.get_running_loop()
        print(site.peers.card.data_endpoints[0].address, flush=True)
        relay = (await loop.run_in_executor(None, sys.stdin.readline)).strip()
        site.peers.card = msgspec.structs.replace(site.peers.card, data_endpoints=(Endpoint(TransportKind.TCP, relay),))
        print(msgspec.json.encode(site.peers.card).decode(), flush=True)
        peer = (await loop.run_in_executor(None, sys.stdin.readline)).split()
        spec = msgspec.json.decode(" ".join(peer[2:]), type=StartSequence).spec
        message = StartSequence(spec, Task.DECODE, 1, (), WorkerId(peer[0]), Incarnation(int(peer[1])))
        site.worker.handle(events.RouterMessageReceived(message))
        print("started", flush=True)
        await asyncio.Event().wait()

    asyncio.run(run())


class Doomed(NamedTuple):
    process: asyncio.subprocess.Process
    relay: Relay
    card: WorkerCard

    async def line(self) -> str:
        return await _line(self.process)


async def _line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(4 * DEADLINE_S):
        found = (await process.stdout.readline()).decode().strip()
    assert found, "the decode process ended too early"
    return found


@contextlib.asynccontextmanager
async def doomed() -> AsyncIterator[Doomed]:
    code = "from tests.faults.test_class_b_killed_decode import die_as_decode; die_as_decode()"
    root = Path(__file__).parents[2]
    paths = ":".join([*(str(each) for each in sys.path if each), str(root)])
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        code,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={"PYTHONPATH": paths, "PATH": "/usr/bin:/bin"},
    )
    assert process.stdin is not None
    relay: Relay | None = None
    try:
        relay = Relay(await _line(process))
        process.stdin.write(f"{relay.address}\n".encode())
        card = msgspec.json.decode(await _line(process), type=WorkerCard)
        yield Doomed(process, relay, card)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        process.stdin.close()
        if relay is not None:
            await asyncio.to_thread(relay.close)


def is_taken(site: Site) -> bool:
    """The destination's word is here, the transport's is not."""
    sequences = site.worker.scheduler._state.sequences.values()
    return any(each.source is not None and each.source.is_taken for each in sequences)


@pytest.mark.parametrize("point", ["before the first byte", "between two bytes", "before the last acknowledgement"])
async def test_b4_decode_killed_between_bytes_on_tcp_gives_prefill_its_blocks_back(point: str) -> None:
    """kill -9 of a real process; the lease of 30 s is not waited for."""
    async with doomed() as decode:
        site = Site("prefill-0", Role.PREFILL, KV, 20)
        await site.open()
        try:
            site.peers.announce((decode.card,))
            await site.until(lambda: None in site.pairings)
            if point == "before the first byte":
                decode.relay.hold_ahead(0)
            elif point == "between two bytes":
                decode.relay.hold_ahead(1 << 20)
            else:
                decode.relay.swallows_answers = True
            prompt = tuple(index % 900 for index in range(250))
            start = msgspec.json.encode(StartSequence(_spec(prompt), Task.DECODE, 1)).decode()
            assert decode.process.stdin is not None
            own = site.peers.card
            decode.process.stdin.write(f"{own.worker_id} {own.incarnation} {start}\n".encode())
            assert await decode.line() == "started"
            message = StartSequence(_spec(prompt), Task.PREFILL, 1, (), WorkerId("decode-0"), decode.card.incarnation)
            site.worker.handle(events.RouterMessageReceived(message))
            counters = site.worker.scheduler.counters
            if point == "before the last acknowledgement":
                # The welcome passes by the same way, so answers are lost from the first acknowledgement on.
                await until(lambda: counters.get(table.PUSHES) > 0)
            else:
                await until(lambda: counters.get(table.PUSHES) > 10)
                await asyncio.to_thread(decode.relay.wait_held)
            assert site.worker.scheduler.snapshot().num_held_blocks
            decode.process.kill()
            started_s = time.monotonic()
            await site.settled()
            assert time.monotonic() - started_s < 25.0
            # Which of its two connections is seen to end first is the kernel's choice.
            (failure,) = site.failures
            assert failure.failure.kind in (FailureKind.WORKER_LOST, FailureKind.TRANSFER_FAILED)
        finally:
            await site.close()


def _spec(prompt: tuple[int, ...]) -> Any:
    from disagg.core.request import SequenceSpec

    return SequenceSpec(sequence_id(0), prompt, SamplingParams(4, temperature=0.0))

"""Class D: whoever dies, and comes back under the same name, is a stranger; what it held for others is made good.

==== ==============================================================================================================
D1   A restarted worker is another incarnation. Whoever was paired with the old one lets go of it, is not disturbed,
     and pairs with the new one. Keys of grants name both incarnations.
D2   A death concerns what was placed on the dead: no step waits for all workers together, there is no collective.
D3   No message outlives its connection, and each handshake names the incarnation that is meant. Dials that fail, and
     links that break as soon as they are made, are tried again ever less often, up to a limit; until one holds, the
     pair is not used.
D5   A decode worker may die after any token: the client's answer goes on where it was, none twice, none missing.
     (The same with real processes and the API's bodies: test_streams_survive.py.)
D7   What shapes an answer (its grammar, stop strings, sampling) is a function of the tokens so far: whoever goes on
     with it makes it anew from them, so nothing is restarted at its root.
     (The same with real processes and JSON schemas: test_grammars_survive.py.)
D8   Noise is a function of seed, choice and position: a moved sequence draws what it would have drawn.
D9   A decode worker that is handed a prompt computes none of it. When it has to, the reason is a counter's label.
==== ==============================================================================================================
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import msgspec
import pytest
from tests.faults import loopback
from tests.faults.loopback import LateEngine, live_router, live_worker, num_pairs, paired
from tests.faults.virtual_rigs import (
    TIMES,
    WatchedCluster,
    any_mode,
    ask,
    attempts,
    finish,
    submit_over,
)
from tests.unit.transport.rigs import PREFILL, TcpRig, write_of
from tests.unit.worker.rigs import DEADLINE_S, gone, site, until

from disagg.channel.channel import Channel
from disagg.channel.listening import listen
from disagg.core.grammar import GrammarKind, GrammarSpec
from disagg.core.ids import Incarnation, WorkerId
from disagg.core.roles import Role
from disagg.kvcache.memory import Segment
from disagg.policy.routing import PlacementReason
from disagg.protocol.messages import (
    AnswerPairing,
    AnswerRegistration,
    RegisterWorker,
    RequestPairing,
    WorkerToRouter,
    WorkerToWorker,
)
from disagg.telemetry import metrics as table
from disagg.transport.api import ConnectionLost, WriteFinished
from disagg.worker import links

pytestmark = pytest.mark.usefixtures("no_socket_left")

FROM_WORKER: msgspec.msgpack.Decoder[WorkerToRouter] = msgspec.msgpack.Decoder(WorkerToRouter)
FROM_PEER: msgspec.msgpack.Decoder[WorkerToWorker] = msgspec.msgpack.Decoder(WorkerToWorker)


# --- restarts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["p0", "d0"])
@pytest.mark.parametrize("seed", range(2 * TIMES))
def test_d1_ten_restarts_at_one_address_under_load_disturb_nobody(seed: int, name: str) -> None:
    """The successor may be there before the death is known."""
    cluster = WatchedCluster(seed)
    cluster.start(2, 2, mode=any_mode(cluster.rng))
    others = {other: worker for other, worker in cluster.workers.items() if other != name}
    submit_over(cluster, 50, 6.0)
    for number in range(10):
        when_s = 0.6 * number + cluster.rng.uniform(0, 0.3)
        cluster.time.after(when_s, lambda: cluster.kill(name))
        cluster.time.after(when_s + cluster.rng.choice([0.001, 0.02, 0.2]), lambda: cluster.restart(name))
    cluster.time.run_for(6.5)
    finish(cluster, 50, limit_s=60.0)
    newest = cluster.worker(name).card.incarnation
    for other, worker in others.items():
        assert cluster.workers[other] is worker
        if worker.card.role is not cluster.worker(name).card.role:
            assert worker.scheduler._state.peers[WorkerId(name)].incarnation == newest
    assert cluster.num_pairs == 4


async def test_d1_a_prefill_worker_restarted_again_and_again_on_real_connections() -> None:
    """The decode worker outlives them all; every answer is whole."""
    async with AsyncExitStack() as stack:
        served, address = await stack.enter_async_context(live_router())
        decode = await stack.enter_async_context(live_worker("d", Role.DECODE, address, LateEngine(1)))
        reading: list[asyncio.Task[None]] = []
        seen: set[Incarnation] = set()
        for number in range(10):
            async with live_worker("p", Role.PREFILL, address, LateEngine(number)) as prefill:
                await paired(served)
                seen.add(prefill.peers.card.incarnation)
                for salt in range(6):
                    asked = loopback.ask(served, 10 * number + salt, num_prompt=60)
                    reading.append(asyncio.create_task(loopback.read_whole(*asked)))
                some = 6 * number + 1  # of this life's are answered; it ends under the others
                await until(lambda some=some: sum(task.done() for task in reading) >= some)  # type: ignore[misc]
            await until(lambda: num_pairs(served) == 0)
        async with asyncio.timeout(loopback.ANSWER_TIMEOUT_S):
            await asyncio.gather(*reading)
        assert len(seen) == 10
        await loopback.settled(decode)


@pytest.mark.parametrize("seed", range(5 * TIMES))
def test_d2_the_death_of_one_prefill_worker_leaves_requests_on_the_other_alone(seed: int) -> None:
    cluster = WatchedCluster(seed)
    cluster.start(2, 1, num_blocks=200, mode=any_mode(cluster.rng))
    decode = cluster.worker("d0")
    for salt in range(16):
        cluster.submit(ask(40, 20, salt=salt))
    cluster.time.run_for(cluster.rng.uniform(0.02, 0.4))
    unconcerned = {
        sequence.sequence_id
        for sequence in attempts(decode)
        if sequence.destination is not None and sequence.destination.peer == "p1"
    }
    assert unconcerned
    cluster.kill("p0")
    cluster.time.run_for(0.5)
    cluster.restart("p0")
    cluster.time.run(until=lambda: cluster.num_pairs == 2)
    moved = {message.sequence_id for _, _, message in cluster.failures}
    assert not moved & unconcerned
    for salt in range(100, 106):
        cluster.submit(ask(40, salt=salt))
    finish(cluster, 22, limit_s=60.0)
    assert cluster.worker("d0") is decode
    assert cluster.total(table.PROMPT_TOKENS_COMPUTED, "p0") > 0  # the new one


# --- handshakes --------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def played_peer() -> AsyncIterator[tuple[str, "asyncio.Queue[Channel[WorkerToWorker]]"]]:
    """An address at which the test answers; each dial has asked for pairing already."""
    dialled: asyncio.Queue[Channel[WorkerToWorker]] = asyncio.Queue()
    everyone: list[Channel[WorkerToWorker]] = []

    async def welcome(channel: Channel[WorkerToWorker]) -> None:
        everyone.append(channel)
        assert isinstance(await channel.receive(DEADLINE_S), RequestPairing)
        dialled.put_nowait(channel)

    server = await listen("127.0.0.1", 0, FROM_PEER, welcome)
    try:
        yield server.address, dialled
    finally:
        server.close()
        for channel in everyone:
            await channel.close(flush_timeout_s=0.1)


async def test_d3_a_late_answer_of_an_old_handshake_is_refused_by_its_incarnation() -> None:
    async with site("p", Role.PREFILL) as source, played_peer() as (address, dialled), asyncio.timeout(DEADLINE_S):
        mine = msgspec.structs.replace(source.peers.card, worker_id=WorkerId("d"), role=Role.DECODE)
        old, new = (
            msgspec.structs.replace(mine, control_address=address, incarnation=Incarnation(number)) for number in (1, 2)
        )
        source.peers.announce((old,))
        first = await dialled.get()
        source.peers.announce((new,))
        second = await dialled.get()
        first.send(AnswerPairing(old))  # on the old connection: nobody reads it
        second.send(AnswerPairing(old))  # on the new one: of somebody else
        third = await dialled.get()
        assert source.pairings == []
        third.send(AnswerPairing(new))
        await source.until(lambda: bool(source.pairings))
        assert source.pairings == [None]
        assert source.worker.scheduler._state.peers[WorkerId("d")] == new
        await gone(first)
        await gone(second)


@pytest.mark.parametrize("is_paired_first", [False, True])
async def test_d3_links_that_never_hold_are_dialled_ever_less_often(
    monkeypatch: pytest.MonkeyPatch, *, is_paired_first: bool
) -> None:
    """Refused in the middle of the handshake, or broken right after it: no storm, and no use of the pair."""
    monkeypatch.setattr(links, "FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(links, "MAX_RETRY_S", 0.16)
    async with site("p", Role.PREFILL) as source, played_peer() as (address, dialled), asyncio.timeout(DEADLINE_S):
        card = msgspec.structs.replace(
            source.peers.card, worker_id=WorkerId("d"), role=Role.DECODE, control_address=address
        )
        source.peers.announce((card,))
        dials_s: list[float] = []
        while len(dials_s) < 9:
            channel = await dialled.get()
            dials_s.append(time.monotonic())
            if is_paired_first:
                channel.send(AnswerPairing(card))
            await channel.close()
        gaps_s = [later - sooner for sooner, later in itertools.pairwise(dials_s)]
        for gap_s, least_s in zip(gaps_s, [0.01, 0.02, 0.04, 0.08, 0.16, 0.16, 0.16, 0.16], strict=True):
            assert gap_s >= least_s
        assert min(gaps_s[4:]) < 1.0  # waits do not grow for ever: nobody is late four times in a row
        assert None not in source.pairings[-1:]


async def test_d3_a_router_that_drops_whoever_registers_is_dialled_ever_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links, "FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(links, "MAX_RETRY_S", 0.08)
    dials_s: list[float] = []

    async def drop(channel: Channel[WorkerToRouter]) -> None:
        assert isinstance(await channel.receive(DEADLINE_S), RegisterWorker)
        dials_s.append(time.monotonic())
        channel.send(AnswerRegistration(Incarnation(1)))
        await channel.close()

    server = await listen("127.0.0.1", 0, FROM_WORKER, drop)
    async with live_worker("m", Role.MIXED, server.address):
        await until(lambda: len(dials_s) >= 7)
    server.close()
    gaps_s = [later - sooner for sooner, later in itertools.pairwise(dials_s)]
    assert all(gap >= least for gap, least in zip(gaps_s, [0.01, 0.02, 0.04, 0.08, 0.08, 0.08], strict=False))


def test_d3_a_restarted_receiver_at_the_same_address_takes_no_byte_meant_for_its_predecessor() -> None:
    """Even under a key that it has granted itself."""
    rig = TcpRig()
    try:
        run, key = (Segment(0, 4096),), b"a key that both have granted"
        rig.receiver.grant(PREFILL, key, run)
        rig.sender.write(write_of(key, 0, run, run))
        assert rig.sent.wait(WriteFinished)[0].failure is None
        rig.restart_receiver(Incarnation(99))
        rig.target.fill(Segment(0, 4096), bytes(4096))
        rig.receiver.grant(PREFILL, key, run)
        rig.sent.wait(ConnectionLost)
        rig.sender.write(write_of(key, 1, run, run))
        refused = rig.sent.wait(WriteFinished, 2)[1].failure
        assert refused is not None
        assert "incarnation" in refused
        assert rig.target.read(run) == bytes(4096)
        rig.connect(rig.sender, Incarnation(99))
        rig.sender.write(write_of(key, 2, run, run))
        assert rig.sent.wait(WriteFinished, 3)[2].failure is None
        assert rig.target.read(run) == rig.source.read(run)
        rig.check_invariants()
    finally:
        rig.close()


# --- one answer --------------------------------------------------------------------------------------------------

LENGTH = 18


def killed_after(
    cluster: WatchedCluster, num_tokens: int, temperature: float, num_choices: int, grammar: GrammarSpec | None = None
) -> None:
    """The worker that writes dies once the client has seen so many tokens of the first choice."""
    cluster.start(2, 2, mode=any_mode(cluster.rng))
    asked = ask(30, LENGTH, salt=7, temperature=temperature, num_choices=num_choices)
    sampling = msgspec.structs.replace(asked.sampling, grammar=grammar)
    request_id = cluster.submit(msgspec.structs.replace(asked, sampling=sampling))
    answer = cluster.answers[request_id]
    opened = cluster.dispatcher.open_request(request_id)
    assert opened is not None
    cluster.time.run(until=lambda: len(answer.tokens[0]) >= num_tokens)
    if num_tokens == 0:
        cluster.time.run_for(cluster.rng.uniform(0.0, 0.15))  # somewhere on the way to the first token
    placement = opened.choices[0].placement
    assert placement is not None
    cluster.kill(placement.decode)
    cluster.time.after(0.3, lambda: cluster.restart(placement.decode))
    finish(cluster, 1, limit_s=60.0)
    assert [len(tokens) for tokens in answer.tokens] == [LENGTH] * num_choices
    # What the router counts, for usage too, is what the client got: no token twice.
    assert cluster.dispatcher.counters.get(table.GENERATED_TOKENS) == LENGTH * num_choices
    assert cluster.dispatcher.counters.get(table.PROMPT_TOKENS) == 30
    assert cluster.dispatcher.counters.get(table.MOVES, "worker_lost") >= (num_tokens < LENGTH - 1)


@pytest.mark.parametrize("num_tokens", range(LENGTH))
def test_d5_a_decode_worker_may_die_after_any_token(num_tokens: int) -> None:
    for seed in range(TIMES):
        killed_after(WatchedCluster(seed + num_tokens), num_tokens, 0.0, 1)


@pytest.mark.parametrize("num_tokens", range(LENGTH))
def test_d8_a_moved_sequence_draws_what_it_would_have_drawn(num_tokens: int) -> None:
    """Every choice of its own, from one seed."""
    for seed in range(TIMES):
        killed_after(WatchedCluster(seed + num_tokens), num_tokens, 0.8, 2)


@pytest.mark.parametrize("num_tokens", range(LENGTH))
def test_d7_a_grammar_goes_on_where_it_was(num_tokens: int) -> None:
    """The fake engine's grammar depends on every token so far: begun anew or one token short, it gives others."""
    for seed in range(TIMES):
        grammar = GrammarSpec(GrammarKind.LARK, "mod 7")
        killed_after(WatchedCluster(seed + num_tokens), num_tokens, 0.8, 2, grammar)


@pytest.mark.parametrize("kill_at", range(6))
def test_d7_a_choice_that_stops_after_a_move_stops_there(kill_at: int) -> None:
    """The stop is found by whoever reads the text; the other choice goes on."""

    class Reader(WatchedCluster):
        def _to_client(self, action: object) -> None:
            super()._to_client(action)  # type: ignore[arg-type]
            ((request_id, answer),) = self.answers.items()
            if len(answer.tokens[1]) == 6 and answer.finish[1] is None:
                self.time.after(0.0, lambda: self.stop_choice(request_id, 1))

    cluster = Reader(kill_at)
    cluster.start(1, 2)
    (request_id,) = [cluster.submit(ask(20, LENGTH, num_choices=2))]
    answer = cluster.answers[request_id]
    opened = cluster.dispatcher.open_request(request_id)
    assert opened is not None
    cluster.time.run(until=lambda: opened.choices[1].is_placed and len(answer.tokens[1]) >= kill_at)
    placement = opened.choices[1].placement
    assert placement is not None
    cluster.kill(placement.decode)
    cluster.time.run(until=lambda: cluster.are_all_over)
    assert len(answer.tokens[0]) == LENGTH
    assert len(answer.tokens[1]) in (6, 7)  # one may have been on its way
    cluster.check_nothing_left()


# --- prefilled twice? --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3 * TIMES))
def test_d9_a_decode_worker_that_is_handed_a_prompt_computes_none_of_it(seed: int) -> None:
    cluster = WatchedCluster(seed)
    cluster.start(2, 2, num_blocks=200, mode=any_mode(cluster.rng))
    submit_over(cluster, 30, 2.0)
    finish(cluster, 30)
    counters = cluster.dispatcher.counters
    num_remote, num_shared = (
        counters.get(table.PLACEMENTS, reason.value)
        for reason in (PlacementReason.LONG_PROMPT, PlacementReason.SHARED_PROMPT)
    )
    assert num_remote >= 30
    # But for choices that share another's prompt: they read the end of it, at most one block each.
    assert num_shared <= cluster.total(table.PROMPT_TOKENS_COMPUTED, "d") <= num_shared * 4
    read = cluster.total(table.PROMPT_TOKENS_RECEIVED, "d") + cluster.total(table.PROMPT_TOKENS_COMPUTED, "p")
    assert read > 0  # or nothing was handed over at all


@pytest.mark.parametrize("seed", range(4 * TIMES))
def test_d9_what_a_decode_worker_has_to_read_itself_is_counted_by_reason(seed: int) -> None:
    """Its prefill workers come and go: a prompt read twice shows as a local placement or a preemption."""
    cluster = WatchedCluster(seed)
    cluster.start(1, 1, mode=any_mode(cluster.rng))
    submit_over(cluster, 25, 3.0)
    for when_s in (0.5, 1.5):
        cluster.time.after(when_s, lambda: cluster.kill("p0"))
        cluster.time.after(when_s + 0.4, lambda: cluster.restart("p0"))
    finish(cluster, 25, limit_s=100.0)
    local = sum(
        cluster.dispatcher.counters.get(table.PLACEMENTS, reason.value)
        for reason in (PlacementReason.SHORT_PROMPT, PlacementReason.NO_PREFILL_WORKER)
    )
    assert cluster.total(table.PROMPT_TOKENS_COMPUTED, "d", "decode") == 0
    assert cluster.total(table.PROMPT_TOKENS_COMPUTED, "d", "whole") > 0
    assert local > 0


async def test_d9_on_real_connections_decode_computes_nothing_of_a_prompt_that_was_handed_over() -> None:
    async with AsyncExitStack() as stack:
        served, address = await stack.enter_async_context(live_router())
        decode = await stack.enter_async_context(live_worker("d", Role.DECODE, address))
        prefill = await stack.enter_async_context(live_worker("p", Role.PREFILL, address))
        await paired(served)
        asked = [loopback.ask(served, number, num_prompt=5 + 7 * number) for number in range(8)]
        for request, stream in asked:
            await loopback.read_whole(request, stream)
        await loopback.settled(prefill, decode)
        num_prompt_tokens = sum(len(request.prompt_ids) for request, _ in asked)
        counters = decode.worker.scheduler.counters
        assert counters.get(table.PROMPT_TOKENS_RECEIVED) == num_prompt_tokens
        for task in ("decode", "whole"):
            assert counters.get(table.PROMPT_TOKENS_COMPUTED, task) == 0
        assert counters.get(table.HANDOFFS, "received") == 8

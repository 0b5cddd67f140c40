"""Class E: KV that has travelled gives the tokens that it would have given at home, or nothing at all.

| case | what the class means here | where it is shown |
|---|---|---|
| E1 | blocks of a dropped hand-off go to somebody else while its source still writes | virtual time, TCP |
| E3 | no drift: thousands of answers of a cluster of unlike workers, every one compared | virtual time |
| E4 | one worker's context is smaller than the other's: 400, and not a token | virtual time, HTTP |
| E5 | all pairs of block sizes bit by bit, other layouts in class F; other shapes never pair | virtual time, TCP |
| E6 | there is no tier yet; what is stored elsewhere is a push: none before its KV is written | scheduler, TCP |
| E7 | an unknown layout is refused, not guessed; and "equal" is not the equality of nothing: bytes were counted | TCP |
| E8 | two revisions of one shape never exchange KV: the digest is of the weights | virtual time; tests/e2e/test_pools |
| E10 | a real model gives equal bodies on every path, for 50 prompts and every parameter | HTTP |

The fake engine's answer is a hash over all KV that it reads, so one wrong byte is a wrong answer. E10 is the short form
of tests/parity, which compares with an implementation that is not ours.
"""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from tests.e2e.cluster import START_TIMEOUT_S, Front, announced, completion, router, worker
from tests.unit.scheduler.rigs import Solo, handoff, of, to_peer
from tests.unit.transport.relays import Relay
from tests.unit.worker.rigs import DEADLINE_S, Site, meet, sequence_id, site, until
from tests.unit.worker.rigs import layout as small_layout

from disagg.channel.channel import dial
from disagg.core.endpoints import Endpoint, TransportKind
from disagg.core.errors import FailureKind, InvalidRequest
from disagg.core.ids import BlockId, Incarnation, RequestId, SequenceId, WorkerId
from disagg.core.request import SamplingParams, SequenceSpec
from disagg.core.roles import HandoffMode, Role, Task
from disagg.core.spans import KvLayout, KvOrder, Span
from disagg.dispatch.stream import GenerateRequest
from disagg.policy.batching import StepBudget
from disagg.protocol.lifecycle import SequenceState
from disagg.protocol.messages import (
    AbortSequence,
    AnswerPairing,
    RequestPairing,
    RequestReservation,
    StartSequence,
    WorkerCard,
    WorkerToWorker,
)
from disagg.scheduler import events
from disagg.scheduler.actions import Action, PushSpan
from disagg.scheduler.engine import OnLayers, StepPlan, StepResult
from disagg.scheduler.scheduler import Scheduler
from disagg.telemetry import metrics as table
from disagg.testing.engine import FakeEngine, expected_tokens, kv_bytes
from disagg.testing.processes import wait_until
from disagg.testing.virtual import MODEL, VirtualCluster
from disagg.testing.virtual_time import Timing
from disagg.testing.virtual_worker import VirtualWorker

GREEDY = SamplingParams(max_tokens=4, temperature=0.0)
# A push takes as long as several steps: there is nearly always one on the way.
SLOW_WRITER = Timing(write_s=0.02, byte_s=2e-4)


def check_answers(cluster: VirtualCluster) -> None:
    """Whoever has stayed has the answer of an undisturbed engine, whoever has left the beginning of it."""
    layout = next(iter(cluster.workers.values())).card.layout
    for request_id, answer in cluster.answers.items():
        spec = answer.request
        for choice, tokens in enumerate(answer.tokens):
            expected = expected_tokens(layout, SequenceId(request_id, choice), spec.prompt_ids, spec.sampling)
            is_short = answer.is_aborted or answer.error is not None
            assert tokens == (expected[: len(tokens)] if is_short else expected), cluster.time.story()


def counted(worker: VirtualWorker | Site, metric: table.Metric, label: str | None = None) -> float:
    """One label's total, or that of all."""
    scheduler = worker.scheduler if isinstance(worker, VirtualWorker) else worker.worker.scheduler
    return sum(n for name, each, n in scheduler.counters.items() if name == metric.name and label in (None, each))


# --- E1 ----------------------------------------------------------------------------------------------------------


def test_e1_blocks_of_an_aborted_hand_off_are_reused_only_when_no_late_write_can_land() -> None:
    """A pool in which the next one must take the blocks of the one that was dropped, under a slow writer."""
    num_late = num_reused = 0.0
    for seed in range(40):
        rng = random.Random(seed)
        cluster = VirtualCluster(seed, timing=SLOW_WRITER)
        cluster.start_worker("prefill-0", Role.PREFILL, mode=rng.choice(list(HandoffMode)))
        decode = cluster.start_worker("decode-0", Role.DECODE, num_blocks=14, answer_headroom=1)
        cluster.time.run(until=lambda now=cluster: now.is_ready)  # type: ignore[misc]
        for index in range(6):
            prompt = tuple(rng.randrange(900) for _ in range(rng.randint(25, 40)))
            request_id = cluster.submit(GenerateRequest(MODEL, prompt, GREEDY))
            if index % 2 == 0:
                cluster.time.run_for(rng.uniform(0.0, 0.25))
                cluster.abort(request_id)
        cluster.time.run(until=lambda now=cluster: now.are_all_over)  # type: ignore[misc]
        check_answers(cluster)
        cluster.check_nothing_left()
        num_late += counted(decode, table.MESSAGES_IGNORED, "WriteLanded")
        num_reused += counted(decode, table.HANDOFFS, "receive_cancelled")
    assert num_reused > 40, "too few reservations were given up"
    assert num_late > 12, "too few writes came late: the fence was not needed"


KV = KvLayout(num_layers=2, num_kv_heads=32, head_dim=128, dtype="float32", block_size=16)  # 64 KiB a token


@pytest.mark.parametrize("num_bytes", [0, 1 << 20, 3 << 20])
async def test_e1_on_tcp_the_next_owner_waits_for_the_fence_and_late_bytes_change_nothing(num_bytes: int) -> None:
    """A writer that is held inside a frame; its bytes are let go while the next owner of the blocks is at work."""
    old, new = (tuple((start + index) % 900 for index in range(250)) for start in (0, 450))
    async with site("p", Role.PREFILL, kv=KV, num_blocks=20) as prefill, relayed(num_blocks=20) as (decode, relay):
        relay.hold_ahead(num_bytes)
        await meet(prefill, decode)
        decode.start(0, Task.DECODE, prefill, old, GREEDY)
        prefill.start(0, Task.PREFILL, decode, old, GREEDY)
        await until(lambda: counted(prefill, table.PUSHES) > 10)
        await asyncio.to_thread(relay.wait_held)
        reserved = _blocks(decode, 0)
        assert len(reserved) == 16
        message = AbortSequence(sequence_id(0), 1, "scripted")
        decode.worker.handle(events.RouterMessageReceived(message))
        spec = SequenceSpec(sequence_id(1), new, SamplingParams(6, temperature=0.0))
        decode.worker.handle(events.RouterMessageReceived(StartSequence(spec, Task.WHOLE, 1)))
        await until(lambda: bool(_blocks(decode, 1)))
        assert set(_blocks(decode, 1)) & set(reserved)
        relay.release()
        await decode.until(lambda: bool(decode.reports(1)))
        tokens = [token.token_id for token in decode.tokens(1)]
        assert tokens == expected_tokens(KV, sequence_id(1), new, spec.sampling)
        await prefill.settled()
        await decode.settled()
        # And the pair goes on: the same prompt again, over a new connection.
        decode.start(2, Task.DECODE, prefill, old, GREEDY)
        prefill.start(2, Task.PREFILL, decode, old, GREEDY)
        await decode.until(lambda: bool(decode.reports(2)))
        tokens = [token.token_id for token in decode.tokens(2)]
        assert tokens == expected_tokens(KV, sequence_id(2), old, GREEDY)
        await prefill.settled()
        await decode.settled()


@asynccontextmanager
async def relayed(num_blocks: int) -> AsyncIterator[tuple[Site, Relay]]:
    """A decode worker whose data comes through a relay."""
    async with site("d", Role.DECODE, kv=KV, num_blocks=num_blocks) as decode:
        relay = Relay(decode.peers.card.data_endpoints[0].address)
        through = (Endpoint(TransportKind.TCP, relay.address),)
        decode.peers.card = msgspec.structs.replace(decode.peers.card, data_endpoints=through)
        try:
            yield decode, relay
        finally:
            await asyncio.to_thread(relay.close)


def _blocks(decode: Site, number: int) -> tuple[BlockId, ...]:
    """Those that a sequence owns: reserved for its source, or its own."""
    sequence = decode.worker.scheduler._state.sequences.get(handoff(number))
    if sequence is None:
        return ()
    allocation = sequence.destination.allocation if sequence.destination is not None else None
    return allocation.blocks if allocation is not None else sequence.blocks


# --- E3 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "num_requests", [1000, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_e3_no_answer_drifts_over_a_long_run_of_unlike_workers(num_requests: int) -> None:
    """Block sizes 2 to 16, one and several ranks, both modes, pools that evict all the time; shared prefixes."""
    rng = random.Random(int(os.environ.get("DISAGG_SEED", "0")))
    cluster = VirtualCluster(3)
    one = KvLayout(num_layers=2, num_kv_heads=2, head_dim=2, dtype="float32", block_size=8)
    spread = msgspec.structs.replace(one, block_size=16, head_shards=2, layer_shards=2)
    other = msgspec.structs.replace(one, block_size=2, order=KvOrder.HEADS.value, head_shards=2)
    cluster.start_worker("prefill-0", Role.PREFILL, layout=one, num_blocks=30)
    cluster.start_worker("prefill-1", Role.PREFILL, layout=spread, num_blocks=20, mode=HandoffMode.SYNC)
    cluster.start_worker("decode-0", Role.DECODE, layout=msgspec.structs.replace(one, block_size=4), num_blocks=40)
    cluster.start_worker("decode-1", Role.DECODE, layout=other, num_blocks=60)
    cluster.time.run(until=lambda: cluster.is_ready)
    cluster.time.run_for(0.1)
    check_only_between_rounds(cluster)
    prefixes = [tuple(rng.randrange(900) for _ in range(64)) for _ in range(8)]
    for _ in range(num_requests // 10):
        for _ in range(10):
            prompt = rng.choice(prefixes)[: rng.choice([0, 8, 13, 32, 64])] + (rng.randrange(900),) * rng.randint(1, 20)
            sampling = SamplingParams(rng.randint(1, 8), rng.choice([0.0, 1.0]), seed=rng.randrange(2**32))
            cluster.submit(GenerateRequest(MODEL, prompt, sampling))
        cluster.time.run(until=lambda: cluster.dispatcher.num_open == 0, limit_s=1e9)
        check_answers(cluster)
        assert all(answer.error is None for answer in cluster.answers.values())
        cluster.answers.clear()
        for each in cluster.workers.values():
            Scheduler.check_invariants(each.scheduler)
    for each in cluster.workers.values():
        is_prefill = each.card.role is Role.PREFILL
        assert counted(each, table.HANDOFFS, "sent" if is_prefill else "received") > num_requests / 10
        assert counted(each, table.BLOCKS_EVICTED) > num_requests / 10
    cluster.check_nothing_left()


def check_only_between_rounds(cluster: VirtualCluster) -> None:
    """Checking all rules after each of a hundred thousand events takes longer than the events."""
    for each in cluster.workers.values():
        each.scheduler.check_invariants = lambda: None  # type: ignore[method-assign]
    cluster.dispatcher.check_invariants = lambda: None  # type: ignore[method-assign]


# --- E4 ----------------------------------------------------------------------------------------------------------


def shorten(cluster_worker: VirtualWorker, max_context: int) -> None:
    """Before it registers."""
    config = msgspec.structs.replace(cluster_worker.scheduler.config, max_context=max_context)
    cluster_worker.scheduler = Scheduler(config)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("length", [97, 98, 150, 200])
def test_e4_a_prompt_over_the_prefill_workers_context_is_refused_and_nothing_is_decoded(length: int, seed: int) -> None:
    """Prefill reads up to 100 tokens and has not said so, decode writes up to 256."""
    cluster = VirtualCluster(seed)
    shorten(cluster.start_worker("prefill-0", Role.PREFILL), 100)
    decode = cluster.start_worker("decode-0", Role.DECODE)
    cluster.time.run(until=lambda: cluster.is_ready)
    request_id = cluster.submit(GenerateRequest(MODEL, tuple(range(length)), GREEDY))
    cluster.time.run(until=lambda: cluster.are_all_over)
    answer = cluster.answers[request_id]
    if length <= 100:
        check_answers(cluster)
        assert answer.error is None
    else:
        assert isinstance(answer.error, InvalidRequest)
        assert "100 tokens" in str(answer.error)
        assert answer.tokens == [[]]
        assert counted(decode, table.OUTPUT_TOKENS) == counted(decode, table.STEPS) == 0
    cluster.check_nothing_left()


# --- E5, E7 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", list(HandoffMode))
@pytest.mark.parametrize("decode_block", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("prefill_block", [1, 2, 3, 4, 16])
def test_e5_kv_is_bit_equal_after_a_hand_off_between_any_two_block_sizes(
    prefill_block: int, decode_block: int, mode: HandoffMode
) -> None:
    """Lengths around chunks and blocks; the second half of them finds a prefix at one end, the other or both."""
    cluster = VirtualCluster(5)
    prefill = cluster.start_worker("prefill-0", Role.PREFILL, block_size=prefill_block, num_blocks=300, mode=mode)
    decode = cluster.start_worker("decode-0", Role.DECODE, block_size=decode_block, num_blocks=300)
    cluster.time.run(until=lambda: cluster.is_ready)
    lengths = (1, 2, 15, 16, 17, 33, 16, 35, 47)
    for length in lengths:
        prompt = tuple(range(length))
        request_id = cluster.submit(GenerateRequest(MODEL, prompt, GREEDY))
        cluster.time.run(until=lambda now=request_id: _is_decoding(decode, now))  # type: ignore[misc]
        (sequence,) = decode.scheduler._state.sequences.values()
        layout = decode.card.layout
        found = decode.engine.read(sequence.blocks, Span(0, length, 0, layout.num_layers))
        assert found == prompt_kv(layout, prompt)
        cluster.time.run(until=lambda: cluster.are_all_over)
    check_answers(cluster)
    received = counted(decode, table.PROMPT_TOKENS_RECEIVED)
    assert received >= max(lengths), "nothing was transferred: equal is no news"
    sent = counted(prefill, table.HANDOFF_BYTES)
    assert sent == received * prefill.card.layout.span_bytes(Span(0, 1, 0, 3))
    assert counted(decode, table.PROMPT_TOKENS_COMPUTED) == 0
    assert counted(decode, table.HANDOFFS, "received") == len(lengths)


def _is_decoding(decode: VirtualWorker, request_id: RequestId) -> bool:
    sequences = decode.scheduler._state.sequences.values()
    return any(s.state is SequenceState.DECODING and s.sequence_id.request_id == request_id for s in sequences)


def prompt_kv(layout: KvLayout, prompt: tuple[int, ...]) -> bytes:
    """In wire order."""
    return b"".join(
        kv_bytes(layout, token, position, layer, kv)
        for layer in range(layout.num_layers)
        for kv in range(layout.num_planes)
        for position, token in enumerate(prompt)
    )


_PEERS: msgspec.msgpack.Decoder[WorkerToWorker] = msgspec.msgpack.Decoder(WorkerToWorker)
UNLIKE: dict[str, Any] = {
    "num_layers": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "dtype": "float16",
    "is_latent": True,
}


async def answer_to(target: Site, **changes: Any) -> AnswerPairing:
    """What a worker says to a peer whose KV is laid out like that."""
    channel = await dial(target.peers.card.control_address, _PEERS, timeout_s=DEADLINE_S)
    layout = msgspec.structs.replace(target.peers.card.layout, **changes)
    channel.send(RequestPairing(_card(target, layout=layout)))
    answer = await channel.receive(DEADLINE_S)
    await channel.close()
    assert isinstance(answer, AnswerPairing)
    return answer


def _card(target: Site, **changes: Any) -> WorkerCard:
    mine = msgspec.structs.replace(target.peers.card, worker_id=WorkerId("by-hand"), incarnation=Incarnation(9))
    return msgspec.structs.replace(mine, **changes)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_e5_an_unlike_layout_is_refused_at_pairing_by_either_side_with_both_values(role: Role) -> None:
    """So there is no first request that could show it."""
    async with site("own", role) as target:
        for field, value in UNLIKE.items():
            answer = await answer_to(target, **{field: value})
            assert answer.failure is not None, field
            assert answer.failure.kind is FailureKind.INVALID_REQUEST
            for text in (str(value), str(getattr(target.peers.card.layout, field)), "own", "by-hand"):
                assert text in answer.failure.message
        # Dialled by the worker itself, it is no other.
        for field, value in UNLIKE.items():
            layout = msgspec.structs.replace(target.peers.card.layout, **{field: value})
            target.peers.announce((_card(target, layout=layout, worker_id=WorkerId(f"peer-{field}")),))
            await target.until(lambda: len(target.pairings) > 0)
            (failure,) = target.pairings
            assert failure is not None
            assert str(value) in failure.message
            target.told.clear()
        assert counted(target, table.PAIRINGS_REFUSED) == 2 * len(UNLIKE)


@pytest.mark.parametrize("changes", [{"dtype": "fp8_fused"}, {"order": "a later release's"}, {"num_layers": 0}])
async def test_e7_a_layout_that_nobody_here_knows_is_refused_and_not_guessed(changes: dict[str, Any]) -> None:
    async with site("own", Role.DECODE) as target:
        answer = await answer_to(target, **changes)
        assert answer.failure is not None
        assert str(next(iter(changes.values()))) in answer.failure.message
        assert (await answer_to(target)).failure is None


@pytest.mark.parametrize("block_size", [4, 16])
async def test_e7_equal_answers_come_from_bytes_that_were_really_moved(block_size: int) -> None:
    """Over TCP: all of the prompt was sent, nothing was computed where it is decoded, and the bytes lie there."""
    prompt = tuple(range(100))
    kv = small_layout(block_size)
    async with site("p", Role.PREFILL) as prefill, site("d", Role.DECODE, kv=kv) as decode:
        await meet(prefill, decode)
        decode.start(0, Task.DECODE, prefill, prompt, GREEDY)
        prefill.start(0, Task.PREFILL, decode, prompt, GREEDY)
        await until(lambda: bool(_blocks(decode, 0)))
        blocks = _blocks(decode, 0)
        await decode.until(lambda: bool(decode.reports(0)))
        await prefill.settled()
        assert [token.token_id for token in decode.tokens(0)] == expected_tokens(kv, sequence_id(0), prompt, GREEDY)
        assert decode.engine.read(blocks, Span(0, 100, 0, kv.num_layers)) == prompt_kv(kv, prompt)
        assert counted(prefill, table.HANDOFF_BYTES) == kv.span_bytes(Span(0, 100, 0, kv.num_layers))
        assert counted(prefill, table.PUSHES) >= kv.num_layers
        assert counted(decode, table.PROMPT_TOKENS_RECEIVED) == 100
        assert counted(decode, table.PROMPT_TOKENS_COMPUTED) == 0


# --- E6 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(100))
def test_e6_no_push_covers_kv_that_is_not_written_yet(seed: int) -> None:
    rng = random.Random(seed)
    chunk = rng.randint(1, 9)
    solo = Solo(
        Role.PREFILL,
        budget=StepBudget(chunk, chunk, 8),
        mode=rng.choice(list(HandoffMode)),
        min_push_bytes=rng.choice([0, 100, 10**6]),
    )
    solo.meet(Role.DECODE)
    written: set[tuple[int, int, int]] = set()  # sequence, layer, token
    pushed: set[tuple[int, int, int]] = set()

    asked: list[int] = []

    def check(actions: list[Action]) -> None:
        asked.extend(each.handoff_id.sequence_id.request_id.number for each in to_peer(RequestReservation, actions))
        for push in of(PushSpan, actions):
            number, span = push.handoff_id.sequence_id.request_id.number, push.span
            cells = {
                (number, layer, token)
                for layer in range(span.layer_start, span.layer_stop)
                for token in range(span.token_start, span.token_stop)
            }
            assert cells <= written, f"{span} of {number} was pushed before it was written"
            pushed.update(cells)

    for number in range(3):
        check(solo.start(number, Task.PREFILL, tuple(range(10 * number, 10 * number + 10))))
    for _ in range(200):
        if asked and (solo.plan is None or rng.random() < 0.3):
            check(solo.hear(solo.answer(asked.pop(0))))
        elif solo.plan is not None:
            rows = solo.plan.rows
            reported = 0
            for layers in range(1, 4):
                for row in rows:
                    number = row.sequence_id.request_id.number
                    written |= {(number, layers - 1, row.position + index) for index in range(len(row.token_ids))}
                if layers < 3 and rng.random() < 0.7 and layers > reported:
                    check(solo.layers(layers))
                    reported = layers
            check(solo.finish_step())
    assert pushed == {(number, layer, token) for number in range(3) for layer in range(3) for token in range(10)}


class LateEngine(FakeEngine):
    """What a step is about to write is rubbish until the very moment in which its layer is reported."""

    def run_step(self, plan: StepPlan, on_layers: OnLayers) -> StepResult:
        for row in plan.rows:
            span = Span(row.position, row.position + len(row.token_ids), 0, self.layout.num_layers)
            self.write(row.block_table, span, b"\xee" * self.layout.span_bytes(span))
        return super().run_step(plan, on_layers)


async def test_e6_bytes_are_read_after_the_engine_has_written_them_on_tcp() -> None:
    sampling = SamplingParams(max_tokens=6, temperature=0.0)
    prefill = Site("p", Role.PREFILL, small_layout(), 64)
    prefill.engine = LateEngine(small_layout(), 64)
    await prefill.open()
    try:
        async with site("d", Role.DECODE) as decode:
            await meet(prefill, decode)
            prompts = {number: tuple((31 * number + index) % 900 for index in range(45)) for number in range(12)}
            for number, prompt in prompts.items():
                decode.start(number, Task.DECODE, prefill, prompt, sampling)
                prefill.start(number, Task.PREFILL, decode, prompt, sampling)
            await decode.until(lambda: all(decode.reports(number) for number in prompts) or bool(decode.failures))
            assert decode.failures == []
            for number, prompt in prompts.items():
                tokens = [token.token_id for token in decode.tokens(number)]
                assert tokens == expected_tokens(small_layout(), sequence_id(number), prompt, sampling)
            await decode.settled()
            await prefill.settled()
    finally:
        await prefill.close()


# --- E8 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_e8_two_revisions_of_one_shape_never_exchange_kv_during_a_rolling_update(seed: int) -> None:
    """Half of the fleet is new: every hand-off stays inside one revision, and every request is served."""
    cluster = VirtualCluster(seed)
    for index, digest in enumerate(("old", "new")):
        cluster.start_worker(f"prefill-{index}", Role.PREFILL, digest=digest)
        cluster.start_worker(f"decode-{index}", Role.DECODE, digest=digest)
    cluster.time.run(until=lambda: cluster.is_ready)
    cluster.time.run_for(0.2)
    for worker_id, each in cluster.workers.items():
        assert {peer[-1] for peer in each.peers} == {worker_id[-1]}
        refused = cluster.dispatcher.registry.get(worker_id)
        assert refused is not None
        if each.card.role is Role.PREFILL:
            (failure,) = refused.refusals.values()
            assert all(text in failure.message for text in ("digest", "old", "new"))
    for number in range(20):
        cluster.submit(GenerateRequest(MODEL, tuple(range(number, number + 30)), GREEDY))
    cluster.time.run(until=lambda: cluster.are_all_over)
    assert all(answer.error is None for answer in cluster.answers.values())
    check_answers(cluster)
    sent = [counted(each, table.HANDOFFS, "sent") for name, each in cluster.workers.items() if "prefill" in name]
    assert sum(sent) == 20
    assert min(sent) > 0


@pytest.mark.parametrize("seed", range(4))
def test_e8_an_answer_that_one_revision_has_begun_is_not_continued_by_another(seed: int) -> None:
    """It waits for a worker of its own revision, and fails in the end with that reason."""
    cluster = VirtualCluster(seed)
    for index, digest in enumerate(("old", "new")):
        cluster.start_worker(f"prefill-{index}", Role.PREFILL, digest=digest)
        cluster.start_worker(f"decode-{index}", Role.DECODE, digest=digest)
    cluster.time.run(until=lambda: cluster.is_ready)
    cluster.time.run_for(0.2)
    sampling = SamplingParams(20, temperature=0.0)
    request_id = cluster.submit(GenerateRequest(MODEL, tuple(range(30)), sampling))
    cluster.time.run(until=lambda: len(cluster.answers[request_id].tokens[0]) > 5)
    opened = cluster.dispatcher.open_request(request_id)
    assert opened is not None
    assert opened.choices[0].placement is not None
    writer = opened.choices[0].placement.decode
    begun_by = cluster.workers[writer].card.pool.model_digest
    cluster.kill(writer)
    cluster.time.run(until=lambda: cluster.are_all_over)
    others = [each for each in cluster.workers.values() if each.card.pool.model_digest != begun_by]
    assert [counted(each, table.OUTPUT_TOKENS) for each in others] == [0, 0]


# --- E4, E10 on real processes -----------------------------------------------------------------------------------

NUM_PROMPTS = 50
LOCAL_TOKENS = 24  # shorter prompts are read where they are decoded
PREFILL_CONTEXT = 200  # the others have what the model allows: 700
NARROW = ("--max-context", str(PREFILL_CONTEXT))
# Who serves what, and how: (served name, worker, role, further arguments).
WORKERS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("mixed", "mixed-0", "mixed", ()),
    ("pair", "prefill-0", "prefill", ("--min-push-bytes", "1K", "--chunk-tokens", "16", *NARROW)),
    ("pair", "prefill-1", "prefill", ("--handoff", "sync", "--block-size", "8", *NARROW)),
    ("pair", "decode-0", "decode", ()),
)


@pytest.fixture(scope="module")
def fleet(tiny_llama: Path) -> Iterator[str]:
    """The address of a router with all of WORKERS, every pair of which has met."""
    with ExitStack() as stack:
        models = dict.fromkeys((name for name, *_ in WORKERS), tiny_llama)
        where = announced(stack.enter_context(router(models, "--local-prefill-tokens", str(LOCAL_TOKENS))))
        for name, worker_id, role, more in WORKERS:
            stack.enter_context(worker(tiny_llama, role, worker_id, where.control, "--served-name", name, *more))
        with Front(f"http://{where.http}") as front:
            wait_until(lambda: are_up(front), 3 * START_TIMEOUT_S, "all workers, and all pairs of them")
        yield f"http://{where.http}"


def are_up(front: Front) -> bool:
    workers = front.client.get("/cluster").json()["workers"]
    num_pairs = sum(len(each["partners"]) for each in workers if each["role"] == "prefill")
    return len(workers) == len(WORKERS) and num_pairs == 2


@pytest.fixture
def front(fleet: str) -> Iterator[Front]:
    with Front(fleet) as front:
        front.wait_idle(len(WORKERS))
        yield front


FEATURES: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0, "logprobs": 3},
    {"temperature": 0.9, "seed": 7},
    {"temperature": 1.3, "seed": 11, "top_p": 0.7, "logprobs": 2},
    {"temperature": 0.8, "seed": 5, "n": 3},
    {"temperature": 0, "stop": ["a", "e"]},
    {"temperature": 0, "max_tokens": 1},
    {"temperature": 0.9, "seed": 3, "ignore_eos": False},
    {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}},
    {"temperature": 0.7, "seed": 2, "n": 2, "stream": True, "stream_options": {"include_usage": True}},
)


def body_of(front: Front, model: str, prompt: list[int], more: dict[str, Any]) -> Any:
    """All that a client sees, but ids, times and what was found cached."""
    body = {**completion(model, prompt, 12), **more}
    if not more.get("stream"):
        response = front.post(body)
        assert response.status_code == httpx.codes.OK, response.text
        return _kept(response.json())
    with front.client.stream("POST", "/v1/completions", json=body) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    choices: dict[int, list[Any]] = {}
    usage = None
    for line in lines:
        event = _kept(msgspec.json.decode(line))
        usage = event["usage"] or usage
        for choice in event["choices"]:
            choices.setdefault(choice["index"], []).append((choice["text"], choice["finish_reason"]))
    # Tokens of one step travel together, so the cut of a stream may differ, its text may not.
    return usage, {i: ("".join(text for text, _ in parts), parts[-1][1]) for i, parts in choices.items()}


def _kept(body: dict[str, Any]) -> dict[str, Any]:
    assert "error" not in body, body
    usage = body.get("usage")
    return {
        "choices": body["choices"],
        "usage": usage and {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")},
    }


def test_e10_bodies_are_equal_on_every_path_for_50_prompts_and_all_parameters(front: Front) -> None:
    """Mixed against separate workers: read locally, handed over by layers and all at once, between block sizes."""
    rng = random.Random(10)
    asked = []
    for number in range(NUM_PROMPTS):
        prompt = [3 + rng.randrange(290) for _ in range(rng.choice([1, 7, 15, 16, 17, 24, 25, 33, 64, 100, 150]))]
        asked.append((prompt, FEATURES[number % len(FEATURES)]))
    before = front.wait_counted()
    with ThreadPoolExecutor(4) as threads:
        expected = list(threads.map(lambda each: body_of(front, "mixed", *each), asked))
        for _ in range(2):  # the second time with what is cached from the first
            found = list(threads.map(lambda each: body_of(front, "pair", *each), asked))
            for (prompt, more), one, other in zip(asked, expected, found, strict=True):
                assert one == other, (len(prompt), more)
    front.wait_idle(len(WORKERS))
    seen = front.wait_counted().since(before)
    num_remote = seen.total(table.PLACEMENTS, reason="long_prompt")
    for reason in ("mixed_worker", "short_prompt", "long_prompt"):
        assert seen.total(table.PLACEMENTS, reason=reason) >= NUM_PROMPTS / 4, reason
    for name in ("prefill-0", "prefill-1"):
        assert seen.total(table.HANDOFFS, worker=name, outcome="sent") > 3
        assert seen.total(table.HANDOFF_BYTES, worker=name) > 0
    assert seen.total(table.HANDOFFS, worker="decode-0", outcome="received") == num_remote
    num_local, num_shared = (
        seen.total(table.PLACEMENTS, reason=reason) for reason in ("short_prompt", "shared_prompt")
    )
    num_read = seen.total(table.PROMPT_TOKENS_COMPUTED, worker="decode-0")
    assert num_read <= LOCAL_TOKENS * num_local + 16 * num_shared
    assert seen.total(table.MOVES) == 0


@pytest.mark.parametrize("length", [PREFILL_CONTEXT, PREFILL_CONTEXT + 1, 500])
def test_e4_over_http_a_prompt_over_the_prefill_workers_context_is_read_where_it_is_decoded(
    front: Front, length: int
) -> None:
    """Never a fluent answer out of empty KV: the router knows both limits and goes the other way, which is counted."""
    prompt = [3 + index % 290 for index in range(length)]
    before = front.readings()
    answers = [front.post(completion(name, prompt, 10)).json() for name in ("pair", "mixed")]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["usage"]["prompt_tokens"] == length
    front.wait_idle(len(WORKERS))
    placed = front.readings().since(before)
    assert placed.total(table.PLACEMENTS, reason="prefill_pool_too_small") == (length > PREFILL_CONTEXT)


def test_e4_over_http_a_prompt_over_both_limits_is_a_400_and_not_a_token(front: Front) -> None:
    response = front.post(completion("pair", [3] * 695, 10))
    assert response.status_code == httpx.codes.BAD_REQUEST, response.text
    assert "700 tokens" in response.json()["error"]["message"]
    assert "choices" not in response.json()

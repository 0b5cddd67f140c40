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

E5 to E7: test_class_e_bytes.py. On real processes: test_class_e_real_answers.py.
"""

import asyncio
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from tests.faults.outputs import GREEDY, KV, blocks_of, check_answers, check_only_between_rounds, counted
from tests.unit.transport.relays import Relay
from tests.unit.worker.rigs import Site, meet, sequence_id, site, until

from disagg.core.endpoints import Endpoint, TransportKind
from disagg.core.errors import InvalidRequest
from disagg.core.request import SamplingParams, SequenceSpec
from disagg.core.roles import HandoffMode, Role, Task
from disagg.core.spans import KvLayout, KvOrder
from disagg.dispatch.stream import GenerateRequest
from disagg.protocol.messages import (
    AbortSequence,
    StartSequence,
)
from disagg.scheduler import events
from disagg.scheduler.scheduler import Scheduler
from disagg.telemetry import metrics as table
from disagg.testing.engine import expected_tokens
from disagg.testing.virtual import MODEL, VirtualCluster
from disagg.testing.virtual_time import Timing
from disagg.testing.virtual_worker import VirtualWorker

# A push takes as long as several steps: there is nearly always one on the way.
SLOW_WRITER = Timing(write_s=0.02, byte_s=2e-4)


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
        reserved = blocks_of(decode, 0)
        assert len(reserved) == 16
        message = AbortSequence(sequence_id(0), 1, "scripted")
        decode.worker.handle(events.RouterMessageReceived(message))
        spec = SequenceSpec(sequence_id(1), new, SamplingParams(6, temperature=0.0))
        decode.worker.handle(events.RouterMessageReceived(StartSequence(spec, Task.WHOLE, 1)))
        await until(lambda: bool(blocks_of(decode, 1)))
        assert set(blocks_of(decode, 1)) & set(reserved)
        relay.release()
        await decode.until(lambda: len(decode.tokens(1)) == 6)
        tokens = [token.token_id for token in decode.tokens(1)]
        assert tokens == expected_tokens(KV, sequence_id(1), new, spec.sampling)
        await prefill.settled()
        await decode.settled()
        # And the pair goes on: the same prompt again, over a new connection.
        decode.start(2, Task.DECODE, prefill, old, GREEDY)
        prefill.start(2, Task.PREFILL, decode, old, GREEDY)
        await decode.until(lambda: decode.has_answered(2))
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

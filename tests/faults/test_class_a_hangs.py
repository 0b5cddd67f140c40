"""Class A: nothing hangs. Whatever one side cannot do, the other hears of it; whatever is silent runs into a deadline.

==== ==============================================================================================================
A1   Both ends are told at once. A decode worker that cannot be reached fails its part; the prefill worker's part of
     that attempt is withdrawn within a second and the sequence is placed again.
A2   A prefill side that fails, or dies, frees the decode side that waits for it in one message, whether or not that
     side had room yet.
A3   Every part answers: what a prefill worker says is acted upon, and when no move helps its words reach the client.
A4   Layouts that cannot be handed over are refused when two workers meet. Health and clients are told both values.
     (A worker is one process: unlike tensor-parallel sizes would be unlike numbers of heads.)
A5   What a cancelled request held comes back by events and clocks of its own, never by the next request.
A6   Deadlines run on an idle worker: its clock is a timer, not a part of the step.
A7   A stalled transfer holds up itself. Bytes move on threads of their own; the loop that plans steps waits for none.
A8   Blocks of a pending push are held by their sequence, so that nothing can evict them until the transport is done.
A11  A prompt may be cut into any chunks: pushes follow the chunks, and positions, not counts, say what is missing.
A12  No order of events that delays can bring about leaves a request behind.
A13  /ready reads the router's own tables: no worker is asked, nothing is generated. It says what could be served now.
A14  A prompt's KV may be any number of times what the transport has under way: pushes are cut and wait their turn.
==== ==============================================================================================================
"""

import random

import msgspec
import pytest
from tests.faults.virtual_rigs import (
    TIMES,
    WatchedCluster,
    any_mode,
    ask,
    attempt,
    attempts,
    check_answers,
    finish,
    submit_over,
)
from tests.unit.scheduler.rigs import Solo

from disagg.core.errors import FailureKind, InvalidRequest, Unavailable
from disagg.core.roles import HandoffMode, Role, Task
from disagg.policy.recovery import RecoveryLimits
from disagg.protocol.messages import ReportFailure
from disagg.scheduler.scheduler import Scheduler
from disagg.telemetry import metrics as table
from disagg.testing.virtual_time import Chances, Timing
from disagg.testing.virtual_worker import VirtualWorker

# --- one side cannot ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_decode", [1, 2])  # one: the next attempt takes another path, not another worker
@pytest.mark.parametrize("seed", range(3 * TIMES))
def test_a1_a_decode_worker_that_cannot_be_reached_frees_the_prefill_side_within_a_second(
    seed: int, num_decode: int
) -> None:
    """Its connections break again and again, it hears of that first, and half of the dials are refused."""

    class Cluster(WatchedCluster):
        num_checked = 0

        def on_failure(self, worker: VirtualWorker, message: ReportFailure) -> None:
            def is_free() -> None:
                self.num_checked += 1
                left = attempt(self.worker("p0"), message.sequence_id, message.attempt)
                assert left is None, (left, self.time.story())

            if worker.worker_id == "d0":
                self.time.after(1.0, is_free)

    cluster = Cluster(seed, chances=Chances(refused_dial=0.5))
    cluster.start(1, num_decode)
    for _ in range(6):
        late_s = cluster.rng.choice([0.3, 1.5])

        def cut(late_s: float = late_s) -> None:
            cluster.cut("p0", "d0", source_knows_after_s=late_s)

        submit_over(cluster, 6, 0.05)
        cluster.time.after(cluster.rng.uniform(0.05, 0.4), cut)
        cluster.time.run_for(3.0)
    finish(cluster, 36, limit_s=60.0)
    assert cluster.num_checked > 0


@pytest.mark.parametrize("cause", ["step fails", "killed"])
@pytest.mark.parametrize("num_blocks", [64, 24])  # the smaller one has no room for what it waits for
@pytest.mark.parametrize("seed", range(2 * TIMES))
def test_a2_prefill_that_fails_early_frees_the_waiting_decode_side_at_once(
    seed: int, num_blocks: int, cause: str
) -> None:
    cluster = WatchedCluster(seed)
    cluster.start_worker("d0", Role.DECODE, num_blocks=num_blocks)
    cluster.start(2, 0, mode=any_mode(cluster.rng))
    cluster.time.run(until=lambda: cluster.num_pairs == 2)
    for salt in range(12):
        cluster.submit(ask(40, salt=salt))
    waiting = cluster.rng.uniform(0.01, 0.15)
    cluster.time.run_for(waiting)
    first, decode = cluster.worker("p0"), cluster.worker("d0")
    waited = [
        s for s in attempts(decode) if s.destination and s.destination.peer == "p0" and s.needs_peer and s.is_live
    ]
    assert waited
    if cause == "killed":
        cluster.kill("p0")
        freed = waited
    else:
        first.is_engine_broken = True
        cluster.time.run(until=lambda: bool(cluster.failures))
        failed = {(message.sequence_id, message.attempt) for _, _, message in cluster.failures}
        freed = [sequence for sequence in waited if (sequence.sequence_id, sequence.attempt) in failed]
        assert freed
    cluster.time.run_for(0.05)  # a notice of death or one message
    assert not [sequence for sequence in freed if sequence.is_live], cluster.time.story()
    finish(cluster, 12, limit_s=60.0)


def test_a3_what_prefill_refuses_for_good_is_told_to_the_client_at_once() -> None:
    cluster = WatchedCluster(0)
    prefill = cluster.start_worker("p0", Role.PREFILL)
    # Its card says 256: a router that knew would let the decode worker read the prompt.
    prefill.scheduler = Scheduler(msgspec.structs.replace(prefill.scheduler.config, max_context=32))
    cluster.start(0, 1)
    cluster.time.run(until=lambda: cluster.is_ready)
    answer = cluster.answers[cluster.submit(ask(60))]
    cluster.time.run(until=lambda: answer.is_over)
    assert isinstance(answer.error, InvalidRequest)
    assert "the context is 32 tokens" in str(answer.error)
    assert cluster.time.now_s < 1.0
    cluster.check_nothing_left()


@pytest.mark.parametrize("seed", range(5))
def test_a3_a_failure_that_no_move_cures_reaches_the_client_with_its_cause(seed: int) -> None:
    cluster = WatchedCluster(seed)
    cluster.start(2, 2)
    for engine in cluster.workers.values():
        engine.is_engine_broken = True
    answer = cluster.answers[cluster.submit(ask(60))]
    cluster.time.run(until=lambda: answer.is_over)
    assert isinstance(answer.error, Unavailable)
    limit = RecoveryLimits().max_attempts
    assert f"attempt {limit} of {limit} failed" in str(answer.error)
    assert "is broken" in str(answer.error)
    assert cluster.time.now_s < 5.0  # not by any timeout
    cluster.check_nothing_left()


@pytest.mark.parametrize("seed", range(3 * TIMES))
def test_a3_a_step_that_fails_now_and_then_moves_what_was_in_it(seed: int) -> None:
    cluster = WatchedCluster(seed, chances=Chances(step_failure=0.02))
    cluster.start(2, 2, mode=any_mode(cluster.rng))
    submit_over(cluster, 20, 2.0)
    finish(cluster, 20, limit_s=60.0)
    moved = cluster.dispatcher.counters.get(table.MOVES, FailureKind.INTERNAL.value)
    assert moved > 0


def test_a3_workers_that_reset_their_connections_are_named_when_nobody_comes_back() -> None:
    cluster = WatchedCluster(0)
    cluster.start(1, 1)
    answer = cluster.answers[cluster.submit(ask(60, 30))]
    cluster.time.run(until=lambda: any(answer.tokens))
    cluster.kill("p0")
    cluster.kill("d0")
    cluster.time.run(until=lambda: answer.is_over)
    assert isinstance(answer.error, Unavailable)
    assert "worker d0, which was writing the answer, was lost" in str(answer.error)
    assert "no worker has registered" in str(answer.error)


def test_a4_unlike_layouts_are_refused_when_workers_meet_and_clients_are_told_both() -> None:
    cluster = WatchedCluster(0)
    cluster.start_worker("p0", Role.PREFILL, dtype="float32")
    cluster.start_worker("d0", Role.DECODE, dtype="bfloat16")
    cluster.time.run(until=lambda: any(r.refusals for r in cluster.dispatcher.registry.records()))
    (status,) = cluster.dispatcher.models()
    assert not status.is_ready
    with pytest.raises(Unavailable) as refused:
        cluster.submit(ask(20))
    for told in (status.missing, str(refused.value)):
        for word in ("p0", "d0", "KV dtype", "float32", "bfloat16"):
            assert word in told
    assert refused.value.retry_after_s > 0
    # One that fits is used; the other never sees a request.
    cluster.start_worker("d1", Role.DECODE, dtype="float32")
    cluster.time.run(until=lambda: cluster.is_ready)
    cluster.submit(ask(20))
    cluster.time.run(until=lambda: cluster.are_all_over)
    check_answers(cluster)
    assert cluster.total(table.SEQUENCES, "d0") == 0
    cluster.check_nothing_left()


# --- nobody asks, nothing is heard -------------------------------------------------------------------------------


@pytest.mark.parametrize("is_stalled", [False, True])
@pytest.mark.parametrize("seed", range(TIMES))
def test_a5_what_cancelled_requests_held_comes_back_without_a_new_request(seed: int, *, is_stalled: bool) -> None:
    """60 at once over a slow link, three times."""
    cluster = WatchedCluster(seed, timing=Timing(byte_s=2e-5))
    cluster.start(1, 1, num_blocks=100)
    sender = cluster.worker("p0")
    for number in range(3):
        sender.is_sending_stalled = is_stalled
        asked = [cluster.submit(ask(60, salt=60 * number + index)) for index in range(60)]
        cluster.time.run_for(1.0)
        for request_id in asked:
            if not cluster.answers[request_id].is_over:
                cluster.abort(request_id)
        sender.is_sending_stalled = False
        cluster.time.run_for(cluster.time.timing.fence_s + 1.0)
        for engine in cluster.workers.values():
            state = engine.scheduler.snapshot()
            assert engine.scheduler.is_idle, cluster.time.story()
            assert state.num_free_blocks + state.num_cached_blocks == 100
    probe = cluster.answers[cluster.submit(ask(60, salt=7777))]
    cluster.time.run(until=lambda: probe.is_over)
    check_answers(cluster)
    cluster.check_nothing_left()


@pytest.mark.parametrize(("role", "task"), [(Role.PREFILL, Task.PREFILL), (Role.DECODE, Task.DECODE)])
def test_a6_an_idle_worker_gives_a_silent_peer_up_at_the_end_of_the_lease(role: Role, task: Task) -> None:
    """Driven by the times that it asks to be woken at, and by nothing else."""
    solo = Solo(role, lease_s=9.0)
    solo.meet(Role.DECODE if role is Role.PREFILL else Role.PREFILL)
    began_s = solo.now_s
    solo.start(0, task, (1, 2, 3))
    for _ in range(100):
        if solo.failures:
            break
        wake_s = solo.scheduler.next_wake_s()
        assert wake_s < float("inf")
        solo.wait(max(0.0, wake_s - solo.now_s))  # 0: at once, for its first renewal
    assert solo.failures[0].failure.kind is FailureKind.LEASE_EXPIRED
    assert solo.now_s == pytest.approx(began_s + 9.0)
    assert solo.num_used == 0


@pytest.mark.parametrize("seed", range(3 * TIMES))
def test_a6_a_transfer_that_never_moves_fails_at_its_own_deadline_on_idle_workers(seed: int) -> None:
    """One push is tried twice; then another prefill worker reads the prompt."""
    cluster = WatchedCluster(seed, timing=Timing(stall_s=20.0))
    cluster.start(2, 1, mode=any_mode(cluster.rng))
    for name in ("p0", "p1"):
        cluster.worker(name).is_sending_stalled = True
    asked_s = cluster.time.now_s
    cluster.submit(ask(40))
    cluster.time.run(until=lambda: bool(cluster.failures))
    for name in ("p0", "p1"):
        cluster.worker(name).is_sending_stalled = False
    assert 40.0 <= cluster.time.now_s - asked_s < 41.0
    assert cluster.failures[0][2].failure.kind is FailureKind.TRANSFER_FAILED
    finish(cluster, 1, limit_s=60.0)


@pytest.mark.parametrize("seed", range(4 * TIMES))
def test_a7_a_stalled_sender_holds_up_no_other_stream(seed: int) -> None:
    cluster = WatchedCluster(seed, timing=Timing(stall_s=20.0))
    cluster.start(2, 1, num_blocks=200, mode=any_mode(cluster.rng))
    cluster.worker("p0").is_sending_stalled = True
    asked = [cluster.submit(ask(30, 60, salt=salt)) for salt in range(8)]
    cluster.time.run_for(15.0)
    answers = [cluster.answers[request_id] for request_id in asked]
    ended = [request_id for request_id, answer in zip(asked, answers, strict=True) if answer.is_over]
    assert 0 < len(ended) < len(asked)
    for request_id in ended:
        assert cluster.largest_gap_s(request_id) < 0.15  # a step beside a chunk takes up to 0.06 s
    cluster.worker("p0").is_sending_stalled = False
    finish(cluster, 8, limit_s=120.0)


@pytest.mark.parametrize("seed", range(6 * TIMES))
def test_a8_blocks_of_a_pending_push_cannot_be_evicted(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small prefill pool, slow writes, prompts that share blocks: every push reads blocks that somebody holds."""
    copy, num_copied = VirtualWorker._copy, [0]

    def checked_copy(self: VirtualWorker, peer: VirtualWorker, action: object, is_corrupt: bool) -> None:
        refcounts = self.scheduler._state.cache.pool.refcounts()
        if action.grant_key not in self.stopped_keys:  # type: ignore[attr-defined]
            assert all(refcounts[block] > 0 for block in action.source_blocks)  # type: ignore[attr-defined]
        num_copied[0] += 1
        copy(self, peer, action, is_corrupt)  # type: ignore[arg-type]

    monkeypatch.setattr(VirtualWorker, "_copy", checked_copy)
    cluster = WatchedCluster(seed, timing=Timing(write_s=0.02, byte_s=2e-5))
    cluster.start_worker("p0", Role.PREFILL, num_blocks=26, mode=any_mode(cluster.rng))
    cluster.start(0, 1)
    cluster.time.run(until=lambda: cluster.is_ready)
    submit_over(cluster, 25, 1.0)
    finish(cluster, 25)
    assert num_copied[0] > 25
    assert cluster.total(table.BLOCKS_EVICTED, "p0") > 0


# --- sizes and orders --------------------------------------------------------------------------------------------

CHUNK = 16


@pytest.mark.parametrize("mode", HandoffMode)
@pytest.mark.parametrize("block_size", [4, 8])
@pytest.mark.parametrize("num_prompt", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK - 1, 3 * CHUNK, 3 * CHUNK + 5])
def test_a11_a_prompt_of_any_number_of_chunks_is_answered_alike(
    num_prompt: int, block_size: int, mode: HandoffMode
) -> None:
    """Alone, then with a part of it cached, then beside streams, which make the chunks smaller."""
    cluster = WatchedCluster(num_prompt)
    cluster.start(1, 1, mode=mode, block_size=block_size, chunk_tokens=CHUNK, mixed_chunk_tokens=5)
    for _ in range(2):
        cluster.submit(ask(num_prompt))
        cluster.time.run(until=lambda: cluster.are_all_over)
    for salt in range(4):
        cluster.submit(ask(num_prompt, salt=salt))
    finish(cluster, 6)
    assert cluster.total(table.PROMPT_TOKENS_COMPUTED, "d") == 0


@pytest.mark.parametrize("seed", range(10 * TIMES))
def test_a12_no_delay_of_any_event_leaves_a_request_behind(seed: int) -> None:
    """Every duration is stretched by up to 300 times, each for itself."""
    jitter = random.Random(seed).choice([30.0, 300.0])
    cluster = WatchedCluster(seed, timing=Timing(step_s=0.001, prompt_token_s=0.0001, jitter=jitter))
    cluster.start(2, 2, mode=any_mode(cluster.rng), lease_s=60.0)
    submit_over(cluster, 20, 2.0)
    cluster.time.run_for(2.0)
    finish(cluster, 20, limit_s=600.0)

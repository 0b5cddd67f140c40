"""Class B: whatever becomes of a request, its KV blocks come back, on every worker, by themselves.

| case | what the class means here | where it is shown |
|---|---|---|
| B1 | KV is awaited from a source that dies, goes silent or gives up, and the client leaves | scheduler, virtual time |
| B2 | a request is refused, before a worker hears of it or by one after the other has begun | virtual time, HTTP |
| B3 | the client leaves at any moment: the router itself lets go, no lease is needed | virtual time, HTTP sockets |
| B4 | a decode worker is killed between any two messages or bytes of a hand-off | virtual time, TCP |
| B5 | an abort meets every state of the tables, again and again, and ids nobody knows | virtual time |
| B7 | nothing is swapped to host memory here; what memory pressure does instead is preempt: abort then | scheduler |
| B8 | an abort comes between the start of a chunk and its result | scheduler |
| B10 | the destination drops what the source still queues: it is never computed | scheduler |

"Comes back" is always the same check: no block held, reserved or quarantined, no sequence, no grant. Over HTTP:
test_class_b_clients.py. B4: test_class_b_killed_decode.py. From B5 on: test_class_b_aborts.py.
"""

from collections.abc import Callable

import msgspec
import pytest
from tests.faults.leaks import (
    PROMPT,
    SLOW_LINK,
    Scene,
    check_clean,
    check_solo_clean,
    every_moment,
    request,
    scene,
)
from tests.unit.scheduler.rigs import PEER, PEER_INCARNATION, Solo, handoff, of

from disagg.core.errors import DisaggError, Failure, FailureKind, InvalidRequest, ModelNotFound, Overloaded
from disagg.core.ids import WorkerId
from disagg.core.roles import HandoffMode, Role, Task
from disagg.core.spans import Span
from disagg.dispatch.stream import GenerateRequest
from disagg.protocol.handoff import decode_grant_key
from disagg.protocol.messages import CancelHandoff, RequestReservation
from disagg.scheduler import events
from disagg.scheduler.actions import RevokeGrant
from disagg.scheduler.scheduler import Scheduler
from disagg.telemetry import metrics as table
from disagg.testing.virtual import VirtualCluster
from disagg.testing.virtual_time import Timing
from disagg.testing.virtual_worker import VirtualWorker

# --- B1 ----------------------------------------------------------------------------------------------------------

SOURCE_ENDS = ("dies before", "dies after", "is silent", "gave up too")
ABORT_POINTS = ("announced", "reserved", "half here", "all but the first token")


@pytest.mark.parametrize("source", SOURCE_ENDS)
@pytest.mark.parametrize("point", ABORT_POINTS)
def test_b1_abort_while_waiting_for_kv_frees_the_blocks_when_the_source_has_died(point: str, source: str) -> None:
    """1000 times over all parameters: not one block is missing, and nothing else of them is kept."""
    solo = Solo(Role.DECODE, lease_s=9.0)
    solo.meet(Role.PREFILL)
    for number in range(1000 // (len(SOURCE_ENDS) * len(ABORT_POINTS)) + 1):
        prompt = tuple((number + index) % 100 for index in range(10))
        solo.start(number, Task.DECODE, prompt)
        if point != "announced":
            solo.hear(RequestReservation(handoff(number), solo.fence(), len(prompt)))
        if point == "half here":
            solo.handle(events.WriteLanded(handoff(number), Span(0, 6, 0, 3), None))
        if point == "all but the first token":
            solo.handle(events.WriteLanded(handoff(number), Span(0, 10, 0, 3), None))
        actions = []
        if source == "dies before":
            actions += solo.handle(events.PeerLost(PEER, PEER_INCARNATION, "killed"))
        actions += solo.abort(number)
        if source == "dies after":
            actions += solo.handle(events.PeerLost(PEER, PEER_INCARNATION, "killed"))
        if source == "gave up too":
            given_up = Failure(FailureKind.CANCELLED, "the client has gone")
            actions += solo.hear(CancelHandoff(handoff(number), solo.fence(), given_up))
        # The transport's word is all that is waited for.
        assert len(of(RevokeGrant, actions)) == (point != "announced")
        for revoked in of(RevokeGrant, actions):
            solo.handle(events.GrantFenced(decode_grant_key(revoked.grant_key).handoff_id))
        check_solo_clean(solo)
        solo.meet(Role.PREFILL)


@pytest.mark.parametrize("point", ABORT_POINTS)
def test_b1_without_an_abort_the_lease_frees_what_a_silent_source_was_to_fill(point: str) -> None:
    solo = Solo(Role.DECODE, lease_s=9.0)
    solo.meet(Role.PREFILL)
    solo.start(0, Task.DECODE, PROMPT)
    if point != "announced":
        solo.hear(RequestReservation(handoff(0), solo.fence(), 10))
    if point in ("half here", "all but the first token"):
        solo.handle(events.WriteLanded(handoff(0), Span(0, 6 if point == "half here" else 10, 0, 3), None))
    assert solo.wait(8.9) is not None
    assert not solo.failures
    for revoked in of(RevokeGrant, solo.wait(0.2)):
        solo.handle(events.GrantFenced(decode_grant_key(revoked.grant_key).handoff_id))
    assert [report.failure.kind for report in solo.failures] == [FailureKind.LEASE_EXPIRED]
    check_solo_clean(solo)


@pytest.mark.parametrize("timing", [Timing(), SLOW_LINK], ids=["fast", "slow"])
def test_b1_source_killed_and_client_gone_at_every_moment_leave_nothing_on_decode(timing: Timing) -> None:
    for _, (cluster, victim) in every_moment(lambda: scene(1, timing=timing)):
        if victim in cluster.answers and not cluster.answers[victim].is_over:
            cluster.abort(victim)
        cluster.kill("prefill-0")
        cluster.time.run_for(2.0)
        check_clean(cluster.workers[WorkerId("decode-0")])
        assert cluster.dispatcher.num_open == 0


# --- B2 ----------------------------------------------------------------------------------------------------------

REFUSED_AT_THE_DOOR: dict[str, tuple[GenerateRequest, type[DisaggError]]] = {
    "unknown model": (msgspec.structs.replace(request(5), model="another"), ModelNotFound),
    "empty prompt": (request(0), InvalidRequest),
    "prompt over the context": (request(300), InvalidRequest),
    "answer over the context": (request(20, 300), InvalidRequest),
    "more than the pool": (request(100, 150), InvalidRequest),
}


@pytest.mark.parametrize("kind", REFUSED_AT_THE_DOOR)
def test_b2_a_request_that_is_refused_at_the_door_reaches_no_worker(kind: str) -> None:
    cluster, _ = scene(2, request(20), decode_blocks=60)
    cluster.time.run(until=lambda: cluster.are_all_over)
    placed = cluster.dispatcher.counters.get(table.PLACEMENTS, "long_prompt")
    refused, error = REFUSED_AT_THE_DOOR[kind]
    with pytest.raises(error):
        cluster.submit(refused)
    assert cluster.dispatcher.num_open == 0
    cluster.time.run_for(1.0)
    for worker in cluster.workers.values():
        check_clean(worker)
    assert cluster.dispatcher.counters.get(table.PLACEMENTS, "long_prompt") == placed


def test_b2_a_request_over_the_limit_of_open_ones_reaches_no_worker() -> None:
    cluster = VirtualCluster(2, max_open_requests=1)
    cluster.start_worker("mixed-0", Role.MIXED)
    cluster.time.run(until=lambda: cluster.is_ready)
    cluster.submit(request(20))
    with pytest.raises(Overloaded):
        cluster.submit(request(20))
    cluster.time.run(until=lambda: cluster.are_all_over)
    cluster.time.run_for(1.0)
    check_clean(cluster.workers[WorkerId("mixed-0")])


def refuse_new_work(worker: VirtualWorker) -> None:
    """It ends, and the router has not heard of it."""
    worker.handle(events.DrainRequested())


def shrink_context(worker: VirtualWorker) -> None:
    worker.scheduler = Scheduler(msgspec.structs.replace(worker.scheduler.config, max_context=10))
    for peer in worker.peers.values():
        worker.handle(events.PeerPaired(peer.card))


def shrink_vocabulary(worker: VirtualWorker) -> None:
    worker.scheduler = Scheduler(msgspec.structs.replace(worker.scheduler.config, vocab_size=3))
    for peer in worker.peers.values():
        worker.handle(events.PeerPaired(peer.card))


def forget_peers(worker: VirtualWorker) -> None:
    worker.scheduler = Scheduler(worker.scheduler.config)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("spoil", [refuse_new_work, shrink_context, shrink_vocabulary, forget_peers])
@pytest.mark.parametrize("name", ["decode-0", "prefill-0"])
def test_b2_a_refusal_by_one_worker_frees_the_other_within_a_second(
    name: str, spoil: Callable[[VirtualWorker], None], seed: int
) -> None:
    """One end says no when the other may have begun; no lease is waited for."""
    made = scene(seed)
    cluster = made.cluster
    cluster.time.run(until=lambda: cluster.are_all_over)
    spoil(cluster.workers[WorkerId(name)])
    victim = cluster.submit(request(30, start=100))
    other = cluster.workers[WorkerId("prefill-0" if name == "decode-0" else "decode-0")]
    if spoil in (shrink_context, shrink_vocabulary):
        cluster.time.run(until=lambda: cluster.answers[victim].is_over)
        assert isinstance(cluster.answers[victim].error, InvalidRequest)
        assert cluster.answers[victim].tokens == [[]]
    else:
        cluster.time.run_for(1.0)  # it waits for another worker, or the decode worker reads the prompt itself
        if not cluster.answers[victim].is_over:
            cluster.abort(victim)
    cluster.time.run_for(1.0)
    check_clean(other)
    made.check_answers()
    assert cluster.dispatcher.num_open == 0


# --- B3 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", list(HandoffMode))
@pytest.mark.parametrize("timing", [Timing(), SLOW_LINK], ids=["fast", "slow"])
def test_b3_client_gone_at_every_moment_is_let_go_by_the_router_itself(mode: HandoffMode, timing: Timing) -> None:
    """Leases are endless here, and the answer would take seconds. A bystander is not hurt."""

    def make() -> Scene:
        return scene(3, request(20, 200), request(9, start=50), mode=mode, timing=timing)

    for _, made in every_moment(make, 7, limit=154):
        cluster, victim = made
        assert not cluster.answers[victim].is_over
        cluster.abort(victim)
        cluster.time.run(until=lambda now=cluster: now.are_all_over)  # type: ignore[misc]
        cluster.time.run_for(0.5)
        for worker in cluster.workers.values():
            check_clean(worker)
        made.check_answers()

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

"Comes back" is always the same check: no block held, reserved or quarantined, no sequence, no grant.
"""

import asyncio
import contextlib
import gc
import itertools
import json
import random
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from tests.e2e.cluster import Front, completion, standing_still
from tests.unit.scheduler.rigs import PEER, PEER_INCARNATION, Solo, duo, handoff, of
from tests.unit.transport.relays import Relay
from tests.unit.worker.rigs import DEADLINE_S, Site, sequence_id, until

from disagg.core.endpoints import Endpoint, TransportKind
from disagg.core.errors import DisaggError, Failure, FailureKind, InvalidRequest, ModelNotFound, Overloaded
from disagg.core.ids import Incarnation, RequestId, SequenceId, WorkerId
from disagg.core.request import SamplingParams
from disagg.core.roles import HandoffMode, Role, Task
from disagg.core.spans import KvLayout, Span
from disagg.dispatch.stream import GenerateRequest
from disagg.policy.batching import StepBudget
from disagg.protocol.handoff import DestinationState, SourceState, decode_grant_key
from disagg.protocol.lifecycle import CHOICE_TABLE, ChoiceState, SequenceState
from disagg.protocol.messages import AbortSequence, CancelHandoff, RequestReservation, StartSequence, WorkerCard
from disagg.scheduler import events
from disagg.scheduler.actions import PushSpan, RevokeGrant, StopPushes
from disagg.scheduler.scheduler import Scheduler
from disagg.scheduler.sequence import Sequence
from disagg.telemetry import metrics as table
from disagg.testing.engine import expected_tokens
from disagg.testing.processes import Serve, wait_until
from disagg.testing.virtual import MODEL, VirtualCluster
from disagg.testing.virtual_time import Timing
from disagg.testing.virtual_worker import VirtualWorker

PROMPT = tuple(range(10))
# No block may owe its return to a lease: where this is set, a lease would come far too late.
ENDLESS_S = 10_000.0
SLOW_LINK = Timing(write_s=0.02, byte_s=1e-5)
SLOWER_LINK = Timing(step_s=0.05, byte_s=3e-4)  # what is missing takes longer than a step is thought to


# --- shared ------------------------------------------------------------------------------------------------------


def num_used(worker: VirtualWorker) -> int:
    state = worker.scheduler.snapshot()
    return state.num_held_blocks + state.num_reserved_blocks + state.num_quarantined_blocks


def check_clean(worker: VirtualWorker) -> None:
    """Nothing of anybody is left on this worker now."""
    assert (num_used(worker), worker.scheduler.is_idle, worker.grants) == (0, True, {}), worker.scheduler.snapshot()


def check_solo_clean(solo: Solo) -> None:
    assert (solo.num_used, solo.scheduler.is_idle) == (0, True), solo.state


class Scene(NamedTuple):
    """A ready cluster with requests under way; the first one is the one that something happens to."""

    cluster: VirtualCluster
    victim: RequestId

    @property
    def worker(self) -> dict[str, VirtualWorker]:
        return {str(name): worker for name, worker in self.cluster.workers.items()}

    def check_answers(self) -> None:
        """Whoever has stayed gets what an undisturbed engine says."""
        for request_id, answer in self.cluster.answers.items():
            layout = next(iter(self.cluster.workers.values())).card.layout
            for choice, tokens in enumerate(answer.tokens):
                spec = answer.request
                expected = expected_tokens(layout, SequenceId(request_id, choice), spec.prompt_ids, spec.sampling)
                is_short = answer.is_aborted or answer.error is not None
                assert tokens == (expected[: len(tokens)] if is_short else expected), self.cluster.time.story()


def request(length: int, max_tokens: int = 4, *, start: int = 0, num_choices: int = 1) -> GenerateRequest:
    prompt = tuple(range(start, start + length))
    return GenerateRequest(MODEL, prompt, SamplingParams(max_tokens, temperature=0.0), num_choices)


def scene(
    seed: int,
    *requests: GenerateRequest,
    num_decode: int = 1,
    num_prefill: int = 1,
    timing: Timing | None = None,
    mode: HandoffMode = HandoffMode.LAYERWISE,
    lease_s: float = ENDLESS_S,
    decode_blocks: int = 64,
) -> Scene:
    cluster = VirtualCluster(seed, timing=timing)
    for index in range(num_prefill):
        cluster.start_worker(f"prefill-{index}", Role.PREFILL, mode=mode, lease_s=lease_s, chunk_tokens=8)
    for index in range(num_decode):
        cluster.start_worker(
            f"decode-{index}", Role.DECODE, lease_s=lease_s, num_blocks=decode_blocks, answer_headroom=1, block_size=4
        )
    cluster.time.run(until=lambda: cluster.is_ready)
    cluster.time.run_for(0.1)  # every pair has met
    ids = [cluster.submit(each) for each in requests or (request(20),)]
    return Scene(cluster, ids[0])


def run_events(cluster: VirtualCluster, count: int) -> None:
    """Let exactly so many things happen."""
    passed = itertools.count()
    cluster.time.run(until=lambda: next(passed) >= count)


def every_moment(make: Callable[[], Scene], stride: int = 1, limit: int = 10_000) -> Iterator[tuple[int, Scene]]:
    """The same scene, stopped before its first event, after it, after the second, ... at most `limit`."""
    undisturbed = make()
    count = itertools.count()
    undisturbed.cluster.time.run(until=lambda: next(count) >= 0 and undisturbed.cluster.are_all_over)
    num_events = next(count)
    assert num_events > 40, "too little happens to prove anything"
    for moment in range(0, min(num_events, limit), stride):
        made = make()
        run_events(made.cluster, moment)
        yield moment, made


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
            solo.hear(RequestReservation(handoff(number), solo.fence(), len(prompt), 9.0))
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
        solo.hear(RequestReservation(handoff(0), solo.fence(), 10, 9.0))
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


@pytest.fixture(scope="module")
def serve(tiny_llama: Path) -> Iterator[Serve]:
    arguments = ("--prefill", "1", "--decode", "1", "--local-prefill-tokens", "0", "--chunk-tokens", "8")
    with Serve((str(tiny_llama), *arguments, "--kv-memory", "8M", "--num-threads", "1")) as running:
        yield running


@pytest.fixture
def front(serve: Serve) -> Iterator[Front]:
    with Front(serve.url) as front:
        front.wait_idle(2)
        yield front


class Leave(NamedTuple):
    """How far a client goes before it closes its socket."""

    num_sent: float = 1.0  # share of the request's bytes
    until: bytes = b""  # of the response
    num_more: int = 0  # bytes after that
    is_reset: bool = False
    stream: bool = True


LEAVES = (
    Leave(0.0),
    Leave(0.02),
    Leave(0.3),
    Leave(0.99),
    Leave(1.0),
    Leave(1.0, is_reset=True),
    Leave(1.0, stream=False),
    Leave(1.0, b"HTTP/1.1"),
    Leave(1.0, b"\r\n\r\n", is_reset=True),
    Leave(1.0, b"data: ", 1),
    Leave(1.0, b"data: ", 30, is_reset=True),
    Leave(1.0, b'"choices"', 900),
)


def leave(url: str, body: dict[str, Any], how: Leave, at_end: Callable[[], object]) -> None:
    """at_end: called just before the socket is closed."""
    host, port = url.removeprefix("http://").split(":")
    content = json.dumps({**body, "stream": how.stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    data = f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content
    with socket.create_connection((host, int(port)), 10.0) as sock:
        sock.settimeout(30.0)
        sock.sendall(data[: round(len(data) * how.num_sent)])
        seen = b""
        while how.until and (how.until not in seen or len(seen.partition(how.until)[2]) < how.num_more):
            got = sock.recv(256)
            assert got, f"the connection ended before {how.until!r}: {seen!r}"
            seen += got
        at_end()
        if how.is_reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize("how", LEAVES, ids=str)
def test_b3_client_closes_its_socket_anywhere_and_no_block_is_kept(serve: Serve, front: Front, how: Leave) -> None:
    """The lease of 30 s is not waited for. The answer does not end first: its writer stands still."""
    writer = serve.pid_of("decode-0")
    before = front.readings()
    started_s = time.monotonic()
    salt = 3 + LEAVES.index(how)
    prompt = [salt, *(3 + index % 300 for index in range(400))]
    with contextlib.ExitStack() as still:
        body = completion("tiny-llama", prompt, 280)
        leave(front.url, body, how, lambda: still.enter_context(standing_still(writer)))
        wait_until(lambda: not front.cluster().router.num_open_requests, 5.0, "the router to let go of it")
    front.wait_idle(2, timeout_s=20.0)
    assert time.monotonic() - started_s < 20.0
    seen = front.readings().since(before)
    assert seen.total(table.REQUESTS, outcome="failed") == 0
    assert seen.total(table.REQUESTS, outcome="finished") == 0, "it was not cut short: nothing is proven"
    assert seen.total(table.REQUESTS, outcome="aborted") == 1 or not how.until
    assert seen.total(table.MOVES) == 0
    assert len(front.complete("tiny-llama", [5, 6, 7], 5)[0].tokens) == 5


@pytest.mark.parametrize(
    "more",
    [
        {"model": "nobody"},
        {"prompt": []},
        {"prompt": [3] * 3000},
        {"prompt": [10**6]},
        {"max_tokens": 10**7},
        {"temperature": -1},
        {"top_p": 7},
        {"n": -1},
        {"stop": ["a"] * 100},
        {"messages": "not a list"},
        {"messages": [{"role": "user"}]},
    ],
    ids=str,
)
def test_b2_a_bad_request_over_http_reaches_no_worker(front: Front, more: dict[str, Any]) -> None:
    """Also a chat whose template cannot be rendered."""
    before = front.readings()
    body = completion("tiny-llama", [5, 6, 7], 5)
    if "messages" in more:
        response = front.post({"model": "tiny-llama", **more}, "/v1/chat/completions")
    else:
        response = front.post({**body, **more})
    assert 400 <= response.status_code < 500, response.text
    assert "error" in response.json()
    assert front.readings().since(before).total(table.PLACEMENTS) == 0
    assert front.is_idle(2)


# --- B4 ----------------------------------------------------------------------------------------------------------


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


def big_layout() -> KvLayout:
    """64 KiB a token: a prompt is more than the sockets between two processes hold."""
    return KvLayout(num_layers=2, num_kv_heads=32, head_dim=128, dtype="float32", block_size=16)


def die_as_decode() -> None:
    """Runs in a process of its own until it is killed: a decode worker whose data comes through the test's relay."""

    async def run() -> None:
        site = Site("decode-0", Role.DECODE, big_layout(), 20)
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
    code = "from tests.faults.test_class_b_leaks import die_as_decode; die_as_decode()"
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
        site = Site("prefill-0", Role.PREFILL, big_layout(), 20)
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
            assert time.monotonic() - started_s < 10.0
            # Which of its two connections is seen to end first is the kernel's choice.
            (failure,) = site.failures
            assert failure.failure.kind in (FailureKind.WORKER_LOST, FailureKind.TRANSFER_FAILED)
        finally:
            await site.close()


def _spec(prompt: tuple[int, ...]) -> Any:
    from disagg.core.request import SequenceSpec

    return SequenceSpec(sequence_id(0), prompt, SamplingParams(4, temperature=0.0))


# --- B5 ----------------------------------------------------------------------------------------------------------


class Seen:
    """States in which an abort has met a sequence."""

    def __init__(self) -> None:
        self.states: set[object] = set()
        self.by_role: dict[Role, set[SequenceState]] = {role: set() for role in Role}

    def note(self, worker: VirtualWorker, victim: RequestId) -> None:
        mine = [s for s in _sequences(worker).values() if s.sequence_id.request_id == victim]
        for each in mine:
            self.by_role[worker.card.role].add(each.state)
            self.states |= {each.state, *(end.state for end in (each.source, each.destination) if end is not None)}


def _sequences(worker: VirtualWorker) -> dict[Any, Sequence]:
    return worker.scheduler._state.sequences


def abort_everywhere(made: Scene, seen: Seen) -> None:
    """Each worker is told twice in a row what the router will tell it too, and of an id nobody knows."""
    for worker in made.cluster.workers.values():
        for number in (made.victim.number, made.victim.number, 4321):
            for choice in range(2):
                target = SequenceId(RequestId(Incarnation(0), number), choice)
                seen.note(worker, made.victim)
                state = worker.scheduler._state
                is_live = state.live(target) is not None
                before = worker.scheduler.counters.get(table.MESSAGES_IGNORED, "AbortSequence")
                message = AbortSequence(target, 9, "the client has gone")
                worker.handle(events.RouterMessageReceived(message))
                assert state.live(target) is None
                ignored = worker.scheduler.counters.get(table.MESSAGES_IGNORED, "AbortSequence") - before
                assert ignored == (0 if is_live else 1)


def mixed_scene() -> Scene:
    cluster = VirtualCluster(5)
    cluster.start_worker("mixed-0", Role.MIXED, num_blocks=14, answer_headroom=1, chunk_tokens=8)
    cluster.time.run(until=lambda: cluster.is_ready)
    ids = [cluster.submit(request(20, 12, start=start)) for start in (60, 0)]
    return Scene(cluster, ids[1])


def queue_scene() -> Scene:
    """The last one waits until the prefill worker has come to the end of the first."""
    made = scene(5, request(20, start=60), request(20))
    return Scene(made.cluster, list(made.cluster.answers)[-1])


SCENES: dict[str, Callable[[], Scene]] = {
    "hand-off": lambda: scene(5, request(20, num_choices=2), request(9, start=60)),
    "queue": queue_scene,
    "slow link": lambda: scene(5, request(20), request(9, start=60), timing=SLOW_LINK),
    "sync": lambda: scene(5, request(20), request(9, start=60), timing=SLOW_LINK, mode=HandoffMode.SYNC),
    "crowded": lambda: scene(5, request(20, 12), request(20, 12, start=60), decode_blocks=14),
    "mixed": mixed_scene,
    "partial start": lambda: scene(5, request(20), timing=SLOWER_LINK),
}
STRIDES = {"partial start": 1}  # what it has to show is over within an event or two


def test_b5_abort_in_every_state_of_the_tables_is_idempotent_and_the_account_exact() -> None:
    """Every state that the tables name must have been met, or a new one has been forgotten here."""
    seen = Seen()
    for name, make in SCENES.items():
        for moment, made in every_moment(make, STRIDES.get(name, 5)):
            cluster = made.cluster
            if not cluster.answers[made.victim].is_over:
                cluster.abort(made.victim)
            for _ in range(3):
                abort_everywhere(made, seen)
                cluster.time.run_for(0.004 * (moment % 3))
            cluster.time.run(until=lambda now=cluster: now.are_all_over)  # type: ignore[misc]
            cluster.time.run_for(1.0)
            abort_everywhere(made, seen)
            made.check_answers()
            check_account(cluster)
    ended = {SequenceState.ENDED, SourceState.CLOSED}  # forgotten: the aborts after the end
    wanted = {*SequenceState, *SourceState, *DestinationState} - ended
    assert seen.states >= wanted, f"never met: {wanted - seen.states}"
    assert all(SequenceState.CLOSING in states and len(states) >= 4 for states in seen.by_role.values())


def check_account(cluster: VirtualCluster) -> None:
    """Each part that was given out ended once; the pool is whole."""
    counters = cluster.dispatcher.counters
    labels = [label for name, label, _ in counters.items() if name == table.PLACEMENTS.name]
    placed = {label: counters.get(table.PLACEMENTS, label) for label in labels}
    for worker in cluster.workers.values():
        check_clean(worker)
        own = worker.scheduler.counters
        ended = sum(total for name, _, total in own.items() if name == table.SEQUENCES.name)
        is_prefill = worker.card.role is Role.PREFILL
        assert ended == (placed.get("long_prompt", 0) if is_prefill else sum(placed.values()))


def test_b5_a_client_that_leaves_in_every_state_of_its_choices_leaves_nothing() -> None:
    """Also while no worker has it: its decode worker was killed a moment ago."""
    seen: set[ChoiceState] = set()
    two = request(12, 6, num_choices=2)
    for moment, made in every_moment(lambda: scene(6, two), 3):
        cluster = made.cluster
        if moment % 2:
            cluster.kill("decode-0")
            cluster.time.run_for(0.05)
        opened = cluster.dispatcher.open_request(made.victim)
        if opened is not None:
            seen |= {choice.machine.state for choice in opened.choices}
            cluster.abort(made.victim)
        cluster.time.run_for(1.0)
        assert cluster.dispatcher.num_open == 0
        for worker in cluster.workers.values():
            check_clean(worker)
    assert seen >= set(ChoiceState) - CHOICE_TABLE.final | {ChoiceState.FINISHED}


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("num_steps", range(3))
def test_b5_an_abort_that_only_one_end_hears_frees_the_other(role: Role, num_steps: int) -> None:
    pair = duo(budget=StepBudget(chunk_tokens=4, mixed_chunk_tokens=4, max_running=8))
    pair.start(0, (Task.PREFILL, Task.DECODE), tuple(range(12)))
    pair.exchange()
    for _ in range(num_steps):
        pair.step(pair.source)
    end = pair.source if role is Role.PREFILL else pair.destination
    assert pair.destination.state.num_reserved_blocks == 3
    pair.take(end, end.abort(0))
    pair.exchange()
    if pair.source.plan is not None:
        pair.step(pair.source)
    for each in (pair.source, pair.destination):
        check_solo_clean(each)


# --- B7, B8, B10 -------------------------------------------------------------------------------------------------


def test_b7_abort_of_what_memory_pressure_has_put_back_keeps_nothing() -> None:
    """Two streams outgrow the pool; the younger gives its blocks up and is aborted. 50 times; not an object more."""
    before = num_sequences()
    solo = Solo(Role.MIXED, num_blocks=8, answer_headroom=1)
    for number in range(0, 100, 2):
        for each in (number, number + 1):
            solo.start(each, Task.WHOLE, tuple((each + index) % 100 for index in range(8)), max_tokens=20)
        preempted = solo.scheduler.counters.get(table.PREEMPTIONS)
        for _ in range(60):
            if solo.scheduler.counters.get(table.PREEMPTIONS) > preempted:
                break
            solo.finish_step()
        assert solo.scheduler.counters.get(table.PREEMPTIONS) == preempted + 1
        solo.abort(number + 1)
        solo.finish_steps()
        check_solo_clean(solo)
        assert len(solo.tokens(number)) == 20
        solo.reports.clear()
        solo.plans.clear()
    assert num_sequences() <= before


def num_sequences() -> int:
    """Alive in this process."""
    gc.collect()
    return sum(type(each) is Sequence for each in gc.get_objects())


@pytest.mark.parametrize("role", [Role.PREFILL, Role.MIXED])
@pytest.mark.parametrize("chunk", range(3))
@pytest.mark.parametrize("num_layers", range(4))
def test_b8_abort_between_a_chunks_start_and_its_result_returns_every_block(
    role: Role, chunk: int, num_layers: int
) -> None:
    solo = Solo(role, budget=StepBudget(chunk_tokens=4, mixed_chunk_tokens=4, max_running=8))
    solo.meet(Role.DECODE)
    solo.start(0, Task.PREFILL if role is Role.PREFILL else Task.WHOLE, tuple(range(12)))
    pushes: list[PushSpan] = []
    if role is Role.PREFILL:
        pushes += of(PushSpan, solo.hear(solo.answer(0)))
    for _ in range(chunk):
        pushes += of(PushSpan, solo.finish_step())
    for layers in range(1, num_layers + 1):
        pushes += of(PushSpan, solo.layers(layers))
    stops = of(StopPushes, solo.abort(0))
    assert solo.num_used >= 3, "the running step still writes them"
    late = [*(solo.layers(3)), *solo.finish_step()]
    assert of(PushSpan, late) == []
    assert bool(stops) == bool(pushes)
    if stops:
        assert solo.num_used == 3, "the transport still reads them"
        solo.handle(events.WritesStopped(handoff(0)))
    check_solo_clean(solo)


@pytest.mark.parametrize("seed", range(50))
def test_b10_what_the_destination_drops_while_the_source_queues_it_is_never_computed(seed: int) -> None:
    """Only the destination is told by the router; its word to the source is enough."""
    rng = random.Random(seed)
    pair = duo(budget=StepBudget(chunk_tokens=4, mixed_chunk_tokens=4, max_running=8), reserve_ahead=1)
    for number in range(12):
        prompt = tuple((number * 7 + index) % 100 for index in range(12))
        pair.start(number, (Task.PREFILL, Task.DECODE), prompt)
    pair.exchange()
    dropped = set(rng.sample(range(1, 12), 6))
    queued = {n for n in dropped if pair.source.scheduler._state.sequences[handoff(n)].blocks == ()}
    for number in dropped:
        pair.take(pair.destination, pair.destination.abort(number))
    pair.exchange()
    for _ in range(200):
        for end in (pair.source, pair.destination):
            if end.plan is not None:
                pair.step(end)
    computed = {row.sequence_id for plan in pair.source.plans for row in plan.rows}
    assert len(queued) >= 5
    assert not computed & {sequence_id(number) for number in queued}
    assert computed >= {sequence_id(number) for number in set(range(12)) - dropped}
    for end in (pair.source, pair.destination):
        check_solo_clean(end)

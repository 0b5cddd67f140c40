"""Class C: no single event ends an engine, or lets a block be used by two.

| case | what the class means here | where it is shown |
|---|---|---|
| C1 | late, second and unknown words of every kind, in any order, change nothing and count once | scheduler |
| C1 | the same about requests that are over | dispatcher |
| C1 | the same from a peer over a real connection, beside answers that go on | TCP |
| C3 | a hand-off's time is over while its bytes are sent: its blocks wait for the transport | scheduler, TCP |

There is one way for KV to leave or enter a worker, so "both connectors" of C1 are the two ends of a hand-off here; a
tier would be one more end. Kinds are taken from the protocol's unions: one that is added is tried, or a test fails.
"""

import asyncio
import random
from collections.abc import Callable, Iterator
from typing import Any, get_args

import msgspec
import pytest
from tests.unit.dispatch.rigs import Desk, events_of
from tests.unit.scheduler.rigs import (
    PEER,
    PEER_INCARNATION,
    Duo,
    Solo,
    card,
    duo,
    handoff,
    of,
    sequence_id,
    to_peer,
)
from tests.unit.transport.relays import Relay
from tests.unit.transport.rigs import EventLog
from tests.unit.worker.rigs import DEADLINE_S, Site, gone, layout, meet, site, until

from disagg.channel.channel import Channel, dial
from disagg.channel.listening import listen
from disagg.core.endpoints import Endpoint, TransportKind
from disagg.core.errors import Failure, FailureKind
from disagg.core.ids import BlockId, Fence, HandoffId, Incarnation, RequestId, SequenceId, StepId, WorkerId
from disagg.core.request import EmittedToken, SamplingParams, SequenceSpec
from disagg.core.roles import Numerics, Role, Task
from disagg.core.spans import KvLayout, Span
from disagg.dispatch.events import ClientGone
from disagg.kvcache.segments import block_segments, span_segments
from disagg.policy.batching import StepBudget
from disagg.protocol.handoff import GrantKey, decode_grant_key
from disagg.protocol.lifecycle import SequenceState
from disagg.protocol.messages import (
    AbortSequence,
    AnnouncePeers,
    AnswerCluster,
    AnswerDrain,
    AnswerExamination,
    AnswerPairing,
    AnswerRegistration,
    AnswerReservation,
    Beat,
    CancelHandoff,
    DrainWorker,
    EmitTokens,
    FinishPrefill,
    HostLimits,
    OfferReservation,
    PoolCard,
    PromptReport,
    RenewLeases,
    ReportFailure,
    RequestExamination,
    RequestPairing,
    RequestReservation,
    RouterToWorker,
    SequenceReport,
    StartSequence,
    TakeHandoff,
    WorkerCard,
    WorkerToWorker,
)
from disagg.scheduler import events
from disagg.scheduler.actions import Action, PushSpan, RevokeGrant, SendToPeer, StopPushes
from disagg.scheduler.engine import StepResult
from disagg.telemetry import metrics as table
from disagg.testing.engine import expected_tokens, kv_bytes
from disagg.testing.memory import BytesMemory
from disagg.transport.api import TransportEvent, WriteLanded
from disagg.transport.tcp_receiver import TcpReceiver

CANCELLED = Failure(FailureKind.CANCELLED, "scripted")
PROMPT = tuple(range(10))


# --- C1: whatever is about nobody --------------------------------------------------------------------------------

NOBODY = 4321
STRANGE = Fence(Incarnation(1), Incarnation(2), 9)


def peer_messages(number: int, fence: Fence) -> dict[type, Any]:
    """One of each kind that a peer can send, about one hand-off."""
    which = handoff(number)
    own = card(PEER, PEER_INCARNATION, Role.DECODE)
    return {
        RequestPairing: RequestPairing(own),
        AnswerPairing: AnswerPairing(own),
        RequestReservation: RequestReservation(which, fence, 10, 9.0),
        AnswerReservation: AnswerReservation(which, fence, CANCELLED),
        OfferReservation: OfferReservation(which, fence),
        FinishPrefill: FinishPrefill(which, fence, EmittedToken(sequence_id(number), 0, 7)),
        TakeHandoff: TakeHandoff(which, fence),
        CancelHandoff: CancelHandoff(which, fence, CANCELLED),
        RenewLeases: RenewLeases((which,), 9.0),
        RequestExamination: RequestExamination(),
        AnswerExamination: AnswerExamination(own, "1", HostLimits(-1, -1, 0, 1), 0.0, False, ()),
        Beat: Beat(1, 2.5),
    }


def router_messages(number: int) -> dict[type, Any]:
    """StartSequence and DrainWorker are about somebody: the first repeats what is known, the second is no event."""
    return {
        AnswerRegistration: AnswerRegistration(Incarnation(5)),
        AnswerDrain: AnswerDrain(),
        AnswerCluster: AnswerCluster("1", ()),
        AnnouncePeers: AnnouncePeers(()),
        AbortSequence: AbortSequence(sequence_id(number), 1, "scripted"),
        Beat: Beat(1, 2.5),
    }


def local_events(number: int) -> dict[type, events.Event]:
    """What the engine and the transport can say."""
    which, step = handoff(number), StepId(number)
    return {
        events.LayersComputed: events.LayersComputed(step, 1),
        events.StepFinished: events.StepFinished(StepResult(step, ()), 0.1),
        events.StepsFinished: events.StepsFinished(step, (0.1, 0.1)),
        events.StepFailed: events.StepFailed(step, CANCELLED),
        events.GrammarPrepared: events.GrammarPrepared(which),
        events.WriteFinished: events.WriteFinished(which, 0, None),
        events.WriteLanded: events.WriteLanded(which, Span(0, 10, 0, 3), None),
        events.GrantFenced: events.GrantFenced(which),
        events.WritesStopped: events.WritesStopped(which),
        events.PeerLost: events.PeerLost(PEER, Incarnation(78), "an earlier incarnation"),
    }


def test_c1_every_kind_of_event_is_tried() -> None:
    """What is left out is no news about a sequence."""
    left_out = {events.RouterLost, events.DrainRequested, events.PeerPaired, events.ClockTicked}
    wrappers = {events.RouterMessageReceived, events.PeerMessageReceived}
    assert set(local_events(0)) == set(get_args(events.Event)) - left_out - wrappers
    assert set(peer_messages(0, STRANGE)) == set(get_args(WorkerToWorker))
    assert set(router_messages(0)) == set(get_args(RouterToWorker)) - {StartSequence, DrainWorker}


def about_nobody() -> Iterator[events.Event]:
    yield from local_events(NOBODY).values()
    for message in router_messages(NOBODY).values():
        yield events.RouterMessageReceived(message)
    for peer in (PEER, WorkerId("stranger")):
        for message in peer_messages(NOBODY, STRANGE).values():
            yield events.PeerMessageReceived(peer, message)
    # The right peer and the right hand-off, but another attempt or another life of one of them.
    for message in peer_messages(0, STRANGE).values():
        if hasattr(message, "handoff_id"):
            yield events.PeerMessageReceived(PEER, message)


def source() -> Solo:
    solo = Solo(Role.PREFILL, budget=StepBudget(chunk_tokens=6, mixed_chunk_tokens=6, max_running=8))
    solo.meet(Role.DECODE)
    solo.start(0, Task.PREFILL, PROMPT)
    return solo


def destination() -> Solo:
    solo = Solo(Role.DECODE)
    solo.meet(Role.PREFILL)
    solo.start(0, Task.DECODE, PROMPT)
    return solo


SOURCE_TURNS: tuple[Callable[[Solo], object], ...] = (
    lambda solo: solo.hear(solo.answer(0)),
    lambda solo: solo.layers(1),
    lambda solo: solo.finish_step(),
    lambda solo: solo.finish_step(),
    lambda solo: solo.handle(events.WriteFinished(handoff(0), 0, None)),
    lambda solo: solo.abort(0),
    lambda solo: solo.handle(events.WritesStopped(handoff(0))),
)
DESTINATION_TURNS: tuple[Callable[[Solo], object], ...] = (
    lambda solo: solo.hear(RequestReservation(handoff(0), solo.fence(), 10, 9.0)),
    lambda solo: solo.handle(events.WriteLanded(handoff(0), Span(0, 10, 0, 3), None)),
    lambda solo: solo.hear(FinishPrefill(handoff(0), solo.fence(), EmittedToken(sequence_id(0), 0, 7))),
    lambda solo: solo.handle(events.GrantFenced(handoff(0))),
    lambda solo: solo.finish_step(),
    lambda solo: solo.abort(0),
    lambda solo: solo.finish_step(),
)


def fingerprint(solo: Solo) -> object:
    """All that an event without effect must leave as it was."""
    parts = []
    for attempt_id, sequence in solo.scheduler._state.sequences.items():
        here, there = sequence.source, sequence.destination
        sending = (here.state, here.num_outstanding, here.is_taken) if here is not None else None
        receiving = (there.state, there.complete_until()) if there is not None else None
        if there is not None and sequence.is_live:  # of what is dropped nothing more may be learnt
            receiving = (*(receiving or ()), there.is_prefill_finished)
        parts.append((attempt_id, sequence.state, sequence.blocks, tuple(sequence.answer_ids), sending, receiving))
    return (msgspec.structs.replace(solo.state, counters=()), tuple(parts), solo.plan)


def num_counted(solo: Solo) -> float:
    """Events that were turned away, whatever the kind."""
    turned_away = {table.MESSAGES_IGNORED.name, table.RESERVATIONS_REFUSED.name}
    return sum(total for name, _, total in solo.scheduler.counters.items() if name in turned_away)


@pytest.mark.parametrize(("begin", "turns"), [(source, SOURCE_TURNS), (destination, DESTINATION_TURNS)])
def test_c1_events_about_nobody_change_nothing_at_any_stage_and_count_once(
    begin: Callable[[], Solo], turns: tuple[Callable[[Solo], object], ...]
) -> None:
    for stage in range(len(turns) + 1):
        solo = begin()
        for turn in turns[:stage]:
            turn(solo)
        for event in about_nobody():
            before, counted = fingerprint(solo), num_counted(solo)
            actions = solo.handle(event)
            assert fingerprint(solo) == before, event
            is_renewal = isinstance(getattr(event, "message", None), RenewLeases)  # of what has just ended: no news
            assert num_counted(solo) - counted == (0 if is_renewal else 1), event
            # A peer that asks is told; nobody else hears anything.
            assert all(isinstance(action, SendToPeer) for action in actions), event
        for turn in turns[stage:]:
            turn(solo)
        assert (solo.num_used, solo.scheduler.is_idle) == (0, True)


# --- C1: everything late and twice, in any order -----------------------------------------------------------------


class Recorder(Duo):
    """Both ends of a hand-off; what each was told is kept, and what is still to be told can be told in any order."""

    def __init__(self, rng: random.Random) -> None:
        budget = StepBudget(chunk_tokens=6, mixed_chunk_tokens=6, max_running=8)
        made = duo(budget=budget)
        self.rng = rng
        self.pending: list[tuple[Solo, events.Event]] = []
        self.told: list[tuple[Solo, events.Event]] = []
        super().__init__(made.source, made.destination)

    def other(self, owner: Solo) -> Solo:
        return self.destination if owner is self.source else self.source

    def take(self, owner: Solo, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case SendToPeer():
                    event = events.PeerMessageReceived(owner.config.worker_id, action.message)
                    self.pending.append((self.other(owner), event))
                case PushSpan():
                    landed = events.WriteLanded(action.handoff_id, action.span, None)
                    self.pending.append((self.other(owner), landed))
                    self.pending.append((owner, events.WriteFinished(action.handoff_id, action.number, None)))
                case RevokeGrant():
                    fenced = events.GrantFenced(decode_grant_key(action.grant_key).handoff_id)
                    self.pending.append((owner, fenced))
                case StopPushes():
                    stopped = events.WritesStopped(decode_grant_key(action.grant_key).handoff_id)
                    self.pending.append((owner, stopped))
                case _:
                    pass

    def tell(self, owner: Solo, event: events.Event) -> None:
        self.told.append((owner, event))
        self.take(owner, owner.handle(event))

    def turn(self) -> bool:
        """The next in order, or a step ends. False when nothing is left."""
        running = [end for end in (self.source, self.destination) if end.plan is not None]
        if self.pending and (not running or self.rng.random() < 0.7):
            self.tell(*self.pending.pop(0))
        elif running:
            end = self.rng.choice(running)
            step = end.plan
            assert step is not None
            self.take(end, end.finish_step())
            self.told.append((end, events.StepFinished(StepResult(step.step_id, ()), 0.1)))
        return bool(self.pending) or self.source.plan is not None or self.destination.plan is not None

    def settle(self) -> None:
        for _ in range(1000):
            if not self.turn():
                return
        raise AssertionError("1000 turns and still not done")

    def check_clean(self) -> None:
        for end in (self.source, self.destination):
            assert (end.num_used, end.scheduler.is_idle) == (0, True), end.state


def start(world: Recorder, number: int) -> None:
    prompt = tuple((number + index) % 100 for index in range(10))
    world.start(number, (Task.PREFILL, Task.DECODE), prompt)


def whole_story() -> tuple[list[events.Event], list[events.Event]]:
    """All that source and destination are ever told of one sequence."""
    world = Recorder(random.Random(0))
    start(world, 0)
    world.settle()
    world.check_clean()
    return tuple([e for owner, e in world.told if owner is end] for end in (world.source, world.destination))  # type: ignore[return-value]


@pytest.mark.parametrize("seed", range(150))
def test_c1_after_an_abort_everything_late_twice_and_in_any_order_is_ignored(seed: int) -> None:
    """The whole story of the sequence, also what had not happened yet, comes twice more; what is turned away counts.

    Steps are the worker's own: only the ends of those that are over come again.
    """
    rng = random.Random(seed)
    world = Recorder(rng)
    start(world, 0)
    start(world, 1)  # somebody who stays
    for _ in range(rng.randrange(40)):
        world.turn()
    for end in rng.choice([(world.source,), (world.destination,), (world.source, world.destination)]):
        world.take(end, end.abort(0))
    for owner, event in [each for each in world.pending if _is_about(each[1], 0)]:
        world.pending.remove((owner, event))
        world.pending.append((owner, event))
        world.pending.append((owner, event))
    past = [each for each in world.told if isinstance(each[1], events.StepFinished)]
    for end in (world.source, world.destination):
        if end.scheduler._state.live(sequence_id(0)) is not None:  # only the other end was told: let it hear
            world.tell(end, events.PeerMessageReceived(world.other(end).config.worker_id, _cancel(end)))
    late = [*past, *past, *_late(world)]
    rng.shuffle(late)
    mine = [each for each in world.pending if _is_about(each[1], 0)]
    world.pending = [each for each in world.pending if not _is_about(each[1], 0)]
    late += mine
    rng.shuffle(late)
    for owner, event in late:
        before, counted = fingerprint(owner), num_counted(owner)
        world.take(owner, owner.handle(event))
        if fingerprint(owner) == before and not isinstance(getattr(event, "message", None), RenewLeases):
            assert num_counted(owner) - counted == 1, event
        if rng.random() < 0.3:
            world.turn()
    world.settle()
    world.check_clean()
    assert [token.position for token in world.destination.tokens(1)] == [0, 1, 2]
    start(world, 2)
    world.settle()
    world.check_clean()
    assert [token.position for token in world.destination.tokens(2)] == [0, 1, 2]


def _cancel(end: Solo) -> CancelHandoff:
    sequence = end.scheduler._state.live(sequence_id(0))
    assert sequence is not None
    one = sequence.source or sequence.destination
    assert one is not None
    return CancelHandoff(one.handoff_id, one.fence, CANCELLED)


def _late(world: Recorder) -> list[tuple[Solo, events.Event]]:
    at_source, at_destination = whole_story()
    told = [(world.source, event) for event in at_source] + [(world.destination, event) for event in at_destination]
    return 2 * [each for each in told if not isinstance(each[1], events.StepFinished)]


def _is_about(event: events.Event, number: int) -> bool:
    which = getattr(getattr(event, "message", event), "handoff_id", None)
    return which == handoff(number)


# --- C1: at the router -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["finished", "client gone", "failed"])
@pytest.mark.parametrize("seed", range(20))
def test_c1_words_about_a_request_that_is_over_reach_no_client_and_no_other_request(end: str, seed: int) -> None:
    rng = random.Random(seed)
    desk = Desk().with_pair()
    over, _ = desk.submit(max_tokens=3)
    other, _ = desk.submit(max_tokens=3)
    desk.read("p0", over)
    desk.emit("p0", over, 0)
    if end == "finished":
        desk.emit("d0", over, 1)
        desk.emit("d0", over, 2)
    elif end == "client gone":
        desk.handle(ClientGone(over))
    else:
        desk.hear("d0", ReportFailure(SequenceId(over, 0), 1, Failure(FailureKind.INVALID_REQUEST, "scripted")))
    assert desk.dispatcher.open_request(over) is None
    claims = desk.claims()
    late = list(_words(over)) + list(_words(RequestId(Incarnation(404), 1)))
    late += [each for choice in (7, -1) for each in _words(other, choice)]
    late *= 2
    rng.shuffle(late)
    for name, message in late:
        incarnation = rng.choice([1, 1, 2])
        before = _ignored(desk)
        assert events_of(desk.hear(name, message, incarnation)) == []
        is_counted = isinstance(message, ReportFailure) or bool(message.tokens) or incarnation == 2
        assert _ignored(desk) - before == is_counted
    assert desk.claims() == claims
    assert [len(events_of(desk.emit("d0", other, position))) for position in range(3)] == [1, 1, 1]
    assert desk.dispatcher.num_open == 0


def _words(request_id: RequestId, choice: int = 0) -> Iterator[tuple[str, EmitTokens | ReportFailure]]:
    """Everything that both workers can say of one choice."""
    which = SequenceId(request_id, choice)
    for name, task in (("p0", Task.PREFILL), ("d0", Task.DECODE)):
        for position in range(3):
            yield name, EmitTokens((EmittedToken(which, position, 9),))
        yield name, EmitTokens((), (PromptReport(HandoffId(which, 1), 0, 10),))
        yield name, EmitTokens((), (), (SequenceReport(which, task),))
        for kind in FailureKind:
            yield name, ReportFailure(which, 1, Failure(kind, "scripted"))


def _ignored(desk: Desk) -> float:
    counters = desk.dispatcher.counters
    return sum(total for name, _, total in counters.items() if name == table.MESSAGES_IGNORED.name)


# --- C1: over real connections -----------------------------------------------------------------------------------

_PEERS: msgspec.msgpack.Decoder[WorkerToWorker] = msgspec.msgpack.Decoder(WorkerToWorker)


@pytest.mark.parametrize("last", ["a raw payload", "the end"])
async def test_c1_a_peer_that_says_everything_wrong_disturbs_no_answer_of_others(last: str) -> None:
    """Well paired, it names nobody and other workers' hand-offs; at last it sends bytes that are no message."""
    sampling = SamplingParams(max_tokens=30, temperature=0.0)
    async with site("p", Role.PREFILL) as prefill, site("d", Role.DECODE) as decode:
        await meet(prefill, decode)
        channels = [await _pair_by_hand(target) for target in (prefill, decode)]
        prompts = {number: tuple((31 * number + index) % 900 for index in range(40)) for number in range(4)}
        for number, prompt in prompts.items():
            decode.start(number, Task.DECODE, prefill, prompt, sampling)
            prefill.start(number, Task.PREFILL, decode, prompt, sampling)
        real = Fence(prefill.peers.card.incarnation, decode.peers.card.incarnation, 1)
        for channel in channels:
            for number in (*prompts, NOBODY):
                for fence in (real, STRANGE):
                    for message in peer_messages(number, fence).values():
                        channel.send(message)
        if last == "a raw payload":
            for channel in channels:
                channel.send({"not": "a message"})
                await gone(channel)
        await decode.until(lambda: all(decode.reports(number) for number in prompts) or bool(decode.failures))
        assert decode.failures == prefill.failures == []
        for number, prompt in prompts.items():
            tokens = [token.token_id for token in decode.tokens(number)]
            assert tokens == expected_tokens(layout(), sequence_id(number), prompt, sampling)
        for channel in channels:
            await channel.close()
        for each in (prefill, decode):
            await each.settled()
            ignored = {
                label for name, label, _ in each.worker.scheduler.counters.items() if name.endswith("ignored_total")
            }
            assert {"TakeHandoff", "CancelHandoff", "FinishPrefill", "AnswerReservation"} <= ignored


async def _pair_by_hand(target: Site) -> Channel[WorkerToWorker]:
    channel = await dial(target.peers.card.control_address, _PEERS, timeout_s=DEADLINE_S)
    mine = msgspec.structs.replace(target.peers.card, worker_id=WorkerId("by-hand"), incarnation=Incarnation(9))
    channel.send(RequestPairing(mine))
    answer = await channel.receive(DEADLINE_S)
    assert isinstance(answer, AnswerPairing)
    assert answer.failure is None
    return channel


# --- C3 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("why", ["lease", "abort", "peer lost", "cancelled by the peer", "push failed twice"])
@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_c3_blocks_that_are_being_sent_are_given_to_nobody_before_the_transport_has_stopped(
    why: str, num_steps: int
) -> None:
    """A second sequence needs all blocks there are: it gets them with the transport's word, and not a moment before."""
    budget = StepBudget(chunk_tokens=6, mixed_chunk_tokens=6, max_running=8)
    solo = Solo(Role.PREFILL, num_blocks=3, budget=budget, lease_s=9.0)
    solo.meet(Role.DECODE)
    solo.start(0, Task.PREFILL, PROMPT)
    solo.hear(solo.answer(0))
    pushes = of(PushSpan, solo.layers(1))
    for _ in range(num_steps):
        pushes += of(PushSpan, solo.finish_step())
    assert pushes
    stops = of(StopPushes, _end(solo, why))
    assert len(stops) == 1
    if solo.plan is not None:
        assert of(PushSpan, solo.finish_step()) == []
    if why == "peer lost":
        solo.meet(Role.DECODE)
    solo.start(1, Task.PREFILL, tuple(range(50, 60)))
    for number in range(len(pushes) - 1):  # late words about the writes are not the transport's last
        solo.handle(events.WriteFinished(handoff(0), number, None if number % 2 else "shut"))
        assert solo.scheduler._state.sequences[handoff(1)].blocks == ()
    assert to_peer(RequestReservation, solo.wait(0.1)) == []
    asked = to_peer(RequestReservation, solo.handle(events.WritesStopped(handoff(0))))
    assert [request.handoff_id for request in asked] == [handoff(1)]
    assert solo.scheduler._state.sequences[handoff(1)].blocks != ()


def _end(solo: Solo, why: str) -> list[Action]:
    match why:
        case "lease":
            return solo.wait(9.1)
        case "abort":
            return solo.abort(0)
        case "peer lost":
            return solo.handle(events.PeerLost(PEER, PEER_INCARNATION, "killed"))
        case "cancelled by the peer":
            return solo.hear(CancelHandoff(handoff(0), solo.fence(), CANCELLED))
        case _:
            solo.handle(events.WriteFinished(handoff(0), 0, "checksum"))
            return solo.handle(events.WriteFinished(handoff(0), 0, "checksum"))


KV = KvLayout(num_layers=2, num_kv_heads=32, head_dim=128, dtype="float32", block_size=16)  # 64 KiB a token
NUM_BLOCKS = 40


class SilentDecode:
    """A decode worker by hand: it pairs, beats and grants, takes bytes for real, and never speaks of its leases."""

    def __init__(self) -> None:
        self.memory = BytesMemory(KV.arena_bytes(NUM_BLOCKS))
        self.landed = EventLog()
        self.landed.on_event = self._on_transport
        self.incarnation = Incarnation(77)
        self.receiver = TcpReceiver(self.memory, self.incarnation, self.landed.post)
        self.relay = Relay(self.receiver.endpoint.address)
        self.channel: Channel[WorkerToWorker] | None = None
        self.finished: list[FinishPrefill] = []
        self.grants: dict[HandoffId, tuple[BlockId, ...]] = {}
        self._num_bytes: dict[bytes, int] = {}
        self._lost = asyncio.Event()

    async def open(self) -> WorkerCard:
        self._server = await listen("127.0.0.1", 0, _PEERS, self._welcome)
        self.card = WorkerCard(
            worker_id=WorkerId("decode-0"),
            incarnation=self.incarnation,
            role=Role.DECODE,
            pool=PoolCard("fake", "weights", "tok", Numerics.EXACT, 1000, max_context=256),
            layout=KV,
            num_blocks=NUM_BLOCKS,
            control_address=self._server.address,
            data_endpoints=(Endpoint(TransportKind.TCP, self.relay.address),),
        )
        return self.card

    async def close(self) -> None:
        self._server.close()
        if self.channel is not None:
            await self.channel.close()
        await asyncio.to_thread(self.receiver.close)
        await asyncio.to_thread(self.relay.close)

    def num_landed(self, number: int) -> int:
        """Bytes verified for one hand-off."""
        return sum(n for key, n in dict(self._num_bytes).items() if decode_grant_key(key).handoff_id == handoff(number))

    async def _welcome(self, channel: Channel[WorkerToWorker]) -> None:
        request = await channel.receive(DEADLINE_S)
        assert isinstance(request, RequestPairing)
        self._peer = request.card.worker_id
        token = self.receiver.endpoint_for(request.card.worker_id, request.card.incarnation).token
        endpoint = Endpoint(TransportKind.TCP, self.relay.address, token)
        channel.send(AnswerPairing(msgspec.structs.replace(self.card, data_endpoints=(endpoint,))))
        self.channel = channel
        channel.start(beat_interval_s=0.2, on_message=self._on_message, on_lost=lambda reason: self._lost.set())

    def _on_message(self, message: WorkerToWorker) -> None:
        if isinstance(message, RequestReservation) and message.handoff_id not in self.grants:
            first = 18 * len(self.grants)
            blocks = tuple(BlockId(block) for block in range(first, first - (-message.num_tokens // KV.block_size)))
            self.grants[message.handoff_id] = blocks
            key = GrantKey(message.handoff_id, message.fence).encode()
            self.receiver.grant(self._peer, key, block_segments(KV, NUM_BLOCKS, blocks))
            assert self.channel is not None
            answer = AnswerReservation(message.handoff_id, message.fence, None, 0.0, blocks, 0, 30.0, key, NUM_BLOCKS)
            self.channel.send(answer)
        elif isinstance(message, FinishPrefill):
            self.finished.append(message)

    def _on_transport(self, event: TransportEvent) -> None:
        if isinstance(event, WriteLanded) and event.failure is None:
            self._num_bytes[event.key] = self._num_bytes.get(event.key, 0) + event.num_bytes


async def test_c3_the_lease_ends_inside_a_frame_on_tcp_and_its_blocks_wait_for_the_transport() -> None:
    """The peer is alive and silent, the bytes are stuck on the way. What lands is the old prompt's, or nothing."""
    old, new = (tuple((start + index) % 900 for index in range(250)) for start in (0, 450))
    decode = SilentDecode()
    prefill = Site("prefill-0", Role.PREFILL, KV, 20)  # 16 blocks a prompt: two do not fit
    prefill.config = msgspec.structs.replace(prefill.config, lease_s=1.0)
    await prefill.open()
    try:
        prefill.peers.announce((await decode.open(),))
        await prefill.until(lambda: None in prefill.pairings)
        order = watch(prefill)
        decode.relay.hold_ahead(1 << 20)
        begin(prefill, 0, old)
        await prefill.until(lambda: bool(prefill.failures))
        assert [each.failure.kind for each in prefill.failures] == [FailureKind.LEASE_EXPIRED]
        sequences = prefill.worker.scheduler._state.sequences
        assert sequences[handoff(0)].state is SequenceState.CLOSING, "nothing was being sent: nothing is proven"
        held = set(sequences[handoff(0)].blocks)
        begin(prefill, 1, new)
        assert sequences[handoff(1)].blocks == ()
        await until(lambda: handoff(1) not in sequences or sequences[handoff(1)].blocks != ())
        assert order[0] == "stopped", "the new prompt had its blocks before the transport had stopped"
        assert held & set(sequences[handoff(1)].blocks)
        decode.relay.release()
        total = KV.span_bytes(Span(0, 250, 0, 2))
        await until(lambda: decode.num_landed(1) == total and bool(decode.finished))
        check_contents(decode, 1, new, may_be_missing=False)
        check_contents(decode, 0, old, may_be_missing=True)
        assert decode.channel is not None
        decode.channel.send(TakeHandoff(handoff(1), decode.finished[-1].fence))
        await prefill.settled()
    finally:
        await prefill.close()
        await decode.close()


def begin(prefill: Site, number: int, prompt: tuple[int, ...]) -> None:
    spec = SequenceSpec(sequence_id(number), prompt, SamplingParams(3, temperature=0.0))
    message = StartSequence(spec, Task.PREFILL, 1, (), WorkerId("decode-0"), Incarnation(77))
    prefill.worker.handle(events.RouterMessageReceived(message))


def watch(prefill: Site) -> list[str]:
    """In which order the transport stopped and the second prompt got its blocks."""
    order: list[str] = []
    original = prefill.worker.handle

    def spy(event: events.Event) -> None:
        if isinstance(event, events.WritesStopped):
            order.append("stopped")
        original(event)
        second = prefill.worker.scheduler._state.sequences.get(handoff(1))
        if second is not None and second.blocks and "given" not in order:
            order.append("given")

    prefill.worker.handle = spy  # type: ignore[method-assign]
    return order


def check_contents(decode: SilentDecode, number: int, prompt: tuple[int, ...], *, may_be_missing: bool) -> None:
    """Every token's KV under this grant is that prompt's, bit for bit; or untouched, where that is allowed."""
    blocks = decode.grants[handoff(number)]
    for layer in range(KV.num_layers):
        for position, token in enumerate(prompt):
            span = Span(position, position + 1, layer, layer + 1)
            found = decode.memory.read(span_segments(KV, NUM_BLOCKS, blocks, span))
            wanted = b"".join(kv_bytes(KV, token, position, layer, kv) for kv in (0, 1))
            for start in range(0, len(found), KV.token_bytes):
                part = found[start : start + KV.token_bytes]
                is_untouched = may_be_missing and not any(part)
                # A frame that was cut ends inside a token: what is there of it is still the old one's.
                is_cut = may_be_missing and all(
                    a in (0, b) for a, b in zip(part[::512], wanted[start::512], strict=False)
                )
                assert part == wanted[start : start + KV.token_bytes] or is_untouched or is_cut, (number, position)

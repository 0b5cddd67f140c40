"""Class C: no single event ends an engine, or lets a block be used by two.

| case | what the class means here | where it is shown |
|---|---|---|
| C1 | late, second and unknown words of every kind, in any order, change nothing and count once | scheduler |
| C1 | the same about requests that are over | dispatcher |
| C1 | the same from a peer over a real connection, beside answers that go on | TCP |
| C3 | a hand-off's time is over while its bytes are sent: its blocks wait for the transport | scheduler, TCP |

There is one way for KV to leave or enter a worker, so "both connectors" of C1 are the two ends of a hand-off here; a
tier would be one more end. Kinds are taken from the protocol's unions: one that is added is tried, or a test fails.
C1 beyond one scheduler: test_class_c_strange_words.py. C3: test_class_c_blocks_in_flight.py.
"""

import random
from collections.abc import Callable, Iterator
from typing import get_args

import msgspec
import pytest
from tests.faults.words import (
    CANCELLED,
    NOBODY,
    PROMPT,
    STRANGE,
    local_events,
    peer_messages,
    router_messages,
)
from tests.unit.scheduler.rigs import (
    PEER,
    Duo,
    Solo,
    duo,
    handoff,
    sequence_id,
)

from disagg.core.ids import WorkerId
from disagg.core.request import EmittedToken
from disagg.core.roles import Role, Task
from disagg.core.spans import Span
from disagg.policy.batching import StepBudget
from disagg.protocol.handoff import decode_grant_key
from disagg.protocol.messages import (
    CancelHandoff,
    DrainWorker,
    FinishPrefill,
    RenewLeases,
    RequestReservation,
    RouterToWorker,
    StartSequence,
    WorkerToWorker,
)
from disagg.scheduler import events
from disagg.scheduler.actions import Action, PushSpan, RevokeGrant, SendToPeer, StopPushes
from disagg.scheduler.engine import StepResult
from disagg.telemetry import metrics as table


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
    lambda solo: solo.hear(RequestReservation(handoff(0), solo.fence(), 10)),
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

"""Class B: aborts in every state (B5), under memory pressure (B7), inside a step (B8), of what is queued (B10)."""

import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
from tests.faults.leaks import (
    SLOW_LINK,
    SLOWER_LINK,
    Scene,
    check_clean,
    check_solo_clean,
    every_moment,
    request,
    scene,
)
from tests.unit.scheduler.rigs import Solo, duo, handoff, of
from tests.unit.worker.rigs import sequence_id

from disagg.core.ids import Incarnation, RequestId, SequenceId
from disagg.core.roles import HandoffMode, Role, Task
from disagg.policy.batching import StepBudget
from disagg.protocol.handoff import DestinationState, SourceState
from disagg.protocol.lifecycle import CHOICE_TABLE, ChoiceState, SequenceState
from disagg.protocol.messages import AbortSequence
from disagg.scheduler import events
from disagg.scheduler.actions import PushSpan, StopPushes
from disagg.scheduler.sequence import Sequence
from disagg.telemetry import metrics as table
from disagg.testing.virtual import VirtualCluster
from disagg.testing.virtual_worker import VirtualWorker

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

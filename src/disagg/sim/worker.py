"""One worker in virtual time: the real scheduler over a step-time model and shared links."""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from disagg.bench.workload import ANSWER_LABEL
from disagg.core.ids import HandoffId, WorkerId
from disagg.core.request import EmittedToken
from disagg.core.roles import HandoffMode
from disagg.core.spans import Span
from disagg.protocol.cards import WorkerCard
from disagg.protocol.handoff import decode_grant_key
from disagg.protocol.messages import RouterToWorker, WorkerToRouter, WorkerToWorker
from disagg.scheduler import events
from disagg.scheduler.actions import (
    Action,
    OpenGrant,
    PrepareGrammar,
    PushSpan,
    RevokeGrant,
    RunStep,
    SendToPeer,
    SendToRouter,
    StopPushes,
)
from disagg.scheduler.config import SchedulerConfig
from disagg.scheduler.engine import StepPlan, StepResult
from disagg.scheduler.scheduler import Scheduler
from disagg.sim.events import EventHeap
from disagg.sim.hardware.step_model import StepModel, StepShape
from disagg.sim.links import Links, Route, Write
from disagg.sim.machine import Machine, Mark
from disagg.sim.scenario import Fidelity, WorkerSlows

FENCE_S = 1e-5  # from a revoked grant to the transport's word that nothing can land


class Surroundings(Protocol):
    """What a worker's actions go to."""

    heap: EventHeap
    links: Links

    def to_router(self, worker: "SimWorker", message: WorkerToRouter) -> None: ...

    def to_peer(self, worker: "SimWorker", peer: "SimWorker", message: WorkerToWorker) -> None: ...

    def route(self, source: "SimWorker", target: "SimWorker") -> Route: ...

    def note_ends(self, worker: "SimWorker", ends_s: Sequence[float]) -> None:
        """Steps are over, one after the other; the scheduler is about to hear of it."""

    def note_step(self, worker: "SimWorker", plan: StepPlan) -> None:
        """A step that reads prompts begins."""


class Stretch:
    """Steps that run one after the other with the same rows, as far as anybody knows now."""

    __slots__ = ("durations_s", "ends_s", "plan")

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan  # of the first
        self.durations_s: list[float] = []
        self.ends_s: list[float] = []

    def cut(self, num_steps: int) -> None:
        del self.durations_s[num_steps:], self.ends_s[num_steps:]


class SimWorker:
    """One incarnation.

    At large fidelity steps between which nothing is decided are one event: whatever else comes first is told of those
    that are over, and what is left of them begins anew. The scheduler says how many there may be.
    """

    def __init__(
        self,
        around: Surroundings,
        card: WorkerCard,
        config: SchedulerConfig,
        steps: StepModel,
        fidelity: Fidelity,
        max_alike: int,
        machine: Machine | None = None,
    ) -> None:
        """max_alike: most steps of one event. machine: that it shares with others, which slow its steps down."""
        self._around = around
        self._heap = around.heap
        self._steps = steps
        self._is_small = fidelity is Fidelity.SMALL
        self.card = card
        self.scheduler = Scheduler(config)
        self.is_alive = True
        self.peers: dict[WorkerId, SimWorker] = {}
        self.grants: dict[bytes, WorkerId] = {}
        self.busy_s = 0.0
        self.num_steps = 0
        self.num_pushes = 0
        self._wake_s = float("inf")
        self._step_began_s = 0.0
        self._is_finishing = False  # actions now come of a step's end
        self._acts_s = 0.0  # when the actions that are performed are due: now, or when a step of a stretch ended
        self._stretch: Stretch | None = None
        self._machine = machine
        self._slowed: WorkerSlows | None = None
        self._max_alike = 1 if machine is not None else max_alike
        self._perform: dict[type, Callable[..., None]] = {
            SendToRouter: self._send_to_router,
            SendToPeer: self._send_to_peer,
            RunStep: self._run,
            PrepareGrammar: self._prepare_grammar,
            OpenGrant: self._open_grant,
            RevokeGrant: self._revoke,
            PushSpan: self._push,
            StopPushes: self._stop_pushes,
        }

    @property
    def worker_id(self) -> WorkerId:
        return self.card.worker_id

    def handle(self, event: events.Event) -> None:
        if self.is_alive:
            self.catch_up()
            self._handle(event, self._heap.now_s)

    def _handle(self, event: events.Event, now_s: float) -> None:
        perform = self._perform
        self._acts_s = now_s
        actions: list[Action] = self.scheduler.handle(event, now_s)
        for action in actions:
            perform[type(action)](action)
        if self._is_small:
            self.scheduler.check_invariants()
        wake_s = self.scheduler.next_wake_s()
        if wake_s < self._wake_s or self._wake_s <= now_s:
            self._wake_s = wake_s
            if wake_s < float("inf"):
                self._heap.at(max(wake_s, now_s + 1e-6), self._wake, wake_s)
        if self._stretch is not None:
            self._shorten(self._stretch)

    def stop(self) -> None:
        """It is dead: whatever it did is not done any more."""
        self.is_alive = False
        if self._machine is not None:
            self._machine.stop(self.worker_id)

    def hear_router(self, message: RouterToWorker) -> None:
        self.handle(events.RouterMessageReceived(message))

    def hear_peer(self, peer: "SimWorker", message: WorkerToWorker) -> None:
        """Dropped when the connection it was sent on has ended."""
        if self.peers.get(peer.worker_id) is peer:
            self.handle(events.PeerMessageReceived(peer.worker_id, message))

    def _wake(self, wake_s: float) -> None:
        if self._wake_s == wake_s:
            self._wake_s = float("inf")
            self.handle(events.ClockTicked())

    def _send_to_router(self, action: SendToRouter) -> None:
        self._around.to_router(self, action.message)

    def _send_to_peer(self, action: SendToPeer) -> None:
        peer = self.peers.get(action.peer)
        if peer is not None:
            self._around.to_peer(self, peer, action.message)

    def _prepare_grammar(self, action: PrepareGrammar) -> None:
        """Beside the steps, in no time: answers here have no text."""
        self._heap.at(self._heap.now_s, self.handle, events.GrammarPrepared(action.attempt_id))

    # --- steps -------------------------------------------------------------------------------------------------

    def _run(self, action: RunStep) -> None:
        plan = action.plan
        self._step_began_s = now_s = self._acts_s
        num_alike = 1 if self._is_small else self.scheduler.num_alike(self._max_alike)
        if num_alike > 1:
            self._begin_stretch(plan, num_alike)
            return
        shape = shape_of(plan)
        if shape.prefill:
            self._around.note_step(self, plan)
        duration_s = self._step_s(shape)
        if plan.layers is not None:
            duration_s *= (plan.layers.stop - plan.layers.start) / self.card.layout.num_layers
        marks = self._layer_marks(plan, duration_s)
        if self._machine is not None:
            marks.append((duration_s, partial(self._finish_now, plan)))
            self._machine.begin(self.worker_id, prompt_share(self._steps, shape), marks)
            return
        for done_s, tell in marks:
            self._heap.at(now_s + done_s, tell)
        self._heap.at(now_s + duration_s, self._finish, plan, duration_s)

    def _step_s(self, shape: StepShape) -> float:
        seconds, slowed = self._steps.step_s(shape), self._slowed
        if slowed is None:
            return seconds
        share = prompt_share(self._steps, shape)
        return seconds * (share * slowed.prompts + (1.0 - share) * slowed.streams)

    def slow_down(self, slowed: WorkerSlows | None) -> None:
        """The steps that begin from now on; as described where there is none."""
        self.catch_up()
        self._slowed = slowed
        if self._stretch is not None:
            self._cut(self._stretch, 1)

    def _layer_marks(self, plan: StepPlan, duration_s: float) -> list[Mark]:
        """When layers are computed that are pushed while the step goes on, in seconds of the step."""
        if not self._is_small or not plan.report_every:
            return []
        num_layers = self.card.layout.num_layers
        return [
            (duration_s * layers / num_layers, partial(self.handle, events.LayersComputed(plan.step_id, layers)))
            for layers in range(plan.report_every, num_layers, plan.report_every)
        ]

    def _finish_now(self, plan: StepPlan) -> None:
        """Its end, however long it took beside others."""
        self._finish(plan, self._heap.now_s - self._step_began_s)

    def _finish(self, plan: StepPlan, duration_s: float) -> None:
        if not self.is_alive:
            return
        self.busy_s += duration_s
        self.num_steps += 1
        tokens = tuple(
            [
                EmittedToken(row.sequence_id, row.output_position, ANSWER_LABEL)
                for row in plan.rows
                if row.sampling is not None
            ]
        )
        self._is_finishing = True
        if plan.layers is None:
            self._around.note_ends(self, (self._heap.now_s,))
        self.handle(events.StepFinished(StepResult(plan.step_id, tokens), duration_s))
        self._is_finishing = False

    # --- steps that are one event ------------------------------------------------------------------------------

    def _begin_stretch(self, plan: StepPlan, num_steps: int) -> None:
        self._stretch = stretch = Stretch(plan)
        shape, end_s = shape_of(plan), self._step_began_s
        for _ in range(num_steps):
            duration_s = self._step_s(shape)
            end_s += duration_s
            stretch.durations_s.append(duration_s)
            stretch.ends_s.append(end_s)
            shape = StepShape((), shape.decode_contexts_sum + shape.num_decode, shape.num_decode)
        self._heap.at(end_s, self._end_stretch, stretch, end_s)

    def catch_up(self) -> None:
        """Let the scheduler know of the steps that are over by now."""
        stretch = self._stretch
        if stretch is not None and stretch.ends_s[0] <= self._heap.now_s and self.is_alive:
            self._finish_steps(stretch, bisect_right(stretch.ends_s, self._heap.now_s))

    def _end_stretch(self, stretch: Stretch, end_s: float) -> None:
        if self._stretch is stretch and stretch.ends_s[-1] == end_s:  # else it was cut short, or has ended
            self.catch_up()

    def _finish_steps(self, stretch: Stretch, num_steps: int) -> None:
        self._stretch = None
        ends_s, durations_s = stretch.ends_s[:num_steps], tuple(stretch.durations_s[:num_steps])
        self.busy_s += math.fsum(durations_s)
        self.num_steps += num_steps
        self._around.note_ends(self, ends_s)
        self._handle(events.StepsFinished(stretch.plan.step_id, durations_s), ends_s[-1])

    def _shorten(self, stretch: Stretch) -> None:
        """Something has happened: some of the steps may be decided anew."""
        num_steps = self.scheduler.num_alike(len(stretch.ends_s))
        if num_steps != len(stretch.ends_s):
            self._cut(stretch, num_steps)

    def _cut(self, stretch: Stretch, num_steps: int) -> None:
        """Only so many are sure; where that is one, its end is decided like any other's."""
        stretch.cut(max(1, num_steps))
        if num_steps > 1:
            self._heap.at(stretch.ends_s[-1], self._end_stretch, stretch, stretch.ends_s[-1])
        else:
            self._stretch = None
            self._heap.at(stretch.ends_s[0], self._finish, stretch.plan, stretch.durations_s[0])

    # --- grants and writes -------------------------------------------------------------------------------------

    def _open_grant(self, action: OpenGrant) -> None:
        self.grants[action.grant_key] = action.peer

    def _revoke(self, action: RevokeGrant) -> None:
        del self.grants[action.grant_key]
        self._around.links.cancel(action.grant_key)
        fenced = events.GrantFenced(decode_grant_key(action.grant_key).handoff_id)
        self._heap.after(FENCE_S, self.handle, fenced)

    def _stop_pushes(self, action: StopPushes) -> None:
        self._around.links.cancel(action.grant_key)
        stopped = events.WritesStopped(decode_grant_key(action.grant_key).handoff_id)
        self._heap.after(FENCE_S, self.handle, stopped)

    def _push(self, action: PushSpan) -> None:
        peer = self.peers.get(action.peer)
        if peer is None:
            self._heap.after(0.0, self._end_write, action.handoff_id, action.number, "not connected")
            return
        self.num_pushes += 1
        route, back = self._around.route(self, peer), self._around.route(peer, self)
        num_bytes, first_s, last_bytes = self.card.layout.span_bytes(action.span), self._heap.now_s, 0
        if self._is_finishing and not self._is_small and self.scheduler.config.handoff_mode is HandoffMode.LAYERWISE:
            first_s, last_bytes = self._spread(action.span)
        pair = (self.worker_id, peer.worker_id)
        write = Write(action.grant_key, pair, route.resources, num_bytes, route.latency_s, first_s, last_bytes)
        self._around.links.send(write, lambda has_arrived: self._land(peer, action, has_arrived, back.message_s))

    def _spread(self, span: Span) -> tuple[float, int]:
        """When the first group of layers of the step that has just ended was computed, and bytes of the last one."""
        layout = self.card.layout
        layer_bytes = layout.span_bytes(span) / span.num_layers
        group = min(span.num_layers, max(1, -(-self.scheduler.config.min_push_bytes // max(1, int(layer_bytes)))))
        num_last = span.num_layers % group or group
        now_s = self._heap.now_s
        first_s = self._step_began_s + (now_s - self._step_began_s) * group / span.num_layers
        return first_s, int(layer_bytes * num_last)

    def _land(self, peer: "SimWorker", action: PushSpan, has_arrived: bool, word_s: float) -> None:
        is_granted = peer.is_alive and peer.grants.get(action.grant_key) == self.worker_id
        if has_arrived and is_granted:
            peer.handle(events.WriteLanded(action.handoff_id, action.span, None))
            failure = None
        else:
            failure = "not granted" if has_arrived else "the transfer was cut off"
        self._heap.after(word_s, self._end_write, action.handoff_id, action.number, failure)

    def _end_write(self, handoff_id: HandoffId, number: int, failure: str | None) -> None:
        self.handle(events.WriteFinished(handoff_id, number, failure))


def shape_of(plan: StepPlan) -> StepShape:
    """A row that reads one token after the first of an answer is a stream, whatever its history."""
    prompts: list[tuple[int, int]] = []
    contexts, num_streams = plan.standing_context, plan.num_standing
    for row in plan.rows:
        if row.output_position and len(row.token_ids) == 1:
            num_streams += 1
            contexts += row.position + 1
        else:
            prompts.append((len(row.token_ids), row.position))
    return StepShape(tuple(prompts), contexts, num_streams)


def prompt_share(steps: StepModel, shape: StepShape) -> float:
    """The part of a step's time, 0 to 1, that its prompts add."""
    if not shape.prefill or not shape.num_decode:
        return 1.0 if shape.prefill else 0.0
    streams = StepShape((), shape.decode_contexts_sum, shape.num_decode)
    return 1.0 - steps.step_s(streams) / steps.step_s(shape)

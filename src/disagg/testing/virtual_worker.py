"""One worker in virtual time: a real scheduler over a fake engine and a faulty link."""

from collections.abc import Callable
from functools import partial

from disagg.core.errors import Failure, FailureKind, InvalidRequest
from disagg.core.ids import WorkerId
from disagg.protocol.cards import WorkerCard
from disagg.protocol.handoff import decode_grant_key
from disagg.protocol.messages import WorkerToRouter, WorkerToWorker
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
from disagg.scheduler.scheduler import Scheduler
from disagg.testing.engine import FakeEngine
from disagg.testing.virtual_time import VirtualTime


class VirtualWorker:
    """One incarnation: a real scheduler over a fake engine."""

    def __init__(
        self,
        time: VirtualTime,
        card: WorkerCard,
        config: SchedulerConfig,
        to_router: Callable[["VirtualWorker", WorkerToRouter], None],
    ) -> None:
        self._time = time
        self._to_router = to_router
        self.card = card
        self.engine = FakeEngine(card.layout, card.num_blocks)
        self.scheduler = Scheduler(config)
        self.is_alive = True
        self.is_paused = False
        self._paused_events: list[events.Event] = []
        self.links: dict[WorkerId, int] = {}  # numbers of connections: no message outlives its own
        self.router_link = 0
        self.grants: dict[bytes, WorkerId] = {}
        self.writing: dict[bytes, float] = {}  # until when a begun write may still touch the arena
        self.peers: dict[WorkerId, VirtualWorker] = {}
        self.stopped_keys: set[bytes] = set()
        self.is_sending_stalled = False  # begun writes neither arrive nor end until the transport gives them up
        self.is_engine_broken = False  # every step raises
        self._wake_s = float("inf")

    @property
    def worker_id(self) -> WorkerId:
        return self.card.worker_id

    def handle(self, event: events.Event) -> None:
        if not self.is_alive:
            return
        if self.is_paused:
            self._paused_events.append(event)
            return
        time = self._time
        time.note(self.worker_id, event)
        for action in self.scheduler.handle(event, time.now_s):
            self._perform(action)
        self.scheduler.check_invariants()
        wake_s = self.scheduler.next_wake_s()
        if wake_s < self._wake_s or self._wake_s <= time.now_s:
            self._wake_s = wake_s
            if wake_s < float("inf"):
                time.at(max(wake_s, time.now_s + 1e-6), lambda: self._wake(wake_s))

    def pause(self) -> None:
        """From now on events wait."""
        self.is_paused = True

    def resume(self) -> None:
        """Take the events that waited, in order."""
        self.is_paused = False
        waiting, self._paused_events = self._paused_events, []
        for event in waiting:
            self.handle(event)

    def _wake(self, wake_s: float) -> None:
        if self._wake_s == wake_s:
            self._wake_s = float("inf")
            self.handle(events.ClockTicked())

    def _perform(self, action: Action) -> None:
        time = self._time
        match action:
            case SendToRouter():
                time.deliver(self.worker_id, "router", lambda: self._to_router(self, action.message))
            case SendToPeer():
                peer = self.peers.get(action.peer)
                if peer is not None:
                    link = self.links[peer.worker_id]
                    act = partial(self._to_peer, peer, link, action.message)
                    time.deliver(self.worker_id, peer.worker_id, act)
            case RunStep():
                self._run(action)
            case PrepareGrammar():
                self._prepare(action)
            case OpenGrant():
                self.grants[action.grant_key] = action.peer
            case RevokeGrant():
                del self.grants[action.grant_key]
                handoff_id = decode_grant_key(action.grant_key).handoff_id
                free_s = max(time.now_s, self.writing.pop(action.grant_key, 0.0))
                time.at(free_s + time.jittered(1e-5), lambda: self.handle(events.GrantFenced(handoff_id)))
            case PushSpan():
                self._push(action)
            case StopPushes():
                self.stopped_keys.add(action.grant_key)
                handoff_id = decode_grant_key(action.grant_key).handoff_id
                stop_s = time.timing.fence_s if self.is_sending_stalled else time.jittered(time.timing.write_s * 2)
                time.after(stop_s, lambda: self.handle(events.WritesStopped(handoff_id)))

    def _to_peer(self, peer: "VirtualWorker", link: int, message: WorkerToWorker) -> None:
        if peer.links.get(self.worker_id) == link:
            peer.handle(events.PeerMessageReceived(self.worker_id, message))

    def _run(self, action: RunStep) -> None:
        time, plan = self._time, action.plan
        chance = time.chances.step_failure
        if self.is_engine_broken or (chance and time.random.random() < chance):
            failed = events.StepFailed(plan.step_id, Failure(FailureKind.INTERNAL, f"{self.worker_id} is broken"))
            time.after(time.jittered(time.timing.step_s), lambda: self.handle(failed))
            return
        layers: list[int] = []
        result = self.engine.run_step(plan, layers.append)
        share = len(layers) / self.card.layout.num_layers  # parts of steps run some of them
        duration_s = share * time.jittered(time.timing.step_s + plan.num_tokens * time.timing.prompt_token_s)
        for num_layers in (n for n in layers if plan.is_reported(n, len(layers))):
            event = events.LayersComputed(plan.step_id, num_layers)
            time.after(duration_s * num_layers / (len(layers) + 1), partial(self.handle, event))
        time.after(duration_s, lambda: self.handle(events.StepFinished(result, duration_s)))

    def _prepare(self, action: PrepareGrammar) -> None:
        failure: Failure | None = None
        try:
            self.engine.prepare_grammar(action.attempt_id, action.grammar, action.emitted_ids)
        except InvalidRequest as error:
            failure = Failure(FailureKind.INVALID_REQUEST, str(error))
        event = events.GrammarPrepared(action.attempt_id, failure)
        self._time.after(self._time.jittered(self._time.timing.step_s), lambda: self.handle(event))

    def _push(self, action: PushSpan) -> None:
        """Begin (the receiver checks the grant), then land; the acknowledgement comes later."""
        time = self._time
        num_bytes = self.card.layout.span_bytes(action.span)
        begin_s = time.jittered(time.timing.write_s)
        land_s = begin_s + time.jittered(num_bytes * time.timing.byte_s + 1e-6)
        is_corrupt = time.random.random() < time.chances.corrupt

        def finish(failure: str | None) -> None:
            event = events.WriteFinished(action.handoff_id, action.number, failure)
            time.after(time.jittered(time.timing.message_s), lambda: self.handle(event))

        def begin() -> None:
            peer = self.peers.get(action.peer)
            if not self.is_alive:
                return
            if peer is None or not peer.is_alive or action.grant_key in self.stopped_keys:
                finish("not connected or stopped")
            elif peer.grants.get(action.grant_key) != self.worker_id:
                finish("not granted")
            elif self.is_sending_stalled:
                until_s = time.now_s + time.timing.fence_s
                peer.writing[action.grant_key] = max(peer.writing.get(action.grant_key, 0.0), until_s)
                time.after(time.timing.stall_s, lambda: finish(f"no byte moved for {time.timing.stall_s:g} s"))
            else:
                peer.writing[action.grant_key] = max(peer.writing.get(action.grant_key, 0.0), time.now_s + land_s)
                time.after(land_s, lambda: land(peer))

        def land(peer: VirtualWorker) -> None:
            if not peer.is_alive or not self.is_alive:
                if self.is_alive:
                    finish("connection lost")
                return
            self._copy(peer, action, is_corrupt)
            failure = "checksum mismatch" if is_corrupt else None
            peer.handle(events.WriteLanded(action.handoff_id, action.span, failure))
            finish(failure)

        time.after(begin_s, begin)

    def _copy(self, peer: "VirtualWorker", action: PushSpan, is_corrupt: bool) -> None:
        """As converted as it has to be: both engines speak of spans in one order."""
        payload = self.engine.read(action.source_blocks, action.span)
        peer.engine.write(action.destination_blocks, action.span, bytes(len(payload)) if is_corrupt else payload)

"""A whole cluster in virtual time: the real dispatcher, schedulers, tables and block pools, fake engines and links.

Time is a heap of callbacks. Chance comes from one seeded generator. Control connections deliver in order, with jitter;
data writes take time in which grants can be revoked, workers can die and bytes can be lost. All invariants are checked
after every event. `history` tells what happened, for the message of a failing test.
"""

import heapq
import random
from collections.abc import Callable
from functools import partial
from itertools import count

import msgspec

from disagg.core.endpoints import Endpoint, TransportKind
from disagg.core.errors import DisaggError, InternalFault
from disagg.core.ids import Incarnation, RequestId, WorkerId
from disagg.core.request import FinishReason
from disagg.core.roles import HandoffMode, Numerics, Role
from disagg.core.spans import KvLayout
from disagg.dispatch.actions import Deliver, DispatchAction, RefuseWorker, SendToWorker
from disagg.dispatch.dispatcher import Dispatcher, DispatcherConfig
from disagg.dispatch.events import (
    ChoiceStopped,
    ClientGone,
    DispatchEvent,
    WorkerLost,
    WorkerMessageReceived,
    WorkerRegistered,
)
from disagg.dispatch.stream import GenerateRequest, RequestFailed
from disagg.kvcache.segments import span_segments
from disagg.policy.batching import StepBudget
from disagg.protocol.handoff import decode_grant_key
from disagg.protocol.messages import (
    AnnouncePeers,
    PoolCard,
    ReportPairing,
    RouterToWorker,
    WorkerCard,
    WorkerToRouter,
    WorkerToWorker,
)
from disagg.protocol.pairing import pairing_failure
from disagg.scheduler import events
from disagg.scheduler.actions import (
    Action,
    OpenGrant,
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

MODEL = "fake"


class Timing(msgspec.Struct, frozen=True):
    """Durations in virtual seconds; each is stretched by a factor drawn from [1, jitter]."""

    message_s: float = 0.0002
    prompt_token_s: float = 0.001
    step_s: float = 0.01
    byte_s: float = 1e-8
    write_s: float = 0.0005
    detect_s: float = 0.01  # from a death to the others' knowing of it
    jitter: float = 3.0


class Chances(msgspec.Struct, frozen=True):
    """Probabilities of faults, per write."""

    corrupt: float = 0.0


class Answer:
    """What a client has seen of one request."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.tokens: list[list[int]] = [[] for _ in range(request.num_choices)]
        self.finish: list[FinishReason | None] = [None] * request.num_choices
        self.error: DisaggError | None = None
        self.is_aborted = False

    @property
    def is_over(self) -> bool:
        return self.error is not None or self.is_aborted or all(reason is not None for reason in self.finish)


class VirtualWorker:
    """One incarnation: a real scheduler over a fake engine."""

    def __init__(self, cluster: "VirtualCluster", card: WorkerCard, config: SchedulerConfig) -> None:
        self.cluster = cluster
        self.card = card
        self.engine = FakeEngine(card.layout, card.num_blocks)
        self.scheduler = Scheduler(config)
        self.is_alive = True
        self.grants: dict[bytes, WorkerId] = {}
        self.writing: dict[bytes, float] = {}  # until when a begun write may still touch the arena
        self.peers: dict[WorkerId, VirtualWorker] = {}
        self.stopped_keys: set[bytes] = set()
        self._wake_s = float("inf")

    @property
    def worker_id(self) -> WorkerId:
        return self.card.worker_id

    def handle(self, event: events.Event) -> None:
        if not self.is_alive:
            return
        cluster = self.cluster
        cluster.note(self.worker_id, event)
        for action in self.scheduler.handle(event, cluster.now_s):
            self._perform(action)
        self.scheduler.check_invariants()
        wake_s = self.scheduler.next_wake_s()
        if wake_s < self._wake_s or self._wake_s <= cluster.now_s:
            self._wake_s = wake_s
            if wake_s < float("inf"):
                cluster.at(max(wake_s, cluster.now_s + 1e-6), lambda: self._wake(wake_s))

    def _wake(self, wake_s: float) -> None:
        if self._wake_s == wake_s:
            self._wake_s = float("inf")
            self.handle(events.ClockTicked())

    def _perform(self, action: Action) -> None:
        cluster = self.cluster
        match action:
            case SendToRouter():
                cluster.deliver(self.worker_id, "router", lambda: cluster.from_worker(self, action.message))
            case SendToPeer():
                peer = self.peers.get(action.peer)
                if peer is not None:
                    cluster.deliver(self.worker_id, peer.worker_id, lambda: self._to_peer(peer, action.message))
            case RunStep():
                self._run(action)
            case OpenGrant():
                self.grants[action.grant_key] = action.peer
            case RevokeGrant():
                del self.grants[action.grant_key]
                handoff_id = decode_grant_key(action.grant_key).handoff_id
                free_s = max(cluster.now_s, self.writing.pop(action.grant_key, 0.0))
                cluster.at(free_s + cluster.jittered(1e-5), lambda: self.handle(events.GrantFenced(handoff_id)))
            case PushSpan():
                self._push(action)
            case StopPushes():
                self.stopped_keys.add(action.grant_key)
                handoff_id = decode_grant_key(action.grant_key).handoff_id
                stop_s = cluster.jittered(cluster.timing.write_s * 2)
                cluster.after(stop_s, lambda: self.handle(events.WritesStopped(handoff_id)))

    def _to_peer(self, peer: "VirtualWorker", message: WorkerToWorker) -> None:
        if peer.peers.get(self.worker_id) is self:
            peer.handle(events.PeerMessageReceived(self.worker_id, message))

    def _run(self, action: RunStep) -> None:
        cluster, plan = self.cluster, action.plan
        layers: list[int] = []
        result = self.engine.run_step(plan, layers.append)
        duration_s = cluster.jittered(cluster.timing.step_s + plan.num_tokens * cluster.timing.prompt_token_s)
        for num_layers in layers:
            event = events.LayersComputed(plan.step_id, num_layers)
            cluster.after(duration_s * num_layers / (len(layers) + 1), partial(self.handle, event))
        cluster.after(duration_s, lambda: self.handle(events.StepFinished(result, duration_s)))

    def _push(self, action: PushSpan) -> None:
        """Begin (the receiver checks the grant), then land; the acknowledgement comes later."""
        cluster = self.cluster
        num_bytes = self.card.layout.span_bytes(action.span)
        begin_s = cluster.jittered(cluster.timing.write_s)
        land_s = begin_s + cluster.jittered(num_bytes * cluster.timing.byte_s + 1e-6)
        is_corrupt = cluster.random.random() < cluster.chances.corrupt

        def finish(failure: str | None) -> None:
            event = events.WriteFinished(action.handoff_id, action.number, failure)
            cluster.after(cluster.jittered(cluster.timing.message_s), lambda: self.handle(event))

        def begin() -> None:
            peer = self.peers.get(action.peer)
            if not self.is_alive:
                return
            if peer is None or not peer.is_alive or action.grant_key in self.stopped_keys:
                finish("not connected or stopped")
            elif peer.grants.get(action.grant_key) != self.worker_id:
                finish("not granted")
            else:
                peer.writing[action.grant_key] = max(peer.writing.get(action.grant_key, 0.0), cluster.now_s + land_s)
                cluster.after(land_s, lambda: land(peer))

        def land(peer: VirtualWorker) -> None:
            if not peer.is_alive or not self.is_alive:
                if self.is_alive:
                    finish("connection lost")
                return
            self._copy(peer, action, is_corrupt)
            failure = "checksum mismatch" if is_corrupt else None
            peer.handle(events.WriteLanded(action.handoff_id, action.span, failure))
            finish(failure)

        cluster.after(begin_s, begin)

    def _copy(self, peer: "VirtualWorker", action: PushSpan, is_corrupt: bool) -> None:
        source = span_segments(self.card.layout, self.card.num_blocks, action.source_blocks, action.span)
        target = span_segments(peer.card.layout, action.destination_num_blocks, action.destination_blocks, action.span)
        payload = b"".join(bytes(view) for view in self.engine.memory.gather(source))
        if is_corrupt:
            payload = bytes(len(payload))
        landing = peer.engine.memory.landing(target)
        offset = 0
        for buffer in landing.buffers:
            buffer[:] = payload[offset : offset + len(buffer)]
            offset += len(buffer)
        landing.commit()


class VirtualCluster:
    """Router and workers of one model. Everything happens inside run()."""

    def __init__(
        self,
        seed: int,
        *,
        local_prefill_tokens: int = 0,
        timing: Timing | None = None,
        chances: Chances | None = None,
        max_open_requests: int = 1024,
    ) -> None:
        self.random = random.Random(seed)
        self.timing = timing or Timing()
        self.chances = chances or Chances()
        self.now_s = 0.0
        self.workers: dict[WorkerId, VirtualWorker] = {}
        self.answers: dict[RequestId, Answer] = {}
        self.history: list[str] = []
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._incarnations = count(1)
        self._in_order_s: dict[tuple[str, str], float] = {}
        self.dispatcher = Dispatcher(
            DispatcherConfig(
                incarnation=Incarnation(0),
                tokenizer_digests={MODEL: "t"},
                local_prefill_tokens=local_prefill_tokens,
                max_open_requests=max_open_requests,
            )
        )

    # --- time --------------------------------------------------------------------------------------------------

    def at(self, when_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (max(when_s, self.now_s), next(self._order), act))

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        self.at(self.now_s + delay_s, act)

    def jittered(self, duration_s: float) -> float:
        return duration_s * self.random.uniform(1.0, self.timing.jitter)

    def run(
        self, *, until: Callable[[], bool] | None = None, limit_s: float = 1000.0, max_events: int = 1_000_000
    ) -> None:
        """Until the condition holds, or nothing is left to happen. Raises when the limits are passed first."""
        for _ in range(max_events):
            if until is not None and until():
                return
            if not self._heap:
                if until is not None:
                    raise InternalFault(f"nothing is left to happen at {self.now_s:.3f} s\n{self.story()}")
                return
            when_s, _, act = heapq.heappop(self._heap)
            if when_s > limit_s:
                raise InternalFault(f"not done after {limit_s} virtual seconds\n{self.story()}")
            self.now_s = when_s
            act()
            self.dispatcher.check_invariants()
        raise InternalFault(f"not done after {max_events} events\n{self.story()}")

    def run_for(self, duration_s: float) -> None:
        end_s = self.now_s + duration_s
        self.at(end_s, lambda: None)
        self.run(until=lambda: self.now_s >= end_s, limit_s=end_s + 1)

    def deliver(self, source: str, target: str, act: Callable[[], None]) -> None:
        """In order per direction, like a stream."""
        when_s = self.now_s + self.jittered(self.timing.message_s)
        when_s = max(when_s, self._in_order_s.get((source, target), 0.0))
        self._in_order_s[(source, target)] = when_s
        self.at(when_s, act)

    def note(self, who: str, what: object) -> None:
        self.history.append(f"{self.now_s:10.6f} {who}: {what}")
        if len(self.history) > 400:
            del self.history[:200]

    def story(self) -> str:
        return "\n".join(self.history[-60:])

    # --- workers -----------------------------------------------------------------------------------------------

    def start_worker(
        self,
        name: str,
        role: Role,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        chunk_tokens: int = 16,
        mixed_chunk_tokens: int = 8,
        max_running: int = 16,
        mode: HandoffMode = HandoffMode.LAYERWISE,
        min_push_bytes: int = 0,
        digest: str = "m",
        lease_s: float = 5.0,
    ) -> VirtualWorker:
        layout = KvLayout(num_layers=3, num_kv_heads=1, head_dim=2, dtype="float32", block_size=block_size)
        incarnation = Incarnation(next(self._incarnations))
        card = WorkerCard(
            worker_id=WorkerId(name),
            incarnation=incarnation,
            role=role,
            pool=PoolCard(MODEL, digest, "t", Numerics.EXACT, vocab_size=1000, max_context=256),
            layout=layout,
            num_blocks=num_blocks,
            control_address=name,
            data_endpoints=(Endpoint(TransportKind.IN_PROCESS, name),),
        )
        config = SchedulerConfig(
            worker_id=card.worker_id,
            incarnation=incarnation,
            role=role,
            model_digest=digest,
            numerics=Numerics.EXACT,
            layout=layout,
            num_blocks=num_blocks,
            max_context=256,
            vocab_size=1000,
            budget=StepBudget(chunk_tokens, mixed_chunk_tokens, max_running),
            handoff_mode=mode,
            min_push_bytes=min_push_bytes,
            max_push_bytes=512,
            lease_s=lease_s,
        )
        worker = VirtualWorker(self, card, config)
        self.workers[card.worker_id] = worker
        self.after(self.jittered(self.timing.message_s), lambda: self._tell_dispatcher(WorkerRegistered(card)))
        return worker

    def kill(self, name: str) -> None:
        """Like SIGKILL: nothing more comes from it; the others notice after a while."""
        worker = self.workers.pop(WorkerId(name))
        worker.is_alive = False
        self.note(name, "killed")
        lost = WorkerLost(worker.worker_id, worker.card.incarnation, "its connection ended")
        self.after(self.jittered(self.timing.detect_s), lambda: self._tell_dispatcher(lost))
        for peer in list(worker.peers.values()):
            self.after(self.jittered(self.timing.detect_s), partial(self._part, peer, worker))

    def _part(self, peer: VirtualWorker, gone: VirtualWorker) -> None:
        if peer.peers.get(gone.worker_id) is gone:
            peer.handle(events.PeerLost(gone.worker_id, gone.card.incarnation, "its connection ended"))
            peer.peers.pop(gone.worker_id, None)

    def _pair(self, source: VirtualWorker, target: VirtualWorker) -> None:
        if not source.is_alive or not target.is_alive or source.peers.get(target.worker_id) is target:
            return
        failure = pairing_failure(source.card, target.card)
        if failure is None:
            source.peers[target.worker_id] = target
            target.peers[source.worker_id] = source
            source.handle(events.PeerPaired(target.card))
            target.handle(events.PeerPaired(source.card))
        report = ReportPairing(target.worker_id, target.card.incarnation, failure)
        self.deliver(source.worker_id, "router", lambda: self.from_worker(source, report))

    # --- router ------------------------------------------------------------------------------------------------

    def submit(self, request: GenerateRequest) -> RequestId:
        """Raises what Dispatcher.submit raises."""
        request_id, actions = self.dispatcher.submit(request)
        self.answers[request_id] = Answer(request)
        self._act(actions)
        return request_id

    def abort(self, request_id: RequestId) -> None:
        self.answers[request_id].is_aborted = True
        self._tell_dispatcher(ClientGone(request_id))

    def stop_choice(self, request_id: RequestId, choice: int) -> None:
        self.answers[request_id].finish[choice] = FinishReason.STOP
        self._tell_dispatcher(ChoiceStopped(request_id, choice))

    def from_worker(self, worker: VirtualWorker, message: WorkerToRouter) -> None:
        if worker.is_alive:
            self._tell_dispatcher(WorkerMessageReceived(worker.worker_id, worker.card.incarnation, message))

    def _tell_dispatcher(self, event: DispatchEvent) -> None:
        self.note("router", event)
        self._act(self.dispatcher.handle(event))

    def _act(self, actions: list[DispatchAction]) -> None:
        for action in actions:
            match action:
                case SendToWorker():
                    worker = self.workers.get(action.worker_id)
                    if worker is not None:
                        self.deliver("router", action.worker_id, partial(self._to_worker, worker, action.message))
                case Deliver():
                    self._to_client(action)
                case RefuseWorker():
                    self.note("router", action)

    def _to_worker(self, worker: VirtualWorker, message: RouterToWorker) -> None:
        if isinstance(message, AnnouncePeers):
            for card in message.peers:
                peer = self.workers.get(card.worker_id)
                if peer is not None and peer.card.incarnation == card.incarnation:
                    self.after(self.jittered(self.timing.message_s), partial(self._pair, worker, peer))
        else:
            worker.handle(events.RouterMessageReceived(message))

    def _to_client(self, action: Deliver) -> None:
        answer = self.answers[action.request_id]
        event = action.event
        if answer.is_over:
            raise InternalFault(f"{event} after the end of {action.request_id}\n{self.story()}")
        if isinstance(event, RequestFailed):
            answer.error = event.error
            return
        for token in event.tokens:
            if token.position != len(answer.tokens[event.choice]):
                raise InternalFault(f"position {token.position} is out of order\n{self.story()}")
            answer.tokens[event.choice].append(token.token_id)
        answer.finish[event.choice] = event.finish_reason

    # --- rules -------------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        return all(status.is_ready for status in self.dispatcher.models())

    @property
    def are_all_over(self) -> bool:
        return all(answer.is_over for answer in self.answers.values())

    def check_nothing_left(self) -> None:
        """After the last answer: every block free or cached, no sequence, no grant, no claim."""
        self.run_for(60.0)
        for worker in self.workers.values():
            state = worker.scheduler.snapshot()
            held = state.num_held_blocks + state.num_reserved_blocks + state.num_quarantined_blocks
            if not worker.scheduler.is_idle or held or worker.grants:
                raise InternalFault(f"{worker.worker_id} still has {state}, grants {worker.grants}\n{self.story()}")
        if self.dispatcher.num_open:
            raise InternalFault(f"{self.dispatcher.num_open} requests are still open")

"""A whole cluster in virtual time: the real dispatcher, schedulers, tables and block pools, fake engines and links.

Time is a heap of callbacks. Chance comes from one seeded generator. Control connections deliver in order, with jitter;
data writes take time in which grants can be revoked, workers can die and bytes can be lost. All invariants are checked
after every event. `history` tells what happened, for the message of a failing test.
"""

from collections.abc import Callable
from functools import partial
from itertools import count

from disagg.core.endpoints import Endpoint, TransportKind
from disagg.core.errors import DisaggError, FailureKind, InternalFault
from disagg.core.ids import Incarnation, RequestId, WorkerId
from disagg.core.request import FinishReason
from disagg.core.roles import FirstToken, HandoffMode, Numerics, PartialStart, Role
from disagg.core.spans import KvLayout
from disagg.dispatch.actions import Deliver, DispatchAction, LogDecision, RefuseWorker, SendToWorker
from disagg.dispatch.config import DispatcherConfig
from disagg.dispatch.dispatcher import Dispatcher
from disagg.dispatch.events import (
    ChoiceStopped,
    ClientGone,
    DispatchEvent,
    DrainAsked,
    TimePassed,
    WorkerLost,
    WorkerMessageReceived,
    WorkerRegistered,
)
from disagg.dispatch.stream import GenerateRequest, RequestFailed
from disagg.policy.batching import StepBudget
from disagg.protocol.cards import PROTOCOL_MAX, PROTOCOL_MIN, PoolCard, WorkerCard
from disagg.protocol.messages import (
    AnnouncePeers,
    ReportPairing,
    RouterToWorker,
    WorkerToRouter,
)
from disagg.protocol.pairing import pairing_failure
from disagg.scheduler import events
from disagg.scheduler.config import SchedulerConfig
from disagg.telemetry.track import RequestTrack
from disagg.testing.virtual_time import Chances, Timing, VirtualTime
from disagg.testing.virtual_worker import VirtualWorker

MODEL = "fake"
FIRST_RETRY_S = 0.1  # of a dial that was refused
MAX_RETRY_S = 2.0


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
        max_claimed_share: float = 1e9,
        router_starts_s: float = 0.0,
    ) -> None:
        self.time = VirtualTime(seed, timing or Timing(), chances or Chances(), self._check)
        self.workers: dict[WorkerId, VirtualWorker] = {}
        self.answers: dict[RequestId, Answer] = {}
        self._incarnations = count(1)
        self._links = count(1)
        self._router_links: dict[WorkerId, int] = {}
        self._wake_s = float("inf")
        self.router_starts_s = router_starts_s  # workers that come earlier dial until it is there
        self.dispatcher = Dispatcher(
            DispatcherConfig(
                incarnation=Incarnation(0),
                tokenizer_digests={MODEL: "t"},
                local_prefill_tokens=local_prefill_tokens,
                max_open_requests=max_open_requests,
                max_claimed_share=max_claimed_share,
                protocol_max=PROTOCOL_MAX + 1,  # so that workers of the next release can be tried
            )
        )

    # --- workers -----------------------------------------------------------------------------------------------

    def start_worker(
        self,
        name: str,
        role: Role,
        *,
        num_blocks: int = 64,
        answer_headroom: int = 4,
        block_size: int = 4,
        chunk_tokens: int = 16,
        mixed_chunk_tokens: int = 8,
        max_running: int = 16,
        mode: HandoffMode = HandoffMode.LAYERWISE,
        min_push_bytes: int = 0,
        digest: str = "m",
        lease_s: float = 5.0,
        dtype: str = "float32",
        max_context: int = 256,
        layout: KvLayout | None = None,
        protocols: tuple[int, int] = (PROTOCOL_MIN, PROTOCOL_MAX),
        partial_start: PartialStart = PartialStart.AUTO,
        first_token: FirstToken = FirstToken.AT_ONCE,
    ) -> VirtualWorker:
        """layout: instead of block_size and dtype."""
        layout = layout or KvLayout(num_layers=3, num_kv_heads=1, head_dim=2, dtype=dtype, block_size=block_size)
        incarnation = Incarnation(next(self._incarnations))
        card = WorkerCard(
            worker_id=WorkerId(name),
            incarnation=incarnation,
            role=role,
            pool=PoolCard(MODEL, digest, "t", Numerics.EXACT, vocab_size=1000, max_context=max_context),
            layout=layout,
            num_blocks=num_blocks,
            control_address=name,
            data_endpoints=tuple(
                Endpoint(TransportKind.IN_PROCESS, name, rank=rank) for rank in range(layout.num_ranks)
            ),
            protocol_min=protocols[0],
            protocol_max=protocols[1],
        )
        config = SchedulerConfig(
            worker_id=card.worker_id,
            incarnation=incarnation,
            role=role,
            model_digest=digest,
            numerics=Numerics.EXACT,
            layout=layout,
            num_blocks=num_blocks,
            max_context=max_context,
            vocab_size=1000,
            budget=StepBudget(chunk_tokens, mixed_chunk_tokens, max_running),
            handoff_mode=mode,
            partial_start=partial_start,
            first_token=first_token,
            min_push_bytes=min_push_bytes,
            max_push_bytes=512,
            answer_headroom=answer_headroom,
            lease_s=lease_s,
        )
        worker = VirtualWorker(self.time, card, config, self.from_worker)
        self.workers[card.worker_id] = worker
        self.time.after(self.time.jittered(self.time.timing.message_s), partial(self._register, worker))
        return worker

    def kill(self, name: str) -> None:
        """Like SIGKILL: nothing more comes from it; the others notice after a while."""
        worker = self.workers.pop(WorkerId(name))
        worker.is_alive = False
        self.time.note(name, "killed")
        self._notice_loss(worker)

    def pause(self, name: str, duration_s: float, *, is_noticed: bool) -> None:
        """Like SIGSTOP and SIGCONT. Noticed: silent for longer than the others wait; its connections are closed."""
        worker = self.workers[WorkerId(name)]
        self.time.note(name, f"paused for {duration_s:.3f} s")
        worker.pause()
        if is_noticed:
            self.time.after(duration_s / 2, partial(self._notice_loss, worker))
        self.time.after(duration_s + 0.1, partial(self._resume, worker, is_noticed=is_noticed))

    def cut(self, source: str, target: str, *, source_knows_after_s: float = 0.0) -> None:
        """The control connection between two workers breaks; they meet again a little later."""
        one, other = self.workers.get(WorkerId(source)), self.workers.get(WorkerId(target))
        if one is None or other is None or one.peers.get(other.worker_id) is not other:
            return
        self.time.note(source, f"cut from {target}")
        self._part(other, one)
        if source_knows_after_s:
            self.time.after(source_knows_after_s, partial(self._part, one, other))
        else:
            self._part(one, other)
        self.time.after(source_knows_after_s + self.time.jittered(0.02), partial(self._pair, one, other))

    def drain(self, name: str) -> None:
        self._tell_dispatcher(DrainAsked(WorkerId(name)))

    def _register(self, worker: VirtualWorker, wait_s: float = FIRST_RETRY_S) -> None:
        if self.time.now_s < self.router_starts_s:
            self._retry(partial(self._register, worker), wait_s)
        elif worker.is_alive:
            refusal = self.dispatcher.registry.refusal(worker.card)
            if (
                refusal is not None and refusal.kind is FailureKind.OVERLOADED
            ):  # its predecessor is not known to be dead
                self.time.note(worker.worker_id, refusal.message)
                self._retry(partial(self._register, worker), wait_s)
                return
            worker.router_link = self._router_links[worker.worker_id] = next(self._links)
            self._tell_dispatcher(WorkerRegistered(worker.card, worker.scheduler.is_draining))

    def _resume(self, worker: VirtualWorker, *, is_noticed: bool) -> None:
        if not worker.is_alive:
            return
        self.time.note(worker.worker_id, "resumed")
        worker.resume()
        if is_noticed:
            # Its connections were closed meanwhile: it sees their ends and registers again.
            for peer in list(worker.peers.values()):
                self._part(peer, worker)
                self._part(worker, peer)
            worker.handle(events.RouterLost())
            self._register(worker)

    def _notice_loss(self, worker: VirtualWorker) -> None:
        self._router_links.pop(worker.worker_id, None)
        lost = WorkerLost(worker.worker_id, worker.card.incarnation, "its connection ended")
        self.time.after(self.time.jittered(self.time.timing.detect_s), lambda: self._tell_dispatcher(lost))
        for peer in list(worker.peers.values()):
            self.time.after(self.time.jittered(self.time.timing.detect_s), partial(self._part, peer, worker))

    def _part(self, peer: VirtualWorker, gone: VirtualWorker) -> None:
        if peer.peers.get(gone.worker_id) is gone:
            peer.peers.pop(gone.worker_id, None)  # first: what it says now to the one it has lost is not sent
            peer.links.pop(gone.worker_id, None)
            peer.handle(events.PeerLost(gone.worker_id, gone.card.incarnation, "its connection ended"))

    def _retry(self, dial: Callable[[float], None], wait_s: float) -> None:
        """Dial again after a wait, which doubles each time up to its limit."""
        self.time.after(wait_s, lambda: dial(min(2 * wait_s, MAX_RETRY_S)))

    def _pair(self, source: VirtualWorker, target: VirtualWorker, wait_s: float = FIRST_RETRY_S) -> None:
        """Connect if they are not, and report how it stands."""
        if not source.is_alive or not target.is_alive:
            return
        is_known, is_half_known = source.peers.get(target.worker_id) is target, source.worker_id in target.peers
        if source.is_paused or target.is_paused or is_known != is_half_known:
            self.time.after(0.05, partial(self._pair, source, target))
            return
        failure = pairing_failure(source.card, target.card)
        chance = self.time.chances.refused_dial
        if failure is None and not is_known and chance and self.time.random.random() < chance:
            self.time.note(source.worker_id, f"cannot reach {target.worker_id}")
            self._retry(partial(self._pair, source, target), wait_s)
            return
        if failure is None and not is_known:
            source.peers[target.worker_id] = target
            target.peers[source.worker_id] = source
            source.links[target.worker_id] = target.links[source.worker_id] = next(self._links)
            source.handle(events.PeerPaired(target.card))
            target.handle(events.PeerPaired(source.card))
        report = ReportPairing(target.worker_id, target.card.incarnation, failure)
        self.time.deliver(source.worker_id, "router", lambda: self.from_worker(source, report))

    # --- router ------------------------------------------------------------------------------------------------

    def submit(self, request: GenerateRequest, track: RequestTrack | None = None) -> RequestId:
        """Raises what Dispatcher.submit raises."""
        request_id, actions = self.dispatcher.submit(request, self.time.now_s, track)
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
        if worker.is_alive and self._router_links.get(worker.worker_id) == worker.router_link:
            self._tell_dispatcher(WorkerMessageReceived(worker.worker_id, worker.card.incarnation, message))

    def _tell_dispatcher(self, event: DispatchEvent) -> None:
        self.time.note("router", event)
        self._act(self.dispatcher.handle(event, self.time.now_s))

    def _set_wake(self) -> None:
        wake_s = self.dispatcher.next_wake_s()
        if wake_s < self._wake_s:
            self._wake_s = wake_s
            self.time.at(wake_s, self._wake)

    def _wake(self) -> None:
        self._wake_s = float("inf")
        self._tell_dispatcher(TimePassed())

    def _act(self, actions: list[DispatchAction]) -> None:
        self._set_wake()
        for action in actions:
            match action:
                case SendToWorker():
                    worker = self.workers.get(action.worker_id)
                    if worker is not None:
                        self.time.deliver("router", action.worker_id, partial(self._to_worker, worker, action.message))
                case Deliver():
                    self._to_client(action)
                case RefuseWorker() | LogDecision():
                    self.time.note("router", action)

    def _to_worker(self, worker: VirtualWorker, message: RouterToWorker) -> None:
        if self._router_links.get(worker.worker_id) != worker.router_link:
            return  # sent on a connection that has ended
        if isinstance(message, AnnouncePeers):
            for card in message.peers:
                peer = self.workers.get(card.worker_id)
                if peer is not None and peer.card.incarnation == card.incarnation:
                    self.time.after(self.time.jittered(self.time.timing.message_s), partial(self._pair, worker, peer))
        else:
            worker.handle(events.RouterMessageReceived(message))

    def _to_client(self, action: Deliver) -> None:
        answer = self.answers[action.request_id]
        event = action.event
        if answer.is_over:
            raise InternalFault(f"{event} after the end of {action.request_id}\n{self.time.story()}")
        if isinstance(event, RequestFailed):
            answer.error = event.error
            return
        for token in event.tokens:
            if token.position != len(answer.tokens[event.choice]):
                raise InternalFault(f"position {token.position} is out of order\n{self.time.story()}")
            answer.tokens[event.choice].append(token.token_id)
        answer.finish[event.choice] = event.finish_reason

    def _check(self) -> None:
        self.dispatcher.check_invariants()

    # --- rules -------------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        return all(status.is_ready for status in self.dispatcher.models())

    @property
    def are_all_over(self) -> bool:
        return all(answer.is_over for answer in self.answers.values())

    def check_nothing_left(self) -> None:
        """After the last answer: every block free or cached, no sequence, no grant, no claim."""
        self.time.run_for(60.0)
        for worker in self.workers.values():
            state = worker.scheduler.snapshot()
            held = state.num_held_blocks + state.num_reserved_blocks + state.num_quarantined_blocks
            if not worker.scheduler.is_idle or held or worker.grants:
                raise InternalFault(
                    f"{worker.worker_id} still has {state}, grants {worker.grants}\n{self.time.story()}"
                )
        if self.dispatcher.num_open:
            raise InternalFault(f"{self.dispatcher.num_open} requests are still open")

"""One scheduler, or two joined by a perfect link, driven by hand; all invariants hold after every event."""

from collections import deque
from collections.abc import Iterable
from typing import TypeVar

import msgspec

from disagg.core.endpoints import Endpoint, TransportKind
from disagg.core.formats import KvWire
from disagg.core.ids import Fence, HandoffId, Incarnation, RequestId, SequenceId, WorkerId
from disagg.core.request import EmittedToken, SamplingParams, SequenceSpec
from disagg.core.roles import FirstToken, HandoffMode, Numerics, PartialStart, Role, Task
from disagg.core.spans import KvLayout
from disagg.policy.batching import StepBudget
from disagg.policy.step_time import StepCosts
from disagg.protocol.cards import PoolCard, WorkerCard
from disagg.protocol.handoff import GrantKey, decode_grant_key
from disagg.protocol.messages import (
    AbortSequence,
    AnswerReservation,
    EmitTokens,
    ReportFailure,
    StartSequence,
    WorkerState,
)
from disagg.scheduler import events
from disagg.scheduler.actions import (
    Action,
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
from disagg.telemetry.metrics import MESSAGES_IGNORED
from disagg.testing.engine import FakeEngine

T = TypeVar("T")

LAYOUT = KvLayout(num_layers=3, num_kv_heads=1, head_dim=2, dtype="float32", block_size=4)
LAYER_TOKEN_BYTES = 16  # keys and values of one token in one layer
PEER = WorkerId("peer")
PEER_INCARNATION = Incarnation(77)
OWN = Incarnation(11)
VOCAB = 100
MAX_CONTEXT = 64


def sequence_id(number: int) -> SequenceId:
    return SequenceId(RequestId(Incarnation(5), number), 0)


def card(name: WorkerId, incarnation: Incarnation, role: Role, num_blocks: int = 16) -> WorkerCard:
    return WorkerCard(
        worker_id=name,
        incarnation=incarnation,
        role=role,
        pool=PoolCard("m", "digest", "t", Numerics.EXACT, VOCAB, MAX_CONTEXT),
        layout=LAYOUT,
        num_blocks=num_blocks,
        control_address=name,
        data_endpoints=(Endpoint(TransportKind.IN_PROCESS, name),),
    )


class Solo:
    """A scheduler whose peers, router, engine and transport are the test."""

    def __init__(
        self,
        role: Role,
        *,
        num_blocks: int = 16,
        budget: StepBudget | None = None,
        step_costs: StepCosts | None = None,
        mode: HandoffMode = HandoffMode.LAYERWISE,
        partial_start: PartialStart = PartialStart.AUTO,
        first_token: FirstToken = FirstToken.AT_ONCE,
        min_push_bytes: int = 0,
        max_push_bytes: int = 10**9,
        reserve_ahead: int = 2,
        answer_headroom: int = 64,
        lease_s: float = 9.0,
        name: WorkerId | None = None,
        incarnation: Incarnation = OWN,
        sure_token_id: int | None = None,
    ) -> None:
        self.config = SchedulerConfig(
            worker_id=name or WorkerId("own"),
            incarnation=incarnation,
            role=role,
            model_digest="digest",
            numerics=Numerics.EXACT,
            layout=LAYOUT,
            num_blocks=num_blocks,
            max_context=MAX_CONTEXT,
            vocab_size=VOCAB,
            budget=budget or StepBudget(chunk_tokens=64, mixed_chunk_tokens=8, max_running=16),
            step_costs=step_costs,
            handoff_mode=mode,
            partial_start=partial_start,
            first_token=first_token,
            min_push_bytes=min_push_bytes,
            max_push_bytes=max_push_bytes,
            lease_s=lease_s,
            answer_headroom=answer_headroom,
            retry_s=0.01,
            starvation_s=2.0,
            reserve_ahead=reserve_ahead,
            sure_token_id=sure_token_id,
        )
        self.scheduler = Scheduler(self.config)
        self.now_s = 100.0
        self.plan: StepPlan | None = None  # of the running step
        self.plans: list[StepPlan] = []
        self.reports: list[ReportFailure | EmitTokens] = []

    @property
    def card(self) -> WorkerCard:
        return card(self.config.worker_id, self.config.incarnation, self.config.role, self.config.num_blocks)

    @property
    def state(self) -> WorkerState:
        return self.scheduler.snapshot()

    @property
    def num_used(self) -> int:
        """Blocks that cannot be given to anybody now."""
        return self.config.num_blocks - self.state.num_free_blocks - self.state.num_cached_blocks

    def handle(self, event: events.Event) -> list[Action]:
        actions = self.scheduler.handle(event, self.now_s)
        self.scheduler.check_invariants()
        for action in actions:
            if isinstance(action, RunStep):
                assert self.plan is None, "two steps at once"
                self.plan = action.plan
                self.plans.append(action.plan)
            if isinstance(action, SendToRouter) and isinstance(action.message, ReportFailure | EmitTokens):
                self.reports.append(action.message)
        return actions

    def wait(self, seconds: float) -> list[Action]:
        """Let time pass."""
        self.now_s += seconds
        return self.handle(events.ClockTicked())

    def ignored(self, message: str) -> float:
        return self.scheduler.counters.get(MESSAGES_IGNORED, message)

    @property
    def failures(self) -> list[ReportFailure]:
        return [report for report in self.reports if isinstance(report, ReportFailure)]

    def tokens(self, number: int) -> list[EmittedToken]:
        """All that the router was told of one sequence."""
        messages = [report for report in self.reports if isinstance(report, EmitTokens)]
        return [t for message in messages for t in message.tokens if t.sequence_id == sequence_id(number)]

    # --- router ------------------------------------------------------------------------------------------------

    def start(self, number: int, task: Task, prompt: tuple[int, ...], max_tokens: int = 3) -> list[Action]:
        spec = SequenceSpec(sequence_id(number), prompt, SamplingParams(max_tokens))
        return self.start_spec(spec, task)

    def start_spec(
        self,
        spec: SequenceSpec,
        task: Task,
        *,
        attempt: int = 1,
        emitted: tuple[int, ...] = (),
        is_timed: bool = False,
    ) -> list[Action]:
        peer, incarnation = (None, None) if task is Task.WHOLE else (PEER, PEER_INCARNATION)
        message = StartSequence(spec, task, attempt, emitted, peer, incarnation, is_timed)
        return self.handle(events.RouterMessageReceived(message))

    def abort(self, number: int, attempt: int = 1) -> list[Action]:
        message = AbortSequence(sequence_id(number), attempt, "the client has gone")
        return self.handle(events.RouterMessageReceived(message))

    # --- engine ------------------------------------------------------------------------------------------------

    def layers(self, num_layers: int) -> list[Action]:
        assert self.plan is not None
        return self.handle(events.LayersComputed(self.plan.step_id, num_layers))

    def finish_step(self, token_id: int = 7, seconds: float = 0.01) -> list[Action]:
        """The running step ends; each row that samples gets the same token. A part carries the layers that have run."""
        assert self.plan is not None, "no step runs"
        plan, self.plan = self.plan, None
        tokens = tuple(
            EmittedToken(row.sequence_id, row.output_position, token_id)
            for row in plan.rows
            if row.sampling is not None
        )
        layers = plan.layers
        carried = plan.carried + bytes(range(layers.start, layers.stop)) if layers is not None else b""
        return self.handle(events.StepFinished(StepResult(plan.step_id, tokens, carried=carried), seconds))

    def compute_step(self, engine: FakeEngine) -> list[Action]:
        """The running step ends with what this engine makes of it."""
        assert self.plan is not None, "no step runs"
        plan, self.plan = self.plan, None
        return self.handle(events.StepFinished(engine.run_step(plan, lambda num_layers: None), 0.01))

    def finish_steps(self) -> None:
        """Until nothing is left to compute."""
        for _ in range(1000):
            if self.plan is None:
                return
            self.finish_step()
        raise AssertionError("1000 steps and still not done")

    # --- peer --------------------------------------------------------------------------------------------------

    def meet(self, role: Role) -> None:
        self.handle(events.PeerPaired(card(PEER, PEER_INCARNATION, role)))

    def hear(self, message: object) -> list[Action]:
        return self.handle(events.PeerMessageReceived(PEER, message))  # type: ignore[arg-type]

    def fence(self, attempt: int = 1) -> Fence:
        """Of a hand-off in the direction that this role has."""
        ends = (OWN, PEER_INCARNATION) if self.config.role is Role.PREFILL else (PEER_INCARNATION, OWN)
        return Fence(*ends, attempt)

    def answer(self, number: int, *, blocks: int = 4, first_missing: int = 0) -> AnswerReservation:
        """A grant of the peer's first blocks."""
        return AnswerReservation(
            handoff_id=handoff(number),
            fence=self.fence(),
            blocks=tuple(range(blocks)),  # type: ignore[arg-type]
            first_missing_token=first_missing,
            grant_key=GrantKey(handoff(number), self.fence()).encode(),
            num_blocks=16,
        )


def handoff(number: int, attempt: int = 1) -> HandoffId:
    return HandoffId(sequence_id(number), attempt)


def of(kind: type[T], actions: Iterable[object]) -> list[T]:
    return [action for action in actions if isinstance(action, kind)]


def to_peer(kind: type[T], actions: Iterable[object]) -> list[T]:
    return [action.message for action in of(SendToPeer, actions) if isinstance(action.message, kind)]


def emitted(actions: Iterable[object]) -> list[EmitTokens]:
    return [action.message for action in of(SendToRouter, actions) if isinstance(action.message, EmitTokens)]


class Duo:
    """A prefill and a decode worker on a link that loses nothing; messages and writes move when exchange() says."""

    def __init__(self, source: Solo, destination: Solo, wire: KvWire = KvWire.NATIVE) -> None:
        self.source = source
        self.destination = destination
        self._queue: deque[tuple[Solo, Action]] = deque()
        self.pushes: list[PushSpan] = []
        source.handle(events.PeerPaired(msgspec.structs.replace(destination.card, kv_wire=wire)))
        destination.handle(events.PeerPaired(msgspec.structs.replace(source.card, kv_wire=wire)))

    def start(self, number: int, tasks: tuple[Task, Task], prompt: tuple[int, ...], max_tokens: int = 3) -> None:
        """(source's, destination's) part of one sequence; decode hears first."""
        self.start_spec(SequenceSpec(sequence_id(number), prompt, SamplingParams(max_tokens)), tasks)

    def start_spec(self, spec: SequenceSpec, tasks: tuple[Task, Task]) -> None:
        ends = ((self.destination, tasks[1], self.source), (self.source, tasks[0], self.destination))
        for end, task, peer in ends:
            message = StartSequence(spec, task, 1, (), peer.config.worker_id, peer.config.incarnation)
            self.take(end, end.handle(events.RouterMessageReceived(message)))

    def take(self, owner: Solo, actions: list[Action]) -> None:
        self._queue.extend((owner, action) for action in actions)

    def exchange(self) -> None:
        """Carry out everything but steps, in order, until nothing is left."""
        while self._queue:
            owner, action = self._queue.popleft()
            other = self.destination if owner is self.source else self.source
            match action:
                case SendToPeer():
                    self.take(other, other.handle(events.PeerMessageReceived(owner.config.worker_id, action.message)))
                case PushSpan():
                    self.pushes.append(action)
                    self.take(other, other.handle(events.WriteLanded(action.handoff_id, action.span, None)))
                    finished = events.WriteFinished(action.handoff_id, action.number, None)
                    self.take(owner, owner.handle(finished))
                case RevokeGrant():
                    handoff_id = decode_grant_key(action.grant_key).handoff_id
                    self.take(owner, owner.handle(events.GrantFenced(handoff_id)))
                case StopPushes():
                    handoff_id = decode_grant_key(action.grant_key).handoff_id
                    self.take(owner, owner.handle(events.WritesStopped(handoff_id)))
                case _:
                    pass

    def step(self, owner: Solo, token_id: int = 7) -> None:
        self.take(owner, owner.finish_step(token_id))
        self.exchange()


def duo(wire: KvWire = KvWire.NATIVE, **source: object) -> Duo:
    """Blocks, budget and mode of the source may be given."""
    return Duo(
        Solo(Role.PREFILL, name=WorkerId("p"), incarnation=Incarnation(1), **source),  # type: ignore[arg-type]
        Solo(Role.DECODE, name=WorkerId("d"), incarnation=Incarnation(2)),
        wire,
    )


def with_fence(answer: AnswerReservation, attempt: int) -> AnswerReservation:
    """The same answer for another attempt."""
    fence = msgspec.structs.replace(answer.fence, attempt=attempt)
    return msgspec.structs.replace(answer, fence=fence)

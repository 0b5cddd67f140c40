"""One scheduler and a fake engine in virtual time: what tests of random work drive."""

import heapq
from collections.abc import Callable
from itertools import count

from disagg.core.ids import Incarnation, RequestId, SequenceId, WorkerId
from disagg.core.request import EmittedToken, SequenceSpec, finish_reason
from disagg.core.roles import Numerics, Role, Task
from disagg.core.spans import KvLayout
from disagg.policy.batching import StepBudget
from disagg.policy.step_time import StepCosts, StepShape
from disagg.protocol.messages import AbortSequence, EmitTokens, StartSequence
from disagg.scheduler import events
from disagg.scheduler.actions import Action, RunStep, SendToRouter
from disagg.scheduler.config import SchedulerConfig
from disagg.scheduler.engine import StepPlan, StepResult
from disagg.scheduler.scheduler import Scheduler
from disagg.testing.engine import FakeEngine

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=2, dtype="float32", block_size=4)
VOCAB = 1000
COSTS = StepCosts(0.01, 0.001, 1e-6, 0.0005, 1e-6)


def sequence_id(number: int) -> SequenceId:
    return SequenceId(RequestId(Incarnation(5), number), 0)


def shape_of(plan: StepPlan) -> StepShape:
    """A row of one token after the answer's first is a stream's; these tests read no prompt token by token."""
    shape = StepShape()
    for row in plan.rows:
        if is_stream(row.output_position, len(row.token_ids)):
            shape = StepShape(
                shape.num_prompt_tokens,
                shape.prompt_context,
                shape.num_streams + 1,
                shape.stream_context + row.position + 1,
            )
        else:
            shape = shape.add_chunk(row.position, len(row.token_ids))
    return shape


def is_stream(output_position: int, num_tokens: int) -> bool:
    return output_position > 0 and num_tokens == 1


class Site:
    """A scheduler, an engine whose steps cost what COSTS says, and a heap of what is to happen."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        budget: StepBudget | None = None,
        engine: FakeEngine | None = None,
        layout: KvLayout = LAYOUT,
        noise: Callable[[], float] = lambda: 1.0,
        checks: bool = True,
    ) -> None:
        self.scheduler = Scheduler(
            SchedulerConfig(
                worker_id=WorkerId("w"),
                incarnation=Incarnation(1),
                role=Role.MIXED,
                model_digest="m",
                numerics=Numerics.EXACT,
                layout=layout,
                num_blocks=num_blocks,
                max_context=100_000,
                vocab_size=VOCAB,
                budget=budget or StepBudget(32, 8, 8),
                answer_headroom=4,
            )
        )
        self.engine = engine
        self.now_s = 1000.0
        self.plan: StepPlan | None = None
        self.specs: dict[SequenceId, SequenceSpec] = {}
        self.arrived_s: dict[SequenceId, float] = {}
        self.first_s: dict[SequenceId, float] = {}
        self.answers: dict[SequenceId, list[int]] = {}
        self.ended: set[SequenceId] = set()
        self.aborted: set[SequenceId] = set()
        self.prompt_tokens: dict[str, int] = {}  # computed, by tenant
        self.on_step: Callable[[StepPlan, float], None] = lambda plan, duration_s: None
        self._noise = noise
        self._checks = checks
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def at(self, when_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (when_s, next(self._order), act))

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        while self._heap and not until():
            self.now_s, _, act = heapq.heappop(self._heap)
            act()

    def run_until_one_ends(self) -> None:
        before = len(self.ended)
        self.run(until=lambda: len(self.ended) > before)

    def start(self, spec: SequenceSpec) -> None:
        self.specs[spec.sequence_id] = spec
        self.arrived_s[spec.sequence_id] = self.now_s
        self.answers[spec.sequence_id] = []
        self._handle(events.RouterMessageReceived(StartSequence(spec, Task.WHOLE, 1)))

    def abort(self, sequence_id: SequenceId) -> None:
        if sequence_id not in self.ended:
            self.aborted.add(sequence_id)
        self._handle(events.RouterMessageReceived(AbortSequence(sequence_id, 1, "gone")))

    def _handle(self, event: events.Event) -> None:
        for action in self.scheduler.handle(event, self.now_s):
            self._do(action)
        if self._checks:
            self.scheduler.check_invariants()
            # Work conserving: nobody waits for a peer here, so with anybody there something can run.
            assert (self.plan is not None) == (not self.scheduler.is_idle)

    def _do(self, action: Action) -> None:
        if isinstance(action, RunStep):
            assert self.plan is None, "two steps at once"
            self.plan = action.plan
            duration_s = COSTS.predict(shape_of(action.plan)) * self._noise()
            self.on_step(action.plan, duration_s)
            self.at(self.now_s + duration_s, lambda: self._finish(duration_s))
        elif isinstance(action, SendToRouter) and isinstance(action.message, EmitTokens):
            for token in action.message.tokens:
                self.first_s.setdefault(token.sequence_id, self.now_s)
                assert token.position == len(self.answers[token.sequence_id])
                answer = self.answers[token.sequence_id]
                answer.append(token.token_id)
                if finish_reason(self.specs[token.sequence_id].sampling, token.token_id, len(answer)) is not None:
                    self.ended.add(token.sequence_id)

    def _finish(self, duration_s: float) -> None:
        plan, self.plan = self.plan, None
        assert plan is not None
        for row in plan.rows:
            if not is_stream(row.output_position, len(row.token_ids)):
                tenant = self.specs[row.sequence_id].tenant
                self.prompt_tokens[tenant] = self.prompt_tokens.get(tenant, 0) + len(row.token_ids)
        self._handle(events.StepFinished(self._result(plan), duration_s))

    def _result(self, plan: StepPlan) -> StepResult:
        if self.engine is not None:
            return self.engine.run_step(plan, lambda num_layers: None)
        rows = [row for row in plan.rows if row.sampling is not None]
        return StepResult(plan.step_id, tuple(EmittedToken(row.sequence_id, row.output_position, 7) for row in rows))

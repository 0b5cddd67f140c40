"""Two schedulers and a hostile link: the hand-off tables under loss, repetition, delay, reordering and death.

Much smaller than the virtual cluster, so that a hundred thousand schedules take minutes. There is no engine: a block's
contents are labels that say whose token of which layer lies where, so a byte in the wrong place is seen at once.
"""

import random
from collections.abc import Callable
from functools import partial

from disagg.core.endpoints import Endpoint, TransportKind
from disagg.core.errors import Failure, FailureKind, InternalFault
from disagg.core.ids import BlockId, HandoffId, Incarnation, RequestId, SequenceId, WorkerId
from disagg.core.request import EmittedToken, SamplingParams, SequenceSpec
from disagg.core.roles import HandoffMode, Numerics, Role, Task
from disagg.core.spans import KvLayout, Span
from disagg.policy.batching import StepBudget
from disagg.protocol.handoff import decode_grant_key
from disagg.protocol.messages import AbortSequence, PoolCard, StartSequence, WorkerCard
from disagg.scheduler import events
from disagg.scheduler.actions import Action, OpenGrant, PushSpan, RevokeGrant, RunStep, SendToPeer, StopPushes
from disagg.scheduler.config import SchedulerConfig
from disagg.scheduler.engine import StepPlan, StepResult
from disagg.scheduler.scheduler import Scheduler

NUM_LAYERS = 2
LEASE_S = 3.0
MAX_TURNS = 4000
ANSWER_TOKEN = 7  # what the model always says

Label = tuple[SequenceId, int]  # the prefix a token ends, and its place


class Side:
    """One worker: a scheduler, labelled blocks, the transport's view of grants and writes."""

    def __init__(self, name: str, role: Role, num_blocks: int, block_size: int, mode: HandoffMode, number: int) -> None:
        self.layout = KvLayout(NUM_LAYERS, 1, 1, "float32", block_size)
        self.card = WorkerCard(
            worker_id=WorkerId(name),
            incarnation=Incarnation(number),
            role=role,
            pool=PoolCard("m", "d", "t", Numerics.EXACT, vocab_size=100, max_context=64),
            layout=self.layout,
            num_blocks=num_blocks,
            control_address=name,
            data_endpoints=(Endpoint(TransportKind.IN_PROCESS, name),),
        )
        self.scheduler = Scheduler(
            SchedulerConfig(
                worker_id=self.card.worker_id,
                incarnation=self.card.incarnation,
                role=role,
                model_digest="d",
                numerics=Numerics.EXACT,
                layout=self.layout,
                num_blocks=num_blocks,
                max_context=64,
                vocab_size=100,
                budget=StepBudget(chunk_tokens=6, mixed_chunk_tokens=4, max_running=8),
                handoff_mode=mode,
                min_push_bytes=0,
                lease_s=LEASE_S,
                answer_headroom=2,
            )
        )
        self.contents: dict[tuple[int, BlockId, int], Label] = {}  # (layer, block, place) -> label
        self.grants: set[bytes] = set()
        self.landing: dict[bytes, int] = {}  # begun writes under a key
        self.stopped: set[bytes] = set()
        self.running: StepPlan | None = None

    def write(self, blocks: tuple[BlockId, ...], span: Span, labels: dict[tuple[int, int], Label]) -> None:
        for layer in range(span.layer_start, span.layer_stop):
            for token in range(span.token_start, span.token_stop):
                index, place = divmod(token, self.layout.block_size)
                self.contents[layer, blocks[index], place] = labels[layer, token]

    def read(self, blocks: tuple[BlockId, ...], span: Span) -> dict[tuple[int, int], Label]:
        found = {}
        for layer in range(span.layer_start, span.layer_stop):
            for token in range(span.token_start, span.token_stop):
                index, place = divmod(token, self.layout.block_size)
                found[layer, token] = self.contents.get((layer, blocks[index], place), (_NOBODY, -1))
        return found


_NOBODY = SequenceId(RequestId(Incarnation(0), -1), 0)


class HandoffWorld:
    """One seeded schedule. run() raises InternalFault when a rule breaks."""

    def __init__(self, seed: int) -> None:
        rng = self.random = random.Random(seed)
        mode = rng.choice(list(HandoffMode))
        sizes = (rng.choice([2, 4]), rng.choice([2, 4]))
        self.source = Side("p", Role.PREFILL, rng.randint(6, 16), sizes[0], mode, 1)
        self.target = Side("d", Role.DECODE, rng.randint(8, 20), sizes[1], mode, 2)
        self.now_s = 0.0
        self.num_handed_over = 0
        self._loss, self._repeat = rng.choice([0.0, 0.0, 0.1]), rng.choice([0.0, 0.0, 0.2])
        self._corrupt = rng.choice([0.0, 0.1])
        self._pending: list[Callable[[], None]] = []
        self._prompts: dict[SequenceId, tuple[int, ...]] = {}
        self._handle(self.source, events.PeerPaired(self.target.card))
        self._handle(self.target, events.PeerPaired(self.source.card))

    def run(self) -> None:
        rng = self.random
        for number in range(rng.randint(1, 4)):
            self._start(number)
        for _ in range(rng.randint(10, 150)):
            self._turn()
            if rng.random() < 0.03:
                self._disturb()
        self._settle()

    def _turn(self) -> None:
        """Something that is due happens, in any order; now and then time passes."""
        rng = self.random
        if self._pending and rng.random() < 0.95:
            self._pending.pop(rng.randrange(len(self._pending)))()
        else:
            self._pass_time(rng.choice([0.001, 0.01, 0.5]))

    def _pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        for side in (self.source, self.target):
            if side.scheduler.next_wake_s() <= self.now_s:
                self._handle(side, events.ClockTicked())

    def _settle(self) -> None:
        """No more faults: what is under way arrives, leases end, and nothing is left."""
        self._loss = self._repeat = self._corrupt = 0.0
        for _ in range(MAX_TURNS):
            if self._pending:
                self._turn()
            elif self.source.scheduler.is_idle and self.target.scheduler.is_idle:
                break
            else:
                self._pass_time(LEASE_S / 2)
        for side in (self.source, self.target):
            state = side.scheduler.snapshot()
            used = state.num_held_blocks + state.num_reserved_blocks + state.num_quarantined_blocks
            if used or side.grants or not side.scheduler.is_idle:
                raise InternalFault(f"{side.card.worker_id} still has {state}, grants {len(side.grants)}")

    # --- requests and faults -----------------------------------------------------------------------------------

    def _start(self, number: int) -> None:
        rng = self.random
        sequence_id = SequenceId(RequestId(Incarnation(9), number), 0)
        shared = rng.choice([0, 4, 8])
        prompt = tuple([1] * shared + [rng.randrange(2, 100) for _ in range(rng.randint(1, 10))])
        self._prompts[sequence_id] = prompt
        spec = SequenceSpec(sequence_id, prompt, SamplingParams(max_tokens=rng.randint(1, 4), temperature=0.0))
        ends = ((self.target, self.source, Task.DECODE), (self.source, self.target, Task.PREFILL))
        for side, peer, task in ends:
            start = StartSequence(spec, task, 1, (), peer.card.worker_id, peer.card.incarnation)
            self._send(side, events.RouterMessageReceived(start))

    def _disturb(self) -> None:
        rng = self.random
        side = rng.choice([self.source, self.target])
        other = self.target if side is self.source else self.source
        sequence_id = rng.choice(sorted(self._prompts))
        kind = rng.choice(["abort one end", "abort both", "part", "step fails"])
        if kind == "part":
            for one, gone in ((side, other), (other, side)):
                lost = events.PeerLost(gone.card.worker_id, gone.card.incarnation, "cut")
                self._handle(one, lost)
                self._handle(one, events.PeerPaired(gone.card))
        elif kind == "step fails" and side.running is not None:
            from_step = side.running.step_id
            side.running = None
            failure = Failure(FailureKind.INTERNAL, "scripted")
            self._handle(side, events.StepFailed(from_step, failure))
        else:
            ends = (side,) if kind == "abort one end" else (side, other)
            for one in ends:
                self._send(one, events.RouterMessageReceived(AbortSequence(sequence_id, 1, "scripted")))

    # --- the link ----------------------------------------------------------------------------------------------

    def _send(self, side: Side, event: events.Event) -> None:
        """On its way: may be lost or come twice, and passes others."""
        if self.random.random() < self._loss:
            return
        self._pending.append(lambda: self._handle(side, event))
        if self.random.random() < self._repeat:
            self._pending.append(lambda: self._handle(side, event))

    def _handle(self, side: Side, event: events.Event) -> None:
        for action in side.scheduler.handle(event, self.now_s):
            self._perform(side, action)
        side.scheduler.check_invariants()

    def _perform(self, side: Side, action: Action) -> None:
        other = self.target if side is self.source else self.source
        match action:
            case SendToPeer():
                self._send(other, events.PeerMessageReceived(side.card.worker_id, action.message))
            case RunStep():
                side.running = action.plan
                self._compute(side, action.plan)
            case OpenGrant():
                side.grants.add(action.grant_key)
            case RevokeGrant():
                side.grants.discard(action.grant_key)
                self._pending.append(lambda: self._fence(side, action.grant_key))
            case PushSpan():
                self._pending.append(lambda: self._begin(side, other, action))
            case StopPushes():
                side.stopped.add(action.grant_key)
                handoff_id = decode_grant_key(action.grant_key).handoff_id
                self._pending.append(lambda: self._handle(side, events.WritesStopped(handoff_id)))

    def _fence(self, side: Side, key: bytes) -> None:
        if side.landing.get(key):  # a begun write may still touch the blocks
            self._pending.append(lambda: self._fence(side, key))
        else:
            self._handle(side, events.GrantFenced(decode_grant_key(key).handoff_id))

    def _begin(self, side: Side, other: Side, push: PushSpan) -> None:
        if push.grant_key in side.stopped or push.grant_key not in other.grants:
            self._finish(side, push, "stopped or not granted")
            return
        other.landing[push.grant_key] = other.landing.get(push.grant_key, 0) + 1
        self._pending.append(lambda: self._land(side, other, push))

    def _land(self, side: Side, other: Side, push: PushSpan) -> None:
        other.landing[push.grant_key] -= 1
        if push.grant_key in side.stopped:  # its blocks may be somebody else's by now: the transport reads no more
            self._finish(side, push, "stopped")
            return
        is_corrupt = self.random.random() < self._corrupt
        labels = side.read(push.source_blocks, push.span)
        other.write(push.destination_blocks, push.span, dict.fromkeys(labels, (_NOBODY, -2)) if is_corrupt else labels)
        failure = "checksum" if is_corrupt else None
        if push.grant_key in other.grants:
            self._handle(other, events.WriteLanded(push.handoff_id, push.span, failure))
        self._finish(side, push, failure)

    def _finish(self, side: Side, push: PushSpan, failure: str | None) -> None:
        event = events.WriteFinished(push.handoff_id, push.number, failure)
        self._pending.append(lambda: self._handle(side, event))

    # --- the engine --------------------------------------------------------------------------------------------

    def _compute(self, side: Side, plan: StepPlan) -> None:
        for layers in range(1, NUM_LAYERS + 1):
            self._pending.append(partial(self._layer, side, plan, layers))

    def _layer(self, side: Side, plan: StepPlan, layers: int) -> None:
        """Layers finish in order whatever the dice say; the last one ends the step."""
        if side.running is not plan:
            return
        for layer in range(layers):
            for row in plan.rows:
                stop = row.position + len(row.token_ids)
                span = Span(row.position, stop, layer, layer + 1)
                labels = {(layer, token): self._label(row.sequence_id, token) for token in range(row.position, stop)}
                side.write(row.block_table, span, labels)
        if layers < NUM_LAYERS:
            self._handle(side, events.LayersComputed(plan.step_id, layers))
            return
        side.running = None
        self._check_contents(side, plan)
        tokens = tuple(
            EmittedToken(row.sequence_id, row.output_position, ANSWER_TOKEN)
            for row in plan.rows
            if row.sampling is not None
        )
        self._handle(side, events.StepFinished(StepResult(plan.step_id, tokens), 0.0))

    def _label(self, sequence_id: SequenceId, token: int) -> Label:
        """Equal beginnings share blocks, the answer's tokens too, so a token is labelled by the prefix it ends."""
        prompt = self._prompts[sequence_id]
        prefix = (*prompt, *[ANSWER_TOKEN] * (token + 1 - len(prompt)))[: token + 1]
        return SequenceId(RequestId(Incarnation(hash(prefix) & (2**62 - 1)), 0), 0), token

    def _check_contents(self, side: Side, plan: StepPlan) -> None:
        """Attention reads every earlier token: each must be where the block table says."""
        for row in plan.rows:
            self.num_handed_over += side is self.target and row.output_position == 1
            span = Span(0, row.position + len(row.token_ids), 0, NUM_LAYERS)
            for (layer, token), label in side.read(row.block_table, span).items():
                if label != self._label(row.sequence_id, token):
                    who = HandoffId(row.sequence_id, 1)
                    raise InternalFault(f"{side.card.worker_id} {who}: layer {layer} token {token} holds {label}")

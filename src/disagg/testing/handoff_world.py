"""Two schedulers and a hostile link: the hand-off tables under loss, repetition, delay, reordering and death.

Much smaller than the virtual cluster, so that a hundred thousand schedules take minutes. There is no engine: a block's
contents are labels that say whose token of which layer lies where, so a byte in the wrong place is seen at once.
In some worlds the heads are spread over ranks: then each rank's part of a push begins, lands and fails by itself.
"""

import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

from disagg.core.endpoints import Endpoint, TransportKind
from disagg.core.errors import Failure, FailureKind, InternalFault
from disagg.core.ids import BlockId, HandoffId, Incarnation, RequestId, SequenceId, WorkerId
from disagg.core.request import EmittedToken, SamplingParams, SequenceSpec
from disagg.core.roles import HandoffMode, Numerics, Role, Task
from disagg.core.spans import KvLayout, Span
from disagg.kvcache.conversion import rank_pairs
from disagg.policy.batching import StepBudget
from disagg.protocol.cards import PoolCard, WorkerCard
from disagg.protocol.handoff import decode_grant_key
from disagg.protocol.messages import AbortSequence, StartSequence
from disagg.scheduler import events
from disagg.scheduler.actions import Action, OpenGrant, PushSpan, RevokeGrant, RunStep, SendToPeer, StopPushes
from disagg.scheduler.config import SchedulerConfig
from disagg.scheduler.engine import StepPlan, StepResult
from disagg.scheduler.scheduler import Scheduler

NUM_LAYERS = 2
LEASE_S = 3.0
STEP_S = 1e-4  # as the engine says; what is on its way takes longer, so first steps begin early
MAX_TURNS = 4000
ANSWER_TOKEN = 7  # what the model always says

Label = tuple[SequenceId, int]  # the prefix a token ends, and its place
Cell = tuple[int, int, int]  # layer, token, head


class Side:
    """One worker: a scheduler, labelled blocks, the transport's view of grants and writes."""

    def __init__(
        self, name: str, role: Role, num_blocks: int, layout: KvLayout, mode: HandoffMode, number: int
    ) -> None:
        self.layout = layout
        self.card = WorkerCard(
            worker_id=WorkerId(name),
            incarnation=Incarnation(number),
            role=role,
            pool=PoolCard("m", "d", "t", Numerics.EXACT, vocab_size=100, max_context=64),
            layout=self.layout,
            num_blocks=num_blocks,
            control_address=name,
            data_endpoints=tuple(
                Endpoint(TransportKind.IN_PROCESS, name, rank=rank) for rank in range(layout.num_ranks)
            ),
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
        self.contents: dict[tuple[int, BlockId, int, int], Label] = {}  # (layer, block, place, head) -> label
        self.grants: set[bytes] = set()
        self.landing: dict[bytes, int] = {}  # begun writes under a key
        self.landed: set[tuple[bytes, int, Span]] = set()  # parts of pushes; the transport takes none of them twice
        self.stopped: set[bytes] = set()
        self.running: StepPlan | None = None

    def write(self, blocks: tuple[BlockId, ...], span: Span, labels: dict[Cell, Label]) -> None:
        for layer, token, head in self.cells(span):
            index, place = divmod(token, self.layout.block_size)
            self.contents[layer, blocks[index], place, head] = labels[layer, token, head]

    def read(self, blocks: tuple[BlockId, ...], span: Span) -> dict[Cell, Label]:
        found = {}
        for layer, token, head in self.cells(span):
            index, place = divmod(token, self.layout.block_size)
            found[layer, token, head] = self.contents.get((layer, blocks[index], place, head), (_NOBODY, -1))
        return found

    def cells(self, span: Span) -> Iterator[Cell]:
        span = self.layout.clipped(span)
        layers, tokens = range(span.layer_start, span.layer_stop), range(span.token_start, span.token_stop)
        return product(layers, tokens, range(span.head_start, span.head_stop))


_NOBODY = SequenceId(RequestId(Incarnation(0), -1), 0)


def _layouts(one_size: int, other_size: int, rng: random.Random) -> tuple[KvLayout, KvLayout]:
    """Of source and target: in half of all worlds of one rank each."""
    ranks = rng.choice([(1, 1), (1, 1), (1, 1), (1, 2), (2, 1), (2, 2)])
    sizes = zip((one_size, other_size), ranks, strict=True)
    one, other = (KvLayout(NUM_LAYERS, max(ranks), 1, "float32", size, head_shards=shards) for size, shards in sizes)
    return one, other


class HandoffWorld:
    """One seeded schedule. run() raises InternalFault when a rule breaks."""

    def __init__(self, seed: int) -> None:
        rng = self.random = random.Random(seed)
        mode = rng.choice(list(HandoffMode))
        one, other = _layouts(rng.choice([2, 4]), rng.choice([2, 4]), random.Random(f"ranks {seed}"))
        self.source = Side("p", Role.PREFILL, rng.randint(6, 16), one, mode, 1)
        self.target = Side("d", Role.DECODE, rng.randint(8, 20), other, mode, 2)
        self.now_s = 0.0
        self.num_handed_over = 0
        self.num_parts = 0  # of steps that began before all KV was there
        self._loss, self._repeat = rng.choice([0.0, 0.0, 0.1]), rng.choice([0.0, 0.0, 0.2])
        self._corrupt = rng.choice([0.0, 0.1])
        self._pending: list[Callable[[], None]] = []
        self._parts: dict[tuple[HandoffId, int], list[str | None]] = {}  # what has become of a push's parts so far
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
                self._parts[action.handoff_id, action.number] = []
                for _, _, part in rank_pairs(side.layout, other.layout, action.span):
                    self._pending.append(partial(self._begin, side, other, action, part))
            case StopPushes():
                side.stopped.add(action.grant_key)
                handoff_id = decode_grant_key(action.grant_key).handoff_id
                self._pending.append(lambda: self._handle(side, events.WritesStopped(handoff_id)))

    def _fence(self, side: Side, key: bytes) -> None:
        if side.landing.get(key):  # a begun write may still touch the blocks
            self._pending.append(lambda: self._fence(side, key))
        else:
            self._handle(side, events.GrantFenced(decode_grant_key(key).handoff_id))

    def _begin(self, side: Side, other: Side, push: PushSpan, part: Span) -> None:
        if push.grant_key in side.stopped or push.grant_key not in other.grants:
            self._finish(side, push, "stopped or not granted")
            return
        other.landing[push.grant_key] = other.landing.get(push.grant_key, 0) + 1
        self._pending.append(lambda: self._land(side, other, push, part))

    def _land(self, side: Side, other: Side, push: PushSpan, part: Span) -> None:
        other.landing[push.grant_key] -= 1
        if push.grant_key in side.stopped:  # its blocks may be somebody else's by now: the transport reads no more
            self._finish(side, push, "stopped")
            return
        is_corrupt = self.random.random() < self._corrupt
        name = (push.grant_key, push.number, part)
        if name in other.landed:
            self._finish(side, push, None)
            return
        if not is_corrupt:
            other.landed.add(name)
        labels = side.read(push.source_blocks, part)
        other.write(push.destination_blocks, part, dict.fromkeys(labels, (_NOBODY, -2)) if is_corrupt else labels)
        failure = "checksum" if is_corrupt else None
        if push.grant_key in other.grants:
            self._handle(other, events.WriteLanded(push.handoff_id, part, failure))
        self._finish(side, push, failure)

    def _finish(self, side: Side, push: PushSpan, failure: str | None) -> None:
        """One part has ended; the last one's end is the push's."""
        ended = self._parts[push.handoff_id, push.number]
        ended.append(failure)
        if len(ended) < len(rank_pairs(self.source.layout, self.target.layout, push.span)):
            return
        failure = next((each for each in ended if each is not None), None)
        event = events.WriteFinished(push.handoff_id, push.number, failure)
        self._pending.append(lambda: self._handle(side, event))

    # --- the engine --------------------------------------------------------------------------------------------

    def _compute(self, side: Side, plan: StepPlan) -> None:
        start, stop = _layers_of(plan)
        for layers in range(start + 1, stop + 1):
            self._pending.append(partial(self._layer, side, plan, layers))

    def _layer(self, side: Side, plan: StepPlan, layers: int) -> None:
        """Layers finish in order whatever the dice say; the last one ends the step."""
        if side.running is not plan:
            return
        start, stop = _layers_of(plan)
        for layer in range(start, layers):
            for row in plan.rows:
                span = Span(row.position, row.position + len(row.token_ids), layer, layer + 1)
                labels = {cell: self._label(row.sequence_id, cell[1]) for cell in side.cells(span)}
                side.write(row.block_table, span, labels)
        if layers < stop:
            self._handle(side, events.LayersComputed(plan.step_id, layers))
            return
        side.running = None
        self._check_contents(side, plan)
        self.num_parts += plan.layers is not None
        tokens = tuple(
            EmittedToken(row.sequence_id, row.output_position, ANSWER_TOKEN)
            for row in plan.rows
            if row.sampling is not None
        )
        self._handle(side, events.StepFinished(StepResult(plan.step_id, tokens), STEP_S))

    def _label(self, sequence_id: SequenceId, token: int) -> Label:
        """Equal beginnings share blocks, the answer's tokens too, so a token is labelled by the prefix it ends."""
        prompt = self._prompts[sequence_id]
        prefix = (*prompt, *[ANSWER_TOKEN] * (token + 1 - len(prompt)))[: token + 1]
        return SequenceId(RequestId(Incarnation(hash(prefix) & (2**62 - 1)), 0), 0), token

    def _check_contents(self, side: Side, plan: StepPlan) -> None:
        """Attention reads every earlier token in the layers that run: each must be where the block table says."""
        start, stop = _layers_of(plan)
        for row in plan.rows:
            self.num_handed_over += side is self.target and row.output_position == 1 and row.sampling is not None
            span = Span(0, row.position + len(row.token_ids), start, stop)
            for (layer, token, _), label in side.read(row.block_table, span).items():
                if label != self._label(row.sequence_id, token):
                    who = HandoffId(row.sequence_id, 1)
                    raise InternalFault(f"{side.card.worker_id} {who}: layer {layer} token {token} holds {label}")


def _layers_of(plan: StepPlan) -> tuple[int, int]:
    return (plan.layers.start, plan.layers.stop) if plan.layers is not None else (0, NUM_LAYERS)

"""What the parts of one worker's scheduler share: blocks, sequences, peers, counters, and the actions so far."""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator

from disagg.core.errors import InternalFault
from disagg.core.ids import BlockId, HandoffId, RequestId, SequenceId, WorkerId
from disagg.core.request import EmittedToken
from disagg.kvcache.block_hash import BlockHash, root_hash
from disagg.kvcache.block_pool import BlockState
from disagg.kvcache.kv_cache import KvCache
from disagg.policy.batching import order_prompts
from disagg.policy.fairness import TenantService
from disagg.policy.link_rate import LinkRate
from disagg.policy.partial_start import PartialOutcome
from disagg.policy.step_time import StepTimes
from disagg.protocol.cards import WorkerCard
from disagg.protocol.lifecycle import SequenceState, SequenceTrigger
from disagg.protocol.messages import WorkerToWorker
from disagg.scheduler.actions import Action, SendToPeer
from disagg.scheduler.begun_steps import BegunSteps
from disagg.scheduler.config import SchedulerConfig
from disagg.scheduler.first_tokens import FirstTokens
from disagg.scheduler.leases import Leases
from disagg.scheduler.outgoing import Outgoing
from disagg.scheduler.reports import prompt_report
from disagg.scheduler.sequence import Sequence
from disagg.scheduler.sequence_table import SequenceTable
from disagg.scheduler.stage_clocks import StageClocks
from disagg.scheduler.standing import Standing
from disagg.telemetry.counters import Counters
from disagg.telemetry.metrics import MESSAGES_IGNORED, OUTPUT_TOKENS, PREFIX_TOKENS_HIT, PREFIX_TOKENS_LOOKED_UP
from disagg.telemetry.stages import Stage

MAX_REMEMBERED = 4096  # ended attempts


class SchedulerState:
    """Changed by the scheduler's parts only, inside one handle() call at a time."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.is_draining = False
        self.cache = KvCache(config.num_blocks, config.layout.block_size)
        self.counters = Counters()
        self.begun = BegunSteps(self.counters)
        # In order of arrival. An attempt that was dropped stays until nothing uses its blocks any more.
        self.sequences: dict[HandoffId, Sequence] = {}
        self.leases = Leases(self.sequences)
        self.peers: dict[WorkerId, WorkerCard] = {}
        self.links: dict[WorkerId, LinkRate] = {}  # to paired peers that were measured or that KV was sent to
        self.now_s = 0.0
        self.step_times = StepTimes(config.step_costs)
        self.tenants = TenantService()
        self.table = SequenceTable()
        self.standing = Standing(config.sure_token_id or 0)
        self.left_standing: list[Sequence] = []  # while a step runs that they are in
        self._live: dict[SequenceId, Sequence] = {}
        # So that a late repeat starts nothing, and a source that asks hears whether its hand-off was taken.
        self._ended: OrderedDict[HandoffId, bool] = OrderedDict()
        self._has_freed = False
        self._outgoing = Outgoing()
        self.stages = StageClocks(self._outgoing)
        self.first_tokens = FirstTokens(self._outgoing, self.stages)

    # --- sequences ---------------------------------------------------------------------------------------------

    def live(self, sequence_id: SequenceId) -> Sequence | None:
        """The attempt that is under way."""
        return self._live.get(sequence_id)

    def is_at_work_on(self, request_id: RequestId) -> bool:
        """Whether some choice of this request is under way."""
        return any(sequence_id.request_id == request_id for sequence_id in self._live)

    def has_taken(self, attempt_id: HandoffId) -> bool:
        """Whether the KV of an attempt that has ended here had come from its peer, whole."""
        return self._ended.get(attempt_id, False)

    def has_seen(self, attempt_id: HandoffId) -> bool:
        return attempt_id in self.sequences or attempt_id in self._ended

    def add(self, sequence: Sequence) -> None:
        self.sequences[sequence.attempt_id] = sequence
        self._live[sequence.sequence_id] = sequence
        self.table.put(sequence)
        self._expect_hits(sequence)
        self._count_open(sequence)

    def end_attempt(self, sequence: Sequence) -> None:
        """It was dropped: another attempt may begin here, whatever still uses its blocks."""
        self._live.pop(sequence.sequence_id, None)
        self._has_freed = True

    def remove(self, sequence: Sequence, *, was_taken: bool) -> None:
        """It has ended, and nothing uses its blocks. was_taken: its KV had come from its peer, whole."""
        self._has_freed = True
        self.stages.stop(sequence)
        self.cache.release(sequence.blocks)
        sequence.blocks = ()
        del self.sequences[sequence.attempt_id]
        self.table.take_out(sequence)
        if self._live.get(sequence.sequence_id) is sequence:
            del self._live[sequence.sequence_id]
        self._ended[sequence.attempt_id] = was_taken
        if len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)

    def move(self, sequence: Sequence, trigger: SequenceTrigger) -> None:
        """Fire a trigger of the sequence's table. Nothing else changes the state of a sequence that was added."""
        if sequence.state is SequenceState.WAITING:
            self.table.forget_refusal(sequence)
        elif sequence in self.standing:
            self.recall(sequence)
            self.left_standing.append(sequence)
        self.table.take_out(sequence)
        sequence.machine.fire(trigger)
        self.table.put(sequence)
        self._count_open(sequence)

    def recall(self, sequence: Sequence) -> None:
        """A stream stands no longer."""
        num_tokens = self.standing.leave(sequence)
        self.table.recall(sequence)
        self.counters.add(OUTPUT_TOKENS, num_tokens, label=sequence.task.value)

    def preempt(self, sequence: Sequence) -> None:
        """A stream gives up its blocks and starts over; from now on it waits for room like one that was refused it."""
        self.begun.give_up(sequence, PartialOutcome.DROPPED)
        self.cache.release(sequence.blocks)
        sequence.blocks = ()
        sequence.start_over()
        self.stages.enter(sequence, Stage.PREFILL_QUEUE, self.now_s)
        self.move(sequence, SequenceTrigger.PREEMPTED)
        self._expect_hits(sequence)
        self.refuse(sequence)

    def refuse(self, sequence: Sequence) -> None:
        """There was no room for a waiting sequence."""
        self.table.refuse(sequence, self.now_s)

    def in_reading_order(self, sequences: Iterable[Sequence]) -> Iterator[Sequence]:
        """The order in which prompts are to run; lazily. Take in what changes it before asking again."""
        by_id = {sequence.sequence_id: sequence for sequence in sequences}
        if len(by_id) < 2:
            return iter(by_id.values())
        work = (sequence.prompt_work for sequence in by_id.values())
        services = self.tenants.services(self.now_s)
        ordered = order_prompts(work, self.now_s, costs=self.step_times.costs, services=services)
        return (by_id[item.sequence_id] for item in ordered)

    def _count_open(self, sequence: Sequence) -> None:
        awaits_turn = sequence.awaits_turn
        if awaits_turn and not sequence.is_counted:
            self.tenants.arrive(sequence.spec.tenant, self.now_s)
        elif sequence.is_counted and not awaits_turn:
            self.tenants.leave(sequence.spec.tenant)
        sequence.is_counted = awaits_turn

    # --- prefixes ----------------------------------------------------------------------------------------------

    def root_of(self, salt: str, form: str = "") -> BlockHash:
        """Where the chains of block hashes of sequences with this salt begin; form: what their KV has lost."""
        return root_hash(self.config.model_digest, self.config.numerics.value, salt, form)

    def extend_hashes(self, sequence: Sequence, num_tokens: int) -> list[BlockHash]:
        """The sequence's own hashes, at least those of the full blocks of its first num_tokens tokens."""
        known = len(sequence.hashes) * self.cache.block_size
        return self.cache.append_hashes(sequence.hashes, sequence.token_ids(known, num_tokens), sequence.root)

    def count_lookup(self, sequence: Sequence) -> None:
        """A sequence got its blocks: some of its tokens were in the index."""
        label = sequence.task.value
        self.counters.add(PREFIX_TOKENS_LOOKED_UP, sequence.num_to_read, label=label)
        self.counters.add(PREFIX_TOKENS_HIT, sequence.num_cached, label=label)

    def _expect_hits(self, sequence: Sequence) -> None:
        if sequence.reads_here:
            hashes = self.extend_hashes(sequence, sequence.num_to_read)
            sequence.num_expected = self.cache.num_matching_tokens(hashes, sequence.max_cached_tokens)

    # --- what the loop will do ---------------------------------------------------------------------------------

    def act(self, *actions: Action) -> None:
        self._outgoing.act(*actions)

    def tell(self, peer: WorkerId, message: WorkerToWorker) -> None:
        self._outgoing.act(SendToPeer(peer, message))

    def emit_tokens(self, tokens: Collection[EmittedToken]) -> None:
        self._outgoing.emit(tokens)

    def report_prompt(self, sequence: Sequence) -> None:
        self._outgoing.report_prompt(prompt_report(sequence, self.now_s))

    def take_actions(self) -> list[Action]:
        """What is to be done since the last call, in order."""
        return self._outgoing.take()

    def take_has_freed(self) -> bool:
        """Whether a sequence has ended or been dropped since the last call."""
        has_freed, self._has_freed = self._has_freed, False
        return has_freed

    def ignore(self, message: object) -> None:
        """Late, repeated or unknown: no effect, one counter."""
        self.counters.add(MESSAGES_IGNORED, label=type(message).__name__)

    def observe_link(self, peer: WorkerId, num_bytes: int, sent_s: float) -> None:
        """A push to a peer is verified."""
        if peer in self.peers:
            self.link_to(peer).observe(num_bytes, sent_s, self.now_s)

    def link_to(self, peer: WorkerId) -> LinkRate:
        """What is known of the way to a paired peer; begun here."""
        return self.links.setdefault(peer, LinkRate())

    # --- room --------------------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks to compute or receive into."""
        return len(self.sequences) - self.table.num_in_state(SequenceState.WAITING) + len(self.table.asking)

    def is_full(self) -> bool:
        """Whether as many run as may."""
        return self.num_running >= self.config.budget.max_running

    @property
    def num_spare_blocks(self) -> int:
        """Blocks to leave at an admission: running streams grow, and preempting them would cost more than waiting."""
        return self.table.num_in_state(SequenceState.DECODING)

    def would_overtake(self, sequence: Sequence) -> bool:
        """Somebody older has been refused room for too long to be overtaken again, by a tenant that has had as much."""
        return self.table.would_overtake(sequence, self.now_s - self.config.starvation_s, self.tenants.had)

    # --- rules -------------------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        self.cache.check_invariants()
        self.step_times.check_invariants()
        self.tenants.check_invariants()
        self.table.check_invariants(self.sequences.values())
        self.leases.check_invariants(self.now_s)
        self.begun.check_invariants()
        self.stages.check_invariants(self.sequences.values())
        self.first_tokens.check_invariants()
        self.standing.check_invariants()
        begun = set(self.begun)
        for attempt_id, sequence in self.sequences.items():
            sequence.check_invariants(self.cache.block_size)
            if sequence.source is not None:
                sequence.source.check_invariants()
            if sequence.destination is not None:
                sequence.destination.check_invariants()
            if (sequence.partial is not None) != (sequence in begun):
                raise InternalFault(f"{attempt_id} has begun its first step and is not listed")
            if sequence.is_counted != sequence.awaits_turn:
                raise InternalFault(f"{attempt_id} is {sequence.state} and counted otherwise")
            if sequence.is_live != (self._live.get(attempt_id.sequence_id) is sequence):
                raise InternalFault(f"{attempt_id} is {sequence.state} and listed otherwise")
        for peer, link in self.links.items():
            link.check_invariants()
            if peer not in self.peers:
                raise InternalFault(f"the rate of the link to {peer} outlives its pairing")
        self._check_use_of_blocks()

    def _check_use_of_blocks(self) -> None:
        """Every block has as many users as the pool counts, and is in the state that its hand-off says."""
        pool = self.cache.pool
        users = [0] * pool.num_blocks
        apart: dict[BlockState, set[BlockId]] = {BlockState.RESERVED: set(), BlockState.QUARANTINED: set()}
        for sequence in self.sequences.values():
            held = [*sequence.blocks]
            if sequence.destination is not None:
                mine, others = sequence.destination.blocks_in_use()
                held += mine
                for kind, kept in others.items():
                    apart[kind].update(kept)
            for block in held:
                users[block] += 1
        if users != pool.refcounts():
            raise InternalFault(f"refcounts {pool.refcounts()} differ from the sequences' use {users}")
        for state, blocks in apart.items():
            if blocks != pool.blocks_in(state):
                raise InternalFault(f"{state} blocks are {pool.blocks_in(state)}, hand-offs say {blocks}")

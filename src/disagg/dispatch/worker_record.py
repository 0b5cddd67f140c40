"""What a router knows of one registered worker, and what it has promised there."""

from disagg.core.errors import Failure, InternalFault
from disagg.core.ids import Incarnation, SequenceId, WorkerId
from disagg.policy.routing import WorkerView
from disagg.protocol.cards import WorkerCard
from disagg.protocol.messages import WorkerState


class WorkerRecord:
    """One registered incarnation. Sums are kept, and the view until something changes: every request asks for all."""

    def __init__(self, card: WorkerCard, changed: set[WorkerId]) -> None:
        """changed: where it puts itself whenever routing would see it otherwise than before."""
        self.card = card
        self.state = WorkerState()
        self.is_draining = False
        self._changed = changed
        self.partners: dict[WorkerId, Incarnation] = {}
        self.refusals: dict[WorkerId, Failure] = {}
        self.claimed_blocks: dict[SequenceId, int] = {}
        self.waiting_tokens: dict[SequenceId, int] = {}
        self._num_claimed_blocks = 0
        self._num_waiting_tokens = 0
        self._num_only_waiting = 0  # sequences that wait here and are written elsewhere
        self._live_partners: frozenset[WorkerId] | None = None
        self._view: WorkerView | None = None

    def claim(self, sequence_id: SequenceId, num_blocks: int) -> None:
        """Promise room for whole answers; what was promised for this sequence before counts no more."""
        if sequence_id in self.claimed_blocks:
            self._num_claimed_blocks -= self.claimed_blocks[sequence_id]
        else:
            self.release(sequence_id)
        self.claimed_blocks[sequence_id] = num_blocks
        self._num_claimed_blocks += num_blocks
        self._forget_view()

    def await_reading(self, sequence_id: SequenceId, num_tokens: int) -> None:
        """A prompt was sent here. After claim(), where both are due."""
        self.note_read(sequence_id)
        self.waiting_tokens[sequence_id] = num_tokens
        self._num_waiting_tokens += num_tokens
        self._num_only_waiting += sequence_id not in self.claimed_blocks
        self._forget_view()

    def note_read(self, sequence_id: SequenceId) -> bool:
        """Its prompt waits no more; False when it did not."""
        num_tokens = self.waiting_tokens.pop(sequence_id, None)
        if num_tokens is None:
            return False
        self._num_waiting_tokens -= num_tokens
        self._num_only_waiting -= sequence_id not in self.claimed_blocks
        self._forget_view()
        return True

    def release(self, sequence_id: SequenceId) -> None:
        """Give back what was promised for a sequence."""
        self.note_read(sequence_id)
        num_blocks = self.claimed_blocks.pop(sequence_id, None)
        if num_blocks is not None:
            self._num_claimed_blocks -= num_blocks
            self._forget_view()

    def pair(self, peer: WorkerId, incarnation: Incarnation) -> None:
        self.partners[peer] = incarnation
        self.refusals.pop(peer, None)
        self.forget_partners()

    def unpair(self, peer: WorkerId) -> None:
        self.partners.pop(peer, None)
        self.forget_partners()

    def forget_partners(self) -> None:
        """Workers have come or gone: who of its partners is live is to be found out again."""
        self._live_partners = None
        self._forget_view()

    def drain(self) -> None:
        """It takes no new work from now on."""
        self.is_draining = True
        self._forget_view()

    def _forget_view(self) -> None:
        self._view = None
        self._changed.add(self.card.worker_id)

    def view(self, records: dict[WorkerId, "WorkerRecord"]) -> WorkerView:
        """As routing sees it among these."""
        if self._view is None:
            if self._live_partners is None:
                self._live_partners = frozenset(
                    peer
                    for peer, incarnation in self.partners.items()
                    if peer in records and records[peer].card.incarnation == incarnation
                )
            card = self.card
            self._view = WorkerView(
                worker_id=card.worker_id,
                role=card.role,
                num_blocks=card.num_blocks,
                block_size=card.layout.block_size,
                num_claimed_blocks=self._num_claimed_blocks,
                num_waiting_tokens=self._num_waiting_tokens,
                num_open=len(self.claimed_blocks) + self._num_only_waiting,
                partners=self._live_partners,
                max_context=card.pool.max_context,
            )
        return self._view

    def check_invariants(self) -> None:
        if any(blocks < 1 for blocks in self.claimed_blocks.values()):
            raise InternalFault(f"worker {self.card.worker_id} has an empty claim")
        sums = (self._num_claimed_blocks, self._num_waiting_tokens, self._num_only_waiting)
        num_only_waiting = len(self.waiting_tokens.keys() - self.claimed_blocks.keys())
        counted = (sum(self.claimed_blocks.values()), sum(self.waiting_tokens.values()), num_only_waiting)
        if sums != counted:
            raise InternalFault(f"worker {self.card.worker_id}: sums {sums} differ from what they sum, {counted}")

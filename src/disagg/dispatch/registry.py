"""The workers a router knows, what it has promised them, and who can hand KV to whom."""

from collections.abc import Iterable

from disagg.core.errors import Failure, FailureKind, InternalFault
from disagg.core.ids import Incarnation, SequenceId, WorkerId
from disagg.core.roles import Role
from disagg.policy.admission import Limits
from disagg.policy.routing import WorkerView, what_is_missing
from disagg.protocol.messages import PROTOCOL_MAX, PROTOCOL_MIN, WorkerCard, WorkerState
from disagg.protocol.pairing import card_flaw, is_handoff_pair


class WorkerRecord:
    """One registered incarnation."""

    def __init__(self, card: WorkerCard) -> None:
        self.card = card
        self.state = WorkerState()
        self.is_draining = False
        self.partners: dict[WorkerId, Incarnation] = {}
        self.refusals: dict[WorkerId, Failure] = {}
        self.claimed_blocks: dict[SequenceId, int] = {}
        self.waiting_tokens: dict[SequenceId, int] = {}

    def view(self, partners: frozenset[WorkerId]) -> WorkerView:
        return WorkerView(
            worker_id=self.card.worker_id,
            role=self.card.role,
            num_blocks=self.card.num_blocks,
            block_size=self.card.layout.block_size,
            num_claimed_blocks=sum(self.claimed_blocks.values()),
            num_waiting_tokens=sum(self.waiting_tokens.values()),
            num_open=len(self.claimed_blocks.keys() | self.waiting_tokens.keys()),
            partners=partners,
            max_context=self.card.pool.max_context,
        )


class Registry:
    """Tokenizer digests by model name decide who may register."""

    def __init__(
        self, tokenizer_digests: dict[str, str], protocol: tuple[int, int] = (PROTOCOL_MIN, PROTOCOL_MAX)
    ) -> None:
        """protocol: the lowest and the highest version that this router speaks."""
        self._protocol_min, self._protocol_max = protocol
        self._tokenizer_digests = tokenizer_digests
        self._records: dict[WorkerId, WorkerRecord] = {}

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(self._tokenizer_digests)

    def get(self, worker_id: WorkerId) -> WorkerRecord | None:
        return self._records.get(worker_id)

    def records(self, model: str | None = None) -> list[WorkerRecord]:
        return [record for record in self._records.values() if model in (None, record.card.pool.model)]

    def refusal(self, card: WorkerCard) -> Failure | None:
        """Why this worker may not serve behind this router."""
        flaw = card_flaw(card)
        if flaw:
            return Failure(FailureKind.INVALID_REQUEST, f"worker {card.worker_id} cannot be used: {flaw}")
        if card.protocol_max < self._protocol_min or self._protocol_max < card.protocol_min:
            theirs, mine = f"{card.protocol_min}..{card.protocol_max}", f"{self._protocol_min}..{self._protocol_max}"
            text = f"worker {card.worker_id} speaks protocol {theirs}, this router {mine}: upgrade the older of the two"
            return Failure(FailureKind.INVALID_REQUEST, text)
        pool = card.pool
        expected = self._tokenizer_digests.get(pool.model)
        if expected is None:
            known = ", ".join(self._tokenizer_digests)
            text = f"worker {card.worker_id} serves model {pool.model}, this router knows {known}"
            return Failure(FailureKind.INVALID_REQUEST, text)
        if pool.tokenizer_digest != expected:
            text = (
                f"worker {card.worker_id} and the router disagree on the tokenizer of {pool.model}: "
                f"digest {pool.tokenizer_digest} is not {expected}; start both from the same model files"
            )
            return Failure(FailureKind.INVALID_REQUEST, text)
        other = self._records.get(card.worker_id)
        if other is not None and other.card.incarnation != card.incarnation:
            text = f"worker id {card.worker_id} is taken by another live process; choose another --worker-id"
            return Failure(FailureKind.OVERLOADED, text)  # it may be a dead one whose end was not seen yet
        return None

    def add(self, card: WorkerCard, *, is_draining: bool) -> None:
        record = WorkerRecord(card)
        record.is_draining = is_draining
        self._records[card.worker_id] = record

    def remove(self, worker_id: WorkerId, incarnation: Incarnation) -> bool:
        """False when this incarnation is not the registered one."""
        record = self._records.get(worker_id)
        if record is None or record.card.incarnation != incarnation:
            return False
        del self._records[worker_id]
        for other in self._records.values():
            other.refusals.pop(worker_id, None)
        return True

    def peers_to_meet(self, card: WorkerCard) -> tuple[WorkerCard, ...]:
        """Workers that this one should connect to and pair with: the source side connects."""
        return tuple(record.card for record in self._records.values() if is_handoff_pair(card, record.card))

    def views(self, model: str, revision: tuple[str, str] | None = None) -> list[WorkerView]:
        """Workers that take new work; with a revision, of that one only."""
        records = [record for record in self.records(model) if not record.is_draining]
        if revision is not None:
            records = [record for record in records if record.card.pool.revision == revision]
        return [record.view(self._live_partners(record)) for record in records]

    def missing(self, model: str) -> str:
        """A plain sentence; "" when requests can be served. Names what workers that are here do not agree on."""
        missing = what_is_missing(self.views(model))
        refusals = [failure.message for record in self.records(model) for failure in record.refusals.values()]
        return f"{missing}: {'; '.join(refusals)}" if missing and refusals else missing

    def limits(self, model: str) -> Limits | None:
        """Of the largest workers that can write an answer; None while there are none."""
        cards = [record.card for record in self.records(model) if record.card.role is not Role.PREFILL]
        if not cards:
            return None
        return Limits(
            max_context=max(card.pool.max_context for card in cards),
            max_pool_tokens=max(card.num_blocks * card.layout.block_size for card in cards),
            vocab_size=min(card.pool.vocab_size for card in cards),
        )

    def is_first_to_read(self, sequence_id: SequenceId, worker_id: WorkerId) -> bool:
        """Whether that worker was sent nothing older that it has not read yet: its prompt may be under way."""
        record = self._records.get(worker_id)
        waiting = record.waiting_tokens if record is not None else {}
        return sequence_id not in waiting or next(iter(waiting)) == sequence_id

    def release(self, sequence_id: SequenceId, worker_ids: Iterable[WorkerId]) -> None:
        """Give back what was promised for a sequence."""
        for worker_id in worker_ids:
            record = self._records.get(worker_id)
            if record is not None:
                record.claimed_blocks.pop(sequence_id, None)
                record.waiting_tokens.pop(sequence_id, None)

    def check_invariants(self) -> None:
        for worker_id, record in self._records.items():
            if record.card.worker_id != worker_id:
                raise InternalFault(f"worker {record.card.worker_id} is registered as {worker_id}")
            if any(blocks < 1 for blocks in record.claimed_blocks.values()):
                raise InternalFault(f"worker {worker_id} has an empty claim")

    def _live_partners(self, record: WorkerRecord) -> frozenset[WorkerId]:
        return frozenset(
            peer
            for peer, incarnation in record.partners.items()
            if peer in self._records and self._records[peer].card.incarnation == incarnation
        )

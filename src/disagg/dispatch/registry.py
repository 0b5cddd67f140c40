"""The workers a router knows, what it has promised them, and who can hand KV to whom."""

from collections.abc import Iterable, Set

from disagg.core.errors import Failure, FailureKind, InternalFault
from disagg.core.ids import Incarnation, SequenceId, WorkerId
from disagg.core.roles import Role
from disagg.dispatch.worker_record import WorkerRecord
from disagg.policy.admission import Limits
from disagg.policy.routing import WorkerView, what_is_missing
from disagg.protocol.cards import ProtocolRange, WorkerCard
from disagg.protocol.pairing import card_flaw, is_handoff_pair


class Registry:
    """Tokenizer digests by model name decide who may register."""

    def __init__(self, tokenizer_digests: dict[str, str], protocols: ProtocolRange) -> None:
        """protocols: of this router."""
        self._protocols = protocols
        self._tokenizer_digests = tokenizer_digests
        self._records: dict[WorkerId, WorkerRecord] = {}
        # Until a worker comes or goes: every request asks.
        self._of_model: dict[str, list[WorkerRecord]] = {}
        self._views: dict[str, dict[WorkerId, WorkerView]] = {}  # of workers that take new work
        self._changed: set[WorkerId] = set()  # whose view is not the one that is kept there
        self._limits: dict[str, Limits | None] = {}

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(self._tokenizer_digests)

    def get(self, worker_id: WorkerId) -> WorkerRecord | None:
        return self._records.get(worker_id)

    def known(self, worker_id: WorkerId) -> WorkerRecord:
        """One that a sequence has just been placed on."""
        record = self._records.get(worker_id)
        if record is None:
            raise InternalFault(f"placed on {worker_id}, which is not registered")
        return record

    def records(self, model: str | None = None) -> list[WorkerRecord]:
        if model is None:
            return list(self._records.values())
        if model not in self._of_model:
            self._of_model[model] = [each for each in self._records.values() if each.card.pool.model == model]
        return self._of_model[model]

    def refusal(self, card: WorkerCard) -> Failure | None:
        """Why this worker may not serve behind this router."""
        flaw = card_flaw(card)
        if flaw:
            return Failure(FailureKind.INVALID_REQUEST, f"worker {card.worker_id} cannot be used: {flaw}")
        if not card.protocols.meets(self._protocols):
            versions = f"speaks protocol {card.protocols}, this router {self._protocols}"
            text = f"worker {card.worker_id} {versions}: upgrade the older of the two"
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
        record = WorkerRecord(card, self._changed)
        if is_draining:
            record.drain()
        self._records[card.worker_id] = record
        self._note_changed()

    def remove(self, worker_id: WorkerId, incarnation: Incarnation) -> bool:
        """False when this incarnation is not the registered one."""
        record = self._records.get(worker_id)
        if record is None or record.card.incarnation != incarnation:
            return False
        del self._records[worker_id]
        for other in self._records.values():
            other.refusals.pop(worker_id, None)
        self._note_changed()
        return True

    def peers_to_meet(self, card: WorkerCard) -> tuple[WorkerCard, ...]:
        """Workers that this one should connect to and pair with: the source side connects."""
        return tuple(record.card for record in self._records.values() if is_handoff_pair(card, record.card))

    def views(self, model: str, revision: tuple[str, str] | None = None) -> list[WorkerView]:
        """Workers that take new work; with a revision, of that one only."""
        known = self._records
        self._renew_views()
        if model not in self._views:
            taking = [record for record in self.records(model) if not record.is_draining]
            self._views[model] = {record.card.worker_id: record.view(known) for record in taking}
        views = self._views[model]
        if revision is None:
            return list(views.values())
        return [view for worker_id, view in views.items() if known[worker_id].card.pool.revision == revision]

    def _renew_views(self) -> None:
        """Those of workers that have changed; the others, and their order, stay."""
        for worker_id in self._changed:
            record = self._records.get(worker_id)
            views = self._views.get(record.card.pool.model) if record is not None else None
            if record is None or views is None:
                continue
            if record.is_draining:
                views.pop(worker_id, None)
            else:
                views[worker_id] = record.view(self._records)
        self._changed.clear()

    def missing(self, model: str) -> str:
        """A plain sentence; "" when requests can be served. Names what workers that are here do not agree on."""
        missing = what_is_missing(self.views(model))
        if not missing:
            return ""
        refusals = [failure.message for record in self.records(model) for failure in record.refusals.values()]
        return f"{missing}: {'; '.join(refusals)}" if refusals else missing

    def limits(self, model: str) -> Limits | None:
        """Of the largest workers that can write an answer; None while there are none."""
        if model not in self._limits:
            cards = [record.card for record in self.records(model) if record.card.role is not Role.PREFILL]
            self._limits[model] = _limits_of(cards) if cards else None
        return self._limits[model]

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
                record.release(sequence_id)

    def check_invariants(self) -> None:
        for worker_id, record in self._records.items():
            if record.card.worker_id != worker_id:
                raise InternalFault(f"worker {record.card.worker_id} is registered as {worker_id}")
            record.check_invariants()
            if record.view(self._records).partners != self._live_partners(record):
                raise InternalFault(f"worker {worker_id}: partners that have come or gone are not noted")
        for model in self._views:
            taking = [record.view(self._records) for record in self.records(model) if not record.is_draining]
            if self.views(model) != taking:
                raise InternalFault(f"views of the workers of {model} are not what they would be made anew")

    def check_claims(self, placed: Set[SequenceId]) -> None:
        """Only of sequences that are placed, somewhere."""
        for record in self._records.values():
            stale = (record.claimed_blocks.keys() | record.waiting_tokens.keys()) - placed
            if stale:
                raise InternalFault(f"worker {record.card.worker_id} has claims of {sorted(stale)}, not placed there")

    def _note_changed(self) -> None:
        self._of_model.clear()
        self._views.clear()
        self._limits.clear()
        for record in self._records.values():
            record.forget_partners()

    def _live_partners(self, record: WorkerRecord) -> frozenset[WorkerId]:
        return frozenset(
            peer
            for peer, incarnation in record.partners.items()
            if peer in self._records and self._records[peer].card.incarnation == incarnation
        )


def _limits_of(cards: list[WorkerCard]) -> Limits:
    return Limits(
        max_context=max(card.pool.max_context for card in cards),
        max_pool_tokens=max(card.num_blocks * card.layout.block_size for card in cards),
        vocab_size=min(card.pool.vocab_size for card in cards),
    )

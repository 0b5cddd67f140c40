"""The receiving end of one hand-off: what has arrived, and when it may be used."""

from disagg.core.ids import BlockId, Fence, HandoffId, WorkerId
from disagg.core.request import EmittedToken
from disagg.core.spans import KvLayout, Span
from disagg.kvcache.block_pool import BlockState
from disagg.kvcache.kv_cache import Allocation
from disagg.kvcache.span_ledger import SpanLedger
from disagg.policy.partial_start import PartialOutcome
from disagg.protocol.handoff import DESTINATION_TABLE, DestinationState, DestinationTrigger
from disagg.protocol.messages import AnswerReservation, FinishPrefill
from disagg.protocol.table import Machine


class HandoffDestination:
    """Lives from the router's command until its blocks are in use here or given up and fenced."""

    def __init__(self, handoff_id: HandoffId, peer: WorkerId, fence: Fence, grant_key: bytes) -> None:
        self.handoff_id = handoff_id
        self.peer = peer
        self.fence = fence
        self.grant_key = grant_key
        self.machine = Machine(DESTINATION_TABLE, handoff_id)
        self.lease_until_s = float("inf")
        self.allocation: Allocation | None = None
        self.answer: AnswerReservation | None = None  # given; the same again to a repeated question
        self.num_tokens = 0
        self.first_missing_token = 0
        self.awaits_room = False  # refused; its source is to be told once it fits
        self.first_token: EmittedToken | None = None  # of the answer, once the source has computed the prompt
        self.bytes_per_s = 0.0  # of the link, as the source knows it; 0 for unknown
        self.why_whole = PartialOutcome.TOO_LATE  # why its first step has not begun before all is here, so far
        self._ledger: SpanLedger | None = None

    def is_of(self, peer: WorkerId, fence: Fence) -> bool:
        """Whether a message of this peer with this fence is about this hand-off."""
        return self.peer == peer and self.fence == fence

    @property
    def state(self) -> DestinationState:
        return self.machine.state

    def reserve(
        self, allocation: Allocation, first_missing_token: int, num_tokens: int, layout: KvLayout, group_heads: int
    ) -> None:
        """group_heads: kv heads that always come together."""
        self.machine.fire(DestinationTrigger.RESERVED)
        self.allocation = allocation
        self.first_missing_token = first_missing_token
        self.num_tokens = num_tokens
        self._ledger = SpanLedger(
            layout.clipped(Span(first_missing_token, num_tokens, 0, layout.num_layers)), group_heads
        )

    def land(self, span: Span) -> None:
        """One verified push. Repeats are harmless."""
        if self._ledger is not None:
            self._ledger.add(span)

    def finish_prefill(self, message: FinishPrefill) -> None:
        self.first_token = message.first_token
        self.bytes_per_s = message.bytes_per_s

    @property
    def is_prefill_finished(self) -> bool:
        return self.first_token is not None

    @property
    def is_all_here(self) -> bool:
        """Every layer verified, and the source has said that this was all."""
        return (
            self.state is DestinationState.RECEIVING
            and self.is_prefill_finished
            and self._ledger is not None
            and self._ledger.is_complete
        )

    def complete_until(self) -> int:
        """End of the longest token prefix that is here and verified in all layers."""
        return self._ledger.complete_until() if self._ledger is not None else 0

    def layers_here(self) -> int:
        """Layers, from the first on, that are here and verified for all tokens."""
        return self._ledger.complete_layers() if self._ledger is not None else 0

    def missing_bytes(self, token_layer_bytes: int) -> int:
        """Bytes still to come, at so many for one token in one layer."""
        return self._ledger.num_missing() * token_layer_bytes if self._ledger is not None else 0

    def blocks_in_use(self) -> tuple[tuple[BlockId, ...], dict[BlockState, tuple[BlockId, ...]]]:
        """What it keeps of the pool: blocks that it holds, and those in other states."""
        allocation, state = self.allocation, self.state
        if allocation is None:
            return (), {}
        if state in (DestinationState.RECEIVING, DestinationState.COMPLETE):
            return allocation.cached + allocation.empty, {BlockState.RESERVED: allocation.reserved}
        if state in (DestinationState.FENCING, DestinationState.IN_STEP):
            return allocation.cached, {BlockState.QUARANTINED: allocation.reserved}
        return (), {}

    def check_invariants(self) -> None:
        if self._ledger is not None:
            self._ledger.check_invariants()

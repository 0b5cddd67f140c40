"""The sending end of one hand-off: which span goes when, what is acknowledged, what is kept for how long."""

from collections.abc import Callable
from typing import NamedTuple

from disagg.core.errors import InternalFault
from disagg.core.formats import KvWire
from disagg.core.ids import BlockId, Fence, HandoffId, WorkerId
from disagg.core.request import EmittedToken
from disagg.core.spans import KvLayout, Span
from disagg.protocol.handoff import SOURCE_TABLE, SourceState, SourceTrigger
from disagg.protocol.messages import AnswerReservation
from disagg.protocol.table import Machine
from disagg.scheduler.actions import PushSpan

MAX_TRIES = 2  # of one push; a second failure gives the hand-off up


class _Outstanding(NamedTuple):
    push: PushSpan
    num_tries: int
    sent_s: float


class HandoffSource:
    """Lives from the router's command until the destination has taken everything or somebody gives up."""

    def __init__(
        self, handoff_id: HandoffId, peer: WorkerId, fence: Fence, layout: KvLayout, wire: KvWire = KvWire.NATIVE
    ) -> None:
        """layout: of the peer, whose bytes travel."""
        self.handoff_id = handoff_id
        self.peer = peer
        self.fence = fence
        self.machine = Machine(SOURCE_TABLE, handoff_id)
        self.lease_until_s = float("inf")
        self.retry_at_s = 0.0
        self.num_refusals = 0
        self.unknown_since_s: float | None = None  # the destination does not know the sequence (yet)
        self.is_taken = False  # the destination's word can overtake the transport's last acknowledgement
        self.first_token: EmittedToken | None = None  # of the answer, once the prompt is computed
        self.answer: AnswerReservation | None = None
        self.acknowledged_bytes = 0
        self.hidden_bytes = 0  # acknowledged before the prompt was computed
        self._layout = layout
        self._wire = wire
        self._next_number = 0
        self._outstanding: dict[int, _Outstanding] = {}
        self._pushed_layers = 0  # of the running step
        self._pushing_s = 0.0  # time in which pushes were under way, without the one that goes on
        self._pushing_since_s: float | None = None

    def is_of(self, peer: WorkerId, fence: Fence) -> bool:
        """Whether a message of this peer with this fence is about this hand-off."""
        return self.peer == peer and self.fence == fence

    @property
    def state(self) -> SourceState:
        return self.machine.state

    @property
    def is_live(self) -> bool:
        return self.state not in (SourceState.STOPPING, SourceState.CLOSED)

    @property
    def num_outstanding(self) -> int:
        return len(self._outstanding)

    @property
    def grant_key(self) -> bytes:
        return self.answer.grant_key if self.answer else b""

    @property
    def first_missing_token(self) -> int:
        return self.answer.first_missing_token if self.answer else 0

    def grant(self, answer: AnswerReservation) -> None:
        self.machine.fire(SourceTrigger.RESERVATION_GRANTED)
        self.answer = answer

    def push_computed(self, blocks: tuple[BlockId, ...], token_stop: int, max_bytes: int) -> list[PushSpan]:
        """Everything the destination lacks of tokens [0, token_stop), which are complete in all layers."""
        span = Span(self.first_missing_token, token_stop, 0, self._layout.num_layers)
        return [self._push(piece, blocks) for piece in cut_by_layers(self._bytes_of, span, max_bytes)]

    def start_step(self) -> None:
        self._pushed_layers = 0

    def layers_per_push(self, token_start: int, token_stop: int, min_bytes: int) -> int:
        """Layers of a chunk that make up a push of min_bytes; all of them when even they do not."""
        num_layers = self._layout.num_layers
        span = Span(max(token_start, self.first_missing_token), token_stop, 0, 1)
        return num_layers if span.is_empty else min(num_layers, max(1, -(-min_bytes // self._bytes_of(span))))

    def push_layers(
        self, blocks: tuple[BlockId, ...], token_start: int, token_stop: int, num_layers: int, min_bytes: int
    ) -> list[PushSpan]:
        """Layers of the running step's chunk [token_start, token_stop), once they make up min_bytes or are the last."""
        start = max(token_start, self.first_missing_token)
        span = Span(start, token_stop, self._pushed_layers, num_layers)
        if span.is_empty:
            return []
        if num_layers < self._layout.num_layers and self._bytes_of(span) < min_bytes:
            return []
        self._pushed_layers = num_layers
        return [self._push(span, blocks)]

    def send(self, number: int, now_s: float) -> None:
        """A push goes to the transport now."""
        if self._pushing_since_s is None:
            self._pushing_since_s = now_s
        self._outstanding[number] = self._outstanding[number]._replace(sent_s=now_s)

    def acknowledge(self, number: int, now_s: float) -> tuple[int, float]:
        """A push is verified at the other end: its bytes, and when it was sent. It must be outstanding."""
        known = self._outstanding.pop(number)
        num_bytes = self._bytes_of(known.push.span)
        self.acknowledged_bytes += num_bytes
        if self.state is SourceState.OPEN:
            self.hidden_bytes += num_bytes
        if not self._outstanding and self._pushing_since_s is not None:
            self._pushing_s += now_s - self._pushing_since_s
            self._pushing_since_s = None
        return num_bytes, known.sent_s

    def pushing_s(self, now_s: float) -> float:
        """Seconds so far in which at least one push was under way."""
        return self._pushing_s + (0.0 if self._pushing_since_s is None else now_s - self._pushing_since_s)

    @property
    def pushed_bytes(self) -> int:
        """On the wire: acknowledged, and under way."""
        return self.acknowledged_bytes + sum(self._bytes_of(each.push.span) for each in self._outstanding.values())

    def retry(self, number: int) -> PushSpan | None:
        """The push to send again after a failure, or None when it has failed too often (or is not known)."""
        known = self._outstanding.get(number)
        if known is None or known.num_tries >= MAX_TRIES:
            return None
        self._outstanding[number] = known._replace(num_tries=known.num_tries + 1)
        return known.push

    def is_outstanding(self, number: int) -> bool:
        return number in self._outstanding

    def close_if_done(self) -> bool:
        """Move on once nothing is outstanding; True when the destination has taken everything."""
        if self.state is SourceState.DRAINING and not self._outstanding:
            self.machine.fire(SourceTrigger.WRITES_ACKNOWLEDGED)
        if self.state is SourceState.DELIVERED and self.is_taken:
            self.machine.fire(SourceTrigger.TAKEN)
            return True
        return False

    def check_invariants(self) -> None:
        num_under_way, since_s = len(self._outstanding), self._pushing_since_s
        if (num_under_way > 0) != (since_s is not None):
            raise InternalFault(f"{self.handoff_id}: {num_under_way} pushes are under way, timed since {since_s}")
        if not 0 <= self.hidden_bytes <= self.acknowledged_bytes:
            text = f"{self.hidden_bytes} of {self.acknowledged_bytes} acknowledged bytes were hidden"
            raise InternalFault(f"{self.handoff_id}: {text}")
        if self.first_token is None and self.state in (SourceState.DRAINING, SourceState.DELIVERED):
            raise InternalFault(f"{self.handoff_id} is {self.state} without a first token")

    def _bytes_of(self, span: Span) -> int:
        """On the wire."""
        return self._layout.span_bytes(span, self._wire)

    def _push(self, span: Span, blocks: tuple[BlockId, ...]) -> PushSpan:
        assert self.answer is not None  # only an open hand-off pushes
        push = PushSpan(
            handoff_id=self.handoff_id,
            peer=self.peer,
            grant_key=self.answer.grant_key,
            number=self._next_number,
            span=span,
            source_blocks=blocks,
            destination_blocks=self.answer.blocks,
            destination_num_blocks=self.answer.num_blocks,
        )
        self._outstanding[push.number] = _Outstanding(push, 1, 0.0)
        self._next_number += 1
        return push


def cut_by_layers(bytes_of: Callable[[Span], int], span: Span, max_bytes: int) -> list[Span]:
    """Pieces of whole layers of at most max_bytes each, or of one layer where that is already more."""
    if span.is_empty:
        return []
    layer_bytes = bytes_of(Span(span.token_start, span.token_stop, 0, 1))
    layers_each = max(1, max_bytes // layer_bytes)
    starts = range(span.layer_start, span.layer_stop, layers_each)
    return [
        Span(span.token_start, span.token_stop, start, min(start + layers_each, span.layer_stop)) for start in starts
    ]

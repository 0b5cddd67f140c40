"""First steps that begin while KV of their prompts is still on the wire, alone and a few layers at a time.

  1. The first token is known, the KV of the first layers is here and verified, and what is missing is to take longer
     than a step: the sequence's first step begins. It is no stream yet; its blocks are still reserved for the peer.
  2. A part runs layers whose KV is here, between two shared steps, at most one part between two. What the row has
     come to then is kept here as a value (`partial_step.py`).
  3. When all is verified and the grant fenced, the blocks are its own and the sequence decodes, like any other. Only
     then the last layer runs and gives a token. If too many layers are left to run beside others, what was done is
     thrown away and the whole step is done in company.

Whoever gives the sequence up throws its part-done step away with it; blocks that a part in the engine may still touch
stay where they are until it is back (`closing.py`). How many layers, and whether at all: `policy/partial_start.py`.
"""

from typing import NamedTuple

from disagg.core.request import finish_reason
from disagg.core.roles import PartialStart
from disagg.core.spans import Span
from disagg.policy.partial_start import PartialOutcome, can_finish_alone, num_layers_now, why_wait
from disagg.policy.step_time import StepShape
from disagg.protocol.handoff import DestinationState
from disagg.protocol.lifecycle import SequenceState
from disagg.scheduler.destination import HandoffDestination
from disagg.scheduler.engine import LayerRange, StepRow
from disagg.scheduler.sequence import Sequence
from disagg.scheduler.state import SchedulerState


class Part(NamedTuple):
    """Some layers of one sequence's first step."""

    sequence: Sequence
    row: StepRow
    layers: LayerRange
    carried: bytes


class PartialStarts:
    """Which part runs next, and what becomes of it."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def try_start(self, *, is_turn: bool) -> Part | None:
        """The part to run now, if there is one. is_turn: others have had a shared step since the last part."""
        if self._state.config.partial_start is PartialStart.OFF:
            return None
        for sequence in self._candidates():
            has_others = self._has_others(sequence)
            layers = self._layers(sequence, has_others=has_others) if is_turn or not has_others else None
            if layers is not None:
                return self._start(sequence, layers)
        return None

    def is_any_due(self) -> bool:
        """Whether a part would run if the engine were free, whoever's turn it was."""
        if self._state.config.partial_start is PartialStart.OFF:
            return False
        return any(self._layers(each, has_others=False) is not None for each in self._candidates())

    def finish(self, sequence: Sequence, carried: bytes) -> bool:
        """A part is over; True when it was the step's last, so that its token counts."""
        partial = sequence.partial
        assert partial is not None  # a part in the engine keeps it
        is_last = partial.finish(carried, self._state.config.layout.num_layers)
        if is_last or not sequence.is_live:
            self._state.begun.end(sequence, PartialOutcome.FINISHED if is_last else None)
        return is_last

    def fail(self, sequence: Sequence) -> None:
        """The engine has failed at a part; whose sequence was given up meanwhile is done with."""
        if sequence.partial is not None and not sequence.is_live:
            self.finish(sequence, b"")

    def join(self, streams: list[Sequence]) -> None:
        """These are in a shared step now: what they had begun is thrown away."""
        for stream in streams if len(self._state.begun) else ():
            self._state.begun.give_up(stream, PartialOutcome.JOINED)

    def _candidates(self) -> tuple[Sequence, ...]:
        """Who may have a part to run: those that have begun first."""
        return (*self._state.begun, *self._state.table.in_state(SequenceState.RECEIVING))

    def _start(self, sequence: Sequence, layers: LayerRange) -> Part:
        partial = sequence.partial or self._state.begun.add(sequence)
        partial.start(layers)
        return Part(sequence, self._row(sequence), layers, partial.carried)

    def _row(self, sequence: Sequence) -> StepRow:
        if sequence.state is SequenceState.DECODING:
            return sequence.decode_row()
        destination = sequence.destination
        assert destination is not None  # see _layers
        assert destination.first_token is not None
        assert destination.allocation is not None
        first, blocks = destination.first_token, destination.allocation.blocks
        return StepRow(
            sequence.sequence_id, (first.token_id,), destination.num_tokens, blocks, None, first.position + 1
        )

    def _has_others(self, sequence: Sequence) -> bool:
        """Whether somebody else's step would wait for a part of this one's."""
        own = sequence.state is SequenceState.DECODING
        table = self._state.table
        return table.num_in_state(SequenceState.DECODING) > own or table.num_in_state(SequenceState.PREFILLING) > 0

    def _layers(self, sequence: Sequence, *, has_others: bool) -> LayerRange | None:
        """What of its first step may run now."""
        num_layers = self._state.config.layout.num_layers
        num_done = sequence.partial.num_done if sequence.partial is not None else 0
        if sequence.state is SequenceState.DECODING:
            may = sequence.grammar_until_s is None
            may = may and can_finish_alone(num_layers - num_done, num_layers, has_others=has_others)
            return LayerRange(num_done, num_layers) if may else None
        destination = sequence.destination
        if destination is None or destination.state is not DestinationState.RECEIVING:
            return None
        num_ready = destination.layers_here() - num_done
        if destination.first_token is None or num_ready <= 0:
            return None
        remaining_bytes = destination.missing_bytes(self._token_layer_bytes(destination))
        step_s = self._shared_step_s(destination.num_tokens + 1)
        if sequence.partial is None:
            reason = self._why_not(sequence, destination) or why_wait(remaining_bytes, destination.bytes_per_s, step_s)
            if reason is not None:
                destination.why_whole = reason
                return None
        num_now = num_layers_now(
            num_ready,
            num_layers - num_done,
            num_layers,
            wire_s=remaining_bytes / destination.bytes_per_s,
            step_s=step_s,
            has_others=has_others,
        )
        return LayerRange(num_done, num_done + num_now)

    def _why_not(self, sequence: Sequence, destination: HandoffDestination) -> PartialOutcome | None:
        """What does not depend on the link."""
        first, allocation = destination.first_token, destination.allocation
        assert first is not None
        assert allocation is not None
        if finish_reason(sequence.spec.sampling, first.token_id, first.position + 1) is not None:
            return PartialOutcome.NO_STEP
        has_room = destination.num_tokens < len(allocation.blocks) * self._state.cache.block_size
        return None if has_room else PartialOutcome.NO_ROOM

    def _token_layer_bytes(self, destination: HandoffDestination) -> int:
        """On the wire."""
        return self._state.config.layout.span_bytes(Span(0, 1, 0, 1), self._state.peers[destination.peer].kv_wire)

    def _shared_step_s(self, context: int) -> float:
        """Predicted, of a step with the streams of now and one more of this context."""
        streams, standing = self._state.table.streams(), self._state.standing
        total = context + standing.context + sum(stream.num_computed + 1 for stream in streams)
        num_streams = len(streams) + len(standing) + 1
        return self._state.step_times.predict(StepShape(num_streams=num_streams, stream_context=total))

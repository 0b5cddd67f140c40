"""First tokens of answers that were handed over here, until the first step behind them begins (`FirstToken.STEADY`).

Mostly a step runs when such an answer arrives, and its own steps begin after that one. Told at once, its first token
would be followed by the longest gap of the whole answer: the rest of that step, and then one more.
"""

from disagg.core.errors import InternalFault
from disagg.core.request import EmittedToken
from disagg.protocol.lifecycle import SequenceState
from disagg.scheduler.outgoing import Outgoing
from disagg.scheduler.sequence import Sequence
from disagg.scheduler.stage_clocks import StageClocks
from disagg.telemetry.stages import Stage


class FirstTokens:
    """In the order in which their answers came."""

    def __init__(self, outgoing: Outgoing, stages: StageClocks) -> None:
        self._outgoing = outgoing
        self._stages = stages
        self._held: list[tuple[Sequence, EmittedToken]] = []

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, sequence: Sequence, token: EmittedToken, now_s: float) -> None:
        self._stages.enter(sequence, Stage.DECODE_QUEUE, now_s)
        self._held.append((sequence, token))

    def tell(self, now_s: float, *, is_running: bool) -> None:
        """What has no step to wait for goes to the router: that of a stream in the step that begins now, of one that
        gave up its blocks, and, unless a step runs, of all. Those of sequences that are gone are forgotten.
        """
        held, self._held = self._held, []
        for sequence, token in held:
            if not sequence.is_live:
                continue
            if is_running and not sequence.is_in_step and sequence.state is SequenceState.DECODING:
                self._held.append((sequence, token))
                continue
            self._stages.report(sequence, token.position, now_s)
            self._outgoing.emit((token,))

    def check_invariants(self) -> None:
        for sequence, token in self._held:
            if sequence.is_live and sequence.answer_ids[token.position : token.position + 1] != [token.token_id]:
                raise InternalFault(f"{token} is held back and not in the answer of {sequence.attempt_id}")

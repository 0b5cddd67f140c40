"""Where the time of timed sequences goes on this worker, until each has got two tokens from here, or one to hand over.

Off for all others: nothing here is called for each token or row, and nobody is timed unless the router asks for it.
"""

from collections.abc import Iterable

from disagg.core.errors import InternalFault
from disagg.core.roles import Task
from disagg.protocol.lifecycle import SequenceState
from disagg.protocol.messages import StageReport
from disagg.scheduler.engine import StepRow
from disagg.scheduler.outgoing import Outgoing
from disagg.scheduler.sequence import Sequence
from disagg.telemetry.stages import Stage, StageClock


class _Timed:
    __slots__ = ("clock", "num_reports")

    def __init__(self, clock: StageClock, num_reports: int) -> None:
        self.clock = clock
        self.num_reports = num_reports  # still to come


class StageClocks:
    """One for each timed sequence. Reports travel with the token that they are about."""

    def __init__(self, outgoing: Outgoing) -> None:
        self._outgoing = outgoing
        self._timed: dict[Sequence, _Timed] = {}
        self._in_step: list[tuple[Sequence, int | None]] = []  # position of the token that the step gives, if it does

    @property
    def is_any(self) -> bool:
        """Whether a step that starts or ends is to be noted."""
        return bool(self._timed or self._in_step)

    def start(self, sequence: Sequence, now_s: float) -> None:
        stage = Stage.PREFILL_ELSEWHERE if sequence.task is Task.DECODE else Stage.PREFILL_QUEUE
        self._timed[sequence] = _Timed(StageClock(stage, now_s), 1 if sequence.task is Task.PREFILL else 2)

    def stop(self, sequence: Sequence) -> None:
        """Harmless for one that is not timed."""
        self._timed.pop(sequence, None)

    def enter(self, sequence: Sequence, stage: Stage, now_s: float) -> None:
        """Harmless for one that is not timed."""
        timed = self._timed.get(sequence)
        if timed is not None:
            timed.clock.enter(stage, now_s)

    def start_step(self, prompts: Iterable[tuple[Sequence, StepRow]], now_s: float) -> None:
        """prompts: the chunks of the step; its streams are known by their state."""
        self._in_step = []
        for sequence, row in prompts:
            timed = self._timed.get(sequence)
            if timed is not None:
                timed.clock.enter(Stage.PREFILL, now_s, len(row.token_ids))
                self._in_step.append((sequence, row.output_position if row.sampling is not None else None))
        for sequence, timed in self._timed.items():
            if sequence.is_in_step and sequence.state is SequenceState.DECODING:
                timed.clock.enter(Stage.FIRST_STEP, now_s)
                self._in_step.append((sequence, len(sequence.answer_ids)))

    def end_step(self, now_s: float) -> None:
        """Its tokens are on their way to the router."""
        for sequence, position in self._in_step:
            if not sequence.is_live:
                continue
            if position is None:
                self.enter(sequence, Stage.PREFILL_QUEUE, now_s)
            else:
                self.report(sequence, position, now_s)
        self._in_step = []

    def report(self, sequence: Sequence, position: int, now_s: float) -> None:
        """The token at this position is on its way. Harmless for a sequence that is not timed."""
        timed = self._timed.get(sequence)
        if timed is None:
            return
        stages = timed.clock.take(now_s)
        self._outgoing.report_stages(StageReport(sequence.attempt_id, position, stages))
        timed.num_reports -= 1
        if timed.num_reports:
            timed.clock.enter(Stage.DECODE_QUEUE, now_s)
        else:
            del self._timed[sequence]

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        """Raises InternalFault when somebody is timed who is not here any more."""
        gone = self._timed.keys() - set(sequences)
        if gone:
            raise InternalFault(f"{[each.attempt_id for each in gone]} are timed and not here")
        for timed in self._timed.values():
            timed.clock.check_invariants()

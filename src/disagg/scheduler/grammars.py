"""Sequences whose grammar is being prepared: they neither start nor write until it is, others go on.

_on_start -> PrepareGrammar -> (engine, beside its steps) -> GrammarPrepared -> admitted, or written on
"""

from disagg.core.errors import Failure, FailureKind, InternalFault
from disagg.core.ids import HandoffId
from disagg.scheduler.actions import PrepareGrammar
from disagg.scheduler.closing import Closing
from disagg.scheduler.events import GrammarPrepared
from disagg.scheduler.sequence import Sequence
from disagg.scheduler.state import SchedulerState


class Grammars:
    """Who waits for a grammar, and until when."""

    def __init__(self, state: SchedulerState, closing: Closing) -> None:
        self._state = state
        self._closing = closing
        self._waiting: dict[HandoffId, Sequence] = {}  # also those dropped meanwhile, until they are looked at

    def ask(self, sequence: Sequence) -> None:
        """Called once for each sequence that was added."""
        grammar = sequence.spec.sampling.grammar
        if grammar is not None:
            sequence.grammar_until_s = self._state.now_s + self._state.config.grammar_timeout_s
            self._waiting[sequence.attempt_id] = sequence
            self._state.act(PrepareGrammar(sequence.attempt_id, grammar, tuple(sequence.answer_ids)))

    def on_prepared(self, event: GrammarPrepared) -> None:
        sequence = self._waiting.pop(event.attempt_id, None)
        if sequence is None or not sequence.is_live:
            self._state.ignore(event)
            return
        sequence.grammar_until_s = None
        if event.failure is not None:
            self._closing.fail(sequence, event.failure)

    def on_clock(self) -> None:
        """Give up those that have waited too long."""
        timeout_s = self._state.config.grammar_timeout_s
        for sequence in self._live():
            if sequence.grammar_until_s is not None and sequence.grammar_until_s <= self._state.now_s:
                del self._waiting[sequence.attempt_id]
                text = f"its grammar was not prepared within {timeout_s:g} s; ask for a simpler one"
                self._closing.fail(sequence, Failure(FailureKind.INTERNAL, text))

    def next_wake_s(self) -> float:
        """When on_clock has something to do; infinity when nobody waits."""
        if not self._waiting:
            return float("inf")
        return min((each.grammar_until_s or 0.0 for each in self._live()), default=float("inf"))

    def check_invariants(self) -> None:
        """Raises InternalFault when somebody waits and is not listed: it would wait for ever."""
        waiting = {each.attempt_id for each in self._state.sequences.values() if each.grammar_until_s is not None}
        live = {each.attempt_id for each in self._live()}
        if live != {each for each in waiting if self._state.sequences[each].is_live}:
            raise InternalFault(f"{sorted(waiting)} wait for grammars, listed are {sorted(live)}")

    def _live(self) -> list[Sequence]:
        for attempt_id in [each for each, sequence in self._waiting.items() if not sequence.is_live]:
            del self._waiting[attempt_id]
        return list(self._waiting.values())

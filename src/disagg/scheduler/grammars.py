"""Sequences whose grammar is being prepared: they neither start nor write until it is, others go on.

_on_start -> PrepareGrammar -> (engine, beside its steps) -> GrammarPrepared -> admitted, or written on
"""

from disagg.core.errors import Failure, FailureKind
from disagg.core.roles import Task
from disagg.scheduler.actions import PrepareGrammar
from disagg.scheduler.events import GrammarPrepared
from disagg.scheduler.sequence import Sequence
from disagg.scheduler.state import SchedulerState

_SAMPLES = (Task.WHOLE, Task.PREFILL, Task.DECODE)


class Grammars:
    """Who waits for a grammar, and until when."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def ask(self, sequence: Sequence) -> None:
        """Called once for each sequence that was added."""
        grammar = sequence.spec.sampling.grammar
        if grammar is not None and sequence.task in _SAMPLES:
            sequence.grammar_until_s = self._state.now_s + self._state.config.grammar_timeout_s
            self._state.act(PrepareGrammar(sequence.attempt_id, grammar, tuple(sequence.answer_ids)))

    def on_prepared(self, event: GrammarPrepared) -> None:
        sequence = self._state.sequences.get(event.attempt_id)
        if sequence is None or sequence.grammar_until_s is None or not sequence.is_live:
            self._state.ignore(event)
            return
        sequence.grammar_until_s = None
        if event.failure is not None:
            self._state.fail(sequence, event.failure)

    def on_clock(self) -> None:
        """Give up those that have waited too long."""
        timeout_s = self._state.config.grammar_timeout_s
        for sequence in self._waiting():
            if sequence.grammar_until_s is not None and sequence.grammar_until_s <= self._state.now_s:
                text = f"its grammar was not prepared within {timeout_s:g} s; ask for a simpler one"
                self._state.fail(sequence, Failure(FailureKind.INTERNAL, text))

    def next_wake_s(self) -> float:
        """When on_clock has something to do; infinity when nobody waits."""
        return min((each.grammar_until_s or 0.0 for each in self._waiting()), default=float("inf"))

    def _waiting(self) -> list[Sequence]:
        sequences = self._state.sequences.values()
        return [each for each in sequences if each.grammar_until_s is not None and each.is_live]

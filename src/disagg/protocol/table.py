"""State machines as tables: (state, trigger) -> state. What is not in the table raises, with the whole story."""

import enum
from collections import deque
from collections.abc import Mapping
from typing import Generic, TypeVar

from disagg.core.errors import InternalFault

MAX_STORY = 64  # triggers kept for error messages

S = TypeVar("S", bound=enum.Enum)
T = TypeVar("T", bound=enum.Enum)


class TransitionTable(Generic[S, T]):
    """An immutable table. `initial` is where every machine starts; `final` states have no way out."""

    def __init__(self, name: str, initial: S, transitions: Mapping[tuple[S, T], S]) -> None:
        self.name = name
        self.initial = initial
        self._transitions = dict(transitions)
        sources = {state for state, _ in self._transitions}
        self.final = frozenset(target for target in self._transitions.values() if target not in sources)

    def rows(self) -> list[tuple[S, T, S]]:
        return [(state, trigger, target) for (state, trigger), target in self._transitions.items()]

    def target(self, state: S, trigger: T) -> S | None:
        return self._transitions.get((state, trigger))

    def diagram(self) -> str:
        """Mermaid text, in table order; docs are compared with it by a test."""
        lines = ["stateDiagram-v2", f"    [*] --> {self.initial.value}"]
        lines += [f"    {source.value} --> {target.value}: {trigger.value}" for source, trigger, target in self.rows()]
        lines += [f"    {state.value} --> [*]" for state in sorted(self.final, key=lambda state: str(state.value))]
        return "\n".join(lines)


class Machine(Generic[S, T]):
    """One run of a table, with its story for error messages."""

    __slots__ = ("_story", "_table", "state", "subject")

    def __init__(self, table: TransitionTable[S, T], subject: object) -> None:
        """subject: named in errors; not written out before there is one."""
        self._table = table
        self.subject = subject
        self.state = table.initial
        self._story: deque[T] = deque(maxlen=MAX_STORY)

    def fire(self, trigger: T) -> S:
        target = self._table.target(self.state, trigger)
        if target is None:
            story = " ".join(str(past.value) for past in self._story) or "nothing"
            raise InternalFault(
                f"{self._table.name} {self.subject}: no {trigger.value} in state {self.state.value} (so far: {story})"
            )
        self._story.append(trigger)
        self.state = target
        return target

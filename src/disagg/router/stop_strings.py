"""Stop strings over streamed text, after Aho and Corasick (1975), "Efficient string matching".

The automaton's state is the longest suffix of the text so far that begins some stop string. Its depth is exactly what
must be held back: one character less could leak part of a stop string, one more would delay text for nothing.
"""

from collections import deque
from collections.abc import Sequence


class StopAutomaton:
    """The stop strings of one request, compiled once. Immutable, shared by all its choices."""

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` are not empty; their total length bounds time and memory."""
        self._next: list[dict[str, int]] = [{}]
        self.depth: list[int] = [0]
        self.matched: list[int] = [0]  # per state: length of the longest stop string that ends here, 0 if none
        for stop in stops:
            self._add(stop)
        self._suffix: list[int] = self._link()

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        while (found := self._next[state].get(character)) is None:
            if state == 0:
                return 0
            state = self._suffix[state]
        return found

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self.depth.append(self.depth[state] + 1)
                self.matched.append(0)
            state = self._next[state][character]
        self.matched[state] = len(stop)

    def _link(self) -> list[int]:
        suffix = [0] * len(self._next)
        self._suffix = suffix
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, child in self._next[state].items():
                suffix[child] = self.step(suffix[state], character)
                self.matched[child] = self.matched[child] or self.matched[suffix[child]]
                queue.append(child)
        return suffix


class StopFilter:
    """Passes one choice's text on up to the first stop string.

    The first stop string is the one that is complete first; of two that end together, the longer. So the result does
    not depend on how the text was cut into deltas.
    """

    def __init__(self, automaton: StopAutomaton) -> None:
        self._automaton = automaton
        self._state = 0
        self._held = ""
        self.is_stopped = False

    def push(self, delta: str, *, is_armed: bool = True) -> str:
        """Text that may be shown now. After a match nothing is. Unarmed, a stop string that ends here is plain text."""
        if self.is_stopped:
            return ""
        automaton, state = self._automaton, self._state
        text = self._held + delta
        for end in range(len(self._held) + 1, len(text) + 1):
            state = automaton.step(state, text[end - 1])
            if is_armed and automaton.matched[state]:
                self.is_stopped = True
                self._held = ""
                return text[: end - automaton.matched[state]]
        self._state = state
        shown = len(text) - automaton.depth[state]
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """What was held back, at the end of an answer in which no stop string became complete."""
        held, self._held, self._state = self._held, "", 0
        return held

    def check_invariants(self) -> None:
        """Raises AssertionError when the held text is not what the automaton's state stands for."""
        assert self.is_stopped or len(self._held) == self._automaton.depth[self._state]
        assert not (self.is_stopped and self._held)

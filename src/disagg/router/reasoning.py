"""What a model thinks, `<think>…</think>` at the beginning of its answer, apart from what it says.

  START      white space, <think>   -> THINKING      anything else -> SAYING
  THINKING   </think>               -> GAP
  GAP        white space; the rest  -> SAYING

White space around either part is dropped. Joined parts do not depend on how the text was cut.
"""

import enum
from typing import Final, NamedTuple

from disagg.router.parser_names import ReasoningParser
from disagg.router.tools.parsers import held_from

THINK_OPEN: Final = "<think>"
THINK_CLOSE: Final = "</think>"


def choose_reasoning(asked: ReasoningParser, template: str | None) -> ReasoningParser:
    """Never AUTO: by the chat template where it is not given."""
    if asked is not ReasoningParser.AUTO:
        return asked
    return ReasoningParser.THINK if THINK_CLOSE in (template or "") else ReasoningParser.NONE


def has_opened(prompt: str) -> bool:
    """Whether a prompt ends inside of what the model thinks, so that the answer begins there."""
    return prompt.rstrip().endswith(THINK_OPEN)


class Thought(NamedTuple):
    """What one piece of text turned out to be."""

    reasoning: str
    said: str


class _State(enum.Enum):
    START = enum.auto()
    THINKING = enum.auto()
    GAP = enum.auto()
    SAYING = enum.auto()


class ThinkSplitter:
    """Splits one answer."""

    def __init__(self, *, is_open: bool) -> None:
        """is_open: the prompt ends with <think>."""
        self._state = _State.THINKING if is_open else _State.START
        self.has_begun = is_open  # to think: it is never taken back
        self._pending = ""
        self._has_thought = False
        self._reasoning: list[str] = []

    @property
    def is_over(self) -> bool:
        """Whether nothing more can be thought."""
        return self._state in (_State.GAP, _State.SAYING)

    def push(self, text: str) -> Thought:
        if self._state is _State.SAYING:
            return Thought("", text)
        self._pending += text
        said = ""
        if self._state is _State.START:
            said = self._start()
        if self._state is _State.THINKING:
            self._think()
        if self._state is _State.GAP:
            said = self._pending.lstrip()
            self._pending = ""
            self._state = _State.SAYING if said else _State.GAP
        reasoning = "".join(self._reasoning)
        self._reasoning.clear()
        return Thought(reasoning, said)

    def flush(self) -> Thought:
        """At the end of the answer: what was begun and not ended is thought all the same."""
        pending, self._pending = self._pending, ""
        if self._state is _State.THINKING:
            return Thought(pending.rstrip(), "")
        return Thought("", pending if self._state is _State.START else "")

    def _start(self) -> str:
        rest = self._pending.lstrip()
        if rest.startswith(THINK_OPEN):
            self._state = _State.THINKING
            self._pending = rest[len(THINK_OPEN) :]
            self.has_begun = True
        elif not THINK_OPEN.startswith(rest):
            said, self._pending = self._pending, ""
            self._state = _State.SAYING
            return said
        return ""

    def _think(self) -> None:
        if not self._has_thought:
            self._pending = self._pending.lstrip()
        found = self._pending.find(THINK_CLOSE)
        if found >= 0:
            shown, rest = self._pending[:found].rstrip(), self._pending[found + len(THINK_CLOSE) :]
            self._state = _State.GAP
        else:
            start = held_from(self._pending, THINK_CLOSE)
            shown, rest = self._pending[:start], self._pending[start:]
        self._has_thought |= bool(shown)
        self._reasoning.append(shown)
        self._pending = rest


class ThoughtCounter:
    """How many tokens of an answer are its thought: all up to the one with which </think> ends."""

    def __init__(self, *, is_open: bool) -> None:
        """is_open: the prompt ends with <think>."""
        self._splitter = ThinkSplitter(is_open=is_open)
        self._num_seen = 0

    def push(self, text: str) -> None:
        """The text of one more token; "" when it has none, or none yet."""
        if not self._splitter.is_over:
            self._num_seen += 1
            self._splitter.push(text)

    @property
    def num_tokens(self) -> int:
        """So far; none where the answer began with something else."""
        return self._num_seen if self._splitter.has_begun else 0

"""Calls out of an answer's text as it comes, one parser for each way in which model families write them.

Whatever is no call after all becomes plain content, none of it lost. Only white space between calls, and before the
first or after the last of them, is dropped. The deltas of a text, joined, do not depend on how the text was cut.
"""

from collections.abc import Collection
from typing import Final, NamedTuple, Protocol

import msgspec

from disagg.router.tools.call_scan import CallScanner, ScanState

HERMES_OPEN: Final = "<tool_call>"
HERMES_CLOSE: Final = "</tool_call>"
PYTHON_TAG: Final = "<|python_tag|>"


class CallDelta(msgspec.Struct, frozen=True):
    """More of one call. The first delta of a call carries its name."""

    index: int
    name: str | None
    arguments: str


class Read(NamedTuple):
    """What one piece of text turned out to be."""

    content: str = ""
    calls: tuple[CallDelta, ...] = ()


class CallParser(Protocol):
    """Reads one answer."""

    @property
    def num_calls(self) -> int: ...

    def push(self, text: str) -> Read: ...

    def flush(self) -> Read:
        """At the end of the answer."""


def held_from(text: str, mark: str) -> int:
    """Where the end of text begins that may become `mark`, white space before it included; len(text) for nowhere."""
    start = len(text)
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[len(text) - length :]):
            start = len(text) - length
            break
    return len(text[:start].rstrip())


class _Calls:
    """What both ways have in common: calls one after the other, with what is needed to take one back."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self.num_calls = 0
        self._scanner = CallScanner(names)
        self._raw: list[str] = []  # text since the call may have begun, while it may still be none
        self._content: list[str] = []
        self._deltas: list[CallDelta] = []

    def begin(self, raw: str) -> None:
        self._scanner = CallScanner(self._names)
        self._raw = [raw]

    def show(self, text: str) -> None:
        self._content.append(text)

    def scan(self, text: str) -> int:
        """Read the call on; how many characters belong to it."""
        scanner, was_named = self._scanner, self._scanner.name is not None
        taken = 0
        while taken < len(text) and not scanner.is_over and scanner.push(text[taken]):
            taken += 1
        if scanner.name is not None:
            self._raw.clear()
            arguments = scanner.take_arguments()
            index = self.num_calls - was_named
            self.num_calls += not was_named
            if not was_named or arguments:
                self._deltas.append(CallDelta(index, None if was_named else scanner.name, arguments))
        else:
            self._raw.append(text[:taken])
            if scanner.is_over:
                self.take_back()
        return taken

    @property
    def state(self) -> ScanState:
        return self._scanner.state

    def take_back(self) -> None:
        """It was no call: all of it is content."""
        self._content.extend(self._raw)
        self._raw.clear()

    def read(self) -> Read:
        found = Read("".join(self._content), tuple(self._deltas))
        self._content.clear()
        self._deltas.clear()
        return found


class HermesParser:
    """`<tool_call>{…}</tool_call>` anywhere in the text: Hermes, Qwen and those who follow them.

    _is_inside: after <tool_call>, up to </tool_call> or to what can be neither.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._calls = _Calls(names)
        self._pending = ""
        self._is_inside = False

    @property
    def num_calls(self) -> int:
        return self._calls.num_calls

    def push(self, text: str) -> Read:
        self._pending += text
        while self._pending and (self._read_call() if self._is_inside else self._look_for_call()):
            pass
        return self._calls.read()

    def flush(self) -> Read:
        if self._is_inside:
            self._calls.take_back()
            self._show_unless_blank("" if HERMES_CLOSE.startswith(self._pending.strip()) else self._pending)
        else:
            self._show_unless_blank(self._pending)
        self._pending = ""
        return self._calls.read()

    def _show_unless_blank(self, text: str) -> None:
        if text.strip() or not self.num_calls:
            self._calls.show(text)

    def _look_for_call(self) -> bool:
        text = self._pending
        found = text.find(HERMES_OPEN)
        if found >= 0:
            start = len(text[:found].rstrip())
            self._calls.show(text[:start])
            end = found + len(HERMES_OPEN)
            self._calls.begin(text[start:end])
            self._pending = text[end:]
            self._is_inside = True
            return True
        start = held_from(text, HERMES_OPEN)
        self._calls.show(text[:start])
        self._pending = text[start:]
        return False

    def _read_call(self) -> bool:
        if self._calls.state is not ScanState.DONE:
            taken = self._calls.scan(self._pending)
            self._pending = self._pending[taken:]
            self._is_inside = self._calls.state is not ScanState.BROKEN
            return self._calls.state in (ScanState.DONE, ScanState.BROKEN)
        rest = self._pending.lstrip()
        if rest.startswith(HERMES_CLOSE):
            self._pending = rest[len(HERMES_CLOSE) :]
        elif HERMES_CLOSE.startswith(rest):
            return False
        self._is_inside = False  # without its end, the call is whole all the same
        return True


class Llama3Parser:
    """`{"name": …, "parameters": {…}}` as the whole answer, perhaps after <|python_tag|>, several with `;` between.

    _is_plain: the answer is, or has become, ordinary text.
    """

    _BETWEEN: Final = " \t\r\n;,"

    def __init__(self, names: Collection[str]) -> None:
        self._calls = _Calls(names)
        self._pending = ""
        self._is_inside = False
        self._is_plain = False

    @property
    def num_calls(self) -> int:
        return self._calls.num_calls

    def push(self, text: str) -> Read:
        self._pending += text
        while self._pending and (self._read_call() if self._is_inside else self._look_for_call()):
            pass
        return self._calls.read()

    def flush(self) -> Read:
        if self._is_inside:
            self._calls.take_back()
        elif self._pending.strip(self._BETWEEN) or not self.num_calls:
            self._calls.show(self._pending)
        self._pending = ""
        return self._calls.read()

    def _look_for_call(self) -> bool:
        if not self._is_plain:
            rest = self._pending.lstrip(self._BETWEEN if self.num_calls else None)
            rest = rest.removeprefix(PYTHON_TAG).lstrip()
            if PYTHON_TAG.startswith(rest):
                return False  # nothing yet, or the beginning of the tag
            if rest.startswith("{"):
                self._calls.begin(self._pending[: len(self._pending) - len(rest)])
                self._pending = rest
                self._is_inside = True
                return True
            self._is_plain = True
        self._calls.show(self._pending)
        self._pending = ""
        return False

    def _read_call(self) -> bool:
        taken = self._calls.scan(self._pending)
        self._pending = self._pending[taken:]
        self._is_plain = self._calls.state is ScanState.BROKEN
        self._is_inside = not (self._is_plain or self._calls.state is ScanState.DONE)
        return not self._is_inside

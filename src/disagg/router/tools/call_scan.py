"""One call as models write it, `{"name": …, "arguments": {…}}`, read character by character.

The state after a text does not depend on how the text was cut. Arguments are passed on as they come, once the name is
known; until then nothing has been said to anybody, and what turns out to be no call can still be shown as plain text.

  OBJECT      {                    -> FIRST_KEY
  FIRST_KEY   "                    -> KEY           } -> DONE
  KEY         … "                  -> COLON
  COLON       :                    -> VALUE
  VALUE       a whole JSON value   -> NEXT
  NEXT        ,                    -> NEXT_KEY      } -> DONE
  NEXT_KEY    "                    -> KEY
  anything else                    -> BROKEN; white space between them means nothing
"""

import enum
import json
from collections.abc import Collection
from typing import Final

_SPACE: Final = " \t\r\n"
_ARGUMENTS: Final = ("arguments", "parameters")


class ScanState(enum.Enum):
    """What is to come."""

    OBJECT = enum.auto()
    FIRST_KEY = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    NEXT = enum.auto()
    NEXT_KEY = enum.auto()
    DONE = enum.auto()
    BROKEN = enum.auto()


_MARKS: Final = {
    (ScanState.OBJECT, "{"): ScanState.FIRST_KEY,
    (ScanState.FIRST_KEY, '"'): ScanState.KEY,
    (ScanState.FIRST_KEY, "}"): ScanState.DONE,
    (ScanState.COLON, ":"): ScanState.VALUE,
    (ScanState.NEXT, ","): ScanState.NEXT_KEY,
    (ScanState.NEXT, "}"): ScanState.DONE,
    (ScanState.NEXT_KEY, '"'): ScanState.KEY,
}


class _Value:
    """Where one JSON value ends: brackets and strings are followed, the rest is taken as it is."""

    __slots__ = ("_depth", "_is_escaped", "_is_in_string", "first", "parts")

    def __init__(self, first: str = "") -> None:
        self.first = first
        self.parts = [first] if first else []
        self._depth = 0
        self._is_in_string = first == '"'
        self._is_escaped = False

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def take(self, character: str) -> bool | None:
        """True: it ended with this character; None: it had ended before it; False: it goes on."""
        if not self._is_in_string and not self._depth and self.first and (character in ",}]" or character in _SPACE):
            return None
        self.first = self.first or character
        self.parts.append(character)
        if self._is_in_string:
            self._follow_string(character)
        elif character == '"':
            self._is_in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
        return not self._is_in_string and not self._depth and self.first in '{["'

    def _follow_string(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._is_in_string = False


class CallScanner:
    """Reads one call. `name` is set as soon as the call is certain to be one."""

    def __init__(self, names: Collection[str]) -> None:
        """`names` are the functions there are; a call of any other is none."""
        self.state = ScanState.OBJECT
        self.name: str | None = None
        self._names = names
        self._key = ""
        self._value = _Value()
        self._read_name: str | None = None
        self._held: list[str] = []  # arguments that nobody has taken yet
        self._has_arguments = False

    @property
    def is_over(self) -> bool:
        return self.state in (ScanState.DONE, ScanState.BROKEN)

    def take_arguments(self) -> str:
        """The arguments' text since the last call; "" before `name` is set."""
        if self.name is None:
            return ""
        text = "".join(self._held)
        self._held.clear()
        return text

    def push(self, character: str) -> bool:
        """Take the next character; False when it does not belong to a call any more, and is not taken."""
        if self.state in (ScanState.KEY, ScanState.VALUE):
            return self._push_value(character)
        if character in _SPACE:
            return True
        state = _MARKS.get((self.state, character), ScanState.BROKEN)
        self.state = state
        if state is ScanState.KEY:
            self._value = _Value('"')
        elif state is ScanState.VALUE:
            self._value = _Value()
        elif state is ScanState.DONE:
            self._close()
        return state is not ScanState.BROKEN

    def _push_value(self, character: str) -> bool:
        if not self._value.first and character in _SPACE:
            return True
        if not self._value.first and character in ",}]:":
            self.state = ScanState.BROKEN
            return False
        ended = self._value.take(character)
        is_streamed = self.state is ScanState.VALUE and self._is_arguments and self._value.first == "{"
        if is_streamed and ended is not None:
            self._held.append(character)
            self._announce()
        if ended is False:
            return True
        self._end_value()
        return self.push(character) if ended is None else self.state is not ScanState.BROKEN

    @property
    def _is_arguments(self) -> bool:
        return self._key in _ARGUMENTS and not self._has_arguments

    def _end_value(self) -> None:
        text = self._value.text
        if self.state is ScanState.KEY:
            decoded = _decoded(text)
            self._key = decoded if isinstance(decoded, str) else ""
            self.state = ScanState.COLON if isinstance(decoded, str) else ScanState.BROKEN
            return
        self.state = ScanState.NEXT
        if self._key == "name" and self._read_name is None:
            name = _decoded(text)
            self._read_name = name if isinstance(name, str) else None
            if self._read_name not in self._names:
                self.state = ScanState.BROKEN
            elif self._held or self._has_arguments:
                self._announce()
        elif self._is_arguments:
            self._end_arguments(text)

    def _end_arguments(self, text: str) -> None:
        """Objects have been passed on; some models spell the object as a string, or write null for none."""
        if self._value.first != "{":
            value = _decoded(text)
            if value is None and text == "null":
                value = "{}"
            if not isinstance(value, str):
                self.state = ScanState.BROKEN
                return
            self._held.append(value)
        self._has_arguments = True
        self._announce()

    def _announce(self) -> None:
        """From now on it is a call."""
        if self._read_name in self._names:
            self.name = self._read_name

    def _close(self) -> None:
        if self._read_name is None:
            self.state = ScanState.BROKEN
            return
        if not self._has_arguments:
            self._held.append("{}")
        self._announce()


def _decoded(text: str) -> object:
    """The value, or None for what is no JSON."""
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value

"""One answer's text as a message: what was thought, what is said, what is called."""

import msgspec

from disagg.core.request import FinishReason
from disagg.router.parser_names import ToolParser
from disagg.router.reasoning import THINK_CLOSE, THINK_OPEN, ThinkSplitter
from disagg.router.tools.families import start_parser
from disagg.router.tools.parsers import HERMES_CLOSE, HERMES_OPEN, CallDelta, Read
from disagg.router.tools.spec import ToolMode


class MessageReading(msgspec.Struct, frozen=True):
    """How the answers of one request are read."""

    parser: ToolParser
    names: tuple[str, ...]  # of functions that may be called
    mode: ToolMode
    is_parallel: bool
    is_thinking: bool  # reasoning is taken out
    is_open: bool  # the prompt ends inside of it

    @property
    def marks(self) -> tuple[str, ...]:
        """What the text is searched for."""
        thoughts = (THINK_OPEN, THINK_CLOSE) if self.is_thinking else ()
        calls = (HERMES_OPEN, HERMES_CLOSE) if self.names and self.parser is ToolParser.HERMES else ()
        return thoughts + calls


class MessageDelta(msgspec.Struct, frozen=True):
    """What a piece of text adds to the message."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.content or self.reasoning or self.calls)


class MessageReader:
    """Reads one choice."""

    def __init__(self, reading: MessageReading) -> None:
        self._reading = reading
        self._thoughts = ThinkSplitter(is_open=reading.is_open) if reading.is_thinking else None
        self._calls = start_parser(reading.parser, reading.names) if reading.names else None

    def push(self, text: str) -> MessageDelta:
        """The text's next piece."""
        if self._thoughts is None:
            return self._delta("", self._read(text))
        thought = self._thoughts.push(text)
        return self._delta(thought.reasoning, self._read(thought.said))

    def flush(self) -> MessageDelta:
        """At the end: what was held back."""
        thought = self._thoughts.flush() if self._thoughts is not None else None
        read = self._read(thought.said) if thought is not None else Read()
        if self._calls is not None:
            last = self._calls.flush()
            read = Read(read.content + last.content, read.calls + last.calls)
        return self._delta(thought.reasoning if thought is not None else "", read)

    def finish_reason(self, reason: FinishReason) -> FinishReason:
        """The client's word for it: an answer that stopped after calls that the model chose, or had to choose."""
        has_called = self._calls is not None and self._calls.num_calls > 0
        if reason is FinishReason.STOP and has_called and self._reading.mode is not ToolMode.NAMED:
            return FinishReason.TOOL_CALLS
        return reason

    def _read(self, text: str) -> Read:
        if self._calls is None or not text:
            return Read(text)
        return self._calls.push(text)

    def _delta(self, reasoning: str, read: Read) -> MessageDelta:
        # Who asked for one call at a time is given the first.
        calls = read.calls if self._reading.is_parallel else tuple(call for call in read.calls if call.index == 0)
        return MessageDelta(read.content, reasoning, calls)

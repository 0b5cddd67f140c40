"""Chat answers that are more than their text: reasoning and function calls beside the content."""

from collections.abc import Sequence
from typing import Final

import msgspec

from disagg.core.request import FinishReason
from disagg.modelfiles.tokenizer import ModelTokenizer
from disagg.router.answer import Usage, WholeChoice
from disagg.router.answer_format import AnswerHead, PromptLogprobs, UsageBody, to_json, usage_body
from disagg.router.chat import ChatFormat, ChatLogprobs
from disagg.router.choice import Piece, TokenEntry
from disagg.router.message_reader import MessageDelta, MessageReader, MessageReading
from disagg.router.tools.parsers import CallDelta

_FUNCTION: Final = "function"


class FunctionText(msgspec.Struct, frozen=True):
    """What a whole call calls."""

    name: str
    arguments: str


class WholeCall(msgspec.Struct, frozen=True):
    """One call of a whole message."""

    id: str
    function: FunctionText
    type: str = _FUNCTION


class FunctionDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """More of what is called. The name comes once."""

    arguments: str
    name: str | None = None


class StreamedCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """More of one call. Its id and type come once, with the name."""

    index: int
    function: FunctionDelta
    id: str | None = None
    type: str | None = None


class StreamedMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a chunk adds to a message."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[StreamedCall] | None = None


class WholeMessage(msgspec.Struct, frozen=True):
    """The answer's message; content is null where there is none beside calls or reasoning."""

    content: str | None
    reasoning_content: str | msgspec.UnsetType | None = msgspec.UNSET
    tool_calls: list[WholeCall] | msgspec.UnsetType = msgspec.UNSET
    role: str = "assistant"
    refusal: None = None


class MessageChoice(msgspec.Struct, frozen=True):
    """One whole choice."""

    index: int
    message: WholeMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class MessageAnswer(msgspec.Struct, frozen=True):
    """The whole answer."""

    id: str
    object: str
    created: int
    model: str
    choices: list[MessageChoice]
    usage: UsageBody
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class MessageFormat:
    """Bytes of one such chat answer. Whole or streamed, its parts are read the same way."""

    def __init__(self, head: AnswerHead, tokenizer: ModelTokenizer, reading: MessageReading) -> None:
        self._head = head
        self._reading = reading
        self._plain = ChatFormat(head, tokenizer)
        self._frame = self._plain.frame
        self._readers: dict[int, MessageReader] = {}
        self._entries: dict[int, list[TokenEntry]] = {}  # of text that is held back

    def opening(self, num_choices: int) -> bytes:
        return self._plain.opening(num_choices)

    def closing(self, usage: Usage | None, extension: bytes) -> bytes:
        return self._plain.closing(usage, extension)

    def piece(self, piece: Piece, usage: Usage | None = None) -> bytes:
        reader = self._readers.setdefault(piece.index, MessageReader(self._reading))
        entries = self._entries.setdefault(piece.index, [])
        entries.extend(piece.entries)
        deltas = [reader.push(piece.text)] if piece.text else []
        if piece.finish_reason is not None:
            deltas.append(reader.flush())
        chunks = [self._chunk(piece.index, delta, entries, usage) for delta in deltas if not delta.is_empty]
        if piece.finish_reason is None:
            return b"".join(chunks)
        if entries:  # of tokens whose text became nothing, like a tag
            chunks.append(self._chunk(piece.index, MessageDelta(), entries, usage))
        del self._readers[piece.index]
        reason = reader.finish_reason(piece.finish_reason)
        return b"".join(chunks) + self._frame.chunk(piece.index, b'"delta":{}', b"null", reason, usage)

    def whole(self, choices: list[WholeChoice], usage: Usage) -> bytes:
        head = self._head
        return to_json(
            MessageAnswer(
                id=head.id,
                object="chat.completion",
                created=head.created,
                model=head.model,
                choices=[self._choice(choice) for choice in choices],
                usage=usage_body(usage),
                prompt_logprobs=self._plain.prompt_logprobs(choices),
            )
        )

    def _chunk(self, index: int, delta: MessageDelta, entries: list[TokenEntry], usage: Usage | None) -> bytes:
        logprobs = to_json(self._logprobs(entries)) if entries else None
        entries.clear()
        if delta.content and not (delta.reasoning or delta.calls):
            return self._frame.text(index, delta.content, logprobs, usage)
        calls = [self._streamed_call(index, call) for call in delta.calls]
        message = StreamedMessage(delta.content or None, delta.reasoning or None, calls or None)
        return self._frame.chunk(index, b'"delta":' + to_json(message), logprobs or b"null", None, usage)

    def _streamed_call(self, index: int, call: CallDelta) -> StreamedCall:
        if call.name is None:
            return StreamedCall(call.index, FunctionDelta(call.arguments))
        function = FunctionDelta(call.arguments, call.name)
        return StreamedCall(call.index, function, self._call_id(index, call.index), _FUNCTION)

    def _choice(self, choice: WholeChoice) -> MessageChoice:
        reader = MessageReader(self._reading)
        deltas = [reader.push(choice.text), reader.flush()]
        content = "".join(delta.content for delta in deltas)
        reasoning = "".join(delta.reasoning for delta in deltas)
        calls = self._whole_calls(choice.index, [call for delta in deltas for call in delta.calls])
        message = WholeMessage(
            content=content if content or not (calls or reasoning) else None,
            reasoning_content=(reasoning or None) if self._reading.is_thinking else msgspec.UNSET,
            tool_calls=calls or msgspec.UNSET,
        )
        logprobs = None if self._head.num_logprobs is None else self._logprobs(choice.entries)
        return MessageChoice(choice.index, message, logprobs, reader.finish_reason(choice.finish_reason))

    def _whole_calls(self, index: int, deltas: Sequence[CallDelta]) -> list[WholeCall]:
        names = {delta.index: delta.name for delta in deltas if delta.name is not None}
        arguments = dict.fromkeys(names, "")
        for delta in deltas:
            arguments[delta.index] += delta.arguments
        return [
            WholeCall(self._call_id(index, number), FunctionText(name, arguments[number]))
            for number, name in names.items()
        ]

    def _call_id(self, index: int, number: int) -> str:
        """The same whichever workers wrote the answer, streamed or not."""
        return f"call_{self._head.id.removeprefix('chatcmpl-')}-{index}-{number}"

    def _logprobs(self, entries: Sequence[TokenEntry]) -> ChatLogprobs:
        return self._plain.logprobs(entries)

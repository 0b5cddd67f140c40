"""What the two endpoints' answers have in common: parts of JSON that do not change are built once for each request."""

from typing import Final, Protocol

import msgspec

from disagg.core.request import FinishReason
from disagg.router.answer import Usage, WholeChoice
from disagg.router.choice import Piece
from disagg.router.sse import event

_LOWEST_LOGPROB: Final = -9999.0  # OpenAI's stand-in for minus infinity, which JSON has no word for

to_json: Final = msgspec.json.Encoder().encode


class AnswerHead(msgspec.Struct, frozen=True):
    """What every object of one answer repeats."""

    id: str
    created: int  # Unix time in seconds
    model: str
    has_usage: bool  # the client asked for a usage chunk, so the others carry "usage": null


class AnswerFormat(Protocol):
    """Bytes of one answer: events of a stream, or one whole object."""

    def opening(self, num_choices: int) -> bytes:
        """Events before any text."""

    def piece(self, piece: Piece) -> bytes:
        """Events of one piece, its finish included."""

    def usage(self, usage: Usage) -> bytes:
        """The event with token counts and no choices."""

    def whole(self, choices: list[WholeChoice], usage: Usage) -> bytes:
        """The whole answer as one JSON object."""


class UsageBody(msgspec.Struct, frozen=True):
    """OpenAI's usage object."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


def usage_body(usage: Usage) -> UsageBody:
    total = usage.prompt_tokens + usage.completion_tokens
    return UsageBody(usage.prompt_tokens, usage.completion_tokens, total, {"cached_tokens": usage.cached_tokens})


def finite(logprob: float) -> float:
    """A natural-log probability that JSON can carry."""
    return max(_LOWEST_LOGPROB, logprob)


class ChunkFrame:
    """The constant bytes around one choice's part of a streamed chunk."""

    def __init__(self, head: AnswerHead, kind: str) -> None:
        """`kind` is the value of "object"."""
        self._start = b"".join(
            (
                b'data: {"id":',
                to_json(head.id),
                b',"object":',
                to_json(kind),
                b',"created":',
                to_json(head.created),
                b',"model":',
                to_json(head.model),
                b',"choices":[',
            )
        )
        self._end = b'}],"usage":null}\n\n' if head.has_usage else b"}]}\n\n"

    def chunk(self, index: int, content: bytes, logprobs: bytes, finish_reason: FinishReason | None) -> bytes:
        """`content` is the choice's own key and value, for example b'"text":"…"'."""
        reason = b"null" if finish_reason is None else b'"%b"' % finish_reason.value.encode()
        return b'%b{"index":%d,%b,"logprobs":%b,"finish_reason":%b%b' % (
            self._start,
            index,
            content,
            logprobs,
            reason,
            self._end,
        )

    def usage(self, usage: Usage) -> bytes:
        json = self._start.removeprefix(b"data: ") + b'],"usage":' + to_json(usage_body(usage)) + b"}"
        return event(json)

"""What the two endpoints' answers have in common: parts of JSON that do not change are built once for each request."""

from typing import Final, Protocol

import msgspec

from disagg.core.request import FinishReason
from disagg.modelfiles.tokenizer import ModelTokenizer
from disagg.router.answer import Usage, WholeChoice
from disagg.router.choice import EchoedPrompt, Piece
from disagg.router.sse import event

_LOWEST_LOGPROB: Final = -9999.0  # OpenAI's stand-in for minus infinity, which JSON has no word for

to_json: Final = msgspec.json.Encoder().encode


class AnswerHead(msgspec.Struct, frozen=True):
    """What every object of one answer repeats."""

    id: str
    created: int  # Unix time in seconds
    model: str
    has_usage: bool = False  # the client asked for a usage chunk, so the others carry "usage": null
    num_logprobs: int | None = None  # likeliest tokens shown with each one; None: no log probabilities at all
    num_prompt_logprobs: int | None = None  # the same for each token of the prompt, beside the answer


class AnswerFormat(Protocol):
    """Bytes of one answer: events of a stream, or one whole object."""

    def opening(self, num_choices: int) -> bytes:
        """Events before any text."""

    def piece(self, piece: Piece, usage: Usage | None = None) -> bytes:
        """Events of one piece, its finish included. With usage, each carries it."""

    def closing(self, usage: Usage | None, extension: bytes) -> bytes:
        """The event without choices after all others: token counts, and a field of ours as "name":value, or b""."""

    def whole(self, choices: list[WholeChoice], usage: Usage) -> bytes:
        """The whole answer as one JSON object."""


class PromptLogprob(msgspec.Struct, frozen=True):
    """One token at a place of the prompt: vLLM's object of the same name."""

    logprob: float
    rank: int | None  # 1 is the likeliest; None: it is not among those shown
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


def prompt_logprobs(prompt: EchoedPrompt | None, num_top: int | None, tokenizer: ModelTokenizer) -> PromptLogprobs:
    """By token id, for each place of the prompt; None for its first token, which follows nothing."""
    assert prompt is not None  # whoever asks for them has them
    assert prompt.scores is not None
    places: PromptLogprobs = [None]
    for token_id, scores in zip(prompt.token_ids[1:], prompt.scores, strict=True):
        ranked = {
            other: PromptLogprob(finite(value), rank, tokenizer.decode((other,), False))
            for rank, (other, value) in enumerate(scores.top[: num_top or 0], 1)
        }
        chosen = PromptLogprob(finite(scores.chosen), None, tokenizer.decode((token_id,), False))
        places.append({str(key): value for key, value in {token_id: chosen, **ranked}.items()})
    return places


class UsageBody(msgspec.Struct, frozen=True):
    """OpenAI's usage object."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int] | msgspec.UnsetType = msgspec.UNSET


def usage_body(usage: Usage) -> UsageBody:
    thought = usage.reasoning_tokens
    return UsageBody(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details={"cached_tokens": usage.cached_tokens},
        completion_tokens_details=msgspec.UNSET if thought is None else {"reasoning_tokens": thought},
    )


def extended(json: bytes, extension: bytes) -> bytes:
    """A JSON object with one more field, written as "name":value; b"" adds none."""
    return b"%b,%b}" % (json[:-1], extension) if extension else json


def finite(logprob: float) -> float:
    """A natural-log probability that JSON can carry."""
    return max(_LOWEST_LOGPROB, logprob)


class ChunkFrame:
    """The constant bytes around one choice's part of a streamed chunk."""

    def __init__(self, head: AnswerHead, kind: str, text_key: bytes, text_close: bytes = b"") -> None:
        """`kind` is the value of "object"; a choice's text is written between text_key and text_close."""
        self._text_key, self._text_close = text_key, text_close
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
        self._text_starts: dict[int, bytes] = {}  # by choice
        self._text_end = b"".join((text_close, b',"logprobs":null,"finish_reason":null', self._end))

    def text(self, index: int, text: str, logprobs: bytes | None = None, usage: Usage | None = None) -> bytes:
        """A chunk of more text."""
        json = to_json(text)
        if logprobs is not None or usage is not None:
            content = b"".join((self._text_key, json, self._text_close))
            return self.chunk(index, content, logprobs or b"null", None, usage)
        start = self._text_starts.get(index)
        if start is None:
            start = self._text_starts[index] = self._choice_start(index) + self._text_key
        return b"".join((start, json, self._text_end))

    def chunk(
        self,
        index: int,
        content: bytes,
        logprobs: bytes = b"null",
        finish_reason: FinishReason | None = None,
        usage: Usage | None = None,
    ) -> bytes:
        """`content` is the choice's own key and value, for example b'"text":"…"'."""
        end = self._end if usage is None else b'}],"usage":%b}\n\n' % to_json(usage_body(usage))
        reason = b"null" if finish_reason is None else b'"%b"' % finish_reason.value.encode()
        start = self._choice_start(index)
        return b"".join((start, content, b',"logprobs":', logprobs, b',"finish_reason":', reason, end))

    def _choice_start(self, index: int) -> bytes:
        return b'%b{"index":%d,' % (self._start, index)

    def closing(self, usage: Usage | None, extension: bytes) -> bytes:
        counts = b"" if usage is None else b',"usage":' + to_json(usage_body(usage))
        json = self._start.removeprefix(b"data: ") + b"]" + counts + b"}"
        return event(extended(json, extension))

"""Answers of POST /v1/chat/completions."""

from collections.abc import Sequence

import msgspec

from disagg.core.request import FinishReason
from disagg.modelfiles.tokenizer import ModelTokenizer
from disagg.router.answer import Usage, WholeChoice
from disagg.router.answer_format import (
    AnswerHead,
    ChunkFrame,
    PromptLogprobs,
    UsageBody,
    finite,
    prompt_logprobs,
    to_json,
    usage_body,
)
from disagg.router.choice import Piece, TokenEntry


class TopLogprob(msgspec.Struct, frozen=True):
    """One of the likeliest tokens at a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    """The token at a position, with the likeliest ones."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log probabilities of one choice or chunk."""

    content: list[TokenLogprob]
    refusal: None = None


class AssistantMessage(msgspec.Struct, frozen=True):
    """The answer's text."""

    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    """One whole choice."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatAnswer(msgspec.Struct, frozen=True):
    """The whole answer."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class ChatFormat:
    """Bytes of one chat answer."""

    def __init__(self, head: AnswerHead, tokenizer: ModelTokenizer) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self.frame = ChunkFrame(head, "chat.completion.chunk", b'"delta":{"content":', b"}")

    def opening(self, num_choices: int) -> bytes:
        """One chunk for each choice that names the role."""
        role = b'"delta":{"role":"assistant","content":"","refusal":null}'
        return b"".join(self.frame.chunk(index, role) for index in range(num_choices))

    def piece(self, piece: Piece, usage: Usage | None = None) -> bytes:
        chunks = b""
        if piece.text or piece.entries:
            logprobs = to_json(self.logprobs(piece.entries)) if piece.entries else None
            chunks = self.frame.text(piece.index, piece.text, logprobs, usage)
        if piece.finish_reason is not None:
            chunks += self.frame.chunk(piece.index, b'"delta":{}', b"null", piece.finish_reason, usage)
        return chunks

    def closing(self, usage: Usage | None, extension: bytes) -> bytes:
        return self.frame.closing(usage, extension)

    def whole(self, choices: list[WholeChoice], usage: Usage) -> bytes:
        return to_json(
            ChatAnswer(
                id=self._head.id,
                object="chat.completion",
                created=self._head.created,
                model=self._head.model,
                choices=[
                    ChatChoice(
                        choice.index,
                        AssistantMessage(choice.text),
                        None if self._head.num_logprobs is None else self.logprobs(choice.entries),
                        choice.finish_reason,
                    )
                    for choice in choices
                ],
                usage=usage_body(usage),
                prompt_logprobs=self.prompt_logprobs(choices),
            )
        )

    def prompt_logprobs(self, choices: Sequence[WholeChoice]) -> PromptLogprobs | msgspec.UnsetType:
        """Of the prompt that all choices have; unset where nobody asked."""
        num_top = self._head.num_prompt_logprobs
        return msgspec.UNSET if num_top is None else prompt_logprobs(choices[0].prompt, num_top, self._tokenizer)

    def logprobs(self, entries: Sequence[TokenEntry]) -> ChatLogprobs:
        """Of these tokens."""
        return ChatLogprobs([self._token_logprob(entry) for entry in entries])

    def _token_logprob(self, entry: TokenEntry) -> TokenLogprob:
        logprobs = entry.logprobs
        assert logprobs is not None  # a chat does not repeat its prompt
        top = [self._spell(token_id, value) for token_id, value in logprobs.top]
        chosen = self._spell(entry.token_id, logprobs.chosen)
        return TokenLogprob(chosen.token, chosen.logprob, chosen.bytes, top)

    def _spell(self, token_id: int, logprob: float) -> TopLogprob:
        raw = self._tokenizer.token_bytes(token_id)
        return TopLogprob(raw.decode(errors="replace"), finite(logprob), list(raw))

"""Answers of POST /v1/completions."""

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


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Aligned lists, one item for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]  # characters from the start of the text


class CompletionChoice(msgspec.Struct, frozen=True):
    """One whole choice."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class CompletionAnswer(msgspec.Struct, frozen=True):
    """The whole answer."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody


class CompletionFormat:
    """Bytes of one completion answer."""

    def __init__(self, head: AnswerHead, tokenizer: ModelTokenizer) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._frame = ChunkFrame(head, "text_completion", b'"text":')

    def opening(self, num_choices: int) -> bytes:
        """Plain completions begin with their text."""
        return b""

    def piece(self, piece: Piece, usage: Usage | None = None) -> bytes:
        chunks = b""
        if piece.text or piece.entries:
            logprobs = to_json(self._logprobs(piece.entries)) if piece.entries else None
            chunks = self._frame.text(piece.index, piece.text, logprobs, usage)
        if piece.finish_reason is not None:
            chunks += self._frame.chunk(piece.index, b'"text":""', b"null", piece.finish_reason, usage)
        return chunks

    def closing(self, usage: Usage | None, extension: bytes) -> bytes:
        return self._frame.closing(usage, extension)

    def whole(self, choices: list[WholeChoice], usage: Usage) -> bytes:
        return to_json(
            CompletionAnswer(
                id=self._head.id,
                object="text_completion",
                created=self._head.created,
                model=self._head.model,
                choices=[self._choice(choice) for choice in choices],
                usage=usage_body(usage),
            )
        )

    def _choice(self, choice: WholeChoice) -> CompletionChoice:
        num_prompt = self._head.num_prompt_logprobs
        prompt = msgspec.UNSET if num_prompt is None else prompt_logprobs(choice.prompt, num_prompt, self._tokenizer)
        logprobs = None if self._head.num_logprobs is None else self._logprobs(choice.entries)
        return CompletionChoice(choice.index, choice.text, logprobs, choice.finish_reason, prompt)

    def _logprobs(self, entries: Sequence[TokenEntry]) -> CompletionLogprobs:
        lists = CompletionLogprobs([], [], [], [])
        for entry in entries:
            logprobs = entry.logprobs
            chosen = self._spell(entry.token_id)
            lists.tokens.append(chosen)
            lists.text_offset.append(entry.offset)
            if logprobs is None:
                lists.token_logprobs.append(None)
                lists.top_logprobs.append(None)
                continue
            lists.token_logprobs.append(finite(logprobs.chosen))
            # The chosen token is always among the likeliest shown, even where it is not one of them.
            shown = logprobs.top[: self._head.num_logprobs or 0]
            top = {self._spell(token_id): finite(value) for token_id, value in shown}
            lists.top_logprobs.append({**top, chosen: finite(logprobs.chosen)})
        return lists

    def _spell(self, token_id: int) -> str:
        """Text of a token; one that is not whole UTF-8 is spelled out, since keys of an object must differ."""
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

"""Answers of POST /v1/completions."""

from collections.abc import Sequence

import msgspec

from disagg.core.request import FinishReason
from disagg.modelfiles.tokenizer import ModelTokenizer
from disagg.router.answer import Usage, WholeChoice
from disagg.router.answer_format import AnswerHead, ChunkFrame, UsageBody, finite, to_json, usage_body
from disagg.router.choice import Piece, TokenEntry


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Aligned lists, one item for each token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]  # characters from the start of the answer


class CompletionChoice(msgspec.Struct, frozen=True):
    """One whole choice."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason


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

    def __init__(self, head: AnswerHead, tokenizer: ModelTokenizer, has_logprobs: bool) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._has_logprobs = has_logprobs
        self._frame = ChunkFrame(head, "text_completion")

    def opening(self, num_choices: int) -> bytes:
        """Plain completions begin with their text."""
        return b""

    def piece(self, piece: Piece) -> bytes:
        chunks = b""
        if piece.text or piece.entries:
            logprobs = to_json(self._logprobs(piece.entries)) if piece.entries else b"null"
            chunks = self._frame.chunk(piece.index, b'"text":%b' % to_json(piece.text), logprobs, None)
        if piece.finish_reason is not None:
            chunks += self._frame.chunk(piece.index, b'"text":""', b"null", piece.finish_reason)
        return chunks

    def usage(self, usage: Usage) -> bytes:
        return self._frame.usage(usage)

    def whole(self, choices: list[WholeChoice], usage: Usage) -> bytes:
        return to_json(
            CompletionAnswer(
                id=self._head.id,
                object="text_completion",
                created=self._head.created,
                model=self._head.model,
                choices=[
                    CompletionChoice(
                        choice.index,
                        choice.text,
                        self._logprobs(choice.entries) if self._has_logprobs else None,
                        choice.finish_reason,
                    )
                    for choice in choices
                ],
                usage=usage_body(usage),
            )
        )

    def _logprobs(self, entries: Sequence[TokenEntry]) -> CompletionLogprobs:
        lists = CompletionLogprobs([], [], [], [])
        for entry in entries:
            logprobs = entry.token.logprobs
            assert logprobs is not None  # entries are made of tokens that carry them
            chosen = self._spell(entry.token.token_id)
            lists.tokens.append(chosen)
            lists.token_logprobs.append(finite(logprobs.chosen))
            # The chosen token is always among the likeliest shown, even where it is not one of them.
            top = {self._spell(token_id): finite(value) for token_id, value in logprobs.top}
            lists.top_logprobs.append({**top, chosen: finite(logprobs.chosen)})
            lists.text_offset.append(entry.offset)
        return lists

    def _spell(self, token_id: int) -> str:
        """Text of a token; one that is not whole UTF-8 is spelled out, since keys of an object must differ."""
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

"""Token ids of one answer to text, one token at a time, never half a character."""

from collections.abc import Sequence
from encodings import utf_8
from typing import Protocol

from tokenizers.decoders import DecodeStream

from disagg.modelfiles.tokenizer import ModelTokenizer


class Detokenizer(Protocol):
    """Text of one answer. Special tokens add nothing, unless they are to be shown."""

    def push(self, token_id: int) -> str:
        """Text that is certain after this token: "" while a character is incomplete."""

    def flush(self) -> str:
        """What is left at the end; a character that never became whole is U+FFFD."""


def start_detokenizer(tokenizer: ModelTokenizer, shown_ids: frozenset[int] = frozenset()) -> Detokenizer:
    """A fresh detokenizer for one answer. shown_ids: special tokens that are text to whoever reads it."""
    table = tokenizer.byte_table
    if table is None:
        return _PieceDetokenizer(tokenizer)
    return _ByteDetokenizer(table, tokenizer.special_ids - shown_ids if shown_ids else tokenizer.special_ids)


class _ByteDetokenizer:
    """For vocabularies whose tokens are byte strings: work per token is its own bytes."""

    def __init__(self, table: Sequence[bytes], hidden: frozenset[int]) -> None:
        self._table = table
        self._hidden = hidden
        self._decoder = utf_8.IncrementalDecoder(errors="replace")

    def push(self, token_id: int) -> str:
        if token_id in self._hidden or not 0 <= token_id < len(self._table):
            return ""
        raw = self._table[token_id]
        if raw.isascii() and not self._decoder.buffer:  # nearly all: nothing begun, nothing left over
            return raw.decode("ascii")
        return self._decoder.decode(raw)

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class _PieceDetokenizer:
    """For vocabularies that join words by rules (WordPiece and others): the library's own stream decides."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._num_sent = 0

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._stream.step(self._tokenizer.backend, token_id) or ""
        self._num_sent += len(text)
        return text

    def flush(self) -> str:
        whole: str = self._tokenizer.backend.decode(self._ids, skip_special_tokens=True)
        return whole[self._num_sent :]

"""Grammars over one model's vocabulary, by llguidance. The only place that knows that library; needs no torch.

Its limits are counted in work, not in seconds, so that a grammar is taken or refused alike on every machine: at its
start about 20 ms of regular expressions, at a token about 15 ms.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from disagg.core.errors import ConfigurationError, InternalFault, InvalidRequest
from disagg.core.grammar import MAX_GRAMMAR_BYTES, GrammarKind, GrammarSpec
from disagg.modelfiles.tokenizer import ModelTokenizer

try:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
except ImportError as error:  # a platform without a wheel still serves everything else
    _MISSING: str | None = str(error)
else:
    _MISSING = None

Allowed = npt.NDArray[np.bool_]  # [vocab_size] by token id

# One space, or a line break with its indentation, or nothing: a model that runs into white space comes out again.
_WHITE_SPACE: Final = r"(\n[ ]{0,24}| )?"
_MAX_REASON: Final = 300  # characters of the library's own explanation
_BYTES: Final = [bytes([byte]) for byte in range(256)]


class GrammarState:
    """Where one answer is in its grammar: a function of the grammar and the token ids accepted so far.

    One thread at a time. The library lets other threads run while it works.
    """

    def __init__(self, matcher: "LLMatcher", vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._num_accepted = 0

    def allowed(self) -> Allowed:
        """What may come next; end-of-text ids only where the grammar may end.

        Raises InvalidRequest when the grammar is too complex at this place.
        """
        packed = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise InvalidRequest(f"the grammar cannot go on after {self._num_accepted} tokens: {self._reason()}")
        bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little", count=self._vocab_size)
        return bits.view(np.bool_)

    def accept(self, token_ids: Sequence[int]) -> None:
        """Take the next tokens of the answer. Raises InternalFault for one that the grammar does not allow."""
        if token_ids and not self._matcher.consume_tokens(list(token_ids)):
            after = f"after {self._num_accepted} tokens the grammar does not allow one of {list(token_ids)[:8]}"
            raise InternalFault(f"{after}: {self._reason()}")
        self._num_accepted += len(token_ids)

    @property
    def can_end(self) -> bool:
        """Whether the answer so far is a whole one."""
        return bool(self._matcher.is_accepting())

    def copy(self) -> Self:
        """A state of its own at the same place, in microseconds."""
        twin = type(self)(self._matcher.deep_copy(), self._vocab_size)
        twin._num_accepted = self._num_accepted
        return twin

    def _reason(self) -> str:
        return _short(self._matcher.get_error() or self._matcher.stop_reason())


class GrammarCompiler:
    """Starts grammars over one vocabulary. Immutable; every method may be called from any thread."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        """Takes a fifth of a second for 49,000 tokens. Raises ConfigurationError saying what is missing."""
        if not tokenizer.is_bytewise:
            raise ConfigurationError("this model's tokens do not spell texts byte by byte, which grammars need")
        if not tokenizer.eos_ids:
            raise ConfigurationError("this model has no end-of-text token, with which an answer by a grammar ends")
        words = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]

        def encode(text: bytes) -> list[int]:
            return tokenizer.encode(text.decode(errors="replace"), add_special_tokens=False)

        self._library = _tokenizer(_Words(words, sorted(tokenizer.special_ids), tokenizer.eos_ids, encode))
        self._vocab_size = tokenizer.vocab_size

    def start(self, spec: GrammarSpec) -> GrammarState:
        """Before the first token; about a millisecond, more for schemas of hundreds of properties.

        Raises InvalidRequest with the reason for what is no grammar.
        """
        return _start(spec, self._library, self._vocab_size)


def can_check_grammars() -> bool:
    """Whether the library is there."""
    return _MISSING is None


def check_grammar(spec: GrammarSpec) -> None:
    """Raises InvalidRequest with the reason when no worker could follow this grammar. Needs no vocabulary."""
    if _MISSING is not None:
        raise _missing()
    if len(spec.text.encode()) > MAX_GRAMMAR_BYTES:
        size = f"{len(spec.text.encode())} bytes"
        raise InvalidRequest(f"it has {size} as a grammar; at most {MAX_GRAMMAR_BYTES} are allowed")
    state = start_bytewise(spec)
    try:
        state.allowed()
    except InvalidRequest as error:  # a rule that only ever leads to itself shows at the first token
        raise InvalidRequest("no text satisfies it, or finding one is too much work") from error


def start_bytewise(spec: GrammarSpec) -> GrammarState:
    """A state over the 256 single bytes as tokens, and 256 as the end of the text. Raises InvalidRequest."""
    return _start(spec, _bytes_only(), 257)


def schema_text(schema: Mapping[str, object], *, is_lenient: bool) -> str:
    """A JSON schema as it stands in a grammar, also after `%json` in rules. is_lenient: unknown keywords are void."""
    options = {"whitespace_pattern": _WHITE_SPACE, "lenient": is_lenient}
    return json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)


class _Words:
    """A vocabulary as the library reads it."""

    bos_token_id = None

    def __init__(
        self, tokens: list[bytes], special_ids: list[int], eos_ids: Sequence[int], encode: Callable[[bytes], list[int]]
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = special_ids
        self.eos_token_id = eos_ids[0]
        self.eos_ids = list(eos_ids)
        self._encode = encode

    def __call__(self, text: bytes) -> list[int]:
        return self._encode(text)


def _tokenizer(words: _Words) -> "LLTokenizer":
    if _MISSING is not None:
        raise _missing()
    return LLTokenizer(TokenizerWrapper(words), n_vocab=len(words.tokens), eos_token=words.eos_ids)


@lru_cache(maxsize=1)
def _bytes_only() -> "LLTokenizer":
    return _tokenizer(_Words([*_BYTES, b"<end>"], [256], (256,), list))


def _start(spec: GrammarSpec, library: "LLTokenizer", vocab_size: int) -> GrammarState:
    try:
        grammar = (
            LLMatcher.grammar_from_json_schema(spec.text)
            if spec.kind is GrammarKind.JSON_SCHEMA
            else LLMatcher.grammar_from_lark(spec.text)
        )
    except ValueError as error:
        raise InvalidRequest(_short(str(error))) from error
    matcher = LLMatcher(library, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
    if matcher.is_error():
        raise InvalidRequest(_short(matcher.get_error()))
    return GrammarState(matcher, vocab_size)


def _missing() -> ConfigurationError:
    return ConfigurationError(f"grammars need the package llguidance ({_MISSING}): pip install llguidance")


def _short(reason: str) -> str:
    line = " ".join(reason.split())
    return line if len(line) <= _MAX_REASON else f"{line[:_MAX_REASON]}…"

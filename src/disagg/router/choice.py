"""One choice of one answer: tokens in, pieces of text with their log probabilities out."""

from collections import deque
from collections.abc import Sequence

import msgspec

from disagg.core.request import EmittedToken, FinishReason, TokenLogprobs
from disagg.modelfiles.tokenizer import ModelTokenizer
from disagg.router.detokenizer import start_detokenizer
from disagg.router.reasoning import ThoughtCounter
from disagg.router.stop_strings import StopAutomaton, StopFilter


class TokenEntry(msgspec.Struct, frozen=True):
    """One token whose log probabilities the client wants, and where its text begins in the answer (characters)."""

    token_id: int
    logprobs: TokenLogprobs | None  # None: the prompt's first token, which follows nothing
    offset: int


class EchoedPrompt(msgspec.Struct, frozen=True):
    """A prompt that its answer begins with."""

    token_ids: tuple[int, ...]
    text: str | None  # as the client wrote it; None where it gave token ids
    scores: tuple[TokenLogprobs, ...] | None  # of the tokens after the first, where they are wanted


class Piece(msgspec.Struct, frozen=True):
    """What one delivery adds to a choice. finish_reason is set in its last piece."""

    index: int
    text: str
    entries: tuple[TokenEntry, ...] = ()
    finish_reason: FinishReason | None = None


class ChoiceText:
    """Text of one choice as it grows. Log probabilities are released together with the text of their token."""

    def __init__(
        self,
        index: int,
        tokenizer: ModelTokenizer,
        stops: StopAutomaton | None,
        end_ids: Sequence[int],
        *,
        min_tokens: int = 0,
        is_prompt_only: bool = False,
        thoughts: ThoughtCounter | None = None,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        """Stop strings that end within the first min_tokens tokens count for nothing; of is_prompt_only the answer
        is not shown at all. thoughts: counts those among its tokens, where they are told from the rest.
        shown_ids: special tokens that are text all the same.
        """
        self._min_tokens = min_tokens
        self._is_prompt_only = is_prompt_only
        self._thoughts = thoughts
        self.index = index
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._end_ids = frozenset(end_ids)
        self._detokenizer = start_detokenizer(tokenizer, shown_ids)
        self._filter = StopFilter(stops) if stops is not None else None
        self._is_plain = self._filter is None and not is_prompt_only
        self._num_decoded = 0
        self._num_shown = 0
        self._waiting: deque[TokenEntry] = deque()

    @property
    def is_stopped_by_text(self) -> bool:
        """Whether a stop string ended this choice, so that its workers must be told."""
        return self._filter is not None and self._filter.is_stopped

    @property
    def num_thought_tokens(self) -> int | None:
        """Those of num_tokens that were thought; None where thoughts are not told from the rest."""
        return self._thoughts.num_tokens if self._thoughts is not None else None

    def echo(self, prompt: EchoedPrompt) -> Piece:
        """The prompt as the first piece. A character that it leaves incomplete may be completed by the answer."""
        offsets: list[int] = []
        shown: list[str] = []
        for token_id in prompt.token_ids:
            offsets.append(self._num_decoded)
            shown.append(self._detokenizer.push(token_id))
            self._num_decoded += len(shown[-1])
        text = "".join(shown) if prompt.text is None else prompt.text
        self._num_decoded = self._num_shown = len(text)
        entries: tuple[TokenEntry, ...] = ()
        if prompt.scores is not None:
            scores = (None, *prompt.scores)
            entries = tuple(map(TokenEntry, prompt.token_ids, scores, offsets))
        return Piece(self.index, text, entries)

    def feed(self, tokens: Sequence[EmittedToken], finish_reason: FinishReason | None) -> Piece | None:
        """Take the next tokens in order. None when nothing can be shown yet or the choice has already ended."""
        if self.finish_reason is not None:
            return None
        if self._is_plain and finish_reason is None and len(tokens) == 1 and tokens[0].logprobs is None:
            # The common case: one token more, and nothing to look out for.
            text = self._decode(tokens[0].token_id)
            self._num_decoded += len(text)
            self._num_shown = self._num_decoded
            return Piece(self.index, text) if text else None
        if self._is_prompt_only:
            self.finish_reason = FinishReason.LENGTH
            return Piece(self.index, "", (), self.finish_reason)
        shown: list[str] = []
        for token in tokens:
            text = self._decode(token.token_id)
            if token.token_id in self._end_ids:
                continue
            if token.logprobs is not None:
                self._waiting.append(TokenEntry(token.token_id, token.logprobs, self._num_decoded))
            shown.append(self._show(text))
            if self.is_stopped_by_text:
                break
        if finish_reason is not None and not self.is_stopped_by_text:
            shown.append(self._show(self._detokenizer.flush()))
            if self._filter is not None and not self._filter.is_stopped:
                shown.append(self._filter.flush())
        text = "".join(shown)
        self._num_shown += len(text)
        self.finish_reason = FinishReason.STOP if self.is_stopped_by_text else finish_reason
        entries = self._release()
        if not text and not entries and self.finish_reason is None:
            return None
        return Piece(self.index, text, entries, self.finish_reason)

    def _decode(self, token_id: int) -> str:
        """The next token's own text; an end of the answer has none."""
        self.num_tokens += 1
        text = "" if token_id in self._end_ids else self._detokenizer.push(token_id)
        if self._thoughts is not None:
            self._thoughts.push(text)
        return text

    def _show(self, delta: str) -> str:
        self._num_decoded += len(delta)
        if self._filter is None:
            return delta
        return self._filter.push(delta, is_armed=self.num_tokens > self._min_tokens)

    def _release(self) -> tuple[TokenEntry, ...]:
        """Entries whose text has begun to show; at an ordinary end all that wait."""
        released: list[TokenEntry] = []
        at_end = self.finish_reason is not None and not self.is_stopped_by_text
        while self._waiting and (at_end or self._waiting[0].offset < self._num_shown):
            released.append(self._waiting.popleft())
        if self.finish_reason is not None:
            self._waiting.clear()
        return tuple(released)

    def check_invariants(self) -> None:
        """Raises AssertionError when more is shown than decoded, or entries outlive their choice."""
        assert self._num_shown <= self._num_decoded
        assert self.finish_reason is None or not self._waiting
        if self._filter is not None:
            self._filter.check_invariants()

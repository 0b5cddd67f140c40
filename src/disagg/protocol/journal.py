"""What must be known of an open request to continue it elsewhere: prompt, parameters, seed, emitted ids, logprobs."""

from collections.abc import Sequence

from disagg.core.errors import InternalFault
from disagg.core.ids import SequenceId
from disagg.core.request import EmittedToken, FinishReason, SequenceSpec, finish_reason


class JournalEntry:
    """One choice. Tokens come from two workers (prefill sends the first, decode may too): positions decide."""

    __slots__ = ("_early", "finish", "spec", "tokens")

    def __init__(self, spec: SequenceSpec) -> None:
        self.spec = spec
        self.tokens: list[EmittedToken] = []
        self.finish: FinishReason | None = None
        self._early: dict[int, EmittedToken] = {}  # came before their turn

    @property
    def sequence_id(self) -> SequenceId:
        return self.spec.sequence_id

    def record(self, token: EmittedToken) -> tuple[EmittedToken, ...]:
        """Tokens that are now in order and new. A repeat gives none; tokens after the end give none."""
        if self.finish is not None or token.position < len(self.tokens):
            return ()
        if token.position >= self.spec.sampling.max_tokens:
            return ()
        self._early.setdefault(token.position, token)
        fresh: list[EmittedToken] = []
        while self.finish is None and (following := self._early.pop(len(self.tokens), None)) is not None:
            self.tokens.append(following)
            fresh.append(following)
            self.finish = finish_reason(self.spec.sampling, following.token_id, len(self.tokens))
        if self.finish is not None:
            self._early.clear()
        return tuple(fresh)

    def record_all(self, tokens: Sequence[EmittedToken]) -> list[EmittedToken]:
        """What record() gives for each, in turn."""
        known, sampling = self.tokens, self.spec.sampling
        fresh: list[EmittedToken] = []
        if len(tokens) > 1 and self._is_next(tokens):
            known.extend(tokens)
            self.finish = finish_reason(sampling, tokens[-1].token_id, len(known))
            return list(tokens)
        for token in tokens:
            if token.position == len(known) and self.finish is None and not self._early:  # nearly all of them
                known.append(token)
                fresh.append(token)
                self.finish = finish_reason(sampling, token.token_id, len(known))
            else:
                fresh += self.record(token)
        return fresh

    def _is_next(self, tokens: Sequence[EmittedToken]) -> bool:
        """Whether all follow each other and what is known, and none but the last can end the answer."""
        sampling, start, stop = self.spec.sampling, len(self.tokens), len(self.tokens) + len(tokens)
        if self.finish is not None or self._early or sampling.stop_token_ids or stop > sampling.max_tokens:
            return False
        return [token.position for token in tokens] == list(range(start, stop))

    def check_invariants(self) -> None:
        if [token.position for token in self.tokens] != list(range(len(self.tokens))):
            raise InternalFault(f"journal of {self.sequence_id}: positions are not 0..{len(self.tokens) - 1}")
        if any(position <= len(self.tokens) - 1 for position in self._early):
            raise InternalFault(f"journal of {self.sequence_id}: an early token is not early")

"""What is asked of the system: a request, its sampling parameters, and the tokens that come back."""

import enum

import msgspec

from disagg.core.ids import SequenceId


class FinishReason(enum.StrEnum):
    """Why a choice ended. The values are OpenAI's."""

    STOP = "stop"
    LENGTH = "length"


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """How the next token is chosen. Noise is a pure function of (seed, choice, output position)."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()  # end-of-text ids are put here by the router
    num_logprobs: int | None = None  # None: none; 0: of the chosen token only; k: of the k likeliest too

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probability of the chosen token and of the likeliest ones, likeliest first."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


class EmittedToken(msgspec.Struct, frozen=True, array_like=True):
    """The token at one output position (0 is the first token of the answer)."""

    sequence_id: SequenceId
    position: int
    token_id: int
    logprobs: TokenLogprobs | None = None


class SequenceSpec(msgspec.Struct, frozen=True, array_like=True):
    """One choice of a request as workers see it: token ids in, token ids out."""

    sequence_id: SequenceId
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    slo_class: str = "default"

    @property
    def max_total_tokens(self) -> int:
        """Most tokens whose KV this sequence can come to hold. The last token's KV is never computed."""
        return len(self.prompt_ids) + max(self.sampling.max_tokens - 1, 0)


def finish_reason(sampling: SamplingParams, last_token_id: int, num_tokens: int) -> FinishReason | None:
    """Why an answer of num_tokens ends after its last token, or None. The same on every worker and router."""
    if last_token_id in sampling.stop_token_ids:
        return FinishReason.STOP
    if num_tokens >= sampling.max_tokens:
        return FinishReason.LENGTH
    return None

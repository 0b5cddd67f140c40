"""What is asked of the system: a request, its sampling parameters, and the tokens that come back."""

import enum

import msgspec

from disagg.core.grammar import GrammarSpec
from disagg.core.ids import SequenceId


class FinishReason(enum.StrEnum):
    """Why a choice ended. The values are OpenAI's."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"  # the router's reading of a text that stopped; workers never say it


GREEDY_BELOW = 1e-5  # temperatures that divide scores beyond what numbers hold; the likeliest token is their limit


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """How the next token is chosen. Noise is a pure function of (seed, choice, output position).

    Scores change in this order: logit_bias, repetition_penalty, frequency_penalty and presence_penalty, stop ids out
    of the way before min_tokens, temperature; then top_k, top_p of what is left, and min_p cut. Log probabilities are
    of the scores as the model gave them.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()  # end-of-text ids are put here by the router
    num_logprobs: int | None = None  # None: none; 0: of the chosen token only; k: of the k likeliest too
    top_k: int = 0  # keep the k likeliest, and those as likely as the last of them; 0: all
    min_p: float = 0.0  # keep tokens at least this likely relative to the likeliest
    presence_penalty: float = 0.0  # taken once from the score of each token of the answer so far
    frequency_penalty: float = 0.0  # taken as often as the token is in the answer
    repetition_penalty: float = (
        1.0  # positive scores of tokens of prompt and answer are divided by it, others multiplied
    )
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its score); each id once
    min_tokens: int = 0  # tokens of the answer before a stop id can be chosen
    num_prompt_logprobs: int | None = None  # of the prompt's tokens after the first; counted like num_logprobs
    grammar: GrammarSpec | None = None  # which texts the answer may be

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def needs_history(self) -> bool:
        """Whether the choice depends on the tokens so far."""
        return self.has_penalty or self.grammar is not None

    @property
    def has_penalty(self) -> bool:
        """Whether scores change with the tokens so far."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probability of the chosen token and of the likeliest ones, likeliest first."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


class EmittedToken(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The token at one output position (0 is the first token of the answer).

    What was asked about the prompt travels with the first token: whoever has that one has all.
    """

    sequence_id: SequenceId
    position: int
    token_id: int
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # of prompt tokens 1, 2, ...


class SequenceSpec(msgspec.Struct, frozen=True, array_like=True):
    """One choice of a request as workers see it: token ids in, token ids out."""

    sequence_id: SequenceId
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    tenant: str = ""  # prompts of one priority take turns by tenant
    cache_salt: str = ""  # KV is shared only between sequences with the same one

    @property
    def max_total_tokens(self) -> int:
        """Most tokens whose KV this sequence can come to hold. The last token's KV is never computed."""
        return len(self.prompt_ids) + max(self.sampling.max_tokens - 1, 0)


def finish_reason(sampling: SamplingParams, last_token_id: int, num_tokens: int) -> FinishReason | None:
    """Why an answer of num_tokens ends after its last token, or None. The same on every worker and router."""
    if last_token_id in sampling.stop_token_ids and num_tokens > sampling.min_tokens:
        return FinishReason.STOP
    if num_tokens >= sampling.max_tokens:
        return FinishReason.LENGTH
    return None

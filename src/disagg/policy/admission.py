"""Can this ever be served, and may it be tried now?"""

from collections.abc import Sequence

import msgspec

from disagg.core.errors import Failure, FailureKind
from disagg.core.roles import Role
from disagg.policy.routing import WorkerView


class Limits(msgspec.Struct, frozen=True):
    """Of one pool: the largest that any of its workers has."""

    max_context: int  # tokens
    max_pool_tokens: int  # tokens that the largest decode-side KV pool holds
    vocab_size: int


def impossible(num_prompt_tokens: int, max_tokens: int, limits: Limits) -> Failure | None:
    """Why a request can never fit, with the numbers; None when it can. max_tokens >= 1."""
    if num_prompt_tokens < 1:
        return Failure(FailureKind.INVALID_REQUEST, "the prompt has 0 tokens; at least 1 is needed")
    if num_prompt_tokens >= limits.max_context:
        return Failure(
            FailureKind.INVALID_REQUEST,
            f"the prompt has {num_prompt_tokens} tokens, the context of this model is {limits.max_context} "
            "tokens and must hold at least one more; shorten the prompt",
        )
    if num_prompt_tokens + max_tokens > limits.max_context:
        return Failure(
            FailureKind.INVALID_REQUEST,
            f"the prompt's {num_prompt_tokens} tokens and max_tokens {max_tokens} make "
            f"{num_prompt_tokens + max_tokens}, the context of this model is {limits.max_context} tokens; "
            f"ask for at most {limits.max_context - num_prompt_tokens}",
        )
    needed = num_prompt_tokens + max_tokens - 1
    if needed > limits.max_pool_tokens:
        return Failure(
            FailureKind.INVALID_REQUEST,
            f"the request needs KV for {needed} tokens, the largest KV pool holds {limits.max_pool_tokens}; "
            "ask for fewer tokens or start the workers with a larger --kv-memory",
        )
    return None


def default_max_tokens(num_prompt_tokens: int, limits: Limits) -> int:
    """As far as context and KV pool go, for a request that names no max_tokens; at least 1."""
    return max(1, min(limits.max_context, limits.max_pool_tokens + 1) - num_prompt_tokens)


def too_much_claimed(workers: Sequence[WorkerView], max_share: float) -> Failure | None:
    """Why a request is turned away now: the writers have promised max_share times the KV they have, or more."""
    writers = [view for view in workers if view.role is not Role.PREFILL]
    shares = [view.num_claimed_blocks / view.num_blocks for view in writers]
    if not shares or min(shares) < max_share:
        return None
    text = f"open requests have been promised {min(shares):.1f} times the KV there is, the limit is {max_share:g}"
    return Failure(FailureKind.OVERLOADED, f"{text}; try again later")

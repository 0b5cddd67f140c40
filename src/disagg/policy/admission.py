"""Can this ever be served, and may it be tried now?"""

from collections.abc import Sequence

import msgspec

from disagg.core.errors import Failure, FailureKind
from disagg.core.roles import Role
from disagg.policy.routing import WorkerView

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0  # what a client that is turned away may be told


class Turnover(msgspec.Struct, frozen=True):
    """What became of requests in the last `seconds`."""

    num_ended: int  # whichever way: each has made room
    num_turned_away: int
    seconds: float


class Limits(msgspec.Struct, frozen=True):
    """Of one pool: the largest that any of its workers has."""

    max_context: int  # tokens
    max_pool_tokens: int  # tokens that the largest decode-side KV pool holds
    vocab_size: int


def impossible(num_prompt_tokens: int, max_tokens: int, limits: Limits) -> Failure | None:
    """Why a request can never fit, with the numbers; None when it can. max_tokens 0: only the prompt is read."""
    if num_prompt_tokens < 1:
        return Failure(FailureKind.INVALID_REQUEST, "the prompt has 0 tokens; at least 1 is needed")
    if num_prompt_tokens + min(max_tokens, 1) > limits.max_context:
        more = " and must hold at least one more" if max_tokens else ""
        return Failure(
            FailureKind.INVALID_REQUEST,
            f"the prompt has {num_prompt_tokens} tokens, the context of this model is {limits.max_context} "
            f"tokens{more}; shorten the prompt",
        )
    if num_prompt_tokens + max_tokens > limits.max_context:
        return Failure(
            FailureKind.INVALID_REQUEST,
            f"the prompt's {num_prompt_tokens} tokens and max_tokens {max_tokens} make "
            f"{num_prompt_tokens + max_tokens}, the context of this model is {limits.max_context} tokens; "
            f"ask for at most {limits.max_context - num_prompt_tokens}",
        )
    needed = num_prompt_tokens + max(max_tokens - 1, 0)
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
    if not writers or any(view.num_claimed_blocks / view.num_blocks < max_share for view in writers):
        return None
    least = min(view.num_claimed_blocks / view.num_blocks for view in writers)
    text = f"open requests have been promised {least:.1f} times the KV there is, the limit is {max_share:g}"
    return Failure(FailureKind.OVERLOADED, f"{text}; try again later")


def retry_after_s(num_open: int, lately: Turnover) -> float:
    """When there should be room for one that is turned away now: 1 to 60 seconds.

    As many as were turned away lately may come back, one for each that ends; when all that is open now has ended,
    there is room in any case. While nothing has ended yet, the first end is taken to be due now.
    """
    seconds_each = lately.seconds / max(1, lately.num_ended)
    num_ahead = min(lately.num_turned_away, max(0, num_open - 1))
    return min(MAX_RETRY_S, max(MIN_RETRY_S, (num_ahead + 1) * seconds_each))

"""What becomes of a sequence whose worker failed, and of the sequences of a worker that is to end."""

import enum

import msgspec

from disagg.core.errors import FailureKind


class Verdict(enum.StrEnum):
    """What the router does with the sequence."""

    MOVE = "move"  # another attempt, from the journal
    GIVE_UP = "give_up"  # an explicit error to the client
    LEAVE = "leave"  # it stays where it is


class RecoveryLimits(msgspec.Struct, frozen=True):
    """How long and how often to try."""

    max_attempts: int = 12  # of one sequence; moves away from a draining worker count too
    num_quick_attempts: int = 3  # the ones after wait first: 0.1 s, then twice as long each time
    max_retry_delay_s: float = 2.0
    max_unplaced_s: float = 30.0  # without a worker that could take it
    max_queue_s: float = 120.0  # placed, without a first token, behind others in its reader's queue
    max_first_token_s: float = 300.0  # the same, but first in that queue: its prompt may be under way
    max_judging_s: float = 2.0  # after the loss of its reader: its writer says what is missing, or goes on
    finish_in_place_tokens: int = 32  # a draining worker finishes answers that cannot be longer than this


class Recovery(msgspec.Struct, frozen=True):
    """The answer, with its reason in one plain sentence."""

    verdict: Verdict
    reason: str
    delay_s: float = 0.0  # before it is placed again


# A request that can be served nowhere is not moved; everything else may be one worker's or one link's fault.
_FINAL = frozenset({FailureKind.INVALID_REQUEST})
_HEALS = frozenset({FailureKind.WORKER_LOST, FailureKind.TRANSFER_FAILED})


def after_failure(kind: FailureKind, message: str, attempt: int, limits: RecoveryLimits) -> Recovery:
    """A worker has failed its part of a sequence, or is gone."""
    if kind in _FINAL:
        return Recovery(Verdict.GIVE_UP, message)
    if attempt >= limits.max_attempts:
        return Recovery(Verdict.GIVE_UP, f"attempt {attempt} of {limits.max_attempts} failed: {message}")
    # Links that all fail at once would use up every attempt within a moment. Computing does not heal by waiting.
    doublings = min(attempt - limits.num_quick_attempts, 16)
    is_late = kind in _HEALS and doublings >= 0
    delay_s = min(0.1 * 2.0**doublings, limits.max_retry_delay_s) if is_late else 0.0
    return Recovery(Verdict.MOVE, f"attempt {attempt} failed ({kind.value}): {message}", delay_s)


def at_drain(num_remaining_tokens: int, *, has_other_worker: bool, limits: RecoveryLimits) -> Recovery:
    """The worker that writes this answer is to end; num_remaining_tokens is the most that may still come."""
    if num_remaining_tokens <= limits.finish_in_place_tokens:
        return Recovery(Verdict.LEAVE, f"at most {num_remaining_tokens} tokens are left")
    if not has_other_worker:
        return Recovery(Verdict.LEAVE, "no other worker could take it")
    return Recovery(Verdict.MOVE, f"its worker drains and up to {num_remaining_tokens} tokens are left")


def while_unplaced(unplaced_s: float, missing: str, limits: RecoveryLimits) -> Recovery:
    """No worker can take it now."""
    if unplaced_s >= limits.max_unplaced_s:
        return Recovery(Verdict.GIVE_UP, f"no worker could take it for {limits.max_unplaced_s:g} s: {missing}")
    return Recovery(Verdict.LEAVE, missing)


def queue_limit_s(limits: RecoveryLimits, *, is_first: bool) -> float:
    """Seconds that a placed choice may be without a token. is_first: its reader has nothing older to read."""
    return max(limits.max_queue_s, limits.max_first_token_s) if is_first else limits.max_queue_s


def queued_too_long(queued_s: float, limits: RecoveryLimits) -> str:
    """Why a placed choice is given up: the workers have more to do than they can."""
    limit = f"the limit is {limits.max_queue_s:g} s behind others (--max-queue-s), {limits.max_first_token_s:g} s else"
    return f"no token came within {queued_s:.0f} s, {limit}: the workers are overloaded; try again later"

"""Whether a first step begins while KV of its prompt is still on the wire, and how many of its layers run at once.

Begun early, the step is over soon after the last layers are here: what can be won is at most one step. It runs alone
and in parts, ranges of layers whose KV is here, between the shared steps of other streams. Each part makes those wait:
so beside others a part is as small as keeps up with the wire, and never more than MAX_SHARE of a step.
"""

import enum
import math

MAX_SHARE = 0.25  # of a step's layers that may run alone between two shared steps


class PartialOutcome(enum.StrEnum):
    """What became of the chance to begin a first step early."""

    FINISHED = "finished"  # begun, and its token came of it
    JOINED = "joined"  # begun, thrown away for a place in the next shared step: too many layers were left
    DROPPED = "dropped"  # begun, thrown away with its hand-off or its blocks
    OFF = "off"  # not wanted, or not possible with this engine
    NO_STEP = "no_step"  # the answer ends with its first token
    NO_ROOM = "no_room"  # no block for the second token yet
    RATE_UNKNOWN = "rate_unknown"  # nothing was seen of the link, nor was it measured
    WIRE_SHORT = "wire_short"  # what was missing was to take no longer than a step
    TOO_LATE = "too_late"  # all was here before a first part could run


def why_wait(remaining_bytes: int, bytes_per_s: float, step_s: float) -> PartialOutcome | None:
    """Why the first step is not to begin before all is here; None when it is to begin. bytes_per_s: 0 for unknown."""
    if not bytes_per_s > 0:
        return PartialOutcome.RATE_UNKNOWN
    return None if remaining_bytes / bytes_per_s > step_s else PartialOutcome.WIRE_SHORT


def num_layers_now(
    num_ready: int, num_left: int, num_layers: int, *, wire_s: float, step_s: float, has_others: bool
) -> int:
    """Layers of the next part: 1 to num_ready, which are here, of num_left that have not run.

    wire_s: what the wire still takes; step_s: a shared step; has_others: somebody else's would wait for the part.
    """
    if not has_others:
        return num_ready
    keeps_up = math.ceil(num_left * min(1.0, step_s / wire_s)) if wire_s > 0 else num_left
    return max(1, min(num_ready, keeps_up, most_beside_others(num_layers)))


def can_finish_alone(num_left: int, num_layers: int, *, has_others: bool) -> bool:
    """Whether the layers that are left once all is here run alone too, instead of the whole step in company."""
    return not has_others or num_left <= most_beside_others(num_layers)


def most_beside_others(num_layers: int) -> int:
    """Layers of one part, at most, where others wait for it."""
    return max(1, int(MAX_SHARE * num_layers))

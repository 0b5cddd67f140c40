"""The dispatcher's decisions as values, for whoever wants to know them."""

from collections.abc import Callable

import msgspec

from disagg.core.errors import DisaggError
from disagg.dispatch.open_request import Choice
from disagg.dispatch.stream import GenerateRequest
from disagg.policy.recovery import Recovery
from disagg.policy.routing import NoPlacement, Placement
from disagg.telemetry.decision_log import Decision, DecisionKind

OnDecided = Callable[[Decision], object]


class RequestSubmitted(msgspec.Struct, frozen=True):
    """In a decision log: what Dispatcher.submit was called with."""

    request: GenerateRequest


def admission(number: int, error: DisaggError | None) -> Decision:
    """number: the request's, if it was let in; of one turned away, that of the next."""
    if error is None:
        return Decision(DecisionKind.ADMISSION, str(number), "accepted")
    return Decision(DecisionKind.ADMISSION, str(number), type(error).__name__, str(error))


def placement_of(choice: Choice, placed: Placement | NoPlacement) -> Decision:
    """attempt: of the placement, or of the last one where there is none."""
    subject = str(choice.sequence_id)
    if isinstance(placed, NoPlacement):
        return Decision(DecisionKind.PLACEMENT, subject, "nowhere", placed.missing, (), choice.attempt)
    workers = (placed.decode,) if placed.prefill is None else (placed.decode, placed.prefill)
    kind, outcome, reason = DecisionKind.PLACEMENT, placed.path.value, placed.reason.value
    return Decision(kind, subject, outcome, reason, workers, choice.attempt)


def following(choice: Choice, leader: Choice) -> Decision:
    """It waits until that one's prompt is where it is written."""
    reason = f"for the prompt of choice {leader.sequence_id.choice}"
    return Decision(DecisionKind.PLACEMENT, str(choice.sequence_id), "follows", reason, leader.workers, choice.attempt)


def recovery_of(kind: DecisionKind, choice: Choice, recovered: Recovery) -> Decision:
    """After a failure, while nobody can take it, or at a drain."""
    subject = str(choice.sequence_id)
    return Decision(kind, subject, recovered.verdict.value, recovered.reason, choice.workers, choice.attempt)

"""What happens to a worker. Past tense; each carries all that is needed to decide."""

import msgspec

from disagg.core.errors import Failure
from disagg.core.ids import HandoffId, Incarnation, StepId, WorkerId
from disagg.core.spans import Span
from disagg.protocol.cards import WorkerCard
from disagg.protocol.messages import RouterToWorker, WorkerToWorker
from disagg.scheduler.engine import StepResult


class RouterMessageReceived(msgspec.Struct, frozen=True):
    """From the router this worker is registered with."""

    message: RouterToWorker


class RouterLost(msgspec.Struct, frozen=True):
    """Nobody is there to take tokens any more."""


class DrainRequested(msgspec.Struct, frozen=True):
    """This worker is to end: no new work from now on."""


class PeerPaired(msgspec.Struct, frozen=True):
    """A peer has been met and found compatible; said again whenever the way to it was measured."""

    card: WorkerCard
    bytes_per_s: float = 0.0  # measured; 0: not, or not yet


class PeerMessageReceived(msgspec.Struct, frozen=True):
    """From a paired peer."""

    peer: WorkerId
    message: WorkerToWorker


class PeerLost(msgspec.Struct, frozen=True):
    """The connection to a peer's incarnation ended or fell silent."""

    peer: WorkerId
    incarnation: Incarnation
    reason: str


class LayersComputed(msgspec.Struct, frozen=True):
    """KV of the running step is written for the first num_layers layers."""

    step_id: StepId
    num_layers: int


class StepFinished(msgspec.Struct, frozen=True):
    """The forward pass is over. duration_s is measured by the loop."""

    result: StepResult
    duration_s: float


class StepsFinished(msgspec.Struct, frozen=True):
    """The running step, which has no rows, and those like it that followed are over, the last of them now.

    Only where Scheduler.num_alike allows so many: nothing was decided between them.
    """

    step_id: StepId  # of the first
    durations_s: tuple[float, ...]


class StepFailed(msgspec.Struct, frozen=True):
    """The engine raised: the step's sequences cannot go on."""

    step_id: StepId
    failure: Failure


class GrammarPrepared(msgspec.Struct, frozen=True):
    """An attempt's grammar can be followed from now on (failure is None), or never."""

    attempt_id: HandoffId
    failure: Failure | None = None


class WriteFinished(msgspec.Struct, frozen=True):
    """At the source: one push was verified by the destination (failure is None) or not."""

    handoff_id: HandoffId
    number: int
    failure: str | None


class WriteLanded(msgspec.Struct, frozen=True):
    """At the destination: one push arrived and was verified (failure is None) or not."""

    handoff_id: HandoffId
    span: Span
    failure: str | None


class GrantFenced(msgspec.Struct, frozen=True):
    """At the destination: no byte of this hand-off can land any more."""

    handoff_id: HandoffId


class WritesStopped(msgspec.Struct, frozen=True):
    """At the source: the transport reads none of this hand-off's blocks any more."""

    handoff_id: HandoffId


class ClockTicked(msgspec.Struct, frozen=True):
    """Nothing happened but time."""


Event = (
    RouterMessageReceived
    | RouterLost
    | DrainRequested
    | PeerPaired
    | PeerMessageReceived
    | PeerLost
    | LayersComputed
    | StepFinished
    | StepsFinished
    | StepFailed
    | GrammarPrepared
    | WriteFinished
    | WriteLanded
    | GrantFenced
    | WritesStopped
    | ClockTicked
)

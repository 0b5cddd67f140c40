"""What happens to a router."""

import msgspec

from disagg.core.ids import Incarnation, RequestId, WorkerId
from disagg.protocol.cards import WorkerCard
from disagg.protocol.messages import WorkerToRouter


class WorkerRegistered(msgspec.Struct, frozen=True):
    """First message of a worker's connection."""

    card: WorkerCard
    is_draining: bool = False


class WorkerLost(msgspec.Struct, frozen=True):
    """Its connection ended or fell silent."""

    worker_id: WorkerId
    incarnation: Incarnation
    reason: str


class WorkerMessageReceived(msgspec.Struct, frozen=True):
    """From a registered worker."""

    worker_id: WorkerId
    incarnation: Incarnation
    message: WorkerToRouter


class ChoiceStopped(msgspec.Struct, frozen=True):
    """The text of one choice matched a stop string."""

    request_id: RequestId
    choice: int


class ClientGone(msgspec.Struct, frozen=True):
    """Nobody reads the answer any more."""

    request_id: RequestId


class DrainAsked(msgspec.Struct, frozen=True):
    """An operator wants this worker to end."""

    worker_id: WorkerId


class TimePassed(msgspec.Struct, frozen=True):
    """Nothing happened but time."""


DispatchEvent = (
    WorkerRegistered | WorkerLost | WorkerMessageReceived | ChoiceStopped | ClientGone | DrainAsked | TimePassed
)

"""What a router's loop has to do."""

import msgspec

from disagg.core.ids import RequestId, WorkerId
from disagg.dispatch.stream import StreamEvent
from disagg.protocol.messages import RouterToWorker


class SendToWorker(msgspec.Struct, frozen=True):
    """Dropped when the worker's connection has ended: its loss is an event of its own."""

    worker_id: WorkerId
    message: RouterToWorker


class RefuseWorker(msgspec.Struct, frozen=True):
    """Answer a registration with a refusal and close the connection."""

    worker_id: WorkerId
    message: RouterToWorker


class Deliver(msgspec.Struct, frozen=True):
    """Hand an event to whoever reads this request's stream."""

    request_id: RequestId
    event: StreamEvent


class LogDecision(msgspec.Struct, frozen=True):
    """One plain sentence for the log: what was decided and why."""

    text: str


DispatchAction = SendToWorker | RefuseWorker | Deliver | LogDecision

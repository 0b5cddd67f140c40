"""What a router's loop is to do after one event."""

from disagg.core.ids import WorkerId
from disagg.dispatch.actions import DispatchAction, SendToWorker
from disagg.protocol.messages import RouterToWorker


class Outgoing:
    """Collects, in order; take() empties it."""

    def __init__(self) -> None:
        self._actions: list[DispatchAction] = []

    def act(self, action: DispatchAction) -> None:
        self._actions.append(action)

    def tell(self, worker_id: WorkerId, message: RouterToWorker) -> None:
        self._actions.append(SendToWorker(worker_id, message))

    def take(self) -> list[DispatchAction]:
        """What is to be done since the last call."""
        actions, self._actions = self._actions, []
        return actions

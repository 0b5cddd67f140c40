"""How far one sequence's first step has come that began before all of its KV was here."""

from disagg.core.errors import InternalFault
from disagg.protocol.handoff import PARTIAL_TABLE, PartialState, PartialTrigger
from disagg.protocol.table import Machine
from disagg.scheduler.engine import LayerRange


class PartialStep:
    """What the row has come to is a value of the engine's: it ends with this, and the engine keeps nothing."""

    def __init__(self, subject: str) -> None:
        self.num_done = 0  # layers that have run
        self.carried = b""  # between them and the next one
        self._machine = Machine(PARTIAL_TABLE, subject)
        self._running: LayerRange | None = None

    @property
    def state(self) -> PartialState:
        return self._machine.state

    def start(self, layers: LayerRange) -> None:
        """These go to the engine."""
        if layers.start != self.num_done or layers.stop <= layers.start:
            raise InternalFault(f"{layers} cannot be the part after {self.num_done} layers of {self._machine.subject}")
        self._machine.fire(PartialTrigger.PART_STARTED)
        self._running = layers

    def finish(self, carried: bytes, num_layers: int) -> bool:
        """The engine is back; True when that was the step's last part and nobody has given it up."""
        assert self._running is not None  # only what was started finishes
        self.num_done, self._running = self._running.stop, None
        is_last = self.state is PartialState.RUNNING and self.num_done == num_layers
        self._machine.fire(PartialTrigger.LAST_PART_FINISHED if is_last else PartialTrigger.PART_FINISHED)
        self.carried = carried if self.state is PartialState.WAITING else b""
        return is_last

    def give_up(self, *, is_in_engine: bool) -> None:
        """Throw away what has come of it; a part that is in the engine is waited for."""
        self._machine.fire(PartialTrigger.GIVEN_UP_MIDWAY if is_in_engine else PartialTrigger.GIVEN_UP)
        self.carried = b""
        if not is_in_engine:
            self._running = None

    def check_invariants(self, num_here: int, *, is_in_engine: bool) -> None:
        """num_here: layers whose KV is here and verified."""
        if is_in_engine != (self.state in (PartialState.RUNNING, PartialState.STOPPING)):
            raise InternalFault(f"{self._machine.subject} is {self.state} and the engine says otherwise")
        num_read = self._running.stop if self._running is not None else self.num_done
        if num_read > num_here:
            raise InternalFault(f"{self._machine.subject} has read {num_read} layers, {num_here} are here")

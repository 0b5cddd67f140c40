"""A decode worker with a sequence whose first step may begin before all of its KV has landed."""

from tests.unit.scheduler.rigs import Solo, handoff, sequence_id

from disagg.core.request import EmittedToken
from disagg.core.roles import Role, Task
from disagg.core.spans import Span
from disagg.policy.partial_start import PartialOutcome
from disagg.protocol.messages import FinishPrefill, RequestReservation
from disagg.scheduler import events
from disagg.scheduler.actions import Action
from disagg.scheduler.engine import StepPlan
from disagg.telemetry.metrics import PARTIAL_STARTS

PROMPT = tuple(range(10))  # its next token goes into the last block that the peer may write
ALIGNED = tuple(range(12))  # its next token goes into a block of its own
LEASE_S = 9.0
SLOW = 100.0  # bytes per second: a layer takes more than a second
TOKEN = EmittedToken(sequence_id(0), 0, 42)


def waiting(prompt: tuple[int, ...] = PROMPT, max_tokens: int = 3, **more: object) -> Solo:
    """Blocks are reserved; no byte has landed."""
    solo = Solo(Role.DECODE, **more)  # type: ignore[arg-type]
    solo.meet(Role.PREFILL)
    solo.start(0, Task.DECODE, prompt, max_tokens)
    solo.hear(RequestReservation(handoff(0), solo.fence(), len(prompt)))
    return solo


def know_token(solo: Solo, bytes_per_s: float = SLOW) -> list[Action]:
    return solo.hear(FinishPrefill(handoff(0), solo.fence(), TOKEN, bytes_per_s))


def land(solo: Solo, layer: int, num_layers: int = 1, failure: str | None = None) -> list[Action]:
    span = Span(0, 12, layer, layer + num_layers)
    return solo.handle(events.WriteLanded(handoff(0), span, failure))


def fence(solo: Solo) -> list[Action]:
    return solo.handle(events.GrantFenced(handoff(0)))


def count(solo: Solo, outcome: PartialOutcome) -> float:
    return solo.scheduler.counters.get(PARTIAL_STARTS, outcome.value)


def running(solo: Solo) -> StepPlan:
    assert solo.plan is not None
    return solo.plan


def begun(num_layers: int, prompt: tuple[int, ...] = PROMPT, *, in_engine: bool) -> Solo:
    """So many layers have landed and run, the last of them perhaps not yet."""
    solo = waiting(prompt)
    know_token(solo)
    for layer in range(num_layers):
        land(solo, layer)
        if layer < num_layers - 1 or not in_engine:
            solo.finish_step()
    assert (solo.plan is not None) is in_engine
    return solo

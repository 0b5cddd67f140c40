"""What a worker says its time went to: each stage in its order, and only where the router asks."""

import pytest
from tests.unit.scheduler.rigs import PEER_INCARNATION, Solo, handoff, sequence_id

from disagg.core.errors import Failure, FailureKind
from disagg.core.ids import Fence, Incarnation
from disagg.core.request import EmittedToken, SamplingParams, SequenceSpec
from disagg.core.roles import HandoffMode, Role, Task
from disagg.core.spans import Span
from disagg.policy.batching import StepBudget
from disagg.protocol.messages import AnswerReservation, EmitTokens, FinishPrefill, RequestReservation, StageReport
from disagg.scheduler import events
from disagg.telemetry.stages import Stage, StageTime

PROMPT = tuple(range(12))
CHUNKS = StepBudget(chunk_tokens=8, mixed_chunk_tokens=8, max_running=16)


def timed(solo: Solo, number: int, task: Task, max_tokens: int = 4) -> None:
    spec = SequenceSpec(sequence_id(number), PROMPT, SamplingParams(max_tokens))
    solo.start_spec(spec, task, is_timed=True)


def reports(solo: Solo, number: int = 0) -> list[StageReport]:
    told = [message for message in solo.reports if isinstance(message, EmitTokens)]
    return [each for message in told for each in message.stages if each.attempt_id == handoff(number)]


def said(solo: Solo, position: int, *stages: StageTime) -> StageReport:
    return StageReport(handoff(0), position, tuple(stages))


def test_a_whole_sequence() -> None:
    solo = Solo(Role.MIXED, budget=CHUNKS)
    timed(solo, 0, Task.WHOLE)
    for seconds in (0.5, 0.25, 0.125, 1.0, 1.0):
        solo.now_s += seconds
        solo.finish_step()
    assert reports(solo) == [
        said(solo, 0, StageTime(Stage.PREFILL, 0.5, 8), StageTime(Stage.PREFILL, 0.25, 4)),
        said(solo, 1, StageTime(Stage.FIRST_STEP, 0.125)),
    ]
    with_tokens = [(m.tokens[0].position, m.stages[0].position) for m in solo.reports if m.stages]  # type: ignore[union-attr]
    assert with_tokens == [(0, 0), (1, 1)]
    assert solo.scheduler.is_idle


def test_what_waits_behind_others_queues() -> None:
    solo = Solo(Role.MIXED, budget=CHUNKS)
    solo.start(1, Task.WHOLE, PROMPT[:8], max_tokens=1)
    timed(solo, 0, Task.WHOLE)
    solo.now_s += 2.0  # the other's step runs
    solo.finish_step()
    solo.now_s += 1.0
    solo.finish_step()
    solo.now_s += 1.0
    solo.finish_step()
    (report,) = reports(solo)
    assert report.stages == (
        StageTime(Stage.PREFILL_QUEUE, 2.0),
        StageTime(Stage.PREFILL, 1.0, 8),
        StageTime(Stage.PREFILL, 1.0, 4),
    )


def test_a_prefill_worker_counts_refusals_as_waiting_for_room() -> None:
    solo = Solo(Role.PREFILL, mode=HandoffMode.SYNC)
    solo.meet(Role.DECODE)
    timed(solo, 0, Task.PREFILL)
    solo.now_s += 0.25
    refused = Failure(FailureKind.OVERLOADED, "no")
    solo.hear(AnswerReservation(handoff(0), solo.fence(), refused, retry_after_s=0.05))
    solo.wait(0.5)
    solo.now_s += 0.25
    solo.hear(solo.answer(0))
    solo.now_s += 3.0
    solo.finish_step()
    assert reports(solo) == [
        said(solo, 0, StageTime(Stage.RESERVATION, 1.0), StageTime(Stage.PREFILL, 3.0, len(PROMPT)))
    ]
    prompt = solo.reports[-1].prompts[0]  # type: ignore[union-attr]
    assert (prompt.handoff_bytes, prompt.hidden_bytes, prompt.hidden_s) == (3 * 12 * 16, 0, 0.0)


def test_a_prefill_worker_says_how_long_kv_travelled_unseen() -> None:
    solo = Solo(Role.PREFILL)
    solo.meet(Role.DECODE)
    timed(solo, 0, Task.PREFILL)
    solo.hear(solo.answer(0))
    solo.now_s += 1.0
    solo.layers(1)
    solo.now_s += 0.25
    solo.handle(events.WriteFinished(handoff(0), 0, None))
    solo.now_s += 1.0
    solo.layers(2)
    solo.now_s += 0.5
    solo.finish_step()
    prompt = solo.reports[-1].prompts[0]  # type: ignore[union-attr]
    layer = 12 * 16
    assert (prompt.handoff_bytes, prompt.hidden_bytes, prompt.hidden_s) == (3 * layer, layer, 0.75)


def test_a_decode_worker() -> None:
    solo = Solo(Role.DECODE)
    solo.meet(Role.PREFILL)
    timed(solo, 0, Task.DECODE)
    solo.now_s += 1.0
    solo.hear(RequestReservation(handoff(0), solo.fence(), len(PROMPT)))
    solo.now_s += 2.0
    fence = Fence(PEER_INCARNATION, Incarnation(11), 1)
    solo.hear(FinishPrefill(handoff(0), fence, EmittedToken(sequence_id(0), 0, 42)))
    solo.now_s += 0.5
    solo.handle(events.WriteLanded(handoff(0), Span(0, len(PROMPT), 0, 3), None))
    solo.now_s += 0.25
    solo.handle(events.GrantFenced(handoff(0)))
    solo.now_s += 0.125
    solo.finish_step()
    solo.finish_step()
    assert reports(solo) == [
        said(solo, 0, StageTime(Stage.PREFILL_ELSEWHERE, 3.0), StageTime(Stage.TRANSFER, 0.75)),
        said(solo, 1, StageTime(Stage.FIRST_STEP, 0.125)),
    ]


def gave_up_after(num_steps: int) -> list[StageReport]:
    """An older stream takes the last block when a younger one has its first token, or a little sooner or later."""
    solo = Solo(Role.MIXED, num_blocks=7, answer_headroom=0)
    solo.start_spec(SequenceSpec(sequence_id(1), PROMPT[7::-1], SamplingParams(16)), Task.WHOLE)
    for _ in range(num_steps):
        solo.finish_step()
    timed(solo, 0, Task.WHOLE, max_tokens=9)
    while solo.plan is not None:
        solo.now_s += 1.0
        solo.finish_step()
    assert solo.scheduler.is_idle
    return reports(solo)


def test_a_stream_that_gives_up_its_blocks_before_its_second_token_has_read_again() -> None:
    found = [gave_up_after(num_steps) for num_steps in range(10)]
    assert all([report.position for report in each] == [0, 1] for each in found)
    again = [each[1].stages for each in found if any(e.stage is Stage.PREFILL for e in each[1].stages)]
    assert again
    assert all(0 < sum(e.num_tokens for e in stages) <= len(PROMPT) + 1 for stages in again)


@pytest.mark.parametrize(("role", "task"), [(Role.MIXED, Task.WHOLE), (Role.PREFILL, Task.PREFILL)])
def test_nobody_is_timed_unless_the_router_asks(role: Role, task: Task) -> None:
    solo = Solo(role)
    solo.meet(Role.DECODE)
    solo.start(0, task, PROMPT)
    if task is Task.PREFILL:
        fence = Fence(Incarnation(11), PEER_INCARNATION, 1)
        solo.hear(AnswerReservation(handoff(0), fence, Failure(FailureKind.INVALID_REQUEST, "no")))
    else:
        solo.finish_steps()
    assert reports(solo) == []
    assert not any(message.stages for message in solo.reports if isinstance(message, EmitTokens))


def test_what_is_dropped_says_nothing_more() -> None:
    solo = Solo(Role.MIXED, budget=CHUNKS)
    timed(solo, 0, Task.WHOLE)
    solo.abort(0)  # in the middle of its first chunk
    solo.finish_step()
    timed(solo, 1, Task.WHOLE)
    assert solo.plan is not None
    solo.handle(events.StepFailed(solo.plan.step_id, Failure(FailureKind.INTERNAL, "broken")))
    solo.plan = None
    assert solo.scheduler.is_idle
    assert reports(solo) == reports(solo, 1) == []

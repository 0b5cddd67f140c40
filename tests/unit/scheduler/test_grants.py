"""What the sending end does with a grant: it is checked, and says how often the engine should report layers."""

import msgspec
import pytest
from tests.unit.scheduler.rigs import LAYER_TOKEN_BYTES, PEER, Solo, handoff, of, to_peer

from disagg.core.errors import FailureKind
from disagg.core.roles import HandoffMode, Role, Task
from disagg.protocol.handoff import GrantKey, make_grant_key
from disagg.protocol.messages import CancelHandoff, FinishPrefill
from disagg.scheduler.actions import PushSpan, RunStep

PROMPT = tuple(range(10))


def source(**more: object) -> Solo:
    solo = Solo(Role.PREFILL, **more)  # type: ignore[arg-type]
    solo.meet(Role.DECODE)
    return solo


FLAWS: dict[str, dict[str, object]] = {
    "a key of nothing": {"grant_key": b"key"},
    "a key of nothing ": {"grant_key": GrantKey(handoff(0), source().fence(), bytes(33)).encode()},
    "a key of another hand-off": {"grant_key": make_grant_key(b"seed", handoff(7), source().fence())},
    "2 blocks of 16 for 10 tokens": {"blocks": (0, 1)},
    "0 blocks of 16 for 10 tokens": {"blocks": ()},
    "3 blocks of 16 for 10 tokens": {"blocks": (0, 1, 16)},
    "3 blocks of 2 for 10 tokens": {"blocks": (0, 1, 2), "num_blocks": 2},
    "3 blocks of 16 for 10 tokens ": {"blocks": (0, -1, 2)},
    "first missing token -1 of 10": {"first_missing_token": -1},
    "first missing token 11 of 10": {"first_missing_token": 11},
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_grant_that_cannot_be_fails_the_hand_off_and_nothing_else(flaw: str) -> None:
    solo = source()
    solo.start(0, Task.PREFILL, PROMPT)
    solo.start(1, Task.PREFILL, PROMPT)
    actions = solo.hear(msgspec.structs.replace(solo.answer(0), **FLAWS[flaw]))
    (report,) = solo.failures
    assert report.failure.kind is FailureKind.TRANSFER_FAILED
    assert report.failure.message == f"{PEER} granted what cannot be: {flaw.strip()}"
    assert [each.handoff_id for each in to_peer(CancelHandoff, actions)] == [handoff(0)]
    assert of(PushSpan, actions) == []
    assert of(RunStep, solo.hear(solo.answer(1)))


def test_a_grant_that_lacks_nothing_pushes_nothing() -> None:
    solo = source()
    solo.start(0, Task.PREFILL, PROMPT)
    solo.hear(solo.answer(0, first_missing=10))
    actions = solo.finish_step()
    assert of(PushSpan, actions) == []
    assert len(to_peer(FinishPrefill, actions)) == 1


@pytest.mark.parametrize(
    ("min_bytes", "first_missing", "every", "reported"),
    [
        (0, 0, 1, [1, 2, 3]),
        (10 * LAYER_TOKEN_BYTES, 0, 1, [1, 2, 3]),
        (10 * LAYER_TOKEN_BYTES + 1, 0, 2, [2, 3]),
        (10**9, 0, 3, [3]),
        (2 * LAYER_TOKEN_BYTES + 1, 8, 2, [2, 3]),  # 2 of 10 tokens are missing
        (0, 10, 3, [3]),
    ],
)
def test_the_engine_is_asked_for_reports_as_often_as_something_may_be_pushed(
    min_bytes: int, first_missing: int, every: int, reported: list[int]
) -> None:
    solo = source(min_push_bytes=min_bytes)
    solo.start(0, Task.PREFILL, PROMPT)
    solo.hear(solo.answer(0, first_missing=first_missing))
    assert solo.plan is not None
    assert solo.plan.report_every == every
    assert [layer for layer in (1, 2, 3) if solo.plan.is_reported(layer, 3)] == reported


def test_steps_without_hand_offs_or_in_sync_mode_ask_for_no_reports() -> None:
    solo = Solo(Role.DECODE)
    solo.start(0, Task.WHOLE, PROMPT)
    sync = source(mode=HandoffMode.SYNC)
    sync.start(0, Task.PREFILL, PROMPT)
    sync.hear(sync.answer(0))
    for plan in (solo.plan, sync.plan):
        assert plan is not None
        assert plan.report_every == 0
        assert not any(plan.is_reported(layer, 3) for layer in (1, 2, 3))

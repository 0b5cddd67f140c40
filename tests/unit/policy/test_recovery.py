"""What becomes of a sequence whose worker fails, drains or is not there: every case, at its border."""

import pytest

from disagg.core.errors import FailureKind
from disagg.policy.recovery import Recovery, RecoveryLimits, Verdict, after_failure, at_drain, while_unplaced

LIMITS = RecoveryLimits(max_attempts=3, max_unplaced_s=30.0, finish_in_place_tokens=8)


@pytest.mark.parametrize("kind", FailureKind)
@pytest.mark.parametrize("attempt", [1, 2, 3, 4])
def test_everything_moves_but_what_can_be_served_nowhere_and_what_was_tried_enough(
    kind: FailureKind, attempt: int
) -> None:
    recovery = after_failure(kind, "because", attempt, LIMITS)
    if kind is FailureKind.INVALID_REQUEST:
        assert recovery == Recovery(Verdict.GIVE_UP, "because")
    elif attempt >= 3:
        assert recovery == Recovery(Verdict.GIVE_UP, f"attempt {attempt} of 3 failed: because")
    else:
        assert recovery == Recovery(Verdict.MOVE, f"attempt {attempt} failed ({kind.value}): because")


def test_links_that_fail_at_once_get_time_to_heal() -> None:
    """The first attempts follow at once; all that are allowed span seconds."""
    limits = RecoveryLimits()
    delays = [after_failure(FailureKind.WORKER_LOST, "", n, limits).delay_s for n in range(1, limits.max_attempts)]
    assert delays[: limits.num_quick_attempts - 1] == [0.0] * (limits.num_quick_attempts - 1)
    assert delays == sorted(delays)
    assert max(delays) == limits.max_retry_delay_s
    assert sum(delays) > 5.0


@pytest.mark.parametrize(
    ("num_remaining", "has_other", "expected"),
    [
        (0, True, Recovery(Verdict.LEAVE, "at most 0 tokens are left")),
        (8, True, Recovery(Verdict.LEAVE, "at most 8 tokens are left")),
        (8, False, Recovery(Verdict.LEAVE, "at most 8 tokens are left")),
        (9, True, Recovery(Verdict.MOVE, "its worker drains and up to 9 tokens are left")),
        (9, False, Recovery(Verdict.LEAVE, "no other worker could take it")),
    ],
)
def test_at_a_drain_only_long_answers_move_and_only_somewhere(
    num_remaining: int, has_other: bool, expected: Recovery
) -> None:
    assert at_drain(num_remaining, has_other_worker=has_other, limits=LIMITS) == expected


@pytest.mark.parametrize(
    ("unplaced_s", "expected"),
    [
        (0.0, Recovery(Verdict.LEAVE, "nobody is here")),
        (29.99, Recovery(Verdict.LEAVE, "nobody is here")),
        (30.0, Recovery(Verdict.GIVE_UP, "no worker could take it for 30 s: nobody is here")),
    ],
)
def test_waiting_for_a_worker_has_an_end(unplaced_s: float, expected: Recovery) -> None:
    assert while_unplaced(unplaced_s, "nobody is here", LIMITS) == expected

"""What can never be served, at the borders, with the numbers."""

import pytest

from disagg.core.errors import FailureKind
from disagg.core.ids import WorkerId
from disagg.core.roles import Role
from disagg.policy.admission import Limits, default_max_tokens, impossible, too_much_claimed
from disagg.policy.routing import WorkerView

LIMITS = Limits(max_context=100, max_pool_tokens=80, vocab_size=1000)
ROOMY = Limits(max_context=100, max_pool_tokens=1000, vocab_size=1000)


@pytest.mark.parametrize(
    ("limits", "num_prompt", "max_tokens", "said"),
    [
        (ROOMY, 0, 1, ["0 tokens", "at least 1"]),
        (ROOMY, 1, 1, None),
        (ROOMY, 99, 1, None),
        (ROOMY, 100, 1, ["100 tokens", "shorten"]),
        (ROOMY, 100, 0, None),  # nothing is to be written
        (ROOMY, 101, 0, ["101 tokens", "100", "shorten"]),
        (LIMITS, 80, 0, None),
        (LIMITS, 81, 0, ["81 tokens", "80", "--kv-memory"]),
        (ROOMY, 5000, 1, ["5000 tokens", "100", "shorten"]),
        (ROOMY, 60, 40, None),
        (ROOMY, 60, 41, ["60", "41", "101", "100", "at most 40"]),
        (LIMITS, 80, 1, None),  # the last token needs no room
        (LIMITS, 81, 1, ["81 tokens", "80", "--kv-memory"]),
        (LIMITS, 40, 41, None),
        (LIMITS, 40, 42, ["81 tokens", "80", "--kv-memory"]),
    ],
)
def test_borders(limits: Limits, num_prompt: int, max_tokens: int, said: list[str] | None) -> None:
    failure = impossible(num_prompt, max_tokens, limits)
    assert (failure is None) is (said is None)
    if failure is not None and said is not None:
        assert failure.kind is FailureKind.INVALID_REQUEST
        assert [text for text in said if text not in failure.message] == []


@pytest.mark.parametrize(
    ("limits", "num_prompt", "most"),
    [(ROOMY, 1, 99), (ROOMY, 99, 1), (LIMITS, 30, 51), (LIMITS, 80, 1), (ROOMY, 500, 1)],
)
def test_an_open_end_goes_as_far_as_it_can_and_no_further(limits: Limits, num_prompt: int, most: int) -> None:
    assert default_max_tokens(num_prompt, limits) == most
    if num_prompt < limits.max_context:
        assert impossible(num_prompt, most, limits) is None
        assert impossible(num_prompt, most + 1, limits) is not None


def view(role: Role, claimed: int, num_blocks: int = 10) -> WorkerView:
    return WorkerView(WorkerId("w"), role, num_blocks, 16, claimed, 0, 0, frozenset())


@pytest.mark.parametrize(
    ("workers", "share"),
    [
        ([], None),  # who may come back has promised nothing
        ([view(Role.PREFILL, 10**6)], None),
        ([view(Role.DECODE, 39)], None),
        ([view(Role.DECODE, 40)], "4.0"),
        ([view(Role.MIXED, 60), view(Role.DECODE, 45), view(Role.PREFILL, 0)], "4.5"),
        ([view(Role.MIXED, 60), view(Role.DECODE, 39)], None),  # one has room
        ([view(Role.DECODE, 40), view(Role.DECODE, 40, num_blocks=100)], None),
    ],
)
def test_promises_are_weighed_against_the_kv_of_the_writer_with_most_room(
    workers: list[WorkerView], share: str | None
) -> None:
    failure = too_much_claimed(workers, 4.0)
    assert (failure is None) is (share is None)
    if failure is not None:
        assert failure.kind is FailureKind.OVERLOADED
        assert failure.message == (
            f"open requests have been promised {share} times the KV there is, the limit is 4; try again later"
        )

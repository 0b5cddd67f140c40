"""When a first step begins early, and how much of it runs at once."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.policy.partial_start import PartialOutcome, can_finish_alone, num_layers_now, why_wait

STEP_S = 0.02


@pytest.mark.parametrize(
    ("remaining_bytes", "bytes_per_s", "reason"),
    [
        (2_000_001, 1e8, None),
        (2_000_000, 1e8, PartialOutcome.WIRE_SHORT),  # exactly a step
        (0, 1e8, PartialOutcome.WIRE_SHORT),
        (1, 1e-300, None),
        (1 << 60, math.inf, PartialOutcome.WIRE_SHORT),
        (1 << 60, 0.0, PartialOutcome.RATE_UNKNOWN),
        (1 << 60, -1.0, PartialOutcome.RATE_UNKNOWN),
        (1 << 60, math.nan, PartialOutcome.RATE_UNKNOWN),
    ],
)
def test_it_begins_where_the_wire_takes_longer_than_a_step(
    remaining_bytes: int, bytes_per_s: float, reason: PartialOutcome | None
) -> None:
    assert why_wait(remaining_bytes, bytes_per_s, STEP_S) is reason


def test_alone_everything_that_is_here_runs_at_once() -> None:
    assert num_layers_now(7, 30, 30, wire_s=2.0, step_s=STEP_S, has_others=False) == 7
    assert can_finish_alone(30, 30, has_others=False)


@pytest.mark.parametrize(
    ("num_ready", "wire_s", "expected"),
    [
        (3, 2.0, 1),  # 100 steps for 30 layers
        (30, 0.2, 3),  # 10 steps
        (2, 0.2, 2),
        (30, 0.01, 7),  # no more than a quarter of the step
        (30, 0.0, 7),
        (5, math.inf, 1),
    ],
)
def test_beside_others_a_part_is_as_small_as_keeps_up_with_the_wire(
    num_ready: int, wire_s: float, expected: int
) -> None:
    assert num_layers_now(num_ready, 30, 30, wire_s=wire_s, step_s=STEP_S, has_others=True) == expected


def test_beside_others_the_rest_runs_alone_when_it_is_no_larger_than_a_part() -> None:
    assert can_finish_alone(7, 30, has_others=True)
    assert not can_finish_alone(8, 30, has_others=True)
    assert can_finish_alone(1, 2, has_others=True)  # a layer is the least


@given(
    num_layers=st.integers(1, 100),
    shares=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    wire_s=st.floats(0, allow_nan=False),
    step_s=st.floats(0, 100),
    has_others=st.booleans(),
)
def test_a_part_is_never_empty_and_never_more_than_is_here(
    num_layers: int, shares: tuple[float, float], wire_s: float, step_s: float, has_others: bool
) -> None:
    num_left = max(1, int(shares[0] * num_layers))
    num_ready = max(1, int(shares[1] * num_left))
    found = num_layers_now(num_ready, num_left, num_layers, wire_s=wire_s, step_s=step_s, has_others=has_others)
    assert 1 <= found <= num_ready

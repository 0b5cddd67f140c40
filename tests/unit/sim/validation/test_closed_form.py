"""Steady states against sums by hand: 5 ms a step, 0.1 ms a prompt token, 0.5 ms a stream."""

import pytest
from tests.unit.sim.rigs import LinearSteps

from disagg.sim.validation.closed_form import closed_loop_tpot_s, decode_tpot_s, wave_tpot_s

STEPS = LinearSteps()
ALONE_S = 0.005 + 4 * 5e-4  # a step of four streams


def test_prompts_that_join_add_their_own_time_once_per_answer() -> None:
    assert closed_loop_tpot_s(STEPS, 100, 10, 4) == pytest.approx(ALONE_S + 4 / 10 * 100e-4)


def test_in_waves_a_stream_waits_for_the_prompts_read_after_its_own() -> None:
    # Two batches of two prompts: the first two streams wait for the second batch, the others do not.
    batch_s = 0.005 + 200e-4
    assert wave_tpot_s(STEPS, 100, 11, 4, 200) == pytest.approx(ALONE_S + batch_s / 2 / 10)
    # Batches of 3 and 1: three wait for a batch of one.
    assert wave_tpot_s(STEPS, 100, 11, 4, 399) == pytest.approx(ALONE_S + 3 / 4 * (0.005 + 100e-4) / 10)


def test_in_one_batch_nobody_waits() -> None:
    assert wave_tpot_s(STEPS, 100, 11, 4, 400) == pytest.approx(ALONE_S)


def test_prompts_longer_than_a_batch_are_read_one_by_one() -> None:
    assert wave_tpot_s(STEPS, 100, 11, 2, 50) == pytest.approx(0.006 + (0.005 + 100e-4) / 2 / 10)


def test_places_are_empty_while_their_prompts_are_read_elsewhere() -> None:
    assert decode_tpot_s(STEPS, 100, 11, 4, 0.0) == pytest.approx(ALONE_S)
    # Two streams take 6 ms a token, 60 ms an answer; away as long, half of four places are empty.
    assert decode_tpot_s(STEPS, 100, 11, 4, 0.06) == pytest.approx(0.006)
    assert decode_tpot_s(STEPS, 100, 11, 4, 100.0) == pytest.approx(0.0055)

"""A worker's clock: every moment in exactly one stage."""

import random

import pytest

from disagg.telemetry.stages import MAX_STAGES, STAGE_PLACES, Stage, StageClock, StageTime


def test_each_moment_is_in_one_stage_and_in_order() -> None:
    clock = StageClock(Stage.PREFILL_QUEUE, 10.0)
    clock.enter(Stage.RESERVATION, 10.5)
    clock.enter(Stage.PREFILL_QUEUE, 10.75)
    clock.enter(Stage.PREFILL_QUEUE, 10.8)  # goes on
    clock.enter(Stage.PREFILL, 11.0, 16)
    clock.enter(Stage.PREFILL, 12.0, 4)  # the next chunk
    assert clock.take(12.25) == (
        StageTime(Stage.PREFILL_QUEUE, 0.5),
        StageTime(Stage.RESERVATION, 0.25),
        StageTime(Stage.PREFILL_QUEUE, 0.25),
        StageTime(Stage.PREFILL, 1.0, 16),
        StageTime(Stage.PREFILL, 0.25, 4),
    )
    assert clock.take(13.0) == (StageTime(Stage.PREFILL, 0.75),)
    assert clock.take(13.0) == ()
    clock.check_invariants()


def test_it_is_bounded_and_loses_nothing() -> None:
    rng, now_s = random.Random(5), 0.0
    clock = StageClock(Stage.PREFILL_QUEUE, now_s)
    num_tokens = 0
    for _ in range(1000):
        stage = rng.choice([Stage.PREFILL_QUEUE, Stage.PREFILL, Stage.RESERVATION])
        chunk = 8 if stage is Stage.PREFILL else 0
        clock.enter(stage, now_s, chunk)
        num_tokens += chunk
        now_s += rng.random()
        clock.check_invariants()
    spent = clock.take(now_s)
    assert len(spent) <= MAX_STAGES + len(Stage)
    assert sum(each.seconds for each in spent) == pytest.approx(now_s)
    assert sum(each.num_tokens for each in spent) == num_tokens


def test_every_stage_has_a_place() -> None:
    assert set(STAGE_PLACES) == set(Stage)

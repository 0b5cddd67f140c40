"""The step-time predictor: right after few steps, whatever the device; never negative, never falling."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.policy.step_time import StepCosts, StepShape, StepTimes, chunk_context

NUM_STEPS = 200
# A laptop, a server without accelerator, a GPU, and odd ones: one cost is 0, or far from the prior's share.
DEVICES = (
    StepCosts(0.004, 1.2e-3, 4e-8, 6e-3, 1e-6),
    StepCosts(0.015, 3e-4, 1e-7, 1e-3, 2e-6),
    StepCosts(0.008, 8e-6, 1e-9, 2e-5, 5e-8),
    StepCosts(0.0, 1e-4, 0.0, 1e-3, 0.0),
    StepCosts(0.05, 1e-6, 1e-7, 1e-2, 1e-8),
    StepCosts(2.0, 0.1, 1e-5, 0.3, 1e-4),
)


def draw_shape(rng: random.Random) -> StepShape:
    """Decode, mixed and prefill steps."""
    num_streams = rng.choice([0, rng.randint(1, 8), rng.randint(1, 64)])
    shape = StepShape(num_streams=num_streams, stream_context=sum(rng.randint(1, 2000) for _ in range(num_streams)))
    if not num_streams or rng.random() < 0.4:
        shape = shape.add_chunk(rng.choice([0, 0, rng.randint(1, 3000)]), rng.randint(1, 512))
    return shape


def draw_seconds(rng: random.Random, costs: StepCosts, shape: StepShape) -> float:
    """10 % of noise; one in 50 was paused."""
    seconds = costs.predict(shape) * max(0.5, rng.gauss(1.0, 0.1))
    return seconds * 20 if rng.random() < 0.02 else seconds


def error(times: StepTimes, device: StepCosts, shape: StepShape) -> float:
    return abs(times.predict(shape) / device.predict(shape) - 1)


@pytest.mark.parametrize("device", DEVICES, ids=range(len(DEVICES)))
@pytest.mark.parametrize("seed", range(10))
def test_it_is_within_a_tenth_after_200_steps(device: StepCosts, seed: int) -> None:
    rng = random.Random(seed)
    times = StepTimes()
    for _ in range(NUM_STEPS):
        shape = draw_shape(rng)
        times.observe(shape, draw_seconds(rng, device, shape))
        times.check_invariants()
    errors = sorted(error(times, device, draw_shape(rng)) for _ in range(100))
    assert errors[50] < 0.05
    assert errors[95] < 0.1
    assert errors[-1] < 0.2


@pytest.mark.parametrize("factor", [0.05, 0.3, 4.0, 50.0])
def test_a_device_that_changes_is_followed(factor: float) -> None:
    rng = random.Random(1)
    times, device = StepTimes(), DEVICES[1]
    for _ in range(NUM_STEPS):
        shape = draw_shape(rng)
        times.observe(shape, draw_seconds(rng, device, shape))
    for _ in range(60):
        shape = draw_shape(rng)
        times.observe(shape, factor * draw_seconds(rng, device, shape))
    drawn = [draw_shape(rng) for _ in range(50)]
    errors = sorted(abs(times.predict(shape) / device.predict(shape) / factor - 1) for shape in drawn)
    assert errors[25] < 0.1


def test_what_is_not_seen_for_long_is_not_forgotten() -> None:
    """An hour of decode steps alone: what was learned of prompts stays."""
    rng = random.Random(2)
    times, device = StepTimes(), DEVICES[0]
    for _ in range(NUM_STEPS):
        shape = draw_shape(rng)
        times.observe(shape, draw_seconds(rng, device, shape))
    for _ in range(2000):
        shape = StepShape(num_streams=8, stream_context=8 * rng.randint(100, 900))
        times.observe(shape, draw_seconds(rng, device, shape))
    assert error(times, device, StepShape().add_chunk(0, 400)) < 0.15
    assert error(times, device, StepShape(num_streams=8, stream_context=4000)) < 0.05


def test_one_paused_step_moves_nothing() -> None:
    rng = random.Random(3)
    times, device = StepTimes(), DEVICES[0]
    for _ in range(NUM_STEPS):
        shape = draw_shape(rng)
        times.observe(shape, device.predict(shape))
    shape = StepShape(num_streams=8, stream_context=4000)
    before = times.predict(shape)
    times.observe(shape, 1000 * before)
    assert times.predict(shape) == pytest.approx(before, rel=0.01)


counts = st.integers(0, 10**6)
shapes = st.builds(StepShape, counts, counts, counts, counts)
steps = st.lists(st.tuples(shapes, st.floats(1e-6, 1e4)), max_size=40)


@given(steps, shapes, shapes)
def test_whatever_it_saw_it_is_never_negative_and_never_falls(
    steps: list[tuple[StepShape, float]], shape: StepShape, more: StepShape
) -> None:
    times = StepTimes()
    for seen, seconds in steps:
        times.observe(seen, seconds)
        times.check_invariants()
    fields = shape.__struct_fields__
    larger = StepShape(*(getattr(shape, name) + getattr(more, name) for name in fields))
    assert 0 <= times.predict(shape) <= times.predict(larger)


@given(st.lists(st.sampled_from([0.0, -1.0, float("nan"), float("inf")])))
def test_times_that_cannot_be_are_ignored(seconds: list[float]) -> None:
    times = StepTimes()
    for each in seconds:
        times.observe(StepShape(1, 1, 1, 1), each)
    assert times.costs == StepCosts()
    assert times.num_observed == 0


costs = st.builds(StepCosts, *[st.one_of(st.just(0.0), st.floats(1e-9, 1.0))] * 5)


@given(costs, st.floats(0, 100), st.integers(0, 10**5), st.integers(0, 5000))
def test_as_many_tokens_as_fit_and_no_more(costs: StepCosts, seconds: float, position: int, max_tokens: int) -> None:
    num_tokens = costs.tokens_within(seconds, position, max_tokens)
    assert 0 <= num_tokens <= max_tokens
    assert num_tokens == 0 or costs.chunk_s(position, num_tokens) <= seconds * (1 + 1e-9)
    assert num_tokens == max_tokens or seconds == 0 or costs.chunk_s(position, num_tokens + 2) > seconds


@given(st.integers(0, 300), st.lists(st.integers(1, 50), max_size=5))
def test_cuts_do_not_change_what_a_prompt_attends_to(position: int, cuts: list[int]) -> None:
    whole, shape = chunk_context(position, sum(cuts)), StepShape()
    for num_tokens in cuts:
        shape = shape.add_chunk(position, num_tokens)
        position += num_tokens
    assert (shape.num_prompt_tokens, shape.prompt_context) == (sum(cuts), whole)

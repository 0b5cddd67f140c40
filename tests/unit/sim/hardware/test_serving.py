"""What serving adds to steps, fitted to times that are known."""

from pathlib import Path

import msgspec
import pytest

from disagg.core.errors import ConfigurationError
from disagg.policy.step_time import StepCosts, StepShape
from disagg.sim.hardware.fitted import FittedModel, Profile
from disagg.sim.hardware.serving import (
    Contention,
    LoneTimes,
    ServedGap,
    ServedPrompt,
    ServedTimes,
    ServedTurns,
    Serving,
    Speed,
    fit_serving,
)
from disagg.sim.hardware.step_model import StepShape as Shape

ENGINE = StepCosts(base_s=0.02, prompt_token_s=1e-3, prompt_pair_s=1e-7, stream_s=1e-3, context_token_s=1e-6)
SERVED = StepCosts(base_s=0.022, prompt_token_s=1.1e-3, prompt_pair_s=1e-7, stream_s=1.5e-3, context_token_s=1e-6)
MESSAGE_S = 1e-4
REQUEST_S = 0.004
PROMPT_STEP_S = 0.007
CONTENTION = Contention(1.3, 1.2, 1.15, 1.4)


def prompt_s(num_tokens: int) -> float:
    return PROMPT_STEP_S + SERVED.predict(StepShape().add_chunk(0, num_tokens))


def gap_s(num_streams: int, context: float = 64.0) -> float:
    return SERVED.predict(StepShape(num_streams=num_streams, stream_context=int(num_streams * context)))


def times() -> ServedTimes:
    around_s = REQUEST_S + 4 * MESSAGE_S
    prompt, gap = prompt_s(160), gap_s(4)

    def turns(around_s: float, alone_s: float, slowdown: float) -> tuple[ServedTurns, ...]:
        """The machine is as fast as it was profiled, then much slower, then much faster."""
        speeds = (1.0, 1.9, 0.7)
        return tuple(ServedTurns(around_s + speed * alone_s, around_s + speed * slowdown * alone_s) for speed in speeds)

    return ServedTimes(
        prompts=tuple(ServedPrompt(n, around_s + prompt_s(n), prompt_s(n)) for n in (48, 160, 448)),
        gaps=tuple(ServedGap(n, 64.0, gap_s(n)) for n in (1, 2, 4, 8)),
        handoff_s=0.003,
        prompts_beside_prompts=turns(around_s, prompt, 1.3),
        prompts_beside_streams=turns(around_s, prompt, 1.2),
        streams_beside_prompts=turns(0.0, gap, 1.15),
        streams_beside_streams=turns(0.0, gap, 1.4),
    )


def profile(serving: Serving | None = None) -> Profile:
    return Profile("m", "h", "fp32", "float32", 4, 64, 100, ENGINE, serving=serving)


def test_what_was_put_in_comes_out() -> None:
    found = fit_serving(ENGINE, times(), MESSAGE_S)
    for name, value in msgspec.structs.asdict(SERVED).items():
        assert getattr(found.costs, name) == pytest.approx(value, rel=1e-6)
    assert found.request_s == pytest.approx(REQUEST_S)
    assert found.prompt_step_s == pytest.approx(PROMPT_STEP_S)
    assert found.handoff_s == pytest.approx(0.003)
    for name, value in msgspec.structs.asdict(CONTENTION).items():
        assert getattr(found.contention, name) == pytest.approx(value)


def test_noise_never_makes_a_cost_negative_or_a_neighbour_a_help() -> None:
    odd = msgspec.structs.replace(
        times(),
        prompts=(ServedPrompt(48, 0.3, 0.31), ServedPrompt(448, 0.2, 0.21)),
        gaps=(ServedGap(1, 64.0, 0.03), ServedGap(4, 64.0, 0.02)),
        handoff_s=-0.001,
        prompts_beside_prompts=(ServedTurns(0.2, 0.001),),
        prompts_beside_streams=(ServedTurns(0.1, 0.05), ServedTurns(0.0, 0.2)),
        streams_beside_prompts=(ServedTurns(0.02, 0.019),),
        streams_beside_streams=(ServedTurns(0.02, 0.001),),
    )
    found = fit_serving(ENGINE, odd, MESSAGE_S)
    assert min(msgspec.structs.astuple(found.costs)) >= 0
    assert min(found.request_s, found.handoff_s) >= 0
    assert found.contention == Contention()


def test_one_length_or_one_number_of_streams_is_too_little() -> None:
    few = msgspec.structs.replace(times(), gaps=times().gaps[:1])
    with pytest.raises(ConfigurationError, match="two numbers of streams"):
        fit_serving(ENGINE, few, MESSAGE_S)


def test_a_profile_with_served_times_is_simulated_as_served_and_survives_its_file(tmp_path: Path) -> None:
    serving = fit_serving(ENGINE, times(), MESSAGE_S)
    engine = profile()
    served = profile(serving)
    shape = Shape(((160, 0),), 256, 4)
    assert FittedModel(served).step_s(shape) > FittedModel(engine).step_s(shape)
    mixed = SERVED.predict(StepShape(num_streams=4, stream_context=256).add_chunk(0, 160))
    assert FittedModel(served).step_s(shape) == pytest.approx(PROMPT_STEP_S + mixed)
    path = tmp_path / "profile.json"
    path.write_bytes(served.encode())
    assert Profile.read(path) == served
    path.write_bytes(engine.encode())
    assert Profile.read(path).serving is None


def test_the_speed_of_a_machine_follows_from_what_a_lone_client_sees() -> None:
    serving = fit_serving(ENGINE, times(), MESSAGE_S)
    for speed in (Speed(), Speed(1.5, 1.2), Speed(0.8, 1.1)):
        slowed = serving.at(speed)
        assert slowed.request_s == serving.request_s
        step_s = FittedModel(profile(slowed)).step_s(Shape(((160, 0),)))
        seen_s = slowed.costs.predict(StepShape(num_streams=1, stream_context=172))
        assert step_s == pytest.approx(speed.prompts * prompt_s(160))
        found = serving.speed_of(LoneTimes(160, step_s, 172.0, seen_s))
        assert msgspec.structs.astuple(found) == pytest.approx(msgspec.structs.astuple(speed), rel=1e-6)


def test_the_mean_of_two_speeds() -> None:
    assert Speed(1.0, 2.0).mean_with(Speed(2.0, 1.0)) == Speed(1.5, 1.5)


def test_a_step_that_reads_prompts_cheaply_is_never_below_that_of_its_streams() -> None:
    serving = Serving(SERVED, prompt_step_s=-0.02)
    model = FittedModel(profile(serving))
    streams = Shape((), 256, 4)
    assert model.step_s(Shape(((1, 0),), 256, 4)) == model.step_s(streams)
    assert model.step_s(Shape(((160, 0),))) == pytest.approx(serving.step_of_prompt_s(160))

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
    Speed,
    fit_serving,
)
from disagg.sim.hardware.step_model import StepShape as Shape

ENGINE = StepCosts(base_s=0.02, prompt_token_s=1e-3, prompt_pair_s=1e-7, stream_s=1e-3, context_token_s=1e-6)
SERVED = StepCosts(base_s=0.022, prompt_token_s=1.1e-3, prompt_pair_s=1e-7, stream_s=1.5e-3, context_token_s=1e-6)
MESSAGE_S = 1e-4
REQUEST_S = 0.004
CONTENTION = Contention(1.3, 1.2, 1.15, 1.4)


def prompt_s(num_tokens: int) -> float:
    return SERVED.predict(StepShape().add_chunk(0, num_tokens))


def gap_s(num_streams: int, context: float = 64.0) -> float:
    return SERVED.predict(StepShape(num_streams=num_streams, stream_context=int(num_streams * context)))


def times() -> ServedTimes:
    around_s = REQUEST_S + 4 * MESSAGE_S
    return ServedTimes(
        prompts=tuple(ServedPrompt(n, around_s + prompt_s(n)) for n in (48, 160, 448)),
        gaps=tuple(ServedGap(n, 64.0, gap_s(n)) for n in (1, 2, 4, 8)),
        first_gap_s=SERVED.base_s + SERVED.stream_s + 0.003,
        prompt_tokens=160,
        ttft_beside_prompts_s=around_s + 1.3 * prompt_s(160),
        ttft_beside_streams_s=around_s + 1.2 * prompt_s(160),
        num_streams=4,
        gap_beside_prompts_s=1.15 * gap_s(4),
        gap_beside_streams_s=1.4 * gap_s(4),
    )


def test_what_was_put_in_comes_out() -> None:
    found = fit_serving(ENGINE, times(), MESSAGE_S)
    for name, value in msgspec.structs.asdict(SERVED).items():
        assert getattr(found.costs, name) == pytest.approx(value, rel=1e-6)
    assert found.request_s == pytest.approx(REQUEST_S)
    assert found.handoff_s == pytest.approx(0.003)
    for name, value in msgspec.structs.asdict(CONTENTION).items():
        assert getattr(found.contention, name) == pytest.approx(value)


def test_noise_never_makes_a_cost_negative_or_a_neighbour_a_help() -> None:
    odd = msgspec.structs.replace(
        times(),
        prompts=(ServedPrompt(48, 0.3), ServedPrompt(448, 0.2)),
        gaps=(ServedGap(1, 64.0, 0.03), ServedGap(4, 64.0, 0.02)),
        first_gap_s=0.001,
        gap_beside_prompts_s=0.001,
        gap_beside_streams_s=0.001,
        ttft_beside_prompts_s=0.001,
        ttft_beside_streams_s=0.001,
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
    engine = Profile("m", "h", "fp32", "float32", 4, 64, 100, ENGINE)
    served = msgspec.structs.replace(engine, serving=serving)
    shape = Shape(((160, 0),), 256, 4)
    assert FittedModel(served).step_s(shape) > FittedModel(engine).step_s(shape)
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
        ttft_s = REQUEST_S + 4 * MESSAGE_S + slowed.costs.predict(StepShape().add_chunk(0, 160))
        seen_s = slowed.costs.predict(StepShape(num_streams=1, stream_context=172))
        found = serving.speed_of(LoneTimes(160, ttft_s, 172.0, seen_s), MESSAGE_S)
        assert msgspec.structs.astuple(found) == pytest.approx(msgspec.structs.astuple(speed), rel=1e-6)


def test_the_mean_of_two_speeds() -> None:
    assert Speed(1.0, 2.0).mean_with(Speed(2.0, 1.0)) == Speed(1.5, 1.5)

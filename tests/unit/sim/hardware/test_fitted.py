"""Coefficients: published ones, and those of a profile."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.core.errors import ConfigurationError
from disagg.policy.step_time import StepCosts
from disagg.policy.step_time import StepShape as LearnedShape
from disagg.sim.hardware.fitted import (
    CoefficientModel,
    FittedModel,
    Profile,
    StepCoefficients,
    read_coefficients,
)
from disagg.sim.hardware.published import published_fits, published_model
from disagg.sim.hardware.step_model import StepShape
from disagg.sim.validation.data_folder import absent_reason, data_folder

FITS = "distserve/profiler-a100-80g.{}.json"
SIMPLE = StepCoefficients((10.0, 1.0, 0.1), (5.0, 0.01, 0.5), (6.0, 0.02, 0.25), large_batch=4)
PROFILE = Profile(
    model="m",
    hardware="h",
    weights="fp32",
    kv_dtype="float32",
    num_layers=4,
    kv_bytes_per_token=64,
    kv_tokens=100,
    costs=StepCosts(1.0, 0.1, 0.01, 0.5, 0.001),
)


def simple(pp: int = 1, stage_s: float = 0.0) -> CoefficientModel:
    return CoefficientModel("x", SIMPLE, kv_bytes_per_token=1, num_layers=1, kv_tokens=100, pp=pp, stage_s=stage_s)


def test_each_coefficient_counts_what_it_says() -> None:
    assert simple().step_s(StepShape(((2, 0), (3, 0)))) == pytest.approx((10 + 5 + 0.1 * 13) / 1e3)
    assert simple().step_s(StepShape((), 100, 3)) == pytest.approx((5 + 1 + 1.5) / 1e3)
    assert simple().step_s(StepShape((), 100, 4)) == pytest.approx((6 + 2 + 1) / 1e3)
    assert simple().step_s(StepShape()) == 0.0


def test_chunks_of_a_prompt_square_to_the_whole() -> None:
    parts = [simple().step_s(StepShape(((50, done),))) for done in (0, 50)]
    assert sum(parts) == pytest.approx(simple().step_s(StepShape(((100, 0),))) + 10 / 1e3)


def test_a_mixed_step_pays_one_constant() -> None:
    both = simple().step_s(StepShape(((2, 0),), 100, 3))
    assert both == pytest.approx((10 + 2 + 0.4 + 1 + 1.5) / 1e3)


def test_stages_share_the_streams_and_delay_prompts() -> None:
    assert simple(pp=2).step_s(StepShape((), 200, 6)) == simple().step_s(StepShape((), 100, 3))
    delayed = simple(pp=2, stage_s=1e-3).step_s(StepShape(((2, 0),)))
    assert delayed == pytest.approx(simple().step_s(StepShape(((2, 0),))) + 2e-3)


@pytest.mark.parametrize("engine", ["DistServe", "vLLM"])
def test_the_shipped_fits_are_those_of_the_source(engine: str) -> None:
    file = FITS.format(engine.lower())
    folder, reason = data_folder(), absent_reason(file)
    if folder is None or reason is not None:
        pytest.skip(str(reason))
    theirs = read_coefficients(folder / file)
    ours = {
        (f"facebook/{fit.model.lower()}", fit.tp): fit.coefficients for fit in published_fits() if fit.engine == engine
    }
    assert ours == theirs


def test_a_published_worker_has_its_models_kv_and_the_sources_room() -> None:
    worker = published_model("facebook/opt-66b", tp=2, pp=2)
    assert (worker.num_layers, worker.kv_bytes_per_token) == (64, 2_359_296)
    assert worker.max_kv_tokens(16) == 78_512


@pytest.mark.parametrize(("tp", "pp", "words"), [(5, 1, "no published fit"), (1, 3, "knows no pp=3")])
def test_a_worker_nobody_published_is_refused(tp: int, pp: int, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        published_model("OPT-13B", tp=tp, pp=pp)


@given(
    prompts=st.lists(st.tuples(st.integers(1, 500), st.integers(0, 500)), max_size=3),
    streams=st.integers(0, 9),
    context=st.integers(1, 99),
)
def test_a_profile_predicts_what_the_worker_itself_would(
    prompts: list[tuple[int, int]], streams: int, context: int
) -> None:
    learned = LearnedShape(num_streams=streams, stream_context=streams * context)
    for new, cached in prompts:
        learned = learned.add_chunk(cached, new)
    shape = StepShape(tuple(prompts), streams * context, streams)
    expected = PROFILE.costs.predict(learned) if prompts or streams else 0.0
    assert FittedModel(PROFILE).step_s(shape) == pytest.approx(expected)


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(PROFILE.encode())
    assert Profile.read(path) == PROFILE
    assert FittedModel(PROFILE).max_kv_tokens(16) == 96


def test_what_is_no_profile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text('{"model": 3}')
    with pytest.raises(ConfigurationError, match="disagg profile"):
        Profile.read(path)
    with pytest.raises(ConfigurationError, match="no step coefficients"):
        read_coefficients(path)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        Profile.read(tmp_path / "none.json")

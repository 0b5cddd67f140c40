"""Fits: the method, and that what is shipped is what the tables give."""

import pytest

from disagg.sim.hardware import catalogue
from disagg.sim.hardware.precision import Precision
from disagg.sim.validation import calibrate
from disagg.sim.validation.data_folder import absent_reason
from disagg.sim.validation.engine_fits import ENGINE_LIMITS, ENGINE_START, silicon_samples
from disagg.sim.validation.fitting import Sample, fit
from disagg.sim.validation.foreign_tables import SILICON

MATMUL_START, MATMUL_LIMITS = (0.75, 20.0, 0.8, 2e-6), (0.99, 300.0, 0.99, 1e-4)


def skip_without(file: str) -> None:
    if (reason := absent_reason(file)) is not None:
        pytest.skip(reason)


def test_values_are_found_again_and_limits_hold() -> None:
    samples = [Sample(3.0 * x + 0.5, lambda v, x=x: v[0] * x + v[1]) for x in range(1, 20)]  # type: ignore[misc]
    found = fit(samples, (1.0, 1.0), (100.0, 100.0))
    assert found.values == pytest.approx((3.0, 0.5), rel=0.05)
    assert found.median < 0.01
    assert fit(samples, (1.0, 1.0), (2.0, 100.0)).values[0] <= 2.0


@pytest.mark.parametrize(("vidur", "family"), [("a100", "ampere"), ("h100", "hopper")])
def test_shipped_multiplications_are_the_fitted_ones(vidur: str, family: str) -> None:
    skip_without(calibrate.LINEAR)
    found = fit(calibrate.layer_samples(vidur), MATMUL_START, MATMUL_LIMITS)
    shares = catalogue.efficiency(family)
    shipped = (
        shares.matmul_share(Precision.BF16),
        shares.matmul_rows,
        shares.stream,
        shares.matmul_fixed_s(Precision.BF16),
    )
    assert found.values == pytest.approx(shipped, rel=0.03)
    assert found.median < 0.05


@pytest.mark.parametrize(("system", "family"), [("a100_sxm vllm/0.14.0", "ampere"), ("h100_sxm vllm/0.19.0", "hopper")])
def test_shipped_attention_is_the_fitted_one(system: str, family: str) -> None:
    skip_without(calibrate.PROMPTS)
    skip_without(calibrate.STREAMS)
    shares = catalogue.efficiency(family)
    prompts = fit(calibrate.prompt_samples(system), (0.6, 400.0, 5e-6), (0.99, 5000.0, 1e-3))
    streams = fit(calibrate.stream_samples(system), (0.8, 1e-5), (0.99, 1e-3))
    assert prompts.values[0] == pytest.approx(shares.prefill_attention, rel=0.05)
    assert prompts.values[1] == pytest.approx(shares.prefill_attention_tokens, rel=0.2)
    assert streams.values[0] == pytest.approx(shares.decode_attention, rel=0.03)


def test_the_shipped_engine_is_the_fitted_one() -> None:
    skip_without(SILICON)
    found = fit(silicon_samples("vllm"), ENGINE_START[:3], ENGINE_LIMITS[:3])
    engine = catalogue.engine("vllm")
    assert found.values == pytest.approx((engine.step_s, engine.row_s, engine.prompt_token_s), rel=0.1)

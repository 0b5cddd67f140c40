"""Data that comes with the package."""

import re

import pytest

from disagg.core.errors import ConfigurationError
from disagg.sim.hardware import catalogue
from disagg.sim.hardware.precision import Precision


@pytest.mark.parametrize("device", catalogue.accelerators(), ids=lambda device: device.name)
def test_every_device_has_a_source_a_link_and_an_efficiency(device: catalogue.Accelerator) -> None:
    assert device.source
    assert catalogue.link(device.link).bytes_s > 0
    shares = catalogue.efficiency(device.efficiency)
    for precision in device.tflops:
        assert 0 < shares.matmul_share(precision) <= 1
    assert device.flops_s(Precision.BF16) > 0
    assert set(device.unconfirmed) <= set(device.__struct_fields__)


def test_names_are_unique_across_aliases() -> None:
    for items in (catalogue.accelerators(), catalogue.models()):
        names = [name.lower() for item in items for name in {item.name, *item.aliases}]
        assert len(names) == len(set(names))


def test_lookups_ignore_case_and_know_aliases() -> None:
    assert catalogue.accelerator("H100_SXM") is catalogue.accelerator("h100-sxm")
    assert catalogue.model_shape("meta-llama/llama-2-70b-hf").name == "Llama-2-70B"
    assert catalogue.price("h100").usd_per_hour == 4.76


def test_what_is_unknown_is_answered_with_what_is_known() -> None:
    with pytest.raises(ConfigurationError, match=r"accelerator 'H900' .*H100-SXM"):
        catalogue.accelerator("H900")
    with pytest.raises(ConfigurationError, match=r"price of .*H100-SXM"):
        catalogue.price("L4")


def test_prices_are_dated_and_of_known_devices() -> None:
    for price in catalogue.prices():
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", price.date)
        assert price.source
        assert catalogue.accelerator(price.accelerator).name == price.accelerator


def test_engines_and_efficiencies_say_where_they_come_from() -> None:
    assert all(engine.source for engine in catalogue.engines())
    assert all(shares.source for shares in catalogue.efficiencies())


def test_narrow_numbers_run_at_their_units_rate_or_at_that_of_16_bits() -> None:
    h100, a100 = catalogue.accelerator("h100"), catalogue.accelerator("a100")
    assert h100.flops_s(Precision.FP8) == h100.flops_s(Precision.FP8_BLOCK) == 1978.9e12
    assert a100.flops_s(Precision.FP8) == a100.flops_s(Precision.BF16) == 312e12
    assert a100.flops_s(Precision.FP32) == 156e12


def test_a_transfer_takes_its_start_and_its_bytes() -> None:
    link = catalogue.link("RoCE-100G")
    assert link.transfer_s(0) == pytest.approx(20e-6)
    assert link.transfer_s(12.5e9 * 0.97) == pytest.approx(1 + 20e-6)

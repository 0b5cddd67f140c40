"""`disagg profile` on a small real model."""

from pathlib import Path

import pytest

from disagg.cli.profile import profile
from disagg.cli.profile_run import describe
from disagg.core.errors import ConfigurationError
from disagg.core.formats import Kernels, KvDtype, Weights
from disagg.sim.hardware.fitted import FittedModel, Profile
from disagg.sim.hardware.step_model import StepShape
from disagg.testing.model_files import write_tiny_llama


def run(model: Path, out: Path) -> None:
    profile(
        model=str(model),
        out=out,
        hardware="a small machine",
        repeats=1,
        max_prompt=128,
        max_streams=2,
        limit_s=60.0,
        served_rounds=0,
        device="cpu",
        num_threads=1,
        weights=Weights.FP32,
        kernels=Kernels.TORCH,
        kv_memory="4M",
        kv_dtype=KvDtype.FLOAT32,
        num_blocks=None,
        block_size=16,
    )


def test_a_profile_names_its_hardware_shows_every_cell_and_can_be_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "profile.json"
    run(write_tiny_llama(tmp_path / "model", num_layers=2), out)
    result = Profile.read(out)
    assert (result.hardware, result.num_layers, result.kv_bytes_per_token) == ("a small machine", 2, 512)
    assert result.kv_tokens == 4 * 2**20 // 512
    assert all(cell.measured_s > 0 for cell in result.cells)
    printed = capsys.readouterr().out
    for cell in result.cells:
        assert describe(cell.shape) in printed
    assert "a small machine" in printed
    assert f"over {len(result.cells)} shapes" in printed
    model = FittedModel(result)
    assert model.step_s(StepShape(((128, 0),))) >= model.step_s(StepShape(((32, 0),))) > 0


def test_a_folder_that_is_not_there_is_said_before_anything_is_loaded(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model", num_layers=1)
    with pytest.raises(ConfigurationError, match="not a folder"):
        run(model, tmp_path / "none" / "profile.json")

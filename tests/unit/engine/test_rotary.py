"""Angles equal those of the reference implementation for every way of stretching them."""

from pathlib import Path

import msgspec
import pytest
import torch
from tests.parity.tiny_models import tiny_model
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from disagg.engine import rotary
from disagg.engine.rotary import rotary_tables
from disagg.modelfiles.config import read_config
from disagg.modelfiles.rope_scaling import KINDS, RopeScaling, rope_factors

YARN: dict[str, object] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS: list[dict[str, object]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.5},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    YARN,
    {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    {**YARN, "truncate": False},
    {**YARN, "attention_factor": 0.7},
    {**YARN, "mscale": 0.8, "mscale_all_dim": 0.5},
    {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 17},
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_tables_equal_the_reference(tmp_path: Path, scaling: dict[str, object]) -> None:
    model = tiny_model(rope_scaling=dict(scaling), num_layers=1)
    model.save_pretrained(tmp_path)
    config = read_config(tmp_path)
    cos, sin = rotary_tables(config, torch.device("cpu"))
    assert cos.shape == sin.shape == (config.max_context, config.head_dim)
    positions = torch.arange(config.max_context)[None]
    expected_cos, expected_sin = LlamaRotaryEmbedding(model.config)(torch.zeros(1), positions)
    # An angle is a float32 of up to 700 radians: half a unit of its last place is 3e-5.
    torch.testing.assert_close(cos, expected_cos[0], rtol=0, atol=2e-4)
    torch.testing.assert_close(sin, expected_sin[0], rtol=0, atol=2e-4)


def test_parts_of_the_table_fit_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model(num_layers=1).save_pretrained(tmp_path)
    config = read_config(tmp_path)
    whole = rotary_tables(config, torch.device("cpu"))
    monkeypatch.setattr(rotary, "POSITIONS_PER_PART", 99)
    for one, other in zip(whole, rotary_tables(config, torch.device("cpu")), strict=True):
        assert torch.equal(one, other)
    factored = msgspec.structs.replace(config, rope_attention_factor=2.0)
    torch.testing.assert_close(rotary_tables(factored, torch.device("cpu"))[0], whole[0] * 2)


def test_scalings_that_cannot_be_right() -> None:
    with pytest.raises(ValueError, match="'spiral' is unknown; known: default, linear"):
        rope_factors(RopeScaling(kind="spiral"), 8, 1e4)
    for kind in KINDS[1:]:
        with pytest.raises(ValueError, match="both must be positive"):
            rope_factors(RopeScaling(kind=kind, factor=-1.0), 8, 1e4)
    assert rope_factors(RopeScaling(factor=-1.0), 8, 1e4).divisors == ()

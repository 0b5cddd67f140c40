"""Weights from GGUF files and Hugging Face directories are the same weights."""

from pathlib import Path

import gguf
import pytest
import torch
from tests.parity.tiny_models import tiny_model, write_gguf
from tests.unit.engine.steps import generate, make_engine

from disagg.core.errors import ConfigurationError, ModelLoadError
from disagg.engine.linears import Float32Linear, linear_factory
from disagg.engine.weights import load_weights
from disagg.modelfiles.config import read_config

PROMPT = [(17 * index) % 300 for index in range(50)]


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_gguf_equals_the_directory_it_was_made_from(tmp_path: Path, architecture: str, tie_embeddings: bool) -> None:
    model = tiny_model(architecture, tie_embeddings=tie_embeddings)
    model.save_pretrained(tmp_path / "hf")
    file = write_gguf(tmp_path / "model.gguf", model)
    config = read_config(file)
    table = load_weights(file, config)
    for name, tensor in model.state_dict().items():
        if name in table:
            assert torch.equal(table.take(name, *tensor.shape), tensor), name
        else:
            assert name == "lm_head.weight"
            assert tie_embeddings
    blocks = [0, 1, 2, 3]
    assert generate(make_engine(file), PROMPT, blocks, 8) == generate(make_engine(tmp_path / "hf"), PROMPT, blocks, 8)


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [
        (gguf.GGMLQuantizationType.F16, 1e-3),
        (gguf.GGMLQuantizationType.BF16, 1e-2),
        (gguf.GGMLQuantizationType.Q8_0, 1e-2),
        (gguf.GGMLQuantizationType.Q4_0, 0.15),
        (gguf.GGMLQuantizationType.Q4_1, 0.15),
    ],
)
def test_stored_formats_come_back_near_their_values(
    tmp_path: Path, kind: gguf.GGMLQuantizationType, tolerance: float
) -> None:
    config = tiny_model().config
    config.hidden_size, config.intermediate_size, config.num_attention_heads = 64, 96, 4
    config.head_dim = 16
    torch.manual_seed(0)
    model = type(tiny_model())(config).float()
    file = write_gguf(tmp_path / "model.gguf", model, kind)
    table = load_weights(file, read_config(file))
    state = model.state_dict()
    for name in ("model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight"):
        got = table.take(name, *state[name].shape)
        assert ((got - state[name]).norm() / state[name].norm()).item() < tolerance
        assert not torch.equal(got, state[name])
    generate(make_engine(file), PROMPT, [0, 1, 2, 3], 2)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    model = tiny_model()
    file = write_gguf(tmp_path / "model.gguf", model)
    file.write_bytes(file.read_bytes().replace(b"blk.1.ffn_down.weight", b"blk.1.ffn_xxxx.weight"))
    with pytest.raises(ModelLoadError, match=r"no tensor model\.layers\.1\.mlp\.down_proj\.weight"):
        make_engine(file)


def test_directories_without_readable_weights_are_refused(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    config = read_config(tmp_path)
    weights = next(tmp_path.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ModelLoadError, match=r"is damaged .* download it again"):
        load_weights(tmp_path, config)
    weights.unlink()
    with pytest.raises(ModelLoadError, match=r"no \*\.safetensors"):
        load_weights(tmp_path, config)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"index\.json is damaged"):
        load_weights(tmp_path, config)


def test_linear_kinds_are_looked_up_by_name() -> None:
    assert linear_factory("float32") is Float32Linear
    with pytest.raises(ConfigurationError, match="'float3' is unknown; choose one of: float32"):
        linear_factory("float3")
    linear = Float32Linear(torch.eye(3, 5), torch.ones(3))
    assert linear.num_bytes == 60
    x = torch.randn(4, 5)
    torch.testing.assert_close(linear(x), x[:, :3] + 1)

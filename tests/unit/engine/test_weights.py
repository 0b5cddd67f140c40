"""Weights from GGUF files and Hugging Face directories are the same weights."""

from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.parity.tiny_models import tiny_model, write_gguf
from tests.unit.engine.steps import generate, make_engine
from torch import Tensor
from transformers import PreTrainedModel

from disagg.core.errors import ConfigurationError, ModelLoadError
from disagg.core.formats import Weights
from disagg.engine.linears import LinearMaker
from disagg.engine.native.library import load_library
from disagg.engine.weights import load_weights
from disagg.modelfiles.config import read_config

Q_NAME, V_NAME = (f"model.layers.0.self_attn.{part}_proj.weight" for part in "qv")
PROMPT = [(17 * index) % 300 for index in range(50)]


def wide_model(architecture: str) -> PreTrainedModel:
    """A tiny model whose rows are whole blocks of 32."""
    tiny = tiny_model(architecture)
    config = tiny.config
    config.hidden_size, config.intermediate_size, config.num_attention_heads = 64, 96, 4
    config.head_dim = 16
    torch.manual_seed(0)
    model: PreTrainedModel = type(tiny)(config).float()
    return model


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
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
    assert read_config(tmp_path / "hf").has_qk_norm is config.has_qk_norm is (architecture == "qwen3")
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
    model = wide_model("llama")
    file = write_gguf(tmp_path / "model.gguf", model, kind)
    table = load_weights(file, read_config(file))
    state = model.state_dict()
    for name in ("model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight"):
        got = table.take(name, *state[name].shape)
        assert ((got - state[name]).norm() / state[name].norm()).item() < tolerance
        assert not torch.equal(got, state[name])
    generate(make_engine(file), PROMPT, [0, 1, 2, 3], 2)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (gguf.GGMLQuantizationType.F32, torch.float32),
        (gguf.GGMLQuantizationType.F16, torch.float16),
        (gguf.GGMLQuantizationType.BF16, torch.bfloat16),
        (gguf.GGMLQuantizationType.Q8_0, torch.float32),
    ],
)
def test_tensors_come_as_they_are_stored(
    tmp_path: Path, architecture: str, kind: gguf.GGMLQuantizationType, dtype: torch.dtype
) -> None:
    model = wide_model(architecture)
    file = write_gguf(tmp_path / "model.gguf", model, kind)
    table = load_weights(file, read_config(file))
    state = model.state_dict()
    for name in (Q_NAME, V_NAME):
        shape = tuple(state[name].shape)
        stored = table.take_stored(name, *shape)
        assert stored.dtype == dtype
        assert torch.equal(stored.float(), table.take(name, *shape))
        assert (stored.float() - state[name]).norm() / state[name].norm() < 1e-2
    first, second = (table.take_stored(V_NAME, *state[V_NAME].shape) for _ in range(2))
    is_plain = kind is not gguf.GGMLQuantizationType.Q8_0
    assert (first.data_ptr() == second.data_ptr()) is is_plain, "plain floats are a view of the file"
    assert table.take_stored("model.norm.weight", 64).dtype == torch.float32
    with pytest.raises(ModelLoadError, match=r"v_proj.* is .*, config says \(3, 64\)"):
        table.take_stored(V_NAME, 3, 64)
    with pytest.raises(ModelLoadError, match="no tensor absent"):
        table.take_stored("absent", 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "kind",
    [
        gguf.GGMLQuantizationType.F32,
        gguf.GGMLQuantizationType.F16,
        gguf.GGMLQuantizationType.BF16,
        gguf.GGMLQuantizationType.Q8_0,
        gguf.GGMLQuantizationType.Q4_1,
    ],
)
def test_joined_tensors_are_the_single_ones_in_order(
    tmp_path: Path, kind: gguf.GGMLQuantizationType, dtype: torch.dtype
) -> None:
    model = wide_model("llama")  # of which GGUF stores q and k in another order
    model.save_pretrained(tmp_path / "hf")
    file = write_gguf(tmp_path / "model.gguf", model, kind)
    names = [f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv"]
    shapes = [tuple(model.state_dict()[name].shape) for name in names]
    for path in (file, tmp_path / "hf"):
        table = load_weights(path, read_config(path))
        joined = table.take_joined(names, shapes, dtype)
        apart = torch.cat([table.take(name, *shape) for name, shape in zip(names, shapes, strict=True)])
        assert joined.is_contiguous()
        assert torch.equal(joined, apart.to(dtype))
        with pytest.raises(ModelLoadError, match=r"k_proj.* config says"):
            table.take_joined(names, [shapes[0], shapes[0], shapes[2]], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "kind",
    [
        gguf.GGMLQuantizationType.F32,
        gguf.GGMLQuantizationType.F16,
        gguf.GGMLQuantizationType.BF16,
        gguf.GGMLQuantizationType.Q8_0,
        gguf.GGMLQuantizationType.Q4_1,
        gguf.GGMLQuantizationType.Q5_0,  # which the kernels do not read
    ],
)
def test_the_kernels_read_from_the_file_what_is_read_into_memory(
    tmp_path: Path, kind: gguf.GGMLQuantizationType, dtype: torch.dtype
) -> None:
    library = load_library()
    if library is None:
        pytest.skip("no native kernels here")
    model = wide_model("llama")
    model.save_pretrained(tmp_path / "hf")
    file = write_gguf(tmp_path / "model.gguf", model, kind)
    names = [f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv"]
    shapes = [(model.state_dict()[name].shape[0], 64) for name in names]
    for path in (file, tmp_path / "hf"):
        table = load_weights(path, read_config(path))
        matrix = table.matrix(names, shapes, torch.device("cpu"))
        expected = table.take_joined(names, shapes, dtype)
        assert torch.equal(library.unpack(matrix.rows(), dtype), expected)
        assert torch.equal(matrix.read(dtype), expected)
        assert matrix.read(dtype) is matrix.read(dtype)
        with pytest.raises(ModelLoadError, match=r"k_proj.* config says"):
            table.matrix(names, [shapes[0], shapes[0], shapes[2]], torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_shards_come_as_they_are_stored(tmp_path: Path, dtype: torch.dtype) -> None:
    model = tiny_model().to(dtype)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    table = load_weights(tmp_path, read_config(tmp_path))
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":  # tied
            continue
        stored = table.take_stored(name, *tensor.shape)
        assert stored.dtype == dtype
        assert torch.equal(stored, tensor)
        assert torch.equal(table.take(name, *tensor.shape), tensor.float())
        assert stored.data_ptr() == table.take_stored(name, *tensor.shape).data_ptr(), "mapped, not copied"
    generate(make_engine(tmp_path), PROMPT, [0, 1, 2, 3], 2)


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


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_weights_whose_scales_lie_elsewhere_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    """By dtype too: not every folder's config says that its weights are quantised."""
    tiny_model().save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: {V_NAME: tensors[V_NAME].to(dtype)})
    with pytest.raises(ModelLoadError, match=rf"{V_NAME} of .* is stored as {dtype}, which is not read; give weights"):
        make_engine(tmp_path)


def test_a_tensor_that_would_be_left_out_is_refused(tmp_path: Path) -> None:
    model = tiny_model()
    model.model.layers[1].self_attn.o_proj.bias = torch.nn.Parameter(torch.ones(72))
    model.save_pretrained(tmp_path)
    for path in (tmp_path, write_gguf(tmp_path / "model.gguf", model)):
        with pytest.raises(
            ModelLoadError, match=r"tensor model\.layers\.1\.self_attn\.o_proj\.bias, which models of its"
        ):
            make_engine(path)


def test_what_is_of_no_layer_may_be_left_out(tmp_path: Path) -> None:
    """Rotary frequencies, which older converters wrote; layers past the last; a head that is the embedding again."""
    tiny_model().save_pretrained(tmp_path)
    names = ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.99.mlp.gate_proj.weight", "lm_head.weight")
    rewrite(tmp_path, lambda tensors: {name: torch.ones(3) for name in names})
    generate(make_engine(tmp_path), PROMPT, [0, 1, 2, 3], 2)


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Replace tensors of the folder's one file, or add some."""
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    save_file(tensors | change(tensors), file)


def test_int8_needs_the_native_kernels() -> None:
    with pytest.raises(ConfigurationError, match="need the native kernels"):
        LinearMaker(Weights.INT8, None)


@pytest.mark.parametrize(("weights", "kernels"), [(w, k) for w in Weights for k in ("torch", "native", "portable")])
def test_linears_multiply(weights: Weights, kernels: str) -> None:
    library = load_library() if kernels != "torch" else None
    if library is not None and kernels == "portable":
        library = library.portable()
    if library is None and (kernels != "torch" or weights is Weights.INT8):
        pytest.skip("no native kernels here")
    generator = torch.Generator().manual_seed(1)
    for num_outputs, num_inputs, num_rows in ((3, 5, 4), (49, 100, 70), (64, 64, 1)):
        weight, bias = torch.randn(num_outputs, num_inputs, generator=generator), torch.ones(num_outputs)
        x = torch.randn(num_rows, num_inputs, generator=generator)
        linear = LinearMaker(weights, library).make(weight, bias)
        if weights is Weights.FP16:
            weight = weight.half().float()
        expected = x.double() @ weight.double().t() + 1
        tolerance = 0.02 if weights is Weights.INT8 else 1e-6
        assert (linear(x) - expected).pow(2).mean().sqrt() <= tolerance * expected.std(correction=0)
        assert linear.num_bytes >= num_outputs * num_inputs

"""Geometry from config.json and GGUF headers, and refusals that say what to do."""

import json
import math
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from disagg.core.errors import ModelLoadError, NotNative
from disagg.modelfiles.config import ModelConfig, read_config
from disagg.modelfiles.gguf_file import GgufFile, is_gguf

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50_000.0,
    "tie_word_embeddings": True,
}
EXPECTED = ModelConfig(
    architecture="llama",
    vocab_size=100,
    hidden_size=48,
    intermediate_size=80,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    max_context=64,
    rms_norm_eps=1e-5,
    rope_theta=50_000.0,
    tie_embeddings=True,
    qkv_bias=False,
)


def write_config(folder: Path, **changes: object) -> Path:
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return folder


def write_gguf(path: Path, architecture: str = "llama", **changes: float | str | None) -> Path:
    """A GGUF file with a header and two tensors. A change of None leaves the field out."""
    fields: dict[str, float | str | None] = {
        "block_count": 2,
        "context_length": 64,
        "embedding_length": 48,
        "feed_forward_length": 80,
        "attention.head_count": 6,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 50_000.0,
        **changes,
    }
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in fields.items():
        if isinstance(value, str):
            writer.add_string(f"{architecture}.{name}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{architecture}.{name}", value)
        elif value is not None:
            writer.add_uint32(f"{architecture}.{name}", value)
    writer.add_array("tokenizer.ggml.tokens", ["a", "é", ""])
    writer.add_array("tokenizer.ggml.token_type", [1, 2, 3])
    writer.add_tensor("token_embd.weight", np.arange(4800, dtype=np.float32).reshape(100, 48))
    writer.add_tensor("output_norm.weight", np.ones(48, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_directories_and_gguf_files_tell_the_same_geometry(tmp_path: Path) -> None:
    assert read_config(write_config(tmp_path)) == EXPECTED
    from_gguf = read_config(write_gguf(tmp_path / "model.gguf"))
    assert from_gguf.rms_norm_eps == pytest.approx(1e-5)
    fields = ("vocab_size", "head_dim", "num_kv_heads", "tie_embeddings", "qkv_bias", "max_context", "rope_theta")
    assert [getattr(from_gguf, name) for name in fields] == [getattr(EXPECTED, name) for name in fields]
    layout = EXPECTED.kv_layout(16)
    assert (layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.block_size) == (2, 2, 8, 16)
    assert layout.token_bytes == 2 * 8 * 4


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, "qkv_bias", True),
        ({"architectures": ["Qwen2ForCausalLM"]}, "has_qk_norm", False),
        ({"architectures": ["Qwen3ForCausalLM"]}, "has_qk_norm", True),
        ({"architectures": ["Qwen3ForCausalLM"]}, "qkv_bias", False),
        ({"architectures": ["Qwen3ForCausalLM"]}, "head_dim", 128),
        ({"architectures": ["Qwen3ForCausalLM"], "head_dim": 40}, "head_dim", 40),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, "architecture", "mistral"),
        ({"num_key_value_heads": None}, "num_kv_heads", 6),
        ({"head_dim": 32}, "head_dim", 32),
        ({"rope_theta": None}, "rope_theta", 10_000.0),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, "rope_theta", 7.0),
        ({"rope_scaling": None}, "rope_factors", ()),
        ({"rope_scaling": {"type": "linear", "factor": 3}}, "rope_factors", (3.0,) * 4),
        ({"rope_parameters": {"rope_type": "linear", "factor": 3.0}}, "rope_factors", (3.0,) * 4),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 1.5}}, "rope_attention_factor", 1.5),
    ],
)
def test_what_a_config_may_say(tmp_path: Path, changes: dict[str, object], field: str, value: object) -> None:
    assert getattr(read_config(write_config(tmp_path, **changes)), field) == value


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 8}, 8),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, 4096),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, None),
        ({"architectures": ["MistralForCausalLM"]}, 4096),  # what the published class means by no entry
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 8}, None),  # the class knows no window
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8}, None),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8, "use_sliding_window": False}, None),
        (
            {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8, "use_sliding_window": True},
            None,
        ),  # from layer 28
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 8,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            8,
        ),
    ],
)
def test_a_window_inside_the_context_ends_it(tmp_path: Path, changes: dict[str, object], window: int | None) -> None:
    config = read_config(write_config(tmp_path, **changes))
    assert config.sliding_window == window
    assert config.max_context == min(64, window or 64)


def test_yarn_reaches_past_the_positions_of_the_file(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert read_config(write_config(tmp_path, rope_scaling=scaling)).max_context == 256
    assert read_config(write_config(tmp_path, rope_scaling={**scaling, "factor": 0.5})).max_context == 64
    implied = read_config(write_config(tmp_path, rope_scaling={"type": "yarn"}, original_max_position_embeddings=16))
    assert implied.max_context == 64
    assert max(implied.rope_factors) == pytest.approx(4.0), "the factor is what leads from 16 to 64 tokens"


def test_llama3_rope_keeps_short_waves_and_stretches_long_ones(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    factors = read_config(write_config(tmp_path, head_dim=128, rope_theta=500_000.0, rope_scaling=scaling)).rope_factors
    assert len(factors) == 64
    assert factors[0] == 1.0
    assert factors[-1] == pytest.approx(8.0)
    assert list(factors) == sorted(factors)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "big"}, r"lacks what the model needs: .*hidden_size"),
        ({"num_key_value_heads": 4}, "6 heads .* do not divide over 4"),
        ({"num_hidden_layers": 0}, "num_layers=0"),
        ({"head_dim": 7}, "head_dim=7"),
        ({"max_position_embeddings": 0}, "max_context=0"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, r"rope scaling .* factor=0\.0 .* must be positive"),
        ({"rope_scaling": {"type": "linear", "factor": math.inf}}, "factor=inf .* must be positive numbers"),
        ({"rope_theta": 0}, r"rope_theta=0\.0 of .* must be positive"),
        ({"rope_theta": math.inf}, "rope_theta=inf"),
    ],
)
def test_what_a_config_may_not_say(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message) as caught:
        read_config(write_config(tmp_path, **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' .* natively; supported: LlamaForCausalLM, .*Qwen3"),
        ({"architectures": None}, "'none'"),
        ({"architectures": 5}, "architecture 5 of"),
        ({"architectures": "LlamaModel"}, "'LlamaModel'"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantised by 'fp8' in .* use weights in F32, F16"),
        ({"quantization_config": {}}, "quantised by 'unknown'"),
        ({"rope_scaling": {"type": "longrope"}}, "'longrope' .* supported: default, linear, llama3, yarn"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic'"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, r"partial_rotary_factor=0\.5"),
        ({"attention_bias": True}, "attention_bias=true"),
        ({"mlp_bias": True}, "mlp_bias=true"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
)
def test_whole_models_of_another_kind_are_told_from_damaged_ones(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(NotNative, match=message) as caught:
        read_config(write_config(tmp_path, **changes))
    assert "\n" not in str(caught.value)


def test_what_pythons_own_writer_writes_is_read(tmp_path: Path) -> None:
    """Numbers that are none, which JSON does not know, and a byte order mark."""
    text = json.dumps({**LLAMA, "attention_dropout": math.nan, "time_limits": [0.0, math.inf]})
    assert "NaN" in text
    (tmp_path / "config.json").write_text("\N{ZERO WIDTH NO-BREAK SPACE}" + text, encoding="utf-8")
    assert read_config(tmp_path) == EXPECTED


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no model at .*absent; give a directory"):
        read_config(tmp_path / "absent")
    with pytest.raises(ModelLoadError, match=r"has no config\.json; give"):
        read_config(tmp_path)
    text = tmp_path / "notes.txt"
    text.write_text("hello")
    assert not is_gguf(text)
    with pytest.raises(ModelLoadError, match=r"notes\.txt is not a model; give"):
        read_config(text)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelLoadError, match="not a JSON object"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="not a JSON object"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ModelLoadError, match="not a JSON object"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("gpt2", {}, "architecture 'gpt2' .* supported in GGUF: llama, qwen2, qwen3: use the model's Hugging Face"),
        (
            "llama",
            {"rope.scaling.type": "longrope"},
            "rope scaling 'longrope' .* supported in GGUF: none, linear, yarn",
        ),
        ("llama", {"rope.dimension_count": 4}, "rotates 4 of 8 elements"),
        ("llama", {"block_count": None}, r"no field llama\.block_count; the file is incomplete"),
        ("llama", {"block_count": "two"}, r"llama\.block_count of .* is 'two', expected a whole number"),
        ("llama", {"attention.layer_norm_rms_epsilon": "small"}, "expected a number"),
        ("llama", {"attention.head_count": 0}, "num_heads=0"),
        (
            "llama",
            {"expert_count": 8},
            "8 experts a layer, which is not supported in GGUF; use .* Hugging Face directory",
        ),
    ],
)
def test_what_a_gguf_header_may_not_say(
    tmp_path: Path, architecture: str, changes: dict[str, float | str | None], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read_config(write_gguf(tmp_path / "model.gguf", architecture, **changes))


def test_gguf_headers_say_the_same_of_rope_as_config_json(tmp_path: Path) -> None:
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    found = read_config(write_gguf(tmp_path / "yarn.gguf", **yarn))  # type: ignore[arg-type]
    expected = read_config(write_config(tmp_path, rope_scaling=scaling))
    assert found.rope_factors == pytest.approx(expected.rope_factors)
    assert found.rope_attention_factor == pytest.approx(expected.rope_attention_factor)
    assert found.rope_attention_factor > 1.1
    doubled = read_config(write_gguf(tmp_path / "x.gguf", **yarn, **{"rope.scaling.attn_factor": 2.0}))  # type: ignore[arg-type]
    assert doubled.rope_attention_factor == pytest.approx(2 * found.rope_attention_factor)
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 3.0}
    assert read_config(write_gguf(tmp_path / "linear.gguf", **linear)).rope_factors == (3.0,) * 4  # type: ignore[arg-type]


def test_gguf_sizes_of_qwen3(tmp_path: Path) -> None:
    config = read_config(write_gguf(tmp_path / "model.gguf", "qwen3", **{"attention.key_length": 20}))
    assert (config.architecture, config.head_dim, config.has_qk_norm) == ("qwen3", 20, False)
    windowed = read_config(write_gguf(tmp_path / "windowed.gguf", "llama", **{"attention.sliding_window": 32}))
    assert (windowed.sliding_window, windowed.max_context) == (32, 32)


def test_gguf_fields_and_tensors(tmp_path: Path) -> None:
    file = GgufFile(write_gguf(tmp_path / "model.gguf"))
    assert file.fields["tokenizer.ggml.tokens"] == ["a", "é", ""]
    assert file.fields["tokenizer.ggml.token_type"] == [1, 2, 3]
    assert file.text("general.architecture") == "llama"
    assert file.tensors["token_embd.weight"].shape == (100, 48)
    assert np.array_equal(file.array("token_embd.weight"), np.arange(4800, dtype=np.float32).reshape(100, 48))
    with pytest.raises(ModelLoadError, match="no tensor output"):
        file.array("output.weight")


def test_damaged_gguf_files_are_told_apart_from_other_files(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    whole = path.read_bytes()
    for size in (4, 20, 60, 400, len(whole) - 100):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelLoadError, match="damaged GGUF"):
            read_config(path)
    path.write_bytes(whole[:4] + struct.pack("<I", 9) + whole[8:])
    with pytest.raises(ModelLoadError, match="version 9"):
        read_config(path)
    path.write_bytes(whole[:16] + struct.pack("<Q", 1 << 60) + whole[24:])
    with pytest.raises(ModelLoadError, match="damaged GGUF"):
        read_config(path)
    (tmp_path / "other").write_text("not a model at all")
    with pytest.raises(ModelLoadError, match="not a GGUF file"):
        GgufFile(tmp_path / "other")

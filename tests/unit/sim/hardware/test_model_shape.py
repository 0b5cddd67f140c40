"""Models from their config.json: parameters, bytes, experts, windows."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.core.errors import ConfigurationError
from disagg.sim.hardware import catalogue
from disagg.sim.hardware.catalogue import KnownModel
from disagg.sim.hardware.model_shape import Experts, ModelShape
from disagg.sim.hardware.precision import Precision

# Bytes of one token's KV in 16 bits, as their publishers' shapes give them.
KV_BYTES = {
    "Llama-2-7B": 524_288,
    "Llama-2-13B": 819_200,
    "Llama-2-70B": 327_680,
    "Llama-3.1-8B": 131_072,
    "Llama-3.1-405B": 516_096,
    "CodeLlama-34B": 196_608,
    "Yi-34B": 245_760,
    "Mixtral-8x7B": 131_072,
    "OPT-13B": 819_200,
    "OPT-66B": 2_359_296,
    "OPT-175B": 4_718_592,
    "BLOOM-176B": 4_014_080,
    "Qwen2.5-0.5B": 12_288,
    "Qwen3-30B-A3B": 98_304,
    "Qwen3-235B-A22B": 192_512,
    "gpt-oss-20b": 49_152,
    "DeepSeek-V3": 70_272,
    "Kimi-K2": 70_272,
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
}


@pytest.mark.parametrize("model", catalogue.models(), ids=lambda model: model.name)
def test_parameters_are_those_of_the_publishers_files(model: KnownModel) -> None:
    assert model.shape.num_parameters == pytest.approx(model.num_parameters, rel=1e-3)


@pytest.mark.parametrize(("name", "expected"), KV_BYTES.items())
def test_kv_bytes_are_exact(name: str, expected: int) -> None:
    assert catalogue.model_shape(name).kv_bytes_per_token(Precision.BF16) == expected
    assert catalogue.model_shape(name).kv_bytes_per_token(Precision.FP8) == expected // 2


def test_a_token_passes_only_its_experts() -> None:
    assert catalogue.model_shape("Qwen3-235B-A22B").active_parameters == pytest.approx(22.2e9, rel=0.01)
    assert catalogue.model_shape("DeepSeek-V3").active_parameters == pytest.approx(37.6e9, rel=0.01)
    dense = catalogue.model_shape("Llama-3.1-8B")
    assert dense.active_parameters == dense.num_parameters


def test_prefill_work_is_two_per_weight_and_attention_over_half_the_square() -> None:
    shape = catalogue.model_shape("Llama-2-7B")
    linear = 2 * 1024 * shape.matrix_parameters + 2 * shape.vocab_size * shape.hidden_size
    attended = 32 * 4 * 32 * 128 * 1024 * 1025 / 2
    assert shape.prefill_flops(1024) == pytest.approx(linear + attended)


def test_decoding_reads_weights_and_kv() -> None:
    shape = catalogue.model_shape("Llama-2-7B")
    read = shape.decode_bytes(1000, 2, Precision.BF16, Precision.BF16)
    assert read == pytest.approx(2 * (shape.matrix_parameters + 32000 * 4096) + 1000 * 524_288)


def test_quantised_weights_leave_embeddings_wide() -> None:
    shape = catalogue.model_shape("Llama-3.1-8B")
    wide, narrow = shape.weight_bytes(Precision.BF16), shape.weight_bytes(Precision.FP8)
    assert wide == 2 * shape.num_parameters
    assert wide - narrow == shape.matrix_parameters


@given(first=st.floats(0, 1e6), more=st.floats(0, 1e6))
def test_more_tokens_touch_more_experts_and_never_more_than_there_are(first: float, more: float) -> None:
    experts = Experts(num_experts=128, num_per_token=8, intermediate_size=1)
    assert 0 <= experts.touched(first) <= experts.touched(first + more) <= 128


def test_one_token_touches_its_own_experts() -> None:
    assert Experts(128, 8, 1).touched(1) == pytest.approx(8)


@given(new=st.integers(1, 60), cached=st.integers(0, 60), window=st.integers(1, 80))
def test_windows_hide_what_lies_before_them(new: int, cached: int, window: int) -> None:
    config = {**LLAMA, "model_type": "mistral", "sliding_window": window}
    seen = sum(min(cached + token + 1, window) for token in range(new))
    assert ModelShape.from_config(config).prompt_pairs(new, cached) == seen
    assert ModelShape.from_config(LLAMA).prompt_pairs(new, cached) == new * cached + new * (new + 1) // 2


def test_half_of_gpt_oss_is_windowed() -> None:
    shape = catalogue.model_shape("gpt-oss-20b")
    assert shape.num_windowed_layers == 12
    assert shape.stream_pairs(10_000, 2) == pytest.approx((10_000 + 2 * 128) / 2)


def test_a_window_that_is_switched_off_does_not_count() -> None:
    config = {**LLAMA, "model_type": "qwen2", "sliding_window": 16, "use_sliding_window": False}
    assert ModelShape.from_config(config).sliding_window is None


def test_a_folder_a_file_and_a_dict_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    from_folder = ModelShape.from_config(tmp_path, "x")
    assert from_folder == ModelShape.from_config(tmp_path / "config.json", "x") == ModelShape.from_config(LLAMA, "x")


def test_the_decoder_of_a_model_that_also_sees_is_found() -> None:
    nested = {"model_type": "llava", "text_config": LLAMA}
    assert ModelShape.from_config(nested, "x") == ModelShape.from_config(LLAMA, "x")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({"kv_lora_rank": 8}, "qk_nope_head_dim"),
    ],
)
def test_what_cannot_be_timed_is_refused_by_name(change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        ModelShape.from_config({**LLAMA, **change})


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        ModelShape.from_config(tmp_path)

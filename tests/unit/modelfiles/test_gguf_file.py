"""Values from GGUF blocks are those of the reference reader, to the bit; files are mapped, not copied."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from disagg.core.errors import ModelLoadError
from disagg.modelfiles import gguf_blocks
from disagg.modelfiles.gguf_blocks import dequantise_into, dequantised_parts
from disagg.modelfiles.gguf_file import GgufFile
from disagg.modelfiles.gguf_kinds import ValueKind, tensor_kind

KINDS = [
    GGMLQuantizationType.F32,
    GGMLQuantizationType.F16,
    GGMLQuantizationType.BF16,
    GGMLQuantizationType.Q8_0,
    GGMLQuantizationType.Q4_0,
    GGMLQuantizationType.Q4_1,
    GGMLQuantizationType.Q5_0,
    GGMLQuantizationType.Q4_K,
    GGMLQuantizationType.Q6_K,
]
NUM_ELEMENTS = 5 * 256 * 3


def random_blocks(kind: GGMLQuantizationType, num_elements: int = NUM_ELEMENTS) -> np.ndarray:
    """Any bytes are a tensor, but for numbers that are none: exponents of all ones are avoided."""
    elements, num_bytes = GGML_QUANT_SIZES[kind]
    raw: np.ndarray = np.random.default_rng(0).integers(0, 256, num_elements // elements * num_bytes, dtype=np.uint8)
    if elements > 1:
        raw[raw % 128 >= 0x78] -= 0x40
    else:
        raw[num_bytes - 1 :: num_bytes] = 0x3C
    return raw


def test_kinds_are_those_of_the_format() -> None:
    for kind, (elements, num_bytes) in GGML_QUANT_SIZES.items():
        assert tensor_kind(int(kind)) == (kind.name, int(kind), elements, num_bytes)
    assert {(kind.name, int(kind)) for kind in ValueKind} == {(kind.name, int(kind)) for kind in GGUFValueType}
    with pytest.raises(ValueError, match="12345"):
        tensor_kind(12345)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", [256, 1024, 1 << 16])
def test_dequantised_values_equal_the_reference(
    kind: GGMLQuantizationType, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_blocks, "PART_ELEMENTS", part)
    raw = random_blocks(kind)
    expected = gguf.quants.dequantize(raw, kind).reshape(-1)
    assert np.isfinite(expected).all()
    assert len(np.unique(expected)) > 100
    out = np.empty(NUM_ELEMENTS, np.float32)
    dequantise_into(raw, tensor_kind(kind), out)
    assert np.array_equal(out, expected)
    parts = [piece.copy() for piece in dequantised_parts(raw, tensor_kind(kind))]
    assert len(parts) == -(-NUM_ELEMENTS // part)
    assert np.array_equal(np.concatenate(parts), expected)


def write_tensors(path: Path, kind: GGMLQuantizationType) -> tuple[Path, np.ndarray]:
    raw = random_blocks(kind)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "é", "", "x" * 300])
    writer.add_array("tokenizer.ggml.merges", [b"\xff\xfe", b"a b"])
    elements, num_bytes = GGML_QUANT_SIZES[kind]
    stored = raw.reshape(5, -1)
    if elements == 1:
        stored = stored.view({2: np.float16, 4: np.float32}[num_bytes])
    writer.add_tensor("t.weight", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, gguf.quants.dequantize(raw, kind).reshape(5, -1)


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_a_file(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    path, expected = write_tensors(tmp_path / "model.gguf", kind)
    file = GgufFile(path)
    assert file.tensors["t.weight"].shape == expected.shape
    assert np.array_equal(file.array("t.weight"), expected)
    view = file.view("t.weight")
    plain = {GGMLQuantizationType.F32: "f4", GGMLQuantizationType.F16: "f2", GGMLQuantizationType.BF16: "i2"}
    if kind not in plain:
        assert view is None
        return
    again = file.view("t.weight")
    assert view is not None
    assert again is not None
    assert view.dtype.str[1:] == plain[kind]
    assert view.ctypes.data == again.ctypes.data, "a view of the mapped file, not a copy"


def test_writing_to_a_view_leaves_the_file_alone(tmp_path: Path) -> None:
    path, expected = write_tensors(tmp_path / "model.gguf", GGMLQuantizationType.F32)
    view = GgufFile(path).view("t.weight")
    assert view is not None
    view[:] = 7
    assert np.array_equal(GgufFile(path).array("t.weight"), expected)


def test_lists_of_text_are_decoded_when_asked_for(tmp_path: Path) -> None:
    path, _ = write_tensors(tmp_path / "model.gguf", GGMLQuantizationType.F32)
    fields = GgufFile(path).fields
    assert fields["tokenizer.ggml.tokens"] == ["a", "é", "", "x" * 300]
    assert fields["tokenizer.ggml.merges"] == ["\udcff\udcfe", "a b"]
    assert fields["tokenizer.ggml.tokens"] is fields["tokenizer.ggml.tokens"]
    assert dict(fields)["general.architecture"] == "llama"
    assert "absent" not in fields
    assert len(fields) == len(list(fields))


def test_a_kind_that_nobody_reads_is_named(tmp_path: Path) -> None:
    path, _ = write_tensors(tmp_path / "model.gguf", GGMLQuantizationType.Q8_0)
    file = GgufFile(path)
    # Q8_1 has a size, but it is made while computing and never stored: no reader knows it.
    elements, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType.Q8_1]
    entry = file.tensors["t.weight"]
    file.tensors["t.weight"] = entry._replace(
        kind=tensor_kind(GGMLQuantizationType.Q8_1), shape=(elements * 4,), num_bytes=num_bytes * 4
    )
    for read in (file.array, lambda name: list(file.parts(name))):
        with pytest.raises(ModelLoadError, match="stored as Q8_1, which cannot be read; convert"):
            read("t.weight")


def test_headers_that_cannot_be_are_damage(tmp_path: Path) -> None:
    path, _ = write_tensors(tmp_path / "model.gguf", GGMLQuantizationType.Q8_0)
    entry, other = (b"t.weight" + struct.pack("<IQ", 2, width) for width in (768, 767))
    whole = path.read_bytes()
    assert whole.count(entry) == 1
    path.write_bytes(whole.replace(entry, other))
    with pytest.raises(ModelLoadError, match=r"damaged .*t\.weight has rows of 767, .* no whole blocks of Q8_0"):
        GgufFile(path)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("general.alignment", 0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match=r"damaged .*alignment of 0 bytes"):
        GgufFile(path)

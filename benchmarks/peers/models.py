"""The same weights in the formats that other engines read, made once and kept in the cache.

    F32, F16, Q8_0     GGUF: every matrix in that type, vectors in float32
    hf-fp32            a Hugging Face folder, float32
    openvino-fp32      OpenVINO's files: float32 constants (their values rounded to float16, as OpenVINO reads GGUF so)
    openvino-fp16      the same with float16 constants, which it may unpack as it likes
    openvino-int8      made of Q8_0

Whatever is written appears under its name only when it is whole.
"""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType, GGUFValueType
from safetensors.numpy import save_file

from disagg.engine.weights import load_weights
from disagg.modelfiles.config import ModelConfig, read_config
from disagg.modelfiles.gguf_file import GgufFile, is_gguf
from peers.environments import OPENVINO, Unavailable, peers_folder, python_of

CONVERT_TIMEOUT_S = 600.0
FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7}  # llama.cpp's names of whole files
OPENVINO_SOURCES = {"openvino-fp32": "F16", "openvino-fp16": "F16", "openvino-int8": "Q8_0"}
OWN_FIELDS = ("general.architecture", "general.file_type", "general.quantization_version")  # written anew


def model_for(form: str, source: Path) -> Path:
    """Path of the model at `source` in one of the forms above. Raises Unavailable."""
    if form == "own":
        return source
    folder = peers_folder() / "models" / source.stem
    if form == "hf-fp32":
        return _once(folder / form, lambda path: _write_hugging_face(source, path))
    if not is_gguf(source):
        raise Unavailable(f"{source} is not a GGUF file, and {form} is made of one")
    if form in FILE_TYPES:
        return _once(folder / f"{source.stem}-{form}.gguf", lambda path: _write_gguf(source, path, form))
    made_of = model_for(OPENVINO_SOURCES[form], source)
    return _once(folder / form, lambda path: _write_openvino(made_of, path, is_wide=form == "openvino-fp32"))


def _once(path: Path, write: Callable[[Path], None]) -> Path:
    if not path.exists():
        print(f"  writing {path}", flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
            unfinished = Path(temporary) / path.name
            write(unfinished)
            os.replace(unfinished, path)
    return path


def _write_gguf(source: Path, path: Path, form: str) -> None:
    tensors = GgufFile(source)
    writer = gguf.GGUFWriter(path, tensors.text("general.architecture"))
    for name, field in gguf.GGUFReader(source).fields.items():
        if not name.startswith("GGUF.") and name not in OWN_FIELDS:
            element = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], element)
    writer.add_file_type(FILE_TYPES[form])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for name in tensors.tensors:
        values = np.asarray(tensors.array(name))
        kind = GGMLQuantizationType[form] if values.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_hugging_face(source: Path, path: Path) -> None:
    config = read_config(source)
    table = load_weights(source, config)
    path.mkdir()
    tensors = {name: table.take(name, *shape).contiguous().numpy() for name, shape in _shapes(config).items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(_hugging_face_config(config), indent=1))


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a Llama-family model."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        for name, size in (("q", queries), ("k", keys), ("v", keys)):
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (size, hidden)
            if config.qkv_bias:
                shapes[f"{prefix}self_attn.{name}_proj.bias"] = (size,)
        shapes[f"{prefix}self_attn.o_proj.weight"] = (hidden, queries)
        shapes[f"{prefix}mlp.gate_proj.weight"] = shapes[f"{prefix}mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}mlp.down_proj.weight"] = (hidden, inner)
        shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
    return shapes


def _hugging_face_config(config: ModelConfig) -> dict[str, object]:
    if config.rope_factors:
        raise Unavailable("scaled rotary positions are not written into a Hugging Face folder by this benchmark")
    is_qwen = config.architecture == "qwen2"
    return {
        "architectures": ["Qwen2ForCausalLM" if is_qwen else "LlamaForCausalLM"],
        "model_type": "qwen2" if is_qwen else "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "float32",
    }


def _write_openvino(source: Path, path: Path, is_wide: bool) -> None:
    python = python_of(OPENVINO)
    script = Path(__file__).with_name("convert_openvino.py")
    command = [str(python), str(script), str(source), str(path), *(["--widen"] if is_wide else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CONVERT_TIMEOUT_S, check=False)
    if done.returncode:
        shutil.rmtree(path, ignore_errors=True)
        raise Unavailable(f"OpenVINO cannot convert {source}: {done.stderr.strip()[-300:]}")

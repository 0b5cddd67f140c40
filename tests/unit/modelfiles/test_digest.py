"""The digest tells models apart by weights and geometry, and is remembered for big files."""

import hashlib
import os
from pathlib import Path

import pytest

from disagg.core.errors import ModelLoadError
from disagg.modelfiles import digest
from disagg.modelfiles.digest import default_cache_dir, model_digest


def write_model(folder: Path, weights: bytes = b"w" * 100, config: str = "{}", name: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(weights)
    (folder / "config.json").write_text(config)
    return folder


@pytest.fixture(autouse=True)
def small_files_are_cached_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "MIN_CACHED_BYTES", 0)


def test_weights_geometry_and_file_layout_count(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = model_digest(write_model(tmp_path / "a"), cache)
    assert len(first) == 64
    assert model_digest(write_model(tmp_path / "b"), cache) == first, "the folder's name does not count"
    assert model_digest(write_model(tmp_path / "c", weights=b"v" * 100), cache) != first
    assert model_digest(write_model(tmp_path / "d", config="{ }"), cache) != first
    both = write_model(tmp_path / "e", name="model-2.safetensors")
    write_model(both, name="model-1.safetensors", weights=b"1")
    swapped = write_model(tmp_path / "f", name="model-1.safetensors")
    write_model(swapped, name="model-2.safetensors", weights=b"1")
    assert model_digest(both, cache) != model_digest(swapped, cache)


def test_a_gguf_file_may_be_renamed(tmp_path: Path) -> None:
    for name, content in (("a.gguf", b"GGUF" + b"1" * 50), ("b.gguf", b"GGUF" + b"1" * 50), ("c.gguf", b"GGUF2")):
        (tmp_path / name).write_bytes(content)
    a, b, c = (model_digest(tmp_path / f"{name}.gguf", tmp_path / "cache") for name in "abc")
    assert a == b != c


def test_unchanged_files_are_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, cache = write_model(tmp_path / "m"), tmp_path / "cache"
    first = model_digest(folder, cache)
    monkeypatch.setattr(digest, "_hash", lambda file: pytest.fail(f"hashed {file} again"))
    assert model_digest(folder, cache) == first
    monkeypatch.undo()
    monkeypatch.setattr(digest, "MIN_CACHED_BYTES", 0)
    weights = folder / "model.safetensors"
    weights.write_bytes(b"x" * 100)
    os.utime(weights, ns=(1, 1))
    assert model_digest(folder, cache) != first


@pytest.mark.parametrize("garbage", [b"", b"{", b"[]", b"\xff\xfe", b'{"num_bytes":"x"}'])
def test_a_damaged_cache_is_ignored_and_mended(tmp_path: Path, garbage: bytes) -> None:
    folder, cache = write_model(tmp_path / "m"), tmp_path / "cache"
    first = model_digest(folder, cache)
    entries = sorted(cache.glob("*.json"))
    assert len(entries) == 2
    good = entries[0].read_bytes()
    entries[0].write_bytes(garbage)
    assert model_digest(folder, cache) == first
    assert entries[0].read_bytes() == good
    assert not list(cache.glob("*.partial"))


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    folder = write_model(tmp_path / "m")
    assert model_digest(folder, blocker / "cache") == model_digest(folder, tmp_path / "cache")


def test_nothing_to_hash(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no model at"):
        model_digest(tmp_path / "absent", tmp_path)
    with pytest.raises(ModelLoadError, match=r"lacks config\.json or"):
        model_digest(tmp_path, tmp_path)
    text = tmp_path / "text"
    text.write_text("hello")
    with pytest.raises(ModelLoadError, match="no model at"):
        model_digest(text, tmp_path)


def test_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "disagg" / "digests"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "disagg" / "digests"
    assert hashlib.sha256(b"").hexdigest() == digest._hash(
        write_model(tmp_path / "m", weights=b"") / "model.safetensors"
    )

"""The digest of a model: its weights and its geometry. Two workers pair only if theirs are equal."""

import contextlib
import hashlib
import os
from pathlib import Path

import msgspec

from disagg.core.errors import ModelLoadError
from disagg.modelfiles.gguf_file import is_gguf

CHUNK_BYTES = 1 << 20
MIN_CACHED_BYTES = 8 << 20  # hashing less is faster than looking it up is worth


class _CachedDigest(msgspec.Struct, frozen=True):
    """One file's digest and what the file looked like when it was taken."""

    num_bytes: int
    mtime_ns: int
    digest: str


def model_digest(path: Path, cache_dir: Path | None = None) -> str:
    """sha256 (hex) over the weights and the geometry at `path`.

    A directory: config.json and every *.safetensors, in name order. A GGUF file: the file. Digests of big files are
    kept in cache_dir (default: the user's cache directory). Raises ModelLoadError if there is nothing to hash.
    """
    cache_dir = cache_dir or default_cache_dir()
    if path.is_dir():
        weights = sorted(path.glob("*.safetensors"))
        config = path / "config.json"
        if not weights or not config.is_file():
            raise ModelLoadError(f"{path} lacks config.json or *.safetensors; give a whole model directory")
        files = [config, *weights]
    elif is_gguf(path):
        files = [path]
    else:
        raise ModelLoadError(
            f"no model at {path}; give a directory with config.json and *.safetensors, or a .gguf file"
        )
    total = hashlib.sha256()
    for file in files:
        name = "gguf" if file == path else file.name  # a GGUF file may be renamed and stay the same model
        total.update(f"{name}:{_file_digest(file, cache_dir)}\n".encode())
    return total.hexdigest()


def default_cache_dir() -> Path:
    """$XDG_CACHE_HOME/disagg/digests, or ~/.cache/disagg/digests."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "disagg" / "digests"


def _file_digest(file: Path, cache_dir: Path) -> str:
    stat = file.stat()
    if stat.st_size < MIN_CACHED_BYTES:
        return _hash(file)
    path = str(file.resolve())
    cached_at = cache_dir / f"{hashlib.sha256(path.encode()).hexdigest()}.json"
    cached = _read_cache(cached_at)
    if cached is not None and (cached.num_bytes, cached.mtime_ns) == (stat.st_size, stat.st_mtime_ns):
        return cached.digest
    digest = _hash(file)
    _write_cache(cached_at, _CachedDigest(stat.st_size, stat.st_mtime_ns, digest))
    return digest


def _hash(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _read_cache(file: Path) -> _CachedDigest | None:
    """A damaged or missing entry is as good as none."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=_CachedDigest)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def _write_cache(file: Path, cached: _CachedDigest) -> None:
    """Replaced in one move, so that two starting workers cannot read half an entry. A read-only home is no error."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}.partial")
        partial.write_bytes(msgspec.json.encode(cached))
        partial.replace(file)

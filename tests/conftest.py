"""Fixtures for every test. Each test must leave no thread and no child process behind."""

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from tests.e2e.models import tiny_llama, tiny_qwen2

from disagg.cluster.ports import reserve_port
from disagg.modelfiles.fetch import KNOWN_MODELS, models_folder
from disagg.testing.processes import children_of

__all__ = ["tiny_llama", "tiny_qwen2"]

LEAK_TIMEOUT_S = 20.0
# Threads that libraries keep for the whole life of the process.
LIBRARY_THREADS = ("pydevd", "tqdm", "ThreadPoolExecutor-hypothesis")

# A change is judged by the same examples everywhere; new ones are looked for on purpose.
settings.register_profile("dev", deadline=None, print_blob=True, max_examples=100, derandomize=True)
settings.register_profile("thorough", settings.get_profile("dev"), max_examples=1000, derandomize=False)
settings.load_profile("dev")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one file share fixtures: they run in one process, with those of other files that name the same group."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(f"{item.path.parent.name}.{item.path.stem}"))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """What collecting has made lives to the end: later collections of garbage need not look at millions of objects."""
    if getattr(session.config.option, "loadgroup", False) and any("@" not in item.nodeid for item in session.items):
        raise pytest.UsageError("pytest-xdist does not group tests of this pytest: install what requirements.lock says")
    gc.collect()
    gc.freeze()


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.name.startswith(LIBRARY_THREADS)}


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves threads or child processes."""
    threads, children = _threads(), children_of(os.getpid())
    yield
    deadline_s = time.monotonic() + LEAK_TIMEOUT_S
    while (_threads() - threads or children_of(os.getpid()) - children) and time.monotonic() < deadline_s:
        time.sleep(0.005)
    assert not _threads() - threads, "threads left behind"
    assert not children_of(os.getpid()) - children, "child processes left behind"


@pytest.fixture
def free_port() -> Iterator[int]:
    """A TCP port on loopback that nobody else is given meanwhile; a server that is told to take it may."""
    with reserve_port("127.0.0.1") as reserved:
        yield reserved.getsockname()[1]


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real weights. Skips, saying how to get them, where they are not."""
    model = KNOWN_MODELS["smollm2"]
    path = models_folder() / model.folder / model.file_name
    if not path.exists():
        pytest.skip(f"no {path}: run `disagg serve smollm2` once to fetch it")
    return path


@pytest.fixture(scope="session")
def tiny_llama_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with random weights as a Hugging Face directory, without a tokenizer."""
    from tests.parity.tiny_models import write_tiny_model  # imports transformers: only for those who ask

    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture
def make_file(tmp_path: Path) -> Callable[[str, bytes], Path]:
    """Write a file into the test's own folder."""

    def make(name: str, content: bytes) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    return make

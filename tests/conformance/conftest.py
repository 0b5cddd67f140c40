"""Every test of this folder runs against both deployments."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conformance.served import MODEL, PATHS, Served, serving

from disagg.testing.model_files import write_tiny_llama


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tools make long prompts of a tokenizer this small."""
    return write_tiny_llama(tmp_path_factory.mktemp("served") / MODEL, max_context=4096)


@pytest.fixture(scope="package", params=PATHS)
def served(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(request.param, model, tmp_path_factory.mktemp("keys") / "keys.toml") as made:
        yield made

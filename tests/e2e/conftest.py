"""Fixtures of tests that start real processes. Processes take seconds to start: files share them where they can.

Files whose tests share a cluster name it as their `xdist_group`, so that one process of pytest runs them all.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.api_paths import MARKS, MAX_OPEN, MODEL, Paths, all_paths

from disagg.testing.model_files import write_tiny_llama


@pytest.fixture(scope="session")
def plain_paths(tiny_llama: Path) -> Iterator[Paths]:
    """Every path of a model with a short context, as it comes."""
    with all_paths(tiny_llama) as made:
        yield made


@pytest.fixture(scope="session")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its context holds tools, which make long prompts of a tokenizer this small, and answers that go on and on."""
    return write_tiny_llama(tmp_path_factory.mktemp("served") / MODEL, max_context=4096, words=MARKS)


@pytest.fixture(scope="session")
def long_paths(long_model: Path) -> Iterator[Paths]:
    """Every path of a model that thinks and calls, and lets few in at once."""
    more = ("--reasoning-parser", "think", "--max-open-requests", str(MAX_OPEN))
    with all_paths(long_model, *more) as made:
        yield made

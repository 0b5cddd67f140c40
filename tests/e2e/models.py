"""Tiny models that can be served: random weights and a small real tokenizer in one Hugging Face directory."""

from pathlib import Path

import pytest

from disagg.testing.tokenizer_files import write_tiny_tokenizer


def write_served_model(path: Path, architecture: str, *, seed: int = 0) -> Path:
    """A directory that `disagg serve` takes. The vocabularies of weights and tokenizer are equally large."""
    from tests.parity.tiny_models import TINY_VOCAB, write_tiny_model  # imports transformers: only when needed

    write_tiny_model(path, architecture, seed=seed)
    return write_tiny_tokenizer(path, vocab_size=TINY_VOCAB)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Served as "tiny-llama"."""
    return write_served_model(tmp_path_factory.mktemp("served") / "tiny-llama", "llama")


@pytest.fixture(scope="session")
def tiny_qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Served as "tiny-qwen2"."""
    return write_served_model(tmp_path_factory.mktemp("served") / "tiny-qwen2", "qwen2")

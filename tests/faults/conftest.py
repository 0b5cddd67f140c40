"""Fixtures of tests that start real processes."""

from tests.e2e.models import tiny_llama, tiny_qwen2

__all__ = ["tiny_llama", "tiny_qwen2"]

"""Fixtures of tests that start real processes."""

from tests.e2e.models import tiny_llama, tiny_qwen2
from tests.faults.survival import mortals, mortals_front

__all__ = ["mortals", "mortals_front", "tiny_llama", "tiny_qwen2"]

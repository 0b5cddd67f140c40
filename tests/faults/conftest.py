"""Fixtures of tests that start real processes."""

from tests.faults.survival import mortals, mortals_front

__all__ = ["mortals", "mortals_front"]

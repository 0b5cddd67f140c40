"""Fixtures of tests that start real processes, or open sockets of their own."""

from tests.faults.survival import mortals, mortals_front
from tests.unit.worker.rigs import no_socket_left

__all__ = ["mortals", "mortals_front", "no_socket_left"]

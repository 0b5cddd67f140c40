"""Fixtures of tests of a worker's connections."""

from tests.unit.worker.rigs import no_socket_left

__all__ = ["no_socket_left"]

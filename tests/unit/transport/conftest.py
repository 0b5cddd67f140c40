"""One rig per kind; each test proves that it leaves nothing behind."""

import threading
from collections.abc import Iterator
from typing import cast

import pytest
from tests.unit.transport.rigs import InProcessRig, Rig, TcpRig, open_descriptors


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    threads, sockets = set(threading.enumerate()), open_descriptors()
    yield
    assert set(threading.enumerate()) <= threads, "threads are left behind"
    assert open_descriptors() <= sockets, "sockets are left behind"


@pytest.fixture(params=["tcp", "in_process"])
def rig(request: pytest.FixtureRequest, nothing_left_behind: None) -> Iterator[Rig]:
    made = cast(Rig, TcpRig() if request.param == "tcp" else InProcessRig())
    yield made
    made.check_invariants()
    made.close()


@pytest.fixture
def tcp(nothing_left_behind: None) -> Iterator[TcpRig]:
    made = TcpRig()
    yield made
    made.check_invariants()
    made.close()

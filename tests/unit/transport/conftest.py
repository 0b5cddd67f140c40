"""One rig per kind; each test proves that it leaves nothing behind."""

import threading
from collections.abc import Callable, Iterator
from typing import cast

import pytest
from tests.unit.transport.rigs import InProcessRig, Rig, TcpRig, open_descriptors

from disagg.channel.keys import Keys, load_keys
from disagg.cluster.authority import make_keys


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    threads, sockets = set(threading.enumerate()), open_descriptors()
    yield
    assert set(threading.enumerate()) <= threads, "threads are left behind"
    assert open_descriptors() <= sockets, "sockets are left behind"


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder, ("localhost",), days=1)
    made = load_keys(str(folder / "localhost"))
    assert made is not None
    return made


@pytest.fixture(params=["tcp", "tls", "two lanes", "in_process"])
def rig(request: pytest.FixtureRequest, keys: Keys, nothing_left_behind: None) -> Iterator[Rig]:
    make: dict[str, Callable[[], object]] = {
        "tcp": TcpRig,
        "tls": lambda: TcpRig(keys.dialling, keys.accepting),
        "two lanes": lambda: TcpRig(num_lanes=2),
        "in_process": InProcessRig,
    }
    made = cast(Rig, make[request.param]())
    yield made
    made.check_invariants()
    made.close()


@pytest.fixture
def tcp(nothing_left_behind: None) -> Iterator[TcpRig]:
    made = TcpRig()
    yield made
    made.check_invariants()
    made.close()

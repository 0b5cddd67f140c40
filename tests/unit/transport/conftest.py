"""One rig per kind; each test proves that it leaves nothing behind."""

import contextlib
import gc
import os
import threading
from collections.abc import Callable, Iterator
from typing import cast

import pytest
from tests.unit.transport.local_rigs import InProcessRig, SharedMemoryRig
from tests.unit.transport.rigs import Rig, TcpRig, open_descriptors

from disagg.channel.keys import Keys, load_keys
from disagg.cluster.authority import make_keys


def shared_pages() -> tuple[int, int, int]:
    """Open arenas, their mappings, and descriptors of processes and wake-ups, of this process."""
    targets = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            targets.append(os.readlink(f"/proc/self/fd/{name}"))
    with open("/proc/self/maps", encoding="utf-8") as maps:
        num_mappings = sum("/memfd:disagg" in line for line in maps)
    is_watch = [target in ("anon_inode:[pidfd]", "anon_inode:[eventfd]") for target in targets]
    return sum("/memfd:disagg" in target for target in targets), num_mappings, sum(is_watch)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    threads, sockets, pages = set(threading.enumerate()), open_descriptors(), shared_pages()
    yield
    assert set(threading.enumerate()) <= threads, "threads are left behind"
    assert open_descriptors() <= sockets, "sockets are left behind"
    left = shared_pages()
    if left != pages:
        gc.collect()  # a failed write's traceback may hold views
        left = shared_pages()
    assert all(now <= before for now, before in zip(left, pages, strict=True)), f"{left} are left of {pages}"


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder, ("localhost",), days=1)
    made = load_keys(str(folder / "localhost"))
    assert made is not None
    return made


@pytest.fixture(params=["tcp", "tls", "two lanes", "shared_memory", "in_process"])
def rig(request: pytest.FixtureRequest, keys: Keys, nothing_left_behind: None) -> Iterator[Rig]:
    make: dict[str, Callable[[], object]] = {
        "tcp": TcpRig,
        "tls": lambda: TcpRig(keys.dialling, keys.accepting),
        "two lanes": lambda: TcpRig(num_lanes=2),
        "shared_memory": SharedMemoryRig,
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


@pytest.fixture
def shared(nothing_left_behind: None) -> Iterator[SharedMemoryRig]:
    made = SharedMemoryRig()
    yield made
    made.check_invariants()
    made.close()

"""Routers of other projects, from the package registry, each in an environment of its own: proxies written in Rust."""

import contextlib
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from disagg.core.errors import InternalFault
from disagg.testing.processes import MarkedProcess, wait_until
from peers.environments import Environment, Unavailable, python_of

START_TIMEOUT_S: Final = 60.0


class RouterPeer(msgspec.Struct, frozen=True):
    """How one is installed and started."""

    name: str
    environment: Environment
    module: str  # of its launcher


PEER_ROUTERS: Final = (
    RouterPeer("vllm-router", Environment("vllm-router", ("vllm-router==0.1.17",)), "vllm_router.launch_router"),
    RouterPeer("sglang-router", Environment("sglang-router", ("sglang-router==0.3.2",)), "sglang_router.launch_router"),
)


class RunningRouter(msgspec.Struct, frozen=True):
    """One that answers."""

    pids: tuple[int, ...]
    port: int


def chosen_routers(names: str) -> list[RouterPeer]:
    """By comma-separated names. Raises SystemExit for an unknown one."""
    wanted = [name for name in names.split(",") if name]
    known = [peer.name for peer in PEER_ROUTERS]
    if unknown := [name for name in wanted if name not in known]:
        raise SystemExit(f"unknown routers {unknown}; there are {', '.join(known)}")
    return [peer for peer in PEER_ROUTERS if peer.name in wanted]


@contextmanager
def running(peer: RouterPeer, python: Path, worker_port: int, request: bytes) -> Iterator[RunningRouter]:
    """Started in front of one worker on loopback, once it has answered `request`; gone afterwards.

    Raises Unavailable with its last words when it does not come up.
    """
    port, metrics_port = _free_port(), _free_port()
    where = ("--host", "127.0.0.1", "--port", str(port), "--worker-urls", f"http://127.0.0.1:{worker_port}")
    how = ("--policy", "round_robin", "--worker-startup-check-interval", "1", "--log-level", "error")
    beside = ("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port))
    quiet = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    arguments = ("-m", peer.module, *where, *how, *beside)
    with MarkedProcess(arguments, program=(str(python),), environment=quiet) as process:
        try:
            wait_until(lambda: _answers(port, request), START_TIMEOUT_S, f"{peer.name} to answer")
        except InternalFault as error:
            raise Unavailable(f"{error}: {' / '.join(process.lines[-3:])}") from None
        yield RunningRouter(tuple(_family(process.pid)), port)


def python_for(peer: RouterPeer) -> Path:
    """Its environment's interpreter; installs what is missing. Raises Unavailable."""
    return python_of(peer.environment)


def _answers(port: int, request: bytes) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 2.0) as sock:
        sock.settimeout(2.0)
        sock.sendall(request)
        return sock.recv(64).startswith(b"HTTP/1.1 200")
    return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


def _family(pid: int) -> list[int]:
    """A process and all that it started. Its environment does not tell them: some write their title over it."""
    lists = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [pid, *(each for children in lists for child in children for each in _family(int(child)))]

"""A router, a prefill and a decode worker, the two workers at different ends of a link, under mutual TLS."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from disagg.cluster.authority import make_keys
from disagg.cluster.local import PROGRAM
from disagg.core.errors import InternalFault
from disagg.router.config import Announcement, decode_announcement
from disagg.testing.links.namespaces import ADDRESSES, LinkedNamespaces
from disagg.testing.processes import MarkedProcess, wait_until

START_TIMEOUT_S = 120.0
KEY_DAYS = 30  # the doctor speaks of those that end sooner


class SpreadCluster:
    """Router and prefill-0 at end 0, decode-0 at end 1. Use as a context manager from a thread that is at end 0.

    worker_arguments: for both; cores: one for each; program: what is run as `disagg`.
    """

    def __init__(
        self,
        pair: LinkedNamespaces,
        model: Path,
        served_name: str,
        worker_arguments: Sequence[str] = (),
        *,
        cores: tuple[str, str] = ("", ""),
        program: Sequence[str] = PROGRAM,
    ) -> None:
        self._pair = pair
        self._model = model
        self._name = served_name
        self._arguments = tuple(worker_arguments)
        self._cores = cores
        self._disagg = tuple(program)
        self._stack = contextlib.ExitStack()
        self.url = ""
        self.keys = ("", "")  # directories, by end
        self.control_address = ""

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="disagg-link-keys-")))
            make_keys(folder, ADDRESSES, KEY_DAYS)
            self.keys = (str(folder / ADDRESSES[0]), str(folder / ADDRESSES[1]))
            announced = _announced(stack.enter_context(self._router()))
            self.url, self.control_address = f"http://{announced.http}", announced.control
            for end, role in enumerate(("prefill", "decode")):
                stack.enter_context(self._worker(end, role))
            wait_until(self._is_ready, START_TIMEOUT_S, f"{self.url}/ready to answer 200")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, tb)

    def _program(self, end: int) -> tuple[str, ...]:
        return (*self._pair.inside(end), *self._disagg)

    def _router(self) -> MarkedProcess:
        http = ("--host", "127.0.0.1", "--port", "0", "--local-prefill-tokens", "0")
        control = ("--control-host", ADDRESSES[0], "--control-port", "0", "--keys", self.keys[0])
        arguments = ("router", "--model", f"{self._name}={self._model}", *http, *control)
        return MarkedProcess(arguments, program=self._program(0), environment=_environment())

    def _worker(self, end: int, role: str) -> MarkedProcess:
        place = ("--host", ADDRESSES[end], "--keys", self.keys[end], "--cores", self._cores[end])
        name = ("--role", role, "--worker-id", f"{role}-0", "--served-name", self._name)
        link = ("--router-address", self.control_address, "--link-gbits", f"{self._pair.shape.rate_mbit / 1000:g}")
        arguments = ("worker", str(self._model), *name, *place, *link, "--num-threads", "1", *self._arguments)
        return MarkedProcess(arguments, program=self._program(end), environment=_environment())

    def _is_ready(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/ready", timeout=2.0, trust_env=False).status_code == httpx.codes.OK
        return False


def _announced(router: MarkedProcess) -> Announcement:
    found = decode_announcement(router.wait_line(r'^\{"http":', START_TIMEOUT_S))
    if found is None:
        raise InternalFault(f"the router did not say where it listens: {router.output!r}")
    return found


def _environment() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}

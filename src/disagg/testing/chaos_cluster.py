"""Real clusters that chaos breaks: `disagg serve` as it is, or its processes behind faulty links.

ServedCluster   `disagg serve`: processes can be killed and stopped
LinkedCluster   the same router and workers under the same supervisor, each worker behind links: these break too
"""

import asyncio
import contextlib
import os
import signal
import sys
import uuid
from types import TracebackType
from typing import Self

import httpx
import msgspec

from disagg.cluster.command_line import router_arguments, worker_arguments
from disagg.cluster.plan import LocalPlan
from disagg.cluster.process import ProcessSpec, Stream
from disagg.cluster.supervisor import ProcessExited, Supervisor
from disagg.core.errors import InternalFault
from disagg.core.roles import Role
from disagg.router.config import Announcement, decode_announcement
from disagg.testing.chaos_links import ClusterLinks
from disagg.testing.fault_script import ROUTER
from disagg.testing.faulty_link import LinkFaults
from disagg.testing.processes import MARK, Serve, marked_processes, wait_until

PROGRAM = (sys.executable, "-m", "disagg")
POLL_S = 0.05
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0
GONE_TIMEOUT_S = 60.0


class _Worker(msgspec.Struct, frozen=True):
    worker_id: str
    partners: tuple[str, ...] = ()


class _Meetings(msgspec.Struct, frozen=True):
    """Who has met whom, as /cluster tells."""

    workers: tuple[_Worker, ...] = ()


class ServedCluster:
    """Processes of a running Serve."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self.url = serve.url

    def kill(self, name: str, number: int) -> int:
        return self._serve.kill(name, number)

    def set_link(self, worker: str, peer: str, faults: LinkFaults) -> None:
        raise InternalFault(f"`disagg serve` has no faulty link {worker}>{peer}: use a LinkedCluster")


class LinkedCluster:
    """A plan's router and workers, started again when they die, as `disagg serve` does. An async context manager.

    Enter it on a loop in the main thread. When it is left nothing of it lives, or InternalFault says what does.
    """

    def __init__(self, plan: LocalPlan, *, seed: int = 1) -> None:
        self.plan = plan
        self.url = ""  # "http://host:port"
        self.lines: list[str] = []  # what the processes said
        self._seed = seed
        self._mark = uuid.uuid4().hex
        self._announced: asyncio.Future[Announcement]

    async def __aenter__(self) -> Self:
        self.links = ClusterLinks(self._seed)
        self._announced = asyncio.get_running_loop().create_future()
        self._supervisor = Supervisor(on_line=self._take_line, on_exit=self._take_exit, policy=self.plan.restart)
        try:
            await self._start()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._stop()
        if error is not None:
            error.add_note("\n".join(["output of the processes:", *self.lines[-60:]]))
        else:
            wait_until(lambda: not marked_processes(self._mark), GONE_TIMEOUT_S, "the end of every process")

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    @property
    def worker_ids(self) -> list[str]:
        return [worker.worker_id for worker in self.plan.workers]

    def pairs(self) -> list[tuple[str, str]]:
        """(who dials, whom): every worker and the router, every prefill worker and decode worker."""
        ids = {role: [worker.worker_id for worker in self.plan.workers if worker.role is role] for role in Role}
        between = [(source, peer) for source in ids[Role.PREFILL] for peer in ids[Role.DECODE]]
        return [(worker_id, ROUTER) for worker_id in self.worker_ids] + between

    def pid_of(self, name: str) -> int:
        """Raises InternalFault when it does not run."""
        pids = {process.name: process.pid for process in self._supervisor.snapshots()}
        pid = pids.get(name)
        if pid is None:
            raise InternalFault(f"{name} does not run: {pids}")
        return pid

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        """Send one process a signal; its pid."""
        pid = self.pid_of(name)
        os.kill(pid, number)
        return pid

    def set_link(self, worker: str, peer: str, faults: LinkFaults) -> None:
        """Of everything between two workers, or a worker and "router"."""
        self.links.set(worker, peer, faults)

    async def wait_whole(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Until every worker is connected and every pair has paired. Raises InternalFault."""
        wanted = {(name, ROUTER) for name in self.worker_ids} | set(self.pairs())
        found: set[tuple[str, str]] = set()
        end_s = asyncio.get_running_loop().time() + timeout_s
        async with httpx.AsyncClient(base_url=self.url, timeout=3.0, trust_env=False, verify=False) as client:
            while asyncio.get_running_loop().time() < end_s:
                with contextlib.suppress(httpx.HTTPError):
                    view = msgspec.json.decode((await client.get("/cluster")).content, type=_Meetings)
                    found = {(worker.worker_id, peer) for worker in view.workers for peer in (ROUTER, *worker.partners)}
                    if found >= wanted:
                        return
                await asyncio.sleep(POLL_S)
        missing = sorted(f"{source}>{peer}" for source, peer in wanted - found)
        raise InternalFault(f"waited {timeout_s:g} s for {missing}; last words: {self.lines[-20:]}")

    def check_invariants(self) -> None:
        self._supervisor.check_invariants()
        self.links.check_invariants()

    async def _start(self) -> None:
        router = self.plan.router
        self._supervisor.start(self._spec(ROUTER, router_arguments(router)))
        async with asyncio.timeout(START_TIMEOUT_S):
            announcement = await self._announced
        self.url = f"http://{announcement.http}"
        ports = [int(address.rpartition(":")[2]) for address in (announcement.http, announcement.control)]
        again = msgspec.structs.replace(router, port=ports[0], control_port=ports[1])
        self._supervisor.change(self._spec(ROUTER, router_arguments(again)))
        self.links.control_address = announcement.control
        for worker in self.plan.workers:
            behind = msgspec.structs.replace(worker, router_address=self.links.router_address(worker.worker_id))
            self._supervisor.start(self._spec(worker.worker_id, worker_arguments(behind)))
        await self.wait_whole()

    async def _stop(self) -> None:
        try:
            await self._supervisor.stop(timeout_s=STOP_TIMEOUT_S)
        finally:
            await self.links.close()
        self.check_invariants()

    def _spec(self, name: str, arguments: tuple[str, ...]) -> ProcessSpec:
        return ProcessSpec(name, (*PROGRAM, *arguments), ((MARK, self._mark),))

    def _take_line(self, name: str, stream: Stream, line: str) -> None:
        if name == ROUTER and not self._announced.done():
            with contextlib.suppress(asyncio.InvalidStateError):
                if (found := decode_announcement(line)) is not None:
                    self._announced.set_result(found)
        self.lines.append(f"[{name}] {line}")

    def _take_exit(self, event: ProcessExited) -> None:
        self.lines.append(event.describe())

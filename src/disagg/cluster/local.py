"""One deployment on this machine: a router and its workers under one supervisor.

1  start()        the router on a control port that is held for it, and all workers at once
2                 the router's announcement on stdout tells the port for clients
3  wait_ready()   until /ready answers 200; a process that ends before that ends the attempt with its own words
4  watch()        from then on: kills a worker whose process lives but which the router has not heard of for long
5  failed()       completes when serving cannot go on: the router, or every worker, was given up
6  restart()      one worker after the other: drains, ends, starts, is there again
7  stop()         router first, so that it closes its requests while workers still answer; then the workers
"""

import asyncio
import contextlib
import socket
import sys
from collections.abc import Callable
from typing import TypeVar

import msgspec

from disagg.channel.channel import MAX_SILENT_BEATS
from disagg.cluster.command_line import router_arguments, router_environment, worker_arguments
from disagg.cluster.plan import LocalPlan
from disagg.cluster.ports import reserve_port
from disagg.cluster.process import OnLine, ProcessSpec, Stream
from disagg.cluster.router_watch import RouterWatch
from disagg.cluster.supervisor import (
    CONFIGURATION_EXIT_CODE,
    ProcessExited,
    ProcessPhase,
    ProcessSnapshot,
    Supervisor,
    describe_returncode,
)
from disagg.cluster.view import ClusterView
from disagg.core.errors import ConfigurationError, DisaggError, InternalFault
from disagg.router.config import Announcement, RouterConfig, decode_announcement
from disagg.transport.sharing import draw_domain

ROUTER = "router"
PROGRAM = (sys.executable, "-m", "disagg")
POLL_INTERVAL_S = 0.2
MEETING_POLL_S = 0.02  # once all are here: they meet each other within some tens of milliseconds
ROUTER_TIMEOUT_S = 60.0
HANG_POLL_S = 1.0
HANG_MARGIN_S = 5.0  # beyond two heartbeat timeouts
RESTART_MARGIN_S = 5.0
RESTART_TIMEOUT_S = 300.0


T = TypeVar("T")


class LocalCluster:
    """Owns the processes of one LocalPlan. All callbacks come on the loop and must not block."""

    def __init__(
        self,
        plan: LocalPlan,
        *,
        on_line: OnLine,
        on_exit: Callable[[ProcessExited], None],
        program: tuple[str, ...] = PROGRAM,
    ) -> None:
        self._plan = plan
        self._program = program
        self._on_line = on_line
        self._on_exit = on_exit
        loop = asyncio.get_running_loop()
        self._announced: asyncio.Future[Announcement] = loop.create_future()
        self._early_exit: asyncio.Future[ProcessExited] = loop.create_future()
        self._failed: asyncio.Future[str] = loop.create_future()
        self._is_ready = False
        self._is_stopping = False
        self._hang_timeout_s = 2 * MAX_SILENT_BEATS * plan.router.beat_interval_s + HANG_MARGIN_S
        self._supervisor = Supervisor(on_line=self._take_line, on_exit=self._take_exit, policy=plan.restart)
        self._domain = draw_domain()
        self._watch: RouterWatch | None = None
        self._reserved: socket.socket | None = None  # the control port
        self._has_news = asyncio.Event()  # a process has said something

    async def start(self) -> str:
        """Start everything; the router's URL.

        Raises ConfigurationError when the operator can cure it, else InternalFault.
        """
        router = self._plan.router
        if router.control_port == 0:
            self._reserved = reserve_port(router.control_host)
            router = msgspec.structs.replace(router, control_port=self._reserved.getsockname()[1])
        self._supervisor.start(self._router_spec(router))
        control = _reachable(f"{router.control_host}:{router.control_port}")
        for worker in self._plan.workers:  # loading takes them longer than the router needs to listen
            known = msgspec.structs.replace(worker, router_address=control)
            arguments = worker_arguments(known)
            # Who has the domain's secret may write into the other workers' memory: workers only.
            secret = tuple(self._domain.environment().items())
            self._supervisor.start(ProcessSpec(known.worker_id, (*self._program, *arguments), secret))
        announcement = await self._unless_exit(self._announced, ROUTER_TIMEOUT_S, "the router to listen")
        # A router that is started again must come back where clients look for it.
        self._supervisor.change(self._router_spec(_with_port(router, announcement)))
        url = f"{announcement.scheme}://{_reachable(announcement.http)}"
        self._watch = RouterWatch(url)
        return url

    async def wait_ready(self, timeout_s: float, on_missing: Callable[[str], None]) -> None:
        """Until every part answers. on_missing is told what is not there yet, whenever that changes."""
        polling = asyncio.ensure_future(self._poll_ready(on_missing))
        await self._unless_exit(polling, timeout_s, "the workers to be ready")
        self._is_ready = True

    async def view(self) -> ClusterView | None:
        """What the router says now; None when it does not answer."""
        return None if self._watch is None else await self._watch.cluster()

    def processes(self) -> tuple[ProcessSnapshot, ...]:
        return self._supervisor.snapshots()

    async def watch(self) -> None:
        """Never returns. A worker that hangs so that it cannot end itself is ended from here."""
        seen_s: dict[int, float] = {}  # by pid: when the router last knew it
        while True:
            await asyncio.sleep(HANG_POLL_S)
            view = await self.view()
            if view is None:
                continue
            now_s = asyncio.get_running_loop().time()
            here = {worker.worker_id for worker in view.workers if worker.connected}
            for process in self.processes():
                if process.pid is None or process.name == ROUTER:
                    continue
                if process.name in here:
                    seen_s[process.pid] = now_s
                elif now_s - seen_s.get(process.pid, now_s) > self._hang_timeout_s:
                    self._on_line(process.name, Stream.STDERR, f"lost for {self._hang_timeout_s:g} s: killing it")
                    self._supervisor.kill_one(process.name)

    async def restart(self, on_note: Callable[[str], None]) -> None:
        """Every worker in turn; the others serve meanwhile."""
        for worker in self._plan.workers:
            name = worker.worker_id
            on_note(f"restarting {name}")
            before = {process.name: process.pid for process in self.processes()}[name]
            await self._supervisor.restart(name, timeout_s=worker.drain_timeout_s + RESTART_MARGIN_S)
            await self._returned(name, before)
        on_note("all workers have been restarted")

    async def _returned(self, name: str, pid_before: int | None) -> None:
        """Until it is here again as another process and the cluster is whole; no longer than a start may take."""
        deadline_s = asyncio.get_running_loop().time() + RESTART_TIMEOUT_S
        while asyncio.get_running_loop().time() < deadline_s:
            pid = {process.name: process.pid for process in self.processes()}[name]
            if pid not in (None, pid_before) and await self._all_connected() and await self._is_healthy():
                return
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _is_healthy(self) -> bool:
        return self._watch is not None and await self._watch.is_healthy()

    async def failed(self) -> str:
        """Completes, with one plain line, when serving cannot go on."""
        return await asyncio.shield(self._failed)

    async def stop(self, timeout_s: float = 10.0) -> None:
        """End everything, router first. Idempotent; nothing is left when it returns."""
        self._is_ready = True  # ends from here on are no failed start
        self._is_stopping = True
        try:
            await self._supervisor.stop((ROUTER,), timeout_s=timeout_s)
        finally:
            await self._supervisor.stop(timeout_s=timeout_s)
            if self._reserved is not None:
                self._reserved.close()
            if self._watch is not None:
                await self._watch.close()

    def kill(self) -> None:
        """SIGKILL everything, now."""
        self._supervisor.kill()

    def check_invariants(self) -> None:
        self._supervisor.check_invariants()

    def _router_spec(self, config: RouterConfig) -> ProcessSpec:
        return ProcessSpec(ROUTER, (*self._program, *router_arguments(config)), router_environment(config))

    async def _poll_ready(self, on_missing: Callable[[str], None]) -> None:
        assert self._watch is not None
        last = ""
        while not await self._watch.is_healthy() or not await self._all_connected():
            view = await self._watch.cluster()
            missing = self._missing(view)
            if missing != last:
                on_missing(missing)
                last = missing
            is_meeting = view is not None and not self._absent(view)
            await self._news(MEETING_POLL_S if is_meeting else POLL_INTERVAL_S)

    async def _news(self, timeout_s: float) -> None:
        """Until a process says something, which may be that it is there; or so long."""
        self._has_news.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._has_news.wait()

    async def _all_connected(self) -> bool:
        """A pool that could answer already may still lack workers that were asked for."""
        view = await self.view()
        return view is not None and not self._absent(view)

    def _absent(self, view: ClusterView) -> list[str]:
        here = {worker.worker_id for worker in view.workers if worker.connected}
        return [worker.worker_id for worker in self._plan.workers if worker.worker_id not in here]

    def _missing(self, view: ClusterView | None) -> str:
        if view is None:
            return "the router does not answer yet"
        if absent := self._absent(view):
            return "not here yet: " + ", ".join(absent)
        return "; ".join(model.missing for model in view.models if model.missing) or "not ready yet"

    async def _unless_exit(self, wanted: asyncio.Future[T], timeout_s: float, what: str) -> T:
        """The wanted result, or an error when a process ends first or time is up."""
        futures: set[asyncio.Future[T] | asyncio.Future[ProcessExited]] = {wanted, self._early_exit}
        await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if wanted.done():
            return wanted.result()
        wanted.cancel()
        await asyncio.gather(wanted, return_exceptions=True)
        if self._early_exit.done():
            raise _start_failure(self._early_exit.result())
        raise InternalFault(f"waited {timeout_s:g} s for {what}: see the lines above")

    def _take_line(self, name: str, stream: Stream, line: str) -> None:
        self._has_news.set()
        if name == ROUTER and stream is Stream.STDOUT and (found := decode_announcement(line)) is not None:
            if not self._announced.done():
                self._announced.set_result(found)
            return
        if not self._is_stopping:  # that workers lose a router which is told to end is no news
            self._on_line(name, stream, line)

    def _take_exit(self, event: ProcessExited) -> None:
        if not self._is_ready:
            if not self._early_exit.done():
                self._early_exit.set_result(event)
            return
        self._on_exit(event)
        given_up = {p.name for p in self._supervisor.snapshots() if p.phase is ProcessPhase.GIVEN_UP}
        if not self._failed.done():
            if ROUTER in given_up:
                self._failed.set_result(f"the router is gone: {event.decision.reason}")
            elif all(worker.worker_id in given_up for worker in self._plan.workers):
                self._failed.set_result(f"no worker is left: {event.decision.reason}")


def _start_failure(event: ProcessExited) -> DisaggError:
    # The child's own one-line error says it best.
    words = (
        event.last_line.removeprefix("disagg: ").removeprefix("error: ")
        or f"ended with {describe_returncode(event.returncode)}"
    )
    kind = ConfigurationError if event.returncode == CONFIGURATION_EXIT_CODE else InternalFault
    return kind(f"{event.name}: {words}")


def _with_port(config: RouterConfig, announcement: Announcement) -> RouterConfig:
    return msgspec.structs.replace(config, port=int(announcement.http.rpartition(":")[2]))


def _reachable(address: str) -> str:
    """An address to connect to: a socket bound to every interface is reached through loopback."""
    host, _, port = address.rpartition(":")
    loopback = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "[::]": "[::1]", "": "127.0.0.1"}
    return f"{loopback.get(host, host)}:{port}"

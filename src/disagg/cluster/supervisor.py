"""Keeps a set of local processes alive.

    1  start(spec) execs a child and a task that waits for its end
    2  an end nobody asked for is a crash: policy.restart decides when to start again, or to leave it dead
    3  an exit code among `final_exit_codes` is no crash but an answer ("cannot work", "drained"): never started again
       unless restart() asked for it
    4  stop() ends all within a deadline; after it nothing is left, whatever state each child was in
    5  if this process dies, even by SIGKILL, the lifeline ends the children

One asyncio loop owns everything here. Run it in the main thread (see channel.lifeline for why).
"""

import asyncio
import enum
import os
import signal
from collections.abc import Callable, Collection, Mapping

import msgspec

from disagg.channel.lifeline import ParentEnd
from disagg.cluster.process import ChildProcess, OnLine, ProcessSpec, start_child
from disagg.core.errors import ConfigurationError
from disagg.policy.restart import DEFAULT_RESTART_POLICY, RestartDecision, RestartPolicy, restart_delay

DRAINED_EXIT_CODE = 0
CONFIGURATION_EXIT_CODE = 2
FINAL_EXIT_CODES = {
    DRAINED_EXIT_CODE: "it has drained and ended as asked",
    CONFIGURATION_EXIT_CODE: "left dead: it cannot work as configured",
}


class ProcessPhase(enum.StrEnum):
    RUNNING = "running"
    WAITING = "waiting"  # crashed, to be started again
    GIVEN_UP = "given up"
    STOPPED = "stopped"


class ProcessExited(msgspec.Struct, frozen=True):
    """A child ended without being asked to. decision.delay_s is None: it stays dead."""

    name: str
    pid: int
    returncode: int  # negative: number of the signal
    last_line: str  # of its stderr
    decision: RestartDecision

    def describe(self) -> str:
        """One plain line."""
        # Who is killed from outside has not said why.
        was_killed = self.returncode in (-signal.SIGKILL, -signal.SIGTERM)
        why = f": {self.last_line}" if self.last_line and not was_killed else ""
        return f"{self.name} ended ({describe_returncode(self.returncode)}){why}; {self.decision.reason}"


class ProcessSnapshot(msgspec.Struct, frozen=True):
    """One supervised process as it stands."""

    name: str
    phase: ProcessPhase
    pid: int | None
    num_starts: int
    last_exit: ProcessExited | None


def describe_returncode(returncode: int) -> str:
    """'exit code 2', 'SIGKILL'."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"


class _Entry:
    """Mutable record of one supervised process. Owned by the supervisor's loop."""

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec
        self.phase = ProcessPhase.STOPPED
        self.child: ChildProcess | None = None
        self.keeper: asyncio.Task[None] | None = None
        self.crashes_s: list[float] = []
        self.num_starts = 0
        self.is_restarting = False
        self.last_exit: ProcessExited | None = None

    def snapshot(self) -> ProcessSnapshot:
        pid = self.child.pid if self.child is not None and self.child.is_alive else None
        return ProcessSnapshot(self.spec.name, self.phase, pid, self.num_starts, self.last_exit)


class Supervisor:
    """Starts, restarts and stops child processes. on_exit and on_line are called on the loop and must not block."""

    def __init__(
        self,
        *,
        on_line: OnLine,
        on_exit: Callable[[ProcessExited], None],
        policy: RestartPolicy = DEFAULT_RESTART_POLICY,
        final_exit_codes: Mapping[int, str] = FINAL_EXIT_CODES,
    ) -> None:
        self._on_line = on_line
        self._on_exit = on_exit
        self._policy = policy
        self._final_exit_codes = dict(final_exit_codes)
        self._entries: dict[str, _Entry] = {}
        self._lifeline = ParentEnd()
        self._is_closed = False

    def start(self, spec: ProcessSpec) -> None:
        """Start one process and keep it alive. Raises ConfigurationError when it cannot even be exec'd."""
        if self._is_closed:
            raise ConfigurationError(f"cannot start {spec.name}: this supervisor has been stopped")
        if spec.name in self._entries:
            raise ConfigurationError(f"cannot start {spec.name}: a process of that name is supervised already")
        entry = _Entry(spec)
        self._entries[spec.name] = entry
        try:
            self._start_child(entry)
        except ConfigurationError:
            del self._entries[spec.name]
            raise
        entry.keeper = asyncio.create_task(self._keep(entry), name=f"keep {spec.name}")

    def change(self, spec: ProcessSpec) -> None:
        """Use this spec when the process of that name is started next."""
        self._entries[spec.name].spec = spec

    def snapshots(self) -> tuple[ProcessSnapshot, ...]:
        return tuple(entry.snapshot() for entry in self._entries.values())

    async def stop(self, names: Collection[str] | None = None, *, timeout_s: float = 10.0) -> None:
        """End these processes (all: and the supervisor), within timeout_s + a few seconds. Idempotent."""
        chosen = [entry for name, entry in self._entries.items() if names is None or name in names]
        await asyncio.gather(*(self._stop_entry(entry, timeout_s) for entry in chosen))
        if names is None and not self._is_closed:
            self._is_closed = True
            self._lifeline.close()

    async def restart(self, name: str, *, timeout_s: float) -> None:
        """Ask one process to end (it drains), and start it again; SIGKILL after timeout_s. Not counted as a crash."""
        entry = self._entries[name]
        child = entry.child
        if child is None or not child.is_alive or self._is_closed:
            return
        entry.is_restarting = True
        child.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(timeout_s):
                await child.exited()
        except TimeoutError:
            child.send_signal(signal.SIGKILL, to_group=True)

    def kill_one(self, name: str) -> None:
        """SIGKILL one process that hangs; it is started again like any that crashed."""
        child = self._entries[name].child
        if child is not None and child.is_alive:
            child.send_signal(signal.SIGKILL, to_group=True)

    def kill(self) -> None:
        """SIGKILL everything, now. A stop() that is under way then returns soon."""
        for entry in self._entries.values():
            if entry.child is not None:
                entry.child.send_signal(signal.SIGKILL, to_group=True)

    def check_invariants(self) -> None:
        """Phases agree with processes; a closed supervisor has none."""
        for entry in self._entries.values():
            is_alive = entry.child is not None and entry.child.is_alive
            assert entry.phase is ProcessPhase.RUNNING or not is_alive, entry.snapshot()
            assert not (self._is_closed and is_alive), entry.snapshot()
            assert len(entry.crashes_s) <= entry.num_starts
            if entry.child is not None:
                entry.child.check_invariants()
        self._lifeline.check_invariants()

    def _start_child(self, entry: _Entry) -> None:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **self._lifeline.environment()}
        entry.child = start_child(
            entry.spec, environment=environment, lifeline_fd=self._lifeline.fd, on_line=self._on_line
        )
        entry.phase = ProcessPhase.RUNNING
        entry.num_starts += 1

    async def _keep(self, entry: _Entry) -> None:
        while entry.child is not None:
            returncode = await entry.child.exited()
            decision = self._judge(entry, entry.child, returncode)
            if decision.delay_s is None:
                return
            await asyncio.sleep(decision.delay_s)
            try:
                self._start_child(entry)
            except ConfigurationError as error:
                entry.phase = ProcessPhase.GIVEN_UP
                self._tell_exit(entry, entry.child, returncode, RestartDecision(None, str(error)))
                return

    def _judge(self, entry: _Entry, child: ChildProcess, returncode: int) -> RestartDecision:
        if entry.is_restarting:
            entry.is_restarting = False
            entry.phase = ProcessPhase.WAITING
            return RestartDecision(0.0, "restarted as asked")
        now_s = asyncio.get_running_loop().time()
        # Older crashes cannot matter any more: the list stays bounded.
        entry.crashes_s = [*entry.crashes_s, now_s][-self._policy.max_crashes :]
        if returncode in self._final_exit_codes:
            decision = RestartDecision(None, self._final_exit_codes[returncode])
        else:
            decision = restart_delay(entry.crashes_s, now_s, self._policy)
        entry.phase = ProcessPhase.GIVEN_UP if decision.delay_s is None else ProcessPhase.WAITING
        self._tell_exit(entry, child, returncode, decision)
        return decision

    def _tell_exit(self, entry: _Entry, child: ChildProcess, returncode: int, decision: RestartDecision) -> None:
        last_line = child.last_lines[-1] if child.last_lines else ""
        entry.last_exit = ProcessExited(entry.spec.name, child.pid, returncode, last_line, decision)
        self._on_exit(entry.last_exit)

    async def _stop_entry(self, entry: _Entry, timeout_s: float) -> None:
        # The keeper goes first: nothing may be started again while its end is waited for.
        if entry.keeper is not None:
            entry.keeper.cancel()
            await asyncio.gather(entry.keeper, return_exceptions=True)
        if entry.child is not None and entry.child.is_alive:
            await entry.child.stop(timeout_s)
        entry.phase = ProcessPhase.STOPPED

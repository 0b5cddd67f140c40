"""The supervisor against children that crash, hang, chatter and outlive their welcome."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from disagg.cluster.process import ProcessSpec, Stream
from disagg.cluster.supervisor import ProcessExited, ProcessPhase, ProcessSnapshot, Supervisor
from disagg.core.errors import ConfigurationError
from disagg.policy.restart import RestartPolicy
from disagg.testing.processes import MarkedProcess, command_line

pytestmark = pytest.mark.timeout(400)  # the waits within say more than the end of all tests would
TIMEOUT_S = 60.0
FAST = RestartPolicy(first_delay_s=0.001, max_delay_s=0.01, max_crashes=4)
WAIT_FOR_EVER = "print('up', flush=True); import threading; threading.Event().wait()"
DRAINS = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); " + WAIT_FOR_EVER
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + WAIT_FOR_EVER


def child(name: str, code: str, *arguments: str) -> ProcessSpec:
    return ProcessSpec(name, (sys.executable, "-S", "-c", code, *arguments))


class Watched:
    """A supervisor and all it said."""

    def __init__(self, policy: RestartPolicy = FAST) -> None:
        self.exits: asyncio.Queue[ProcessExited] = asyncio.Queue()
        self.lines: asyncio.Queue[tuple[str, Stream, str]] = asyncio.Queue()
        self.supervisor = Supervisor(
            on_line=lambda *line: self.lines.put_nowait(line), on_exit=self.exits.put_nowait, policy=policy
        )

    async def next_line(self) -> tuple[str, Stream, str]:
        return await asyncio.wait_for(self.lines.get(), TIMEOUT_S)

    async def next_exit(self) -> ProcessExited:
        event = await asyncio.wait_for(self.exits.get(), TIMEOUT_S)
        self.supervisor.check_invariants()
        return event

    async def stop(self, timeout_s: float = TIMEOUT_S) -> None:
        await asyncio.wait_for(self.supervisor.stop(timeout_s=timeout_s), 2 * TIMEOUT_S)
        self.supervisor.check_invariants()

    def snapshot(self, name: str) -> ProcessSnapshot:
        return next(process for process in self.supervisor.snapshots() if process.name == name)


async def test_output_comes_line_by_line_with_its_process_and_stream() -> None:
    watched = Watched()
    code = "import sys; print('to err', file=sys.stderr, flush=True); " + WAIT_FOR_EVER
    watched.supervisor.start(child("a", code))
    lines = {await watched.next_line(), await watched.next_line()}
    assert lines == {("a", Stream.STDERR, "to err"), ("a", Stream.STDOUT, "up")}
    await watched.stop()


async def test_a_crashing_process_is_started_again_and_then_visibly_left_dead() -> None:
    watched = Watched()
    watched.supervisor.start(child("loop", "import sys; sys.exit('no luck')"))
    exits = [await watched.next_exit() for _ in range(4)]
    assert [event.decision.delay_s for event in exits] == [0.001, 0.002, 0.004, None]
    assert exits[-1].describe() == "loop ended (exit code 1): no luck; 4 crashes within 300 s: left dead"
    snapshot = watched.snapshot("loop")
    assert (snapshot.phase, snapshot.num_starts, snapshot.pid) == (ProcessPhase.GIVEN_UP, 4, None)
    await watched.stop()
    assert watched.exits.empty()


async def test_a_killed_process_comes_back_with_another_pid() -> None:
    watched = Watched()
    watched.supervisor.start(child("a", WAIT_FOR_EVER))
    await watched.next_line()
    first = watched.snapshot("a").pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    assert (await watched.next_exit()).describe() == "a ended (SIGKILL); crash 1 of 4: again in 0.001 s"
    await watched.next_line()
    assert watched.snapshot("a").pid not in (None, first)
    await watched.stop()


async def test_exit_code_2_is_an_answer_not_a_crash() -> None:
    watched = Watched()
    code = "import sys; print('disagg: port 80 is in use', file=sys.stderr); sys.exit(2)"
    watched.supervisor.start(child("a", code))
    event = await watched.next_exit()
    assert event.decision.delay_s is None
    assert event.last_line == "disagg: port 80 is in use"
    await watched.stop()


async def test_a_process_that_drained_by_itself_has_ended_as_asked() -> None:
    watched = Watched()
    watched.supervisor.start(child("a", "print('drained', flush=True)"))
    event = await watched.next_exit()
    assert (event.returncode, event.decision.delay_s) == (0, None)
    assert event.describe() == "a ended (exit code 0); it has drained and ended as asked"
    assert watched.snapshot("a").phase is ProcessPhase.GIVEN_UP
    await watched.supervisor.restart("a", timeout_s=TIMEOUT_S)  # nothing is there to be restarted
    assert (watched.snapshot("a").num_starts, watched.snapshot("a").pid) == (1, None)
    await watched.stop()


@pytest.mark.parametrize(("code", "timeout_s"), [(DRAINS, TIMEOUT_S), (WAIT_FOR_EVER, TIMEOUT_S), (DEAF, 0.05)])
async def test_a_restart_lets_the_old_process_end_and_is_no_crash(code: str, timeout_s: float) -> None:
    """However it ends: drained with code 0, by the signal, or killed when it does not in time."""
    watched = Watched()
    watched.supervisor.start(child("a", code))
    pids: list[int] = []
    for number in range(1, 6):  # more often than it may crash
        if pids:
            await watched.supervisor.restart("a", timeout_s=timeout_s)
        assert await watched.next_line() == ("a", Stream.STDOUT, "up")
        snapshot = watched.snapshot("a")
        assert (snapshot.phase, snapshot.num_starts) == (ProcessPhase.RUNNING, number)
        assert not any(command_line(pid) for pid in pids)
        assert snapshot.pid is not None
        pids.append(snapshot.pid)
    assert len(set(pids)) == 5
    assert watched.snapshot("a").last_exit is None
    assert watched.exits.empty()
    await watched.stop(timeout_s)


async def test_a_changed_spec_is_used_at_the_next_start() -> None:
    watched = Watched()
    watched.supervisor.start(child("a", WAIT_FOR_EVER))
    await watched.next_line()
    watched.supervisor.change(child("a", "print('other', flush=True);" + WAIT_FOR_EVER))
    pid = watched.snapshot("a").pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert await watched.next_line() == ("a", Stream.STDOUT, "other")
    await watched.stop()


async def test_stop_ends_a_process_that_ignores_sigterm_and_one_that_is_suspended() -> None:
    watched = Watched()
    watched.supervisor.start(child("deaf", DEAF))
    watched.supervisor.start(child("asleep", WAIT_FOR_EVER))
    await watched.next_line()
    await watched.next_line()
    pids = [process.pid for process in watched.supervisor.snapshots()]
    os.kill(pids[1] or 0, signal.SIGSTOP)
    await watched.stop(timeout_s=0.3)
    assert not any(command_line(pid or 0) for pid in pids)
    await watched.stop()  # again: nothing happens


async def test_stop_of_one_leaves_the_others_alone() -> None:
    watched = Watched()
    for name in ("a", "b"):
        watched.supervisor.start(child(name, WAIT_FOR_EVER))
        await watched.next_line()
    await watched.supervisor.stop(("a",), timeout_s=TIMEOUT_S)
    assert watched.snapshot("a").phase is ProcessPhase.STOPPED
    assert watched.snapshot("b").phase is ProcessPhase.RUNNING
    await watched.stop()
    assert watched.exits.empty()


async def test_stop_while_waiting_to_restart_starts_nothing() -> None:
    watched = Watched(RestartPolicy(first_delay_s=600.0, max_delay_s=600.0))
    watched.supervisor.start(child("a", "raise SystemExit(1)"))
    await watched.next_exit()
    assert watched.snapshot("a").phase is ProcessPhase.WAITING
    await watched.stop()
    assert watched.snapshot("a").num_starts == 1


async def test_kill_ends_a_stop_that_waits() -> None:
    watched = Watched()
    watched.supervisor.start(child("deaf", DEAF))
    await watched.next_line()
    stopping = asyncio.create_task(watched.stop(timeout_s=600.0))
    await asyncio.sleep(0)  # let stop() begin
    watched.supervisor.kill()
    await asyncio.wait_for(stopping, TIMEOUT_S)


async def test_a_grandchild_that_holds_the_output_does_not_hold_up_the_end(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', sys.argv[1]]);"
        "open(sys.argv[2], 'w').write(str(p.pid)); sys.exit(2)"
    )
    watched = Watched()
    try:
        watched.supervisor.start(child("a", code, "import threading; threading.Event().wait()", str(pid_file)))
        assert (await watched.next_exit()).returncode == 2
        await watched.stop()
    finally:
        os.kill(int(pid_file.read_text()), signal.SIGKILL)


async def test_a_program_that_does_not_exist_is_named() -> None:
    watched = Watched()
    with pytest.raises(ConfigurationError, match="cannot start '/no/such/program' for a: No such file"):
        watched.supervisor.start(ProcessSpec("a", ("/no/such/program",)))
    await watched.stop()
    with pytest.raises(ConfigurationError, match="has been stopped"):
        watched.supervisor.start(child("b", "pass"))


async def test_a_name_is_supervised_once() -> None:
    watched = Watched()
    watched.supervisor.start(child("a", WAIT_FOR_EVER))
    with pytest.raises(ConfigurationError, match="supervised already"):
        watched.supervisor.start(child("a", WAIT_FOR_EVER))
    await watched.stop()


PARENT = """
import asyncio, sys
from disagg.cluster.process import ProcessSpec
from disagg.cluster.supervisor import Supervisor
from disagg.channel.lifeline import watch_parent
CHILD = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" \
    "from disagg.channel.lifeline import watch_parent; watch_parent(grace_s=0.05);" \
    "print('child up', flush=True); import threading; threading.Event().wait()"
async def main():
    supervisor = Supervisor(on_line=lambda name, stream, line: print(line, flush=True), on_exit=print)
    for n in range(2):
        supervisor.start(ProcessSpec(f"c{n}", (sys.executable, "-c", CHILD)))
    await asyncio.Event().wait()
asyncio.run(main())
"""


def test_sigkill_of_the_supervisor_leaves_no_child() -> None:
    with MarkedProcess(("-c", PARENT), program=(sys.executable,)) as parent:
        parent.wait_line("child up", TIMEOUT_S)
        parent.send_signal(signal.SIGKILL)
        assert parent.wait(TIMEOUT_S) == -signal.SIGKILL
        parent.check_nothing_left(TIMEOUT_S)

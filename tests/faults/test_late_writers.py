"""A writer that is killed, stopped, or goes on too late, at every moment of a write, in shared memory and over tcp.

Blocks are given to somebody else only after the fence, and what that one writes there stays as it is.
"""

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec
import pytest
from tests.faults.writer_process import BYTE, STATES, WRITER, WRITER_INCARNATION
from tests.unit.transport.rigs import DEADLINE_S, EventLog

from disagg.core.endpoints import Endpoint, TransportKind
from disagg.core.ids import Incarnation, WorkerId
from disagg.kvcache.memory import Segment
from disagg.testing.memory import BytesLanding, SealedBytesMemory, StagedLanding
from disagg.transport.api import GrantFenced, Sender, TransportEvent, Write, WriteFinished, WriteLanded, WriterStuck
from disagg.transport.shared_memory_receiver import SharedMemoryReceiver
from disagg.transport.shared_memory_sender import SharedMemorySender
from disagg.transport.sharing import draw_domain
from disagg.transport.tcp_receiver import TcpReceiver
from disagg.transport.tcp_sender import TcpSender

ARENA_BYTES = 8 << 20
WHOLE = (Segment(0, ARENA_BYTES),)
OWNER, NEXT = WorkerId("owner"), WorkerId("next")
NEXT_INCARNATION = Incarnation(4)
INCARNATION = Incarnation(7)
KEY, NEXT_KEY = b"key", b"next"
ROUNDS = [pytest.param(1, id="once"), pytest.param(10, id="ten times", marks=pytest.mark.slow)]
STUCK_AFTER_S = 0.4
PROGRAM = Path(__file__).with_name("writer_process.py")


class WatchedMemory(SealedBytesMemory):
    """Tells when something is about to land."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self.entered = threading.Event()

    def landing(self, segments: Sequence[Segment]) -> BytesLanding | StagedLanding:
        self.entered.set()
        return super().landing(segments)


class Site:
    """The arena's owner, an honest second writer in this process, and one writer that stops where it is told."""

    def __init__(self, kind: TransportKind, fence_timeout_s: float) -> None:
        self.kind = kind
        self.domain = draw_domain()
        self.memory = WatchedMemory(ARENA_BYTES)
        self.landed, self.sent = EventLog(), EventLog()
        source = SealedBytesMemory(data=b"n" * ARENA_BYTES)
        self.receiver: SharedMemoryReceiver | TcpReceiver
        self.next: Sender
        if kind is TransportKind.TCP:
            self.receiver = TcpReceiver(self.memory, INCARNATION, self.landed.post, fence_timeout_s=fence_timeout_s)
            self.next = TcpSender(NEXT, NEXT_INCARNATION, source, self.sent.post)
        else:
            self.receiver = SharedMemoryReceiver(
                self.memory, INCARNATION, self.landed.post, self.domain, fence_timeout_s=fence_timeout_s
            )
            self.next = SharedMemorySender(NEXT, source, self.sent.post, self.domain)
        self.next.connect(OWNER, self.endpoint_for(NEXT, NEXT_INCARNATION), INCARNATION)
        self.receiver.grant(WRITER, KEY, WHOLE)

    def endpoint_for(self, peer: WorkerId, incarnation: Incarnation) -> Endpoint:
        """As the paired peer is told it."""
        return self.receiver.endpoint_for(peer, incarnation)

    def start(self, state: str) -> None:
        """Returns when the writer is at that moment of its write."""
        paths = os.pathsep.join([*(path for path in sys.path if path), str(PROGRAM.parents[2])])
        environment = {**os.environ, **self.domain.environment(), "PYTHONPATH": paths}
        endpoint = msgspec.msgpack.encode(self.endpoint_for(WRITER, WRITER_INCARNATION)).hex()
        arguments = (state, endpoint, str(INCARNATION), KEY.hex(), str(ARENA_BYTES))
        self.child = subprocess.Popen(
            [sys.executable, str(PROGRAM), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        assert self.read_line() == state
        if self.kind is TransportKind.TCP and may_land(self.kind, state):
            assert self.memory.entered.wait(DEADLINE_S)  # the header has been read

    def read_line(self) -> str:
        assert self.child.stdout is not None
        return self.child.stdout.readline().strip()

    def go_on(self) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write("\n")
        self.child.stdin.flush()

    def give_to_next(self) -> None:
        """What quarantine guards: the blocks are somebody else's from now on."""
        self.receiver.check_invariants()
        self.receiver.grant(NEXT, NEXT_KEY, WHOLE)
        self.next.write(Write(OWNER, NEXT_KEY, 0, b"", WHOLE, WHOLE))
        assert self.sent.wait(WriteFinished)[0].failure is None

    def assert_all_is_nexts(self) -> None:
        assert self.memory.read(WHOLE) == b"n" * ARENA_BYTES

    def close(self) -> None:
        self.child.kill()
        self.child.wait(DEADLINE_S)
        for pipe in (self.child.stdin, self.child.stdout):
            assert pipe is not None
            pipe.close()
        self.next.close()
        self.receiver.close()


@pytest.fixture
def sites() -> Iterator[list[Site]]:
    made: list[Site] = []
    yield made
    for site in made:
        site.close()


def at(sites: list[Site], kind: TransportKind, state: str, fence_timeout_s: float) -> Site:
    site = Site(kind, fence_timeout_s)
    sites.append(site)
    site.start(state)
    return site


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize(("kind", "state"), STATES)
def test_a_killed_writers_blocks_are_fenced_by_its_death(
    sites: list[Site], kind: TransportKind, state: str, rounds: int
) -> None:
    for number in range(rounds):
        site = at(sites, kind, state, 60.0)
        if number % 2:  # the withdrawal may come before the death, or after
            site.receiver.revoke(KEY)
            assert (site.landed.of(GrantFenced) == []) is may_land(kind, state)
        site.child.kill()
        site.child.wait(DEADLINE_S)
        if not number % 2:
            site.receiver.revoke(KEY)
        assert site.landed.wait(GrantFenced) == [GrantFenced(KEY)]
        assert site.landed.of(WriterStuck) == []
        assert site.landed.of(WriteLanded) == []
        site.give_to_next()
        site.assert_all_is_nexts()


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("state", [state for kind, state in STATES if kind is TransportKind.SHARED_MEMORY])
def test_a_stopped_writer_is_ended_by_force_and_only_then_are_its_blocks_fenced(
    sites: list[Site], state: str, rounds: int
) -> None:
    for _ in range(rounds):
        site = at(sites, TransportKind.SHARED_MEMORY, state, STUCK_AFTER_S)
        site.child.send_signal(signal.SIGSTOP)
        states_when_fenced: queue.SimpleQueue[str] = queue.SimpleQueue()
        site.landed.on_event = partial(_note_state, site.child.pid, states_when_fenced)
        revoked_s = time.monotonic()
        site.receiver.revoke(KEY)
        with contextlib.suppress(subprocess.TimeoutExpired):
            site.child.wait(0.1)
            assert time.monotonic() - revoked_s >= STUCK_AFTER_S, "it was ended before its time"
        assert site.landed.wait(WriterStuck) == [WriterStuck(WRITER, KEY, site.child.pid)]
        assert states_when_fenced.get(timeout=DEADLINE_S) in ("Z", "")
        assert [type(event) for event in site.landed.events] == [WriterStuck, GrantFenced]
        assert site.child.wait(DEADLINE_S) == -signal.SIGKILL
        site.give_to_next()
        site.assert_all_is_nexts()


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize(("kind", "state"), STATES)
def test_a_writer_that_goes_on_late_writes_into_quarantined_blocks_only(
    sites: list[Site], kind: TransportKind, state: str, rounds: int
) -> None:
    for _ in range(rounds):
        site = at(sites, kind, state, 60.0)
        site.child.send_signal(signal.SIGSTOP)
        site.receiver.revoke(KEY)
        with pytest.raises(subprocess.TimeoutExpired):
            site.child.wait(0.1)
        site.child.send_signal(signal.SIGCONT)
        with pytest.raises(subprocess.TimeoutExpired):
            site.child.wait(0.1)
        # It runs, and has not said that it writes no more.
        assert (site.landed.of(GrantFenced) == []) is may_land(kind, state)
        site.go_on()
        assert site.landed.wait(GrantFenced) == [GrantFenced(KEY)]
        did_write = site.memory.read((Segment(ARENA_BYTES - 1, 1),)) == BYTE
        assert did_write is may_land(kind, state)  # and that before the fence
        site.give_to_next()
        assert re.search("revoked|not granted", site.read_line())
        assert site.child.wait(DEADLINE_S) == 0
        site.assert_all_is_nexts()
        assert [event.key for event in site.landed.of(WriteLanded)] == [NEXT_KEY]


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("state", [state for kind, state in STATES if kind is TransportKind.TCP])
def test_over_tcp_a_stopped_writer_is_cut_off_and_goes_on_in_vain(sites: list[Site], state: str, rounds: int) -> None:
    for _ in range(rounds):
        site = at(sites, TransportKind.TCP, state, 0.2)
        site.child.send_signal(signal.SIGSTOP)
        site.receiver.revoke(KEY)
        assert site.landed.wait(GrantFenced) == [GrantFenced(KEY)]
        site.give_to_next()
        site.child.send_signal(signal.SIGCONT)
        site.go_on()
        assert site.read_line().startswith("failed")
        assert site.child.wait(DEADLINE_S) == 0
        site.assert_all_is_nexts()
        assert [event.key for event in site.landed.of(WriteLanded)] == [NEXT_KEY]


def may_land(kind: TransportKind, state: str) -> bool:
    """Whether bytes of that writer can still land: over tcp only once the receiver has seen the header."""
    return kind is TransportKind.SHARED_MEMORY or state != "permitted"


def _note_state(pid: int, states: "queue.SimpleQueue[str]", event: TransportEvent) -> None:
    if isinstance(event, GrantFenced):
        states.put(_state_of(pid))


def _state_of(pid: int) -> str:
    """One letter, as the kernel spells it; "" when the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return ""

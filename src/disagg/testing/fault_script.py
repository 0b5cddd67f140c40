"""What goes wrong on a real system, when, and for how long: drawn from a seed, then played.

    pure part   draw_script(rng, ...) -> frozen faults in order of time
    player      FaultPlayer starts each at its moment and ends it after its duration; none outlives play()

Faults of different targets overlap; two faults of one target do not.
"""

import asyncio
import contextlib
import enum
import random
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from disagg.core.errors import InternalFault
from disagg.testing.faulty_link import WORKS, LinkFaults

ROUTER = "router"
SLICE_S = 0.05  # of a slow worker: so often it is stopped
STOPPED_SHARE = 0.8
REST_S = 0.5  # between two faults of one target


class FaultKind(enum.StrEnum):
    KILL = "kill"
    SHORT_STOP = "short stop"  # below the heartbeat's limit
    LONG_STOP = "long stop"  # beyond it
    SLOW_WORKER = "slow worker"  # stopped for 80 % of every 50 ms
    LINK_CUT = "link cut"
    LINK_SILENT = "link silent"  # half-open: no data, no end
    LINK_DELAYED = "link delayed"
    LINK_NARROW = "link narrow"
    MESSAGES_DUPLICATED = "messages duplicated"
    MESSAGES_DROPPED = "messages dropped"
    MESSAGES_CORRUPTED = "messages corrupted"
    KV_CORRUPTED = "KV corrupted"


PROCESS_KINDS = (FaultKind.KILL, FaultKind.SHORT_STOP, FaultKind.LONG_STOP, FaultKind.SLOW_WORKER)
LINK_KINDS = tuple(kind for kind in FaultKind if kind not in PROCESS_KINDS)

# Least and most seconds.
DURATIONS_S: dict[FaultKind, tuple[float, float]] = {
    FaultKind.KILL: (0.0, 0.0),
    FaultKind.SHORT_STOP: (0.1, 0.8),
    FaultKind.LONG_STOP: (4.0, 4.0),
    FaultKind.SLOW_WORKER: (2.0, 5.0),
    FaultKind.LINK_CUT: (0.2, 3.0),
    FaultKind.LINK_SILENT: (0.5, 6.0),
    FaultKind.LINK_DELAYED: (2.0, 5.0),
    FaultKind.LINK_NARROW: (2.0, 5.0),
    FaultKind.MESSAGES_DUPLICATED: (2.0, 5.0),
    FaultKind.MESSAGES_DROPPED: (2.0, 5.0),
    FaultKind.MESSAGES_CORRUPTED: (2.0, 5.0),
    FaultKind.KV_CORRUPTED: (2.0, 5.0),
}
LINK_FAULTS: dict[FaultKind, LinkFaults] = {
    FaultKind.LINK_CUT: LinkFaults(is_cut=True),
    FaultKind.LINK_SILENT: LinkFaults(is_silent=True),
    FaultKind.LINK_DELAYED: LinkFaults(delay_s=0.1),
    FaultKind.LINK_NARROW: LinkFaults(bytes_per_s=200e3),
    FaultKind.MESSAGES_DUPLICATED: LinkFaults(duplicate_share=0.3),
    FaultKind.MESSAGES_DROPPED: LinkFaults(drop_share=0.02),
    FaultKind.MESSAGES_CORRUPTED: LinkFaults(corrupt_share=0.02),
    FaultKind.KV_CORRUPTED: LinkFaults(corrupt_push_share=0.5),
}


class Target(msgspec.Struct, frozen=True):
    """A worker, or the link on which it dials `peer` (a worker or "router")."""

    worker: str
    peer: str = ""

    def __str__(self) -> str:
        return f"{self.worker}>{self.peer}" if self.peer else self.worker


class Fault(msgspec.Struct, frozen=True):
    """at_s: after the script's start."""

    at_s: float
    kind: FaultKind
    target: Target
    duration_s: float


def draw_script(
    rng: random.Random,
    *,
    duration_s: float,
    mean_gap_s: float,
    workers: Sequence[str],
    links: Sequence[tuple[str, str]] = (),
) -> tuple[Fault, ...]:
    """Faults of [0, duration_s), every kind about equally often; without links only those of processes.

    Raises InternalFault without workers or with a gap of 0.
    """
    if not workers or mean_gap_s <= 0:
        raise InternalFault(f"{len(workers)} workers, a fault every {mean_gap_s:g} s: both must be above 0")
    busy_until_s: dict[Target, float] = {}
    faults: list[Fault] = []
    deck: list[FaultKind] = []
    at_s = rng.expovariate(1 / mean_gap_s)
    while at_s < duration_s:
        if not deck:
            deck = [*PROCESS_KINDS, *(kind for kind in LINK_KINDS if _links_of(kind, links))]
            rng.shuffle(deck)
        kind = deck.pop()
        target = _draw_target(rng, kind, workers, links)
        length_s = rng.uniform(*DURATIONS_S[kind])
        if busy_until_s.get(target, 0.0) <= at_s:
            faults.append(Fault(at_s, kind, target, length_s))
            busy_until_s[target] = at_s + length_s + REST_S
        else:
            deck.insert(0, kind)
        at_s += rng.expovariate(1 / mean_gap_s)
    return tuple(faults)


def _draw_target(
    rng: random.Random, kind: FaultKind, workers: Sequence[str], links: Sequence[tuple[str, str]]
) -> Target:
    return Target(*rng.choice(_links_of(kind, links))) if kind in LINK_KINDS else Target(rng.choice(workers))


def _links_of(kind: FaultKind, links: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """KV travels between workers only."""
    return [link for link in links if kind is not FaultKind.KV_CORRUPTED or link[1] != ROUTER]


class Breakable(Protocol):
    """A real cluster. kill() raises InternalFault or ProcessLookupError for a process that is not there."""

    def kill(self, name: str, number: int) -> int:
        """Send a worker's process a signal; its pid."""

    def set_link(self, worker: str, peer: str, faults: LinkFaults) -> None: ...


class FaultPlayer:
    """Plays one script against one cluster."""

    def __init__(self, cluster: Breakable, script: Sequence[Fault], say: Callable[[str], None] = lambda line: None):
        self._cluster = cluster
        self._script = script
        self._say = say
        self.played: Counter[FaultKind] = Counter()
        self.num_running = 0

    async def play(self) -> None:
        """Until the last fault is over. Cancelled, it ends all faults that are under way."""
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        async with asyncio.TaskGroup() as tasks:
            for fault in self._script:
                await asyncio.sleep(max(0.0, start_s + fault.at_s - loop.time()))
                tasks.create_task(self._play_one(fault))

    def check_invariants(self) -> None:
        if not 0 <= self.num_running <= len(self._script):
            raise InternalFault(f"{self.num_running} of {len(self._script)} faults are under way")

    async def _play_one(self, fault: Fault) -> None:
        self.num_running += 1
        try:
            with contextlib.suppress(InternalFault, ProcessLookupError):  # it is down already
                await (self._break_link(fault) if fault.target.peer else self._break_worker(fault))
        finally:
            self.num_running -= 1

    def _note(self, fault: Fault) -> None:
        """It has begun."""
        self.played[fault.kind] += 1
        self._say(f"{fault.at_s:7.2f} s  {fault.kind} of {fault.target} for {fault.duration_s:.2f} s")

    async def _break_link(self, fault: Fault) -> None:
        target = fault.target
        self._cluster.set_link(target.worker, target.peer, LINK_FAULTS[fault.kind])
        self._note(fault)
        try:
            await asyncio.sleep(fault.duration_s)
        finally:
            self._cluster.set_link(target.worker, target.peer, WORKS)

    async def _break_worker(self, fault: Fault) -> None:
        name = fault.target.worker
        if fault.kind is FaultKind.KILL:
            self._cluster.kill(name, signal.SIGKILL)
            self._note(fault)
            return
        is_slow = fault.kind is FaultKind.SLOW_WORKER
        end_s = asyncio.get_running_loop().time() + fault.duration_s
        await self._stop(name, SLICE_S * STOPPED_SHARE if is_slow else fault.duration_s, lambda: self._note(fault))
        while is_slow and asyncio.get_running_loop().time() < end_s:
            await asyncio.sleep(SLICE_S * (1 - STOPPED_SHARE))
            await self._stop(name, SLICE_S * STOPPED_SHARE)

    async def _stop(self, name: str, duration_s: float, on_stopped: Callable[[], None] = lambda: None) -> None:
        self._cluster.kill(name, signal.SIGSTOP)
        try:
            on_stopped()
            await asyncio.sleep(duration_s)
        finally:
            self._cluster.kill(name, signal.SIGCONT)

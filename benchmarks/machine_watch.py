"""How fast each core is, moment by moment, beside whatever else runs there.

    python benchmarks/machine_watch.py CORE [SECONDS]        one line for each moment, until it is killed

A virtual machine gets faster and slower with its neighbours, within seconds and by half. So two small pieces of work
that are no part of what is measured are done again and again on each core: one that computes, as reading prompts does,
and one that reads memory, as steps of streams do. They are timed in seconds of the processor, so waiting for one's turn
does not count; together they take some thousandths of a core.
"""

import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from disagg.testing.processes import MarkedProcess

EVERY_S = 1.0
MATRIX = 192  # rows and columns: its three fit into a core's own cache
REPEATS = 2  # the better one counts: what interrupts one does not interrupt both
MEMORY_BYTES = 16 << 20  # more than stays in a cache beside a busy worker
NEAR = 3  # moments whose median is one's own


class Moment(msgspec.Struct, frozen=True):
    """Seconds on time.perf_counter(), which all processes of a machine share; and what the two pieces took."""

    at_s: float
    compute_s: float
    memory_s: float


class Pace(msgspec.Struct, frozen=True):
    """From then on: how many times as long as at another time."""

    at_s: float
    prompts: float
    streams: float


class Watched:
    """One core's moments, in order."""

    def __init__(self, moments: Sequence[Moment]) -> None:
        self._moments = moments

    def level(self, since_s: float, until_s: float) -> Moment:
        """Medians of a while; of all that there is where nothing was seen in it."""
        seen = [each for each in self._moments if since_s <= each.at_s <= until_s] or self._moments
        return Moment(
            since_s,
            statistics.median(each.compute_s for each in seen),
            statistics.median(each.memory_s for each in seen),
        )

    def paces(self, since_s: float, until_s: float, usual: Moment) -> Iterator[Pace]:
        """From moment to moment, beside `usual`; times count from since_s, where the first one begins."""
        for place, moment in enumerate(self._moments):
            if not since_s - EVERY_S <= moment.at_s <= until_s:
                continue
            near = self._moments[max(0, place - NEAR // 2) : place + NEAR // 2 + 1]
            compute_s = statistics.median(each.compute_s for each in near)
            memory_s = statistics.median(each.memory_s for each in near)
            at_s = max(0.0, moment.at_s - EVERY_S / 2 - since_s)
            yield Pace(at_s, compute_s / usual.compute_s, memory_s / usual.memory_s)


class MachineWatch:
    """Watches these cores. Use as a context manager; `watched()` after it has ended, or meanwhile."""

    def __init__(self, cores: Sequence[int]) -> None:
        self._cores = cores
        self._stack = contextlib.ExitStack()
        self._processes: dict[int, MarkedProcess] = {}

    def __enter__(self) -> "MachineWatch":
        program = (sys.executable, str(Path(__file__).resolve()))
        for core in self._cores:
            arguments = (str(core), str(EVERY_S), str(os.getpid()))
            process = MarkedProcess(arguments, program=program, environment={"OPENBLAS_NUM_THREADS": "1"})
            self._processes[core] = self._stack.enter_context(process)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def watched(self, core: int) -> Watched:
        """Raises LookupError before anything was seen, or of a core that is not watched."""
        lines = self._processes[core].lines
        moments = [msgspec.json.decode(line, type=Moment) for line in lines if line.startswith("{")]
        if not moments:
            raise LookupError(f"nothing was seen of core {core} yet: it is asked every {EVERY_S:g} s")
        return Watched(moments)


def cpu_s(work: Callable[[], object]) -> float:
    """Of the best try."""
    best_s = float("inf")
    for _ in range(REPEATS):
        begun_s = time.thread_time()
        work()
        best_s = min(best_s, time.thread_time() - begun_s)
    return best_s


def main() -> None:
    core, every_s = int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else EVERY_S
    parent = int(sys.argv[3]) if len(sys.argv) > 3 else os.getppid()
    os.sched_setaffinity(0, {core})
    one = np.ones((MATRIX, MATRIX), np.float32)
    product = np.empty_like(one)
    memory = np.ones(MEMORY_BYTES // 4, np.float32)
    next_s = time.perf_counter()
    while os.getppid() == parent:
        computed_s = cpu_s(lambda: np.matmul(one, one, out=product))
        read_s = cpu_s(memory.sum)
        print(msgspec.json.encode(Moment(time.perf_counter(), computed_s, read_s)).decode(), flush=True)
        next_s += every_s
        time.sleep(max(0.0, next_s - time.perf_counter()))


if __name__ == "__main__":
    main()

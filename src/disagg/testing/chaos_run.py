"""One run of chaos against one cluster.

standard   questions undisturbed: latencies to compare with
fault      the same questions while a script of faults is played, and some clients leave
recovery   undisturbed again, once everything is back
at the end no block may be held, reserved or quarantined
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Sequence

import httpx
import msgspec

from disagg.cluster.view import ClusterView
from disagg.core.errors import InternalFault
from disagg.telemetry import metrics as table
from disagg.testing.chaos_counters import CounterWatch
from disagg.testing.chaos_workload import Outcome, Question, ask, is_longer, is_same
from disagg.testing.fault_script import Breakable, FaultPlayer, draw_script

RETURN_TIMEOUT_S = 120.0
IDLE_TIMEOUT_S = 40.0
POLL_S = 0.2
PHASES = ("standard", "fault", "recovery")


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What clients do, and how often something breaks."""

    seed: int
    concurrency: int  # clients, each with one request at a time
    max_requests: int  # of the fault phase
    fault_seconds: float  # most seconds of the fault phase
    fault_every_s: float  # mean
    abort_share: float  # of the clients of the fault phase leave before their answer is whole


class Asked(msgspec.Struct, frozen=True):
    index: int  # of the question
    outcome: Outcome


class ChaosRun:
    """Drives the clients and the faults; keeps what came of them."""

    def __init__(
        self,
        cluster: Breakable,
        url: str,
        load: Load,
        *,
        workers: Sequence[str],
        links: Sequence[tuple[str, str]],
        questions: Sequence[Question],
        reference: dict[int, Outcome],
    ) -> None:
        """`reference` by number of the question is filled in where it lacks one; answers are compared with it."""
        self.asked: dict[str, list[Asked]] = {phase: [] for phase in PHASES}
        self.counters = CounterWatch()
        self.num_leaked_blocks = 0
        self._url = url
        self._load = load
        self._workers = list(workers)
        self._questions = questions
        self._reference = reference
        self._random = random.Random(load.seed)
        script = draw_script(
            self._random,
            duration_s=load.fault_seconds,
            mean_gap_s=load.fault_every_s,
            workers=workers,
            links=links,
        )
        self.player = FaultPlayer(cluster, script)

    async def run(self, wait_whole: Callable[[], Awaitable[None]]) -> None:
        """All phases. Raises InternalFault when an undisturbed answer fails or the cluster does not come back."""
        limits = httpx.Limits(max_connections=self._load.concurrency * 2)
        async with httpx.AsyncClient(base_url=self._url, timeout=None, limits=limits, trust_env=False) as client:
            await self._learn(client)
            await self._phase(client, "standard", len(self._questions))
            background = [
                asyncio.create_task(self.player.play()),
                asyncio.create_task(self.counters.keep_reading(client)),
            ]
            try:
                await self._phase(client, "fault", self._load.max_requests, self._load.fault_seconds)
            finally:
                for task in background:
                    task.cancel()
                results = await asyncio.gather(*background, return_exceptions=True)
            for result in results:
                if isinstance(result, Exception):
                    raise result
            await wait_whole()
            await self._phase(client, "recovery", len(self._questions))
            await self.counters.read_once(client)
            self.num_leaked_blocks = await self._leaked_blocks(client)

    def check_invariants(self) -> None:
        self.counters.check_invariants()
        self.player.check_invariants()

    def num_lost(self) -> int:
        return sum(asked.outcome.error is not None for asked in self._answered())

    def num_differing(self) -> int:
        return sum(
            asked.outcome.error is None and not is_same(asked.outcome, self._reference[asked.index])
            for asked in self._answered()
        )

    def num_duplicated(self) -> int:
        """Of the differing answers, those with more tokens than the undisturbed one."""
        return sum(is_longer(asked.outcome, self._reference[asked.index]) for asked in self._answered())

    def _answered(self) -> list[Asked]:
        return [asked for phase in self.asked.values() for asked in phase if not asked.outcome.is_aborted]

    async def _learn(self, client: httpx.AsyncClient) -> None:
        for index, question in enumerate(self._questions):
            if index not in self._reference:
                outcome = await ask(client, question)
                if outcome.error is not None:
                    raise InternalFault(f"undisturbed, and yet: {outcome.error}")
                self._reference[index] = outcome

    async def _phase(
        self, client: httpx.AsyncClient, name: str, num_requests: int, seconds: float = float("inf")
    ) -> None:
        """A closed loop of `concurrency` clients: that many requests, or as many as begin in time."""
        end_s = time.monotonic() + seconds
        left = iter(range(num_requests))
        leave_share = self._load.abort_share if name == "fault" else 0.0

        async def work() -> None:
            for _ in left:
                if time.monotonic() > end_s:
                    return
                index = self._random.randrange(len(self._questions))
                leaves_s = self._random.uniform(0, 0.5) if self._random.random() < leave_share else None
                outcome = await ask(client, self._questions[index], leaves_s)
                self.asked[name].append(Asked(index, outcome))
                self._tell(name, index, outcome)

        await asyncio.gather(*(work() for _ in range(self._load.concurrency)))

    def _tell(self, phase: str, index: int, outcome: Outcome) -> None:
        if outcome.error is not None:
            print(f"lost ({phase}): {self._questions[index].kind}: {outcome.error}", flush=True)
        elif not outcome.is_aborted and not is_same(outcome, self._reference[index]):
            print(f"differs: {self._questions[index].body}\n  {outcome}\n  {self._reference[index]}", flush=True)

    async def _leaked_blocks(self, client: httpx.AsyncClient) -> int:
        """Blocks that are neither free nor cached once nothing runs."""
        end_s = time.monotonic() + IDLE_TIMEOUT_S
        while True:
            view = msgspec.json.decode((await client.get("/cluster")).content, type=ClusterView)
            states = [worker.state for worker in view.workers]
            left = sum(s.num_held_blocks + s.num_reserved_blocks + s.num_quarantined_blocks for s in states)
            if left == 0 or time.monotonic() > end_s:
                return left
            await asyncio.sleep(POLL_S)


async def wait_connected(url: str, num_workers: int) -> None:
    """Until so many workers are registered. Raises InternalFault."""
    end_s = time.monotonic() + RETURN_TIMEOUT_S
    async with httpx.AsyncClient(base_url=url, timeout=5.0, trust_env=False) as client:
        while time.monotonic() < end_s:
            with contextlib.suppress(httpx.HTTPError):
                view = msgspec.json.decode((await client.get("/cluster")).content, type=ClusterView)
                if len(view.workers) == num_workers:
                    return
            await asyncio.sleep(POLL_S)
    raise InternalFault(f"not all of {num_workers} workers were back within {RETURN_TIMEOUT_S:g} s")


def figures(run: ChaosRun) -> dict[str, object]:
    """What a report prints, by name."""
    counters = run.counters
    everything = [asked for phase in PHASES for asked in run.asked[phase]]
    found: dict[str, object] = {
        "requests": len(everything),
        "left by their client": sum(asked.outcome.is_aborted for asked in everything),
        "faults": {kind.value: count for kind, count in sorted(run.player.played.items())},
        "moved, by cause": counters.by_label(table.MOVES),
        "tokens read again": counters.by_label(table.MOVED_TOKENS),
        "wrong checksums": counters.total(table.LANDINGS_REJECTED),
        "pushes repeated": counters.total(table.PUSH_RETRIES),
        "preemptions": counters.total(table.PREEMPTIONS),
        "lost": run.num_lost(),
        "differing": run.num_differing(),
        "duplicated": run.num_duplicated(),
        "leaked blocks": run.num_leaked_blocks,
    }
    for phase in PHASES:
        outcomes = [asked.outcome for asked in run.asked[phase]]
        streamed = [o for o in outcomes if len(o.piece_times_s) > 1 and o.error is None and not o.is_aborted]
        firsts = sorted(o.ttft_s for o in streamed if o.ttft_s is not None)
        gaps = sorted(gap for o in streamed for gap in o.gaps_s)
        found[phase] = {
            "requests": len(outcomes),
            "ttft_ms p50 p99": [_ms(firsts, 0.5), _ms(firsts, 0.99)],
            "itl_ms p50 p99 most": [_ms(gaps, 0.5), _ms(gaps, 0.99), _ms(gaps, 1.0)],
        }
    return found


def _ms(values: Sequence[float], share: float) -> float:
    return round(1e3 * values[min(len(values) - 1, int(share * len(values)))], 1) if values else 0.0

"""The live half of simulated_live.py: a server whose cores are watched, and how fast the machine is now."""

import argparse
import os
import statistics
import time
from pathlib import Path

import msgspec

import harness
import paced
from disagg.bench.client import Api
from disagg.bench.measure import LoadPlan, LoadResult, Target, measure
from disagg.bench.prompts import plain_ids
from disagg.bench.slo import Slo
from disagg.bench.workload import ClosedWork
from disagg.core.errors import ConfigurationError
from disagg.sim.hardware.serving import LoneTimes, Serving, Speed
from disagg.telemetry.stages import Stage
from disagg.telemetry.timeline import Part
from disagg.testing.processes import Serve
from machine_watch import MachineWatch, Watched
from simulated_side import LONE_ANSWER, LONE_PROMPT, LONE_PROMPTS, Side, lone_work

ANSWER_TIMEOUT_S = 120.0


class Lone(msgspec.Struct, frozen=True):
    """What a lone client saw. per_watched: times as long as profiled, for a second of each piece of the watch.

    The same as speed on a paced device, which is not watched.
    """

    speed: Speed
    per_watched: Speed


class Shares:
    """CPU time of this client and of a router over a while."""

    def __init__(self, server: Serve, args: argparse.Namespace) -> None:
        self._args = args
        self._router = server.pid_of("router")
        self._use = harness.cpu_use()
        self._before = (time.process_time(), self._router_s())

    def _router_s(self) -> float:
        fields = Path(f"/proc/{self._router}/stat").read_bytes().rpartition(b")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def taken(self) -> tuple[float, float, float]:
        """Client and router, of a core; others, of all cores."""
        use = harness.cpu_use()
        passed_s = use.at_s - self._use.at_s
        client_s, router_s = time.process_time() - self._before[0], self._router_s() - self._before[1]
        return client_s / passed_s, router_s / passed_s, paced.foreign_share(self._args, self._use, use)


class LiveSide:
    """A server with its workers' cores watched."""

    def __init__(
        self, side: Side, server: Serve, watch: MachineWatch, serving: Serving, args: argparse.Namespace
    ) -> None:
        self.server = server
        self._watch = watch
        self._serving = serving
        self._cores = {name: harness.cores_of(server, name)[0] for name in side.workers}
        ids = plain_ids(args.model)
        self._target = Target(url=server.url, api=Api.IDS, ids=ids, timeout_s=ANSWER_TIMEOUT_S)
        self._seed = args.seed
        self._is_paced = args.paced
        self._num_lone = 0

    def ask(self, plan: LoadPlan) -> LoadResult:
        return measure(self._target, plan)

    def watched(self) -> dict[str, Watched]:
        """By worker, so far."""
        return {name: self._watch.watched(core) for name, core in self._cores.items()}

    def ask_lone(self) -> Lone:
        """How fast the machine is now."""
        self._num_lone += 1
        seed = self._seed + 1000 * self._num_lone
        begun_s = time.perf_counter()
        result = self.ask(LoadPlan(workload=ClosedWork(lone_work(), 1), slo=Slo(), seed=seed, prompt_seed=seed))
        gaps_s = [gap_s for record in result.records if record.is_whole for gap_s in record.gaps_s[1:]]
        choices = [choice for timeline in result.observation.timelines for choice in timeline.choices]
        if not gaps_s or not choices:
            raise ConfigurationError(
                f"none of {LONE_PROMPTS} lone prompts got an answer of three tokens and a timeline"
            )
        step_s = statistics.median(choice.seconds(Part.TTFT, Stage.PREFILL) for choice in choices)
        lone = LoneTimes(LONE_PROMPT, step_s, LONE_PROMPT + LONE_ANSWER / 2, statistics.median(gaps_s))
        speed = self._serving.speed_of(lone)
        if self._is_paced:
            return Lone(speed, speed)
        reader = statistics.mode(choice.prefill_worker or choice.decode_worker for choice in choices)
        writer = statistics.mode(choice.decode_worker for choice in choices)
        seen = {name: each.level(begun_s, time.perf_counter()) for name, each in self.watched().items()}
        return Lone(speed, Speed(speed.prompts / seen[reader].compute_s, speed.streams / seen[writer].memory_s))

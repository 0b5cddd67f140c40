"""The simulator beside our own live system: the same requests, asked here and played in virtual time.

    python benchmarks/simulated_live.py [--seconds 35] [--profile FILE] [--paced] [--quick]

1. `disagg profile --served-rounds` times steps, a lone client, and workers beside busy neighbours on this machine
   (--profile: one that was written before). Nothing of what is compared goes into it.
2. The highest rate that attains 90 % is looked for in the simulator, for 1 prefill + 1 decode and for 2 mixed workers.
3. At 40, 60 and 85 % of it a seeded open-loop load is asked of the live system, and the very same requests, lengths and
   times of the simulator: TTFT, TPOT (p50, p90) and attainment, live, simulated, error.
4. Before and after each load a lone client asks a few prompts of the same server. A machine that is shared with others
   is not as fast now as when it was profiled: the simulated one is as fast as those lone answers were, and there is no
   verdict where they changed by more than 10 % from before to after the load.

--paced serves and profiles on a device whose speed holds still (see paced.py): all is there but the machine's own
moods, which on a shared one are larger than what is compared. How many steps were late is printed.

Router and client have no core of their own: what they take of the workers' cores is printed. Target: 10 %.
"""

import argparse
import math
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

import harness
import paced
from disagg.bench.arrivals import EvenArrivals, PoissonArrivals
from disagg.bench.client import Api
from disagg.bench.measure import LoadPlan, LoadResult, Target, measure
from disagg.bench.percentiles import summary
from disagg.bench.prompts import plain_ids
from disagg.bench.search import RateSearch
from disagg.bench.slo import Slo
from disagg.bench.workload import ClosedWork, Lengths, RandomWork
from disagg.core.errors import ConfigurationError
from disagg.core.roles import Role
from disagg.router.config import RouterConfig
from disagg.sim.hardware.fitted import Profile
from disagg.sim.hardware.serving import LoneTimes, Serving, Speed
from disagg.sim.outcome import Outcome
from disagg.sim.profiled import profiled_worker
from disagg.sim.scenario import MESSAGE_S, Fidelity, Scenario, WorkerSpec
from disagg.sim.simulate import simulate
from disagg.testing.processes import MarkedProcess, Serve
from disagg.worker.config import WorkerConfig

NUM_BLOCKS = 512
LOCAL_TOKENS = 64  # prompts up to so many are read by the decode worker: both paths are played
PROMPT = Lengths(160, 110, is_lognormal=True, least=16, most=480)
ANSWER = Lengths(32, 14, is_lognormal=True, least=8, most=80)
LOADS = (0.4, 0.6, 0.85)
TARGET_SHARE = 0.9
SEARCH_RUNS, SEARCH_REQUESTS = 12, 250
MAX_ERROR = 0.10
LONE_PROMPTS, LONE_PROMPT, LONE_ANSWER = 4, 160, 24  # of a lone client, before and after each load
MAX_DRIFT = 0.10
PROFILE_TIMEOUT_S = 500.0
ANSWER_TIMEOUT_S = 120.0


class Side(msgspec.Struct, frozen=True):
    """One way to use two cores."""

    name: str
    pools: tuple[str, ...]
    roles: tuple[Role, ...]


SIDES = (
    Side("1 prefill + 1 decode", ("--prefill", "1", "--decode", "1"), (Role.PREFILL, Role.DECODE)),
    Side("2 mixed", ("--mixed", "2"), (Role.MIXED, Role.MIXED)),
)


class Row(msgspec.Struct, frozen=True):
    """One figure of both; seconds or a share."""

    figure: str
    live: float
    simulated: float

    @property
    def error(self) -> float:
        if not self.live:
            return math.inf if self.simulated else 0.0
        return self.simulated / self.live - 1


class Compared(msgspec.Struct, frozen=True):
    """One load. client_share, router_share: of one core. before, after: how long steps took beside the profile's."""

    side: str
    load: float
    rate_per_s: float
    num_requests: int
    num_failed: int
    rows: tuple[Row, ...]
    client_share: float
    router_share: float
    foreign_share: float
    before: Speed
    after: Speed

    @property
    def is_steady(self) -> bool:
        pairs = zip(msgspec.structs.astuple(self.before), msgspec.structs.astuple(self.after), strict=True)
        return all(abs(after - before) <= MAX_DRIFT * before for before, after in pairs)


# ---- profile


class Profiled(NamedTuple):
    """foreign_share: what others took of all cores while it was measured."""

    profile: Profile
    serving: Serving
    foreign_share: float

    def at(self, speed: Speed) -> "Profiled":
        """On the machine as fast as it is now."""
        serving = self.serving.at(speed)
        return self._replace(profile=msgspec.structs.replace(self.profile, serving=serving), serving=serving)


def profile_of(args: argparse.Namespace, folder: Path) -> Profiled:
    """Raises ConfigurationError for a file without served times."""
    path, foreign = Path(args.profile or folder / "profile.json"), 0.0
    if not args.profile:
        repeats, rounds = ("1", "1") if args.quick else ("3", "3")
        flags = ("--max-prompt", "512", "--max-streams", "8", "--limit-s", "30", "--num-blocks", str(NUM_BLOCKS))
        words = ("profile", args.model, "--out", str(path), "--repeats", repeats, "--served-rounds", rounds)
        words = (*words, *args.device.flags, *flags)
        before, ours_s = harness.cpu_use(), ended_children_s()
        with MarkedProcess(words, program=args.device.program) as process:
            if process.wait(PROFILE_TIMEOUT_S) != 0:
                raise ConfigurationError(f"disagg profile failed: {process.output}")
            print("\n".join(f"  {line}" for line in process.lines[-4:]), flush=True)
        after = harness.cpu_use()
        own_s = after.ours - before.ours + ended_children_s() - ours_s
        foreign = max(0.0, (after.busy - before.busy - own_s) / (after.at_s - before.at_s) / (os.cpu_count() or 1))
    found = Profile.read(path)
    if found.serving is None:
        raise ConfigurationError(f"{path} knows of no served times: write it with --served-rounds 3")
    return Profiled(found, found.serving, foreign)


def ended_children_s() -> float:
    """CPU time of processes that were started here and have ended, and of theirs."""
    use = resource.getrusage(resource.RUSAGE_CHILDREN)
    return use.ru_utime + use.ru_stime


def slo_of(serving: Serving) -> Slo:
    """Four times what a mean prompt takes alone, and the target that workers keep beside prompts."""
    costs = serving.costs
    prompt_s = serving.request_s + costs.base_s + costs.prompt_token_s * PROMPT.mean
    live = WorkerConfig(model="-", served_name="-", role=Role.MIXED, worker_id="-", router_address="-")
    return Slo(ttft_s=round(4 * prompt_s, 3), tpot_s=live.itl_target_s)


# ---- simulated


def scenario_of(side: Side, here: Profiled, work: RandomWork, slo: Slo, fidelity: Fidelity) -> Scenario:
    """The live system's defaults, on this machine."""
    router = RouterConfig(models=(("-", "-"),))
    return Scenario(
        workers=tuple(worker_of(f"{role.value}-{n}", role, here.profile) for n, role in enumerate(side.roles)),
        work=work,
        slo=slo,
        fidelity=fidelity,
        local_prefill_tokens=LOCAL_TOKENS,
        max_open_requests=router.max_open_requests,
        contention=here.serving.contention,
        request_s=here.serving.request_s,
    )


def worker_of(name: str, role: Role, profile: Profile) -> WorkerSpec:
    live = WorkerConfig(
        model="-", served_name="-", role=role, worker_id=name, router_address="-", num_blocks=NUM_BLOCKS
    )
    return profiled_worker(live, profile)


def work_of(rate_per_s: float, num_requests: int) -> RandomWork:
    return RandomWork(num_requests=num_requests, arrivals=PoissonArrivals(rate_per_s), prompt=PROMPT, output=ANSWER)


def highest_rate(side: Side, here: Profiled, slo: Slo, seed: int) -> float:
    """Of those that attain the target in the simulator."""
    search = RateSearch(1.0, TARGET_SHARE, max_runs=SEARCH_RUNS, narrow=1.05)
    while (rate_per_s := search.next_rate()) is not None:
        scenario = scenario_of(side, here, work_of(rate_per_s, SEARCH_REQUESTS), slo, Fidelity.LARGE)
        report = simulate(scenario, seed + len(search.trials)).report
        search.tell(rate_per_s, round(report.attainment * report.num_requests), report.num_requests)
    rate_per_s = search.limit().rate_per_s
    if not rate_per_s:
        raise ConfigurationError(
            f"{side.name} attains {slo} at no rate: the machine is busy, or was when it was profiled"
        )
    return rate_per_s


# ---- live


class Shares:
    """CPU time of this client and of a router over a while."""

    def __init__(self, server: Serve) -> None:
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
        return client_s / passed_s, router_s / passed_s, harness.foreign_share(self._use, use)


def asked_live(server: Serve, ids: Sequence[int], plan: LoadPlan) -> tuple[LoadResult, tuple[float, float, float]]:
    shares = Shares(server)
    result = measure(Target(url=server.url, api=Api.IDS, ids=tuple(ids), timeout_s=ANSWER_TIMEOUT_S), plan)
    return result, shares.taken()


class Machine:
    """How fast it is now, by what a lone client sees of a server."""

    def __init__(self, server: Serve, ids: Sequence[int], here: Profiled, seed: int) -> None:
        self._target = Target(url=server.url, api=Api.IDS, ids=tuple(ids), timeout_s=ANSWER_TIMEOUT_S)
        self._serving = here.serving
        self._seed = seed
        self._number = 0

    def speed(self) -> Speed:
        self._number += 1
        work = RandomWork(
            num_requests=LONE_PROMPTS,
            arrivals=EvenArrivals(1.0),
            prompt=Lengths(LONE_PROMPT),
            output=Lengths(LONE_ANSWER),
        )
        seed = self._seed + 1000 * self._number
        plan = LoadPlan(workload=ClosedWork(work, 1), slo=Slo(), seed=seed, prompt_seed=seed)
        records = [record for record in measure(self._target, plan).records if record.is_whole]
        gaps_s = [gap_s for record in records for gap_s in record.gaps_s[1:]]
        if not gaps_s:
            raise ConfigurationError(f"none of {LONE_PROMPTS} lone prompts got an answer of three tokens")
        ttft_s = statistics.median(record.ttft_s for record in records)
        lone = LoneTimes(LONE_PROMPT, ttft_s, LONE_PROMPT + LONE_ANSWER / 2, statistics.median(gaps_s))
        return self._serving.speed_of(lone, MESSAGE_S)


# ---- both


def compare(side: Side, here: Profiled, slo: Slo, args: argparse.Namespace) -> list[Compared]:
    found: list[Compared] = []
    ids = plain_ids(args.model)
    flags = ("--local-prefill-tokens", str(LOCAL_TOKENS), "--num-blocks", str(NUM_BLOCKS))
    words = (args.model, *side.pools, *args.device.flags, *flags)
    with harness.serving(*words, program=args.device.program) as server:
        machine = Machine(server, ids, here, args.seed)
        machine.speed()  # touches memory and code paths that later requests find touched
        speeds = [machine.speed()]
        limit_per_s = highest_rate(side, here.at(speeds[0]), slo, args.seed)
        print(f"\n{side.name}: {limit_per_s:.2f} requests/s attain {TARGET_SHARE:.0%} as simulated", flush=True)
        for number, load in enumerate(args.loads):
            rate_per_s = load * limit_per_s
            work = work_of(rate_per_s, max(8, round(rate_per_s * args.seconds)))
            plan = LoadPlan(workload=work, slo=slo, rate_per_s=rate_per_s, seed=args.seed, prompt_seed=number)
            live, shares = asked_live(server, ids, plan)
            speeds.append(machine.speed())
            now = here.at(speeds[-2].mean_with(speeds[-1]))
            outcome = simulate(scenario_of(side, now, work, slo, Fidelity.SMALL), args.seed)
            found.append(compared(side, load, live, outcome, shares, speeds[-2:]))
            show(found[-1])
    return found


def compared(
    side: Side,
    load: float,
    live: LoadResult,
    outcome: Outcome,
    shares: tuple[float, float, float],
    speeds: Sequence[Speed],
) -> Compared:
    whole = [record for record in live.records if record.is_whole]
    played = list(outcome.records)
    pairs = (
        ("TTFT", summary(r.ttft_s for r in whole), summary(r.ttft_s for r in played)),
        ("TPOT", summary(r.tpot_s or 0.0 for r in whole), summary(r.tpot_s for r in played)),
    )
    rows = [Row(f"{name} {p}", getattr(a, p), getattr(b, p)) for name, a, b in pairs for p in ("p50", "p90")]
    rows.append(Row("attainment", live.figures.attainment.value, outcome.report.attainment))
    num_failed = len(live.records) - len(whole)
    return Compared(side.name, load, live.rate_per_s, len(live.records), num_failed, tuple(rows), *shares, *speeds)


def show(each: Compared) -> None:
    has_verdict = each.foreign_share <= harness.MAX_FOREIGN_SHARE and each.is_steady
    speeds = (f"{speed.prompts:.2f} and {speed.streams:.2f}" for speed in (each.before, each.after))
    print(
        f"  load {each.load:.0%}, {each.rate_per_s:.2f}/s, {each.num_requests} requests, {each.num_failed} failed; "
        f"client {each.client_share:.0%} and router {each.router_share:.0%} of a core, others "
        f"{each.foreign_share:.0%} of all\n"
        f"    prompts and steps take {', then '.join(speeds)} times as long as when profiled"
    )
    for row in each.rows:
        unit, scale = ("%", 100.0) if row.figure == "attainment" else ("ms", 1e3)
        word = "NO VERDICT" if not has_verdict else "met" if abs(row.error) <= MAX_ERROR else "MISSED"
        print(
            f"    {row.figure:12}{scale * row.live:9.1f} live {scale * row.simulated:9.1f} simulated {unit:2}"
            f" {row.error:+7.1%}  {word}",
            flush=True,
        )


def main() -> int:
    parser = harness.options(__doc__, rounds=1)
    parser.add_argument("--seconds", type=float, default=35.0, help="of each load")
    parser.add_argument("--profile", default="", help="a profile with served times, instead of a new one")
    paced.add_option(parser)
    args = parser.parse_args()
    args.loads = LOADS
    args.device = paced.device(args)
    if args.quick:
        args.seconds, args.loads = min(args.seconds, 8.0), LOADS[1:2]
    print(harness.heading(args), f" {args.seconds:g} s a load", flush=True)
    try:
        with tempfile.TemporaryDirectory() as folder:
            late_path = Path(folder) / "late"
            os.environ[paced.LATE_FILE] = str(late_path)
            here = profile_of(args, Path(folder))
            slo = slo_of(here.serving)
            print(f"targets: TTFT {slo.ttft_s:g} s, TPOT {slo.tpot_s:g} s", flush=True)
            found = [each for side in SIDES for each in compare(side, here, slo, args)]
            if args.paced:
                print(f"\n{paced.late_steps(late_path)}")
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        return 2
    errors = [abs(row.error) for each in found for row in each.rows]
    num_within = sum(error <= MAX_ERROR for error in errors)
    worst = max(errors)
    print(f"\n{num_within} of {len(errors)} figures within {MAX_ERROR:.0%}, worst {worst:.1%}")
    foreign = max(here.foreign_share, *(each.foreign_share for each in found))
    harness.warn_of_others(foreign)
    harness.report_json(
        "simulated_live",
        args,
        {
            "slo": slo,
            "serving": here.serving,
            "loads": [
                {**msgspec.structs.asdict(each), "errors": {row.figure: row.error for row in each.rows}}
                for each in found
            ],
            "num_within": num_within,
            "num_figures": len(errors),
            "worst_error": worst,
            "foreign_share_profile": here.foreign_share,
            "foreign_share": foreign,
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

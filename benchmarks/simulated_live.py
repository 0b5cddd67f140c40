"""The simulator beside our own live system: the same requests, asked here and played in virtual time.

    python benchmarks/simulated_live.py [--seconds 20] [--rounds 3] [--profile FILE] [--paced] [--stages] [--quick]

1. `disagg profile --served-rounds` times steps, a lone client, and workers beside busy neighbours on this machine
   (--profile: one that was written before). Nothing of what is compared goes into it.
2. The highest rate that attains 90 % is looked for in the simulator, for 1 prefill + 1 decode and for 2 mixed workers.
3. At 40, 60 and 85 % of it a seeded open-loop load is asked of the live system, and the very same requests, lengths and
   times of the simulator, in rounds: TTFT, TPOT (p50, p90) and attainment over all rounds, live, simulated, error.
4. A machine that is shared with others is not as fast now as when it was profiled, nor from one second to the next. How
   fast it is follows from two things that are no part of the load: a lone client asks a few prompts before and after
   each, and machine_watch.py times two small pieces of work on each core every second. The simulated workers are as
   fast, moment by moment. In brackets: as fast as the lone answers were, all the time. A round counts where the two
   lone clients agree on what the watch's seconds mean, within 10 %; without such a round there is no verdict.

--paced serves and profiles on a device whose speed holds still (see paced.py): all is there but the machine's own
moods, which on a shared one are larger than what is compared. How many steps were late is printed. Nothing is watched.
--stages shows where the time of each request went on both sides (stages_beside.py), of the last round of each load.
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
from disagg.bench.measure import LoadPlan, LoadResult
from disagg.bench.percentiles import summary
from disagg.bench.record import RequestRecord
from disagg.bench.slo import Slo
from disagg.bench.workload import ClosedWork
from disagg.core.errors import ConfigurationError
from disagg.sim.hardware.fitted import Profile
from disagg.sim.hardware.serving import Speed
from disagg.sim.outcome import Outcome
from disagg.sim.records import RequestRecord as Played
from disagg.sim.scenario import Fidelity, WorkerSlows
from disagg.sim.simulate import simulate
from disagg.telemetry.timeline import RequestTimeline
from disagg.testing.processes import MarkedProcess
from live_side import LiveSide, Lone, Shares
from machine_watch import MachineWatch, Moment, Watched
from simulated_side import (
    LOCAL_TOKENS,
    LONE_PROMPTS,
    NUM_BLOCKS,
    SIDES,
    TARGET_SHARE,
    AfterLone,
    Here,
    Side,
    highest_rate,
    lone_work,
    scenario_of,
    slo_of,
    work_of,
)
from stages_beside import Metrics, lines_of, live_steps, simulated_steps

LOADS = (0.4, 0.6, 0.85)
MAX_ERROR = 0.10
MAX_DRIFT = 0.10
PROFILE_TIMEOUT_S = 600.0


class Row(msgspec.Struct, frozen=True):
    """One figure of both; seconds or a share. by_lone: simulated, as fast as the lone answers were all the time."""

    figure: str
    live: float
    simulated: float
    by_lone: float

    @property
    def error(self) -> float:
        return error_of(self.live, self.simulated)


def error_of(live: float, simulated: float) -> float:
    if not live:
        return math.inf if simulated else 0.0
    return simulated / live - 1


class Round(NamedTuple):
    """One load, once: here, and in virtual time."""

    live: LoadResult
    watched: Outcome
    by_lone: Outcome
    lone: tuple[Lone, Lone]  # before and after
    shares: tuple[float, float, float]  # of client and router, of a core; of others, of all
    stages: tuple[str, ...]

    @property
    def is_steady(self) -> bool:
        pairs = zip(*(msgspec.structs.astuple(each.per_watched) for each in self.lone), strict=True)
        return all(abs(after - before) <= MAX_DRIFT * before for before, after in pairs)


class Compared(msgspec.Struct, frozen=True):
    """One load over its steady rounds; over all where none was. Shares are means."""

    side: str
    load: float
    rate_per_s: float
    num_requests: int
    num_failed: int
    num_rounds: int
    num_steady: int
    rows: tuple[Row, ...]
    client_share: float
    router_share: float
    foreign_share: float
    speeds: tuple[Speed, ...]  # of the lone clients


# ---- profile


def profile_of(args: argparse.Namespace, folder: Path) -> Here:
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
        if not args.paced:  # see paced.foreign_share
            foreign = max(0.0, (after.busy - before.busy - own_s) / (after.at_s - before.at_s) / (os.cpu_count() or 1))
    found = Profile.read(path)
    if found.serving is None:
        raise ConfigurationError(f"{path} knows of no served times: write it with --served-rounds 3")
    return Here(found, found.serving, foreign, args.device.itl_target_s)


def ended_children_s() -> float:
    """CPU time of processes that were started here and have ended, and of theirs."""
    use = resource.getrusage(resource.RUSAGE_CHILDREN)
    return use.ru_utime + use.ru_stime


# ---- both


def compare(side: Side, here: Here, slo: Slo, args: argparse.Namespace) -> list[Compared]:
    flags = ("--local-prefill-tokens", str(LOCAL_TOKENS), "--num-blocks", str(NUM_BLOCKS))
    flags = (*flags, "--itl-target-s", f"{here.itl_target_s:g}")
    words = (args.model, *side.pools, *args.device.flags, *flags)
    with harness.serving(*words, program=args.device.program) as server:
        cores = sorted({harness.cores_of(server, name)[0] for name in side.workers})
        with MachineWatch(cores) as watch:
            live = LiveSide(side, server, watch, here.serving, args)
            twice = ClosedWork(lone_work(), 2)  # touches memory and code paths of all that later requests find touched
            live.ask(LoadPlan(workload=twice, slo=Slo(), seed=args.seed, prompt_seed=args.seed))
            lone = live.ask_lone()
            limit_per_s = highest_rate(side, here.at(lone.speed), slo, args.seed)
            print(f"\n{side.name}: {limit_per_s:.2f} requests/s attain {TARGET_SHARE:.0%} as simulated", flush=True)
            rounds: dict[float, list[Round]] = {load: [] for load in args.loads}
            for number in range(args.rounds):
                for load in args.loads:
                    rounds[load].append(play_round(side, live, here, slo, args, load * limit_per_s, number, lone))
                    lone = rounds[load][-1].lone[1]
    found = [compared(side, load, load * limit_per_s, slo, each) for load, each in rounds.items()]
    for each, load in zip(found, args.loads, strict=True):
        show(each, rounds[load][-1].stages if args.stages else ())
    return found


def play_round(
    side: Side,
    live: LiveSide,
    here: Here,
    slo: Slo,
    args: argparse.Namespace,
    rate_per_s: float,
    number: int,
    before: Lone,
) -> Round:
    load = work_of(rate_per_s, max(8, round(rate_per_s * args.seconds)))
    seed = args.seed + number
    plan = LoadPlan(
        workload=load, slo=slo, rate_per_s=rate_per_s, seed=seed, prompt_seed=round(1e6 * rate_per_s) + seed
    )
    shares, steps = Shares(live.server, args), harness.scrape(live.server)
    begun_s = time.perf_counter()
    result = live.ask(plan)
    ended_s, taken, steps_after = time.perf_counter(), shares.taken(), harness.scrape(live.server)
    after = live.ask_lone()
    lone_at = here.at(before.speed.mean_with(after.speed))
    watched_at = lone_at
    slows: tuple[WorkerSlows, ...] = ()
    if not args.paced:
        usual, slows = paces_of(live.watched(), begun_s, ended_s, AfterLone(load).start_s)
        level = before.per_watched.mean_with(after.per_watched)
        watched_at = here.at(Speed(level.prompts * usual.compute_s, level.streams * usual.memory_s))
    num_kept = load.num_requests + LONE_PROMPTS
    watched, by_lone = (
        simulate(scenario_of(side, at, AfterLone(load), slo, Fidelity.SMALL, faults, num_kept), seed)
        for at, faults in ((watched_at, slows), (lone_at, ()))
    )
    lines = stage_lines(result, watched, steps, steps_after)
    return Round(result, watched, by_lone, (before, after), taken, tuple(lines))


def paces_of(
    watched: dict[str, Watched], begun_s: float, ended_s: float, start_s: float
) -> tuple[Moment, tuple[WorkerSlows, ...]]:
    """What the watch's pieces took in that while, and how each worker was slower or faster than that.

    start_s: virtual second of begun_s.
    """
    levels = [each.level(begun_s, ended_s) for each in watched.values()]
    usual = Moment(
        begun_s, statistics.fmean(each.compute_s for each in levels), statistics.fmean(each.memory_s for each in levels)
    )
    slows = [
        WorkerSlows(start_s + pace.at_s, name, pace.prompts, pace.streams)
        for name, each in watched.items()
        for pace in each.paces(begun_s, ended_s, usual)
    ]
    return usual, tuple(slows)


def stage_lines(live: LoadResult, outcome: Outcome, before: Metrics, after: Metrics) -> list[str]:
    played = [each for each in outcome.timelines if number_of(each) >= LONE_PROMPTS]
    steps = live_steps(before, after), simulated_steps(outcome.report.workers)
    return lines_of(live.observation.timelines, played, *steps)


def number_of(timeline: RequestTimeline) -> int:
    """Of a simulated request, in order of arrival."""
    return int(timeline.request_id.rpartition("-")[2])


def compared(side: Side, load: float, rate_per_s: float, slo: Slo, rounds: Sequence[Round]) -> Compared:
    steady = [each for each in rounds if each.is_steady]
    counted = steady or rounds
    records = [record for each in counted for record in each.live.records]
    found = [figures_of(records, slo)]
    for outcomes in ([each.watched for each in counted], [each.by_lone for each in counted]):
        played = [r for outcome in outcomes for r in outcome.records if r.number >= LONE_PROMPTS]
        found.append(figures_of(played, slo))
    rows = [Row(name, *(each[name] for each in found)) for name in found[0]]
    shares = (statistics.fmean(each) for each in zip(*(each.shares for each in counted), strict=True))
    speeds = tuple(lone.speed for each in rounds for lone in each.lone)
    num_failed = sum(not record.is_whole for record in records)
    counts = (len(records), num_failed, len(rounds), len(steady))
    return Compared(side.name, load, rate_per_s, *counts, tuple(rows), *shares, speeds)


def figures_of(records: Sequence[RequestRecord] | Sequence[Played], slo: Slo) -> dict[str, float]:
    """Of live or of simulated requests."""
    whole = [(record.ttft_s, record.tpot_s or 0.0) for record in records if is_whole(record)]
    spreads = (("TTFT", summary(ttft_s for ttft_s, _ in whole)), ("TPOT", summary(tpot_s for _, tpot_s in whole)))
    found = {f"{name} {p}": float(getattr(spread, p)) for name, spread in spreads for p in ("p50", "p90")}
    num_good = sum(ttft_s <= slo.ttft_s and tpot_s <= slo.tpot_s for ttft_s, tpot_s in whole)
    return {**found, "attainment": num_good / max(1, len(records))}


def is_whole(record: RequestRecord | Played) -> bool:
    return record.is_whole if isinstance(record, RequestRecord) else record.end == "finished"


def has_verdict(each: Compared) -> bool:
    return each.foreign_share <= harness.MAX_FOREIGN_SHARE and each.num_steady > 0


def show(each: Compared, stages: Sequence[str]) -> None:
    prompts, streams = ([getattr(speed, name) for speed in each.speeds] for name in ("prompts", "streams"))
    print(
        f"  load {each.load:.0%}, {each.rate_per_s:.2f}/s, {each.num_requests} requests in {each.num_steady} steady of "
        f"{each.num_rounds} rounds, {each.num_failed} failed; client {each.client_share:.0%} and router "
        f"{each.router_share:.0%} of a core, others {each.foreign_share:.0%} of all\n"
        f"    lone prompts took {min(prompts):.2f} to {max(prompts):.2f}, steps of a lone stream {min(streams):.2f} to "
        f"{max(streams):.2f} times as long as when profiled"
    )
    for row in each.rows:
        unit, scale = ("%", 100.0) if row.figure == "attainment" else ("ms", 1e3)
        word = "NO VERDICT" if not has_verdict(each) else "met" if abs(row.error) <= MAX_ERROR else "MISSED"
        print(
            f"    {row.figure:12}{scale * row.live:9.1f} live {scale * row.simulated:9.1f} simulated {unit:2}"
            f" {row.error:+7.1%}  {word}   ({scale * row.by_lone:.1f} {error_of(row.live, row.by_lone):+.1%})",
            flush=True,
        )
    print("".join(f"      {line}\n" for line in stages), end="", flush=True)


def main() -> int:
    parser = harness.options(__doc__, rounds=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load in a round")
    parser.add_argument("--profile", default="", help="a profile with served times, instead of a new one")
    parser.add_argument("--stages", action="store_true", help="show where the time of the requests went on both sides")
    paced.add_option(parser)
    args = parser.parse_args()
    args.loads = LOADS
    args.device = paced.device(args)
    if args.quick:
        args.seconds, args.rounds, args.loads = min(args.seconds, 8.0), 1, LOADS[1:2]
    print(harness.heading(args), f" {args.seconds:g} s a load", flush=True)
    try:
        with tempfile.TemporaryDirectory() as folder, paced.watched(args):
            here = profile_of(args, Path(folder))
            slo = slo_of(here)
            print(f"targets: TTFT {slo.ttft_s:g} s, TPOT {slo.tpot_s:g} s", flush=True)
            found = [each for side in SIDES for each in compare(side, here, slo, args)]
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        return 2
    rows = [row for each in found for row in each.rows]
    num_within, num_by_lone = (
        sum(abs(error_of(row.live, value)) <= MAX_ERROR for row, value in pairs)
        for pairs in ([(row, row.simulated) for row in rows], [(row, row.by_lone) for row in rows])
    )
    worst = max(abs(row.error) for row in rows)
    num_judged = sum(len(each.rows) for each in found if has_verdict(each))
    print(
        f"\n{num_within} of {len(rows)} figures within {MAX_ERROR:.0%}, worst {worst:.1%}; {num_judged} have a verdict"
        f" ({num_by_lone} within by the lone answers' speed)"
    )
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
            "num_within_by_lone": num_by_lone,
            "num_judged": num_judged,
            "num_figures": len(rows),
            "worst_error": worst,
            "foreign_share_profile": here.foreign_share,
            "foreign_share": foreign,
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Which workers to run, with what limits: the best of a search, what stands beside it, and how much it can take."""

import msgspec

from disagg.core.roles import Role
from disagg.planner.candidate import Candidate
from disagg.planner.measure import Point, Trial
from disagg.planner.search import Search, Searched, Watch

LOADS = (0.8, 1.0, 1.2)  # of the rate that is looked at


class PlanRow(msgspec.Struct, frozen=True):
    """One simulated candidate. usd_per_million: of goodput requests; nan where no price is known."""

    trial: Trial
    goodput_per_gpu: float
    usd_per_million: float
    is_on_front: bool  # no other has more goodput, fewer devices and a shorter TPOT
    is_short_look: bool  # its runs were shorter: read it as a hint

    @property
    def candidate(self) -> Candidate:
        return self.trial.candidate


class Probe(msgspec.Struct, frozen=True):
    """The best candidate, or it without a worker, at a rate."""

    what: str
    point: Point


class Plan(msgspec.Struct, frozen=True):
    """best may be mixed. rate_per_s: the asked one, or the best's goodput where that is less.

    mixed, split: the best of each. equal: mixed on the devices of `split`; None where both have the whole fleet.
    """

    best: PlanRow
    mixed: PlanRow | None
    split: PlanRow | None
    equal: PlanRow | None
    rows: tuple[PlanRow, ...]
    asked_per_s: float
    rate_per_s: float
    loads: tuple[Probe, ...]
    one_less: tuple[Probe, ...]
    num_gpus_for_asked: int  # of the best's kind, in its ratio; 0 where nothing is carried
    searched: Searched


def plan(search: Search, watch: Watch | None = None) -> Plan:
    """Raises ConfigurationError as Search.run does."""
    searched = search.run(watch)
    rows = _rows(search, searched)
    best = max(_comparable(rows), key=lambda row: search.merit(row.candidate, row.trial.goodput_per_s))
    asked = search.traffic.rate_per_s
    goodput = best.trial.goodput_per_s
    rate = min(asked, goodput) or asked
    at = [(share, search.bench.run(best.candidate, share * rate, best.trial.num_requests)) for share in LOADS]
    return Plan(
        best=best,
        mixed=next((row for row in rows if row.candidate.is_mixed), None),
        split=next((row for row in rows if not row.candidate.is_mixed), None),
        equal=next((row for row in rows if row.candidate == searched.equal_mixed), None),
        rows=rows,
        asked_per_s=asked,
        rate_per_s=rate,
        loads=tuple(Probe(f"{share:.0%} of the load", point) for share, point in at),
        one_less=tuple(_one_less(search, best.trial, rate)),
        num_gpus_for_asked=-(-round(1000 * asked / goodput * best.candidate.num_gpus) // 1000) if goodput else 0,
        searched=searched,
    )


def _comparable(rows: tuple[PlanRow, ...]) -> list[PlanRow]:
    """Those looked at long, unless time ended before both kinds were: then all."""
    looked = [row for row in rows if not row.is_short_look]
    kinds = {row.candidate.is_mixed for row in rows}
    return looked if {row.candidate.is_mixed for row in looked} == kinds else list(rows)


def _rows(search: Search, searched: Searched) -> tuple[PlanRow, ...]:
    points = [_measures(trial) for trial in searched.trials]
    longest = max(trial.num_requests for trial in searched.trials)
    rows = []
    for trial, own in zip(searched.trials, points, strict=True):
        usd, goodput = trial.candidate.usd_per_hour(search.fleet), trial.goodput_per_s
        rows.append(
            PlanRow(
                trial=trial,
                goodput_per_gpu=goodput / trial.candidate.num_gpus,
                usd_per_million=usd / 3600 / goodput * 1e6 if usd and goodput else float("nan"),
                is_on_front=goodput > 0 and not any(_is_better(other, own) for other in points),
                is_short_look=trial.num_requests < longest and len(trial.points) <= search.effort.num_short_runs,
            )
        )
    return tuple(rows)


def _measures(trial: Trial) -> tuple[float, float, float]:
    """The more the better, each."""
    tpot_s = trial.nearest(trial.goodput_per_s).tpot_s
    return trial.goodput_per_s, -float(trial.candidate.num_gpus), -tpot_s if tpot_s == tpot_s else -1e9


def _is_better(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one != other and all(a >= b for a, b in zip(one, other, strict=True))


def _one_less(search: Search, trial: Trial, rate_per_s: float) -> list[Probe]:
    """Without the only prefill worker decode workers read prompts; without the last of others there is no answer."""
    probes = []
    for pool in trial.candidate.pools:
        less = trial.candidate.with_one_less(pool)
        what = f"one {pool.role} worker ({pool.cut}) less"
        if less is not None:
            probes.append(Probe(what, search.bench.run(less, rate_per_s, trial.num_requests)))
        elif pool.role is Role.PREFILL:
            point = search.bench.run(trial.candidate, rate_per_s, trial.num_requests, dead=f"{pool.role}-0")
            probes.append(Probe(f"{what}: decode reads", point))
    return probes
